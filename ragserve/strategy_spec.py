"""Strategies with their options, as the command line spells them:
``full,epic:first=16,cacheblend:share=0.15``.

A nested option is written with a dot: ``samkv:experimental.lexical_weight=1`` is
``{"experimental": {"lexical_weight": 1}}`` in a request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragserve.best_passages import PASSAGES, choice_of
from ragserve.errors import InvalidRequest
from sglang_ext.wire.request_options import STRATEGY_OPTIONS, PlanError, merged, strategy_options

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_HINT = "Write for example: full,epic:first=16,cacheblend:share=0.15"
FORCE = "force"  # option of a request, not of a strategy: answer though the gate has not verified it


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """A strategy and its options. Specs with the same ``label`` are the same."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Command-line spelling, options sorted. Keys of the gate's record and of cost profiles."""
        if not self.options:
            return self.name
        written = [
            f"{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
            for key, value in sorted(_flat(self.options).items())
        ]
        return f"{self.name}:{','.join(written)}"

    def check(self) -> None:
        """Raise InvalidRequest for options that the strategy does not have, and for bad values."""
        try:
            _, options = choice_of(self.name, self.options)
            if self.name in STRATEGY_OPTIONS:
                strategy_options(self.name, options)
            elif options:
                raise PlanError(f"strategy {self.name} takes no options")
        except PlanError as error:
            text = str(error)
            raise InvalidRequest(f"{text[0].upper()}{text[1:]}.", param="strategy_options") from None

    @property
    def chooses_passages(self) -> bool:
        """Only the best passages are read."""
        return PASSAGES in (self.name, *self.options)

    def resolve(self, name: str | None, options: Mapping[str, Any]) -> StrategySpec:
        """A request's strategy, where this spec is the server's default.

        A request that names this strategy, or none, inherits its options; the request's own options win.
        Raises InvalidRequest for bad options."""
        if name in (None, self.name):
            spec = StrategySpec(self.name, merged(self.options, options))
        else:
            spec = StrategySpec(str(name), dict(options))
        own = {key: value for key, value in spec.options.items() if key != FORCE}
        StrategySpec(spec.name, own).check()
        return spec


FULL = StrategySpec("full")


def keeps_whole(spec: StrategySpec) -> bool:
    """Return whether a strategy keeps every token of a document at its place, as sessions need it."""
    given = spec.options
    whole = given.get("keep", 1) == 1 and given.get("kept_positions", "original") == "original"
    return spec.name != "samkv" and not spec.chooses_passages and whole and "experimental" not in given


def reads_as_many(spec: StrategySpec) -> bool:
    """Return whether a strategy leaves out no more of fewer passages: it keeps all, or a number of passages
    or tokens, but no share."""
    best, rest = choice_of(spec.name, spec.options)
    by_number = best is None or (best.share == 1 and not best.adaptive)
    return by_number and (spec.name == PASSAGES or keeps_whole(StrategySpec(spec.name, rest)))


def without_passages(spec: StrategySpec) -> StrategySpec:
    """A composed strategy without its choice of passages: what it costs depends on those that it reads."""
    options = {name: value for name, value in spec.options.items() if name != PASSAGES}
    return spec if spec.name == PASSAGES else StrategySpec(spec.name, options)


def check_read_whole(specs: Sequence[StrategySpec]) -> None:
    """Raise InvalidRequest for strategies that choose passages: costs are measured on all passages of a
    prompt."""
    for spec in specs:
        if spec.chooses_passages:
            raise InvalidRequest(
                f"Strategy {spec.label} reads the best passages alone, and this measures strategies on all "
                "passages of a prompt.",
                hint="Leave passages out: what it costs is that of as many passages.",
                param="strategies",
            )


def candidates(k: int) -> str:
    """Strategies that are worth comparing where a search finds ``k`` passages: fewer passages, in the order
    of the search or by their links, exact or from stored KV, and all of them from stored KV. A single passage
    is none of them: probes are worded after a passage, so that a search finds it first more often than it
    finds what users ask about."""
    exact = [f"passages:by=score,count={count}" for count in _COUNTS if count < k]
    return ",".join([*exact, *_CANDIDATES])


_COUNTS = (3, 5, 10, 20)
_CANDIDATES = (
    "passages:keep=0.25",
    "passages:keep=0.5",
    "concat:passages.keep=0.25,recompute=question,share=0.2",
    "concat:passages.keep=0.5,recompute=question,share=0.2",
    "concat:recompute=question,share=0.15",
    "concat:recompute=sentences,share=0.15",
    "concat:recompute=sentences,share=0.3",
)


def parse(text: str, known: Sequence[str] = ()) -> list[StrategySpec]:
    """Parse a list like ``full,samkv:update=fusion,block_size=16,concat``; duplicates are dropped.

    A part with ``=`` and without ``:`` is a further option of the strategy before it. Values are JSON where
    they parse as JSON, otherwise text. Raises InvalidRequest for a malformed list and, if ``known`` is given,
    for strategies not in it and for bad options."""
    found: list[tuple[str, dict[str, Any]]] = []
    for part in filter(None, (piece.strip() for piece in _parts(text))):
        name, colon, option = part.partition(":")
        if "=" in name:  # a further option; its value may contain a colon
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
        given = _value(value.strip())
        for part_of_key in reversed(key.strip().split(".")[1:]):
            given = {part_of_key: given}
        name, options = found[-1]
        found[-1] = name, merged(options, {key.strip().partition(".")[0]: given})
    for name, _ in found:
        if not _NAME.fullmatch(name) or (known and name not in known):
            raise InvalidRequest(
                f"Unknown strategy {name!r}.", hint=f"Choose from {', '.join(known)}." if known else _HINT
            )
    specs = [StrategySpec(name, options) for name, options in found]
    if not specs:
        raise InvalidRequest("No strategy given.", hint=_HINT)
    if known:
        for spec in specs:
            spec.check()
    return list({spec.label: spec for spec in specs}.values())


def _parts(text: str) -> list[str]:
    """Split at commas outside brackets, so that a value may be a JSON list."""
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


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options by dotted name."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def one_label(text: str, known: Sequence[str]) -> str:
    """Return the label of the one strategy that ``text`` names. Raises ValueError, as validators do."""
    try:
        specs = parse(text, known)
    except InvalidRequest as error:
        raise ValueError(str(error)) from error
    if len(specs) > 1:
        raise ValueError(f"one strategy, not {len(specs)}")
    return specs[0].label
