"""Strategies with their options, in a readable spelling: ``full,epic:first=16,cacheblend:share=0.15``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragserve.errors import InvalidRequest

_NAME = re.compile(r"[a-z][a-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """A strategy and its options; two with the same ``label`` do the same."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """As it is written on the command line, options sorted."""
        if not self.options:
            return self.name
        return f"{self.name}:" + ",".join(
            f"{key}={_written(value)}" for key, value in sorted(self.options.items())
        )

    def asked(self, name: str | None, options: Mapping[str, Any]) -> StrategySpec:
        """What a request asks for whose server answers by this strategy. Where it names this one, or none,
        this one's options hold, too; its own win."""
        return (
            StrategySpec(self.name, {**self.options, **options})
            if name in (None, self.name)
            else StrategySpec(str(name), dict(options))
        )


def parse(text: str, known: Sequence[str] = ()) -> list[StrategySpec]:
    """The strategies of a list like ``full,samkv:update=fusion,block_size=16,concat``, each once, in order.

    A part with ``=`` and without ``:`` is a further option of the strategy before it. Values are JSON where
    they can be read so, otherwise text. Raises InvalidRequest for what is not such a list, and, where
    ``known`` is given, for a name that is not in it."""
    found: list[tuple[str, dict[str, Any]]] = []
    for part in filter(None, (piece.strip() for piece in _parts(text))):
        name, colon, option = part.partition(":")
        if "=" in name:  # a further option; its value may hold a colon
            if not found:
                raise InvalidRequest(f"Option {part!r} belongs to no strategy.", hint=_HINT)
            option = part
        else:
            found.append((name.strip(), {}))
            if not colon:
                continue
        key, equals, value = option.partition("=")
        if not equals or not key.strip():
            raise InvalidRequest(f"{option!r} is not an option of a strategy.", hint=_HINT)
        found[-1][1][key.strip()] = _value(value.strip())
    for name, _ in found:
        if not _NAME.fullmatch(name) or (known and name not in known):
            raise InvalidRequest(
                f"Unknown strategy {name!r}.", hint=f"Choose from {', '.join(known)}." if known else _HINT
            )
    specs = [StrategySpec(name, options) for name, options in found]
    if not specs:
        raise InvalidRequest("No strategy given.", hint=_HINT)
    return list({spec.label: spec for spec in specs}.values())


_HINT = "Write for example: full,epic:first=16,cacheblend:share=0.15"


def _parts(text: str) -> list[str]:
    """Split at commas that stand in no bracket, so that a value may be a JSON list."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
