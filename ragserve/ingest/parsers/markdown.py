"""Markdown: the unchanged source, whose marks help readers and models alike, without its front matter."""

from __future__ import annotations

import re

from ragserve.ingest.parsers.base import Parsed, Raw
from ragserve.ingest.parsers.charset import decode

_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)\r?\n(---|\.\.\.)[ \t]*(\r?\n|\Z)", re.S)
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
_HEADING = re.compile(r"^# ++(\S.*)$", re.M)
_CLOSING = re.compile(r" #++\Z")  # of a heading: `# Title #`
_SETEXT = re.compile(r"^(\S.*+)\n=++ *+\r?$", re.M)


def parse(raw: Raw) -> Parsed:
    text, note = decode(raw.data, raw.charset)
    title = ""
    front = _FRONT_MATTER.match(text)
    if front:
        title = _title_in(front.group(1))
        text = text[front.end() :]
    if not title:
        prose = _FENCE.sub("", text)  # a comment in a shell example is not a heading
        found = min(
            (m for m in (_HEADING.search(prose), _SETEXT.search(prose)) if m),
            key=lambda m: m.start(),
            default=None,
        )
        title = found.group(1).rstrip() if found else ""
        if found and found.re is _HEADING:
            title = _CLOSING.sub("", title).rstrip()
    return Parsed(text, "text/markdown", title=title, note=note)


def _title_in(front_matter: str) -> str:
    import yaml

    try:
        fields = yaml.safe_load(front_matter)
    except Exception:  # noqa: BLE001 - not YAML, or a value that it raises anything for: the first heading
        return ""
    title = fields.get("title") if isinstance(fields, dict) else None
    return title if isinstance(title, str) else ""
