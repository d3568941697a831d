"""The fields that Markdown begins with: YAML between ``---``, TOML between ``+++``."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ragserve.ingest.parsers.base import without_controls

# as Pandoc has it: the line behind the first mark is not blank, else the marks are rules between paragraphs
_YAML = re.compile(r"\A---[ \t]*\r?\n(?![ \t]*\r?\n)(.*?)\r?\n(?:---|\.\.\.)[ \t]*(?:\r?\n|\Z)", re.S)
_TOML = re.compile(r"\A\+\+\+[ \t]*\r?\n(.*?)\r?\n\+\+\+[ \t]*(?:\r?\n|\Z)", re.S)
# what ragserve itself says of a document
_OWN = frozenset(["title", "path", "url", "filename", "ext", "pages", "page_kind", "page_names"])
_MOST_FIELDS, _MOST_CHARS = 64, 1000  # every search reads them with the document
_INT64 = 2**63

Value = str | int | list[str]


class FrontMatter(NamedTuple):
    """``end``: offset of the text behind it, 0 without any. ``metadata``: a field of a field is ``a.b``."""

    end: int
    title: str
    metadata: dict[str, Value]


def front_matter(text: str) -> FrontMatter:
    """Read the front matter of a text, if what stands there is a mapping."""
    for pattern, load in ((_YAML, _yaml), (_TOML, _toml)):
        if found := pattern.match(text):
            try:
                fields = load(found.group(1))
            except Exception:  # noqa: BLE001 - not YAML, or a value that it raises anything for: text
                fields = None
            if isinstance(fields, dict) and fields:
                title = fields.get("title")
                return FrontMatter(found.end(), title if isinstance(title, str) else "", _metadata(fields))
    return FrontMatter(0, "", {})


def _yaml(source: str) -> Any:
    """Fields as they are written: 04110, 1.10, a date and `no` are text."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def as_written(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> object:
        return int(node.value) if re.fullmatch(r"0|-?[1-9]\d{0,17}", node.value) else node.value

    for kind in ("int", "float", "timestamp"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", as_written)
    Loader.add_constructor(
        "tag:yaml.org,2002:bool",
        lambda loader, node: {"true": True, "false": False}.get(node.value.lower(), node.value),
    )
    return yaml.load(source, Loader)


def _toml(source: str) -> Any:
    import tomllib

    return tomllib.loads(source, parse_float=str)


def _metadata(fields: dict[Any, Any]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    below = [(str(key), value) for key, value in fields.items()]
    for _ in range(10 * _MOST_FIELDS):  # anchors can make a few lines endless
        if not below or len(found) >= _MOST_FIELDS:
            break
        key, value = below.pop(0)
        if isinstance(value, dict):
            below += [(f"{key}.{inner}", each) for inner, each in list(value.items())[:_MOST_FIELDS]]
        elif isinstance(value, list | set):
            scalars = [each for each in value if not isinstance(each, list | dict | set)]
            found[_text(key)] = [_text(each) for each in scalars[:_MOST_FIELDS]]
        elif isinstance(value, bool | int) and -_INT64 <= value < _INT64:
            found[_text(key)] = value
        elif value is not None:
            found[_text(key)] = _text(value)
    return {key: value for key, value in found.items() if key not in _OWN}


def _text(value: object) -> str:
    return without_controls(str(value))[:_MOST_CHARS]
