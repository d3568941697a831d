"""Which tokens of a context are kept and which are computed again: one function per strategy, one registry.

All share selection -> gather -> recompute -> extend; a strategy only decides the two sets. A strategy gives a
:class:`PartialSelection` from the plan alone, when the request arrives. What of it needs the documents'
analyses or the question's queries is settled before the request is admitted
(`sglang_ext.context.scheduler.selection_stage`); what needs the model (`deviation`) is left to the recompute
pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.analysis.document_analysis import Analysis, Cut
from sglang_ext.context.selection import recompute_rules as rules
from sglang_ext.context.selection.blocks import Blocks
from sglang_ext.context.selection.profile import Profile
from sglang_ext.context.selection.recompute_rules import Kept, Rule
from sglang_ext.context.selection.samkv import (
    ASKS,
    LEAST,
    LENGTH,
    OPENINGS,
    POSITIONS,
    SCOPES,
    SCORINGS,
    SENTENCE_SCORINGS,
    SHARPNESS,
    WORDS,
    SamKv,
)
from sglang_ext.protocol import ContextPlan, PlanError, Span

BLOCK = 16  # tokens; unit of `keep`
Update = Literal["overwrite", "fusion"]
_UPDATES: tuple[Update, ...] = ("overwrite", "fusion")
Places = Literal["full", "closed"]
_PLACES: tuple[Places, ...] = ("full", "closed")
_SENTENCES_SHARE = 0.1  # nothing is gained beyond it on any set measured (README.md)
_SELECTED_SHARE = (
    0.66  # of chosen sentences, most of which matter: a tenth of all document tokens where 15 % are kept
)
_SENTENCES_FIRST = 4  # tokens of each document; what they bring is measured there, too
_COMMON = ("recompute", "share", "first", "seed", "update")
_T = TypeVar("_T", bound=str)


@dataclass(frozen=True, slots=True)
class ContextSelection:
    """Positions in the full prompt, ascending, int64.

    ``kept`` is [S], the same in every layer, or [layers, S]. ``recomputed`` is [R]. With ``deviation_share``
    the recomputed tokens are chosen at run time among the document tokens instead: that share of them, by how
    much their values differ at layer 1. ``rotate`` False leaves keys at their documents' own positions (wrong
    on purpose: it shows what re-rotation is for). ``asks``: the recomputed tokens are chosen once the context
    is composed, by what the question attends to. ``closed``: kept tokens, and the question behind them, have
    the positions of a prompt of these tokens alone; ``kept`` is [S] then. ``fuse``: recomputed KV is blended
    with the cached (the paper's equation 4) instead of replacing it."""

    kept: torch.Tensor
    recomputed: torch.Tensor
    deviation_share: float | None = None
    rotate: bool = True
    fuse: bool = False
    asks: bool = False
    closed: bool = False

    @property
    def slots(self) -> int:
        """S: KV slots the context takes in every layer."""
        return int(self.kept.shape[-1])


@dataclass(frozen=True, eq=False)
class PartialSelection:
    """What a plan says by itself. ``kept`` as in ContextSelection; with ``samkv`` only the initial and local
    tokens and the system text, and ``slots`` is then the most that the selection may take."""

    plan: ContextPlan
    kept: torch.Tensor
    rule: Rule
    slots: int
    update: Update = "overwrite"
    rotate: bool = True
    cut: Cut = field(default_factory=Cut)
    """How the documents have to be cut in their analyses."""
    samkv: SamKv | None = None
    blocks: Blocks | None = None
    closed: bool = False

    @property
    def needs_query(self) -> bool:
        """Whether something is left to select with the question's queries."""
        return self.selects and self.samkv is not None and self.samkv.asks

    @property
    def selects(self) -> bool:
        """Whether something is left to select."""
        return self.samkv is not None and self.blocks is not None and self.samkv.budget(self.blocks) > 0

    @property
    def needs_analysis(self) -> bool:
        return self.selects or (self.rule.needs_analysis and len(self.plan.spans) > 1)

    def settle(
        self, analyses: Sequence[Analysis] = (), chosen: torch.Tensor | None = None
    ) -> ContextSelection:
        """The selection. ``analyses``: of every document, where needed; ``chosen``: the kept document tokens
        that a selector found.
        """
        kept = self.kept
        if chosen is not None:
            system = torch.arange(self.plan.spans[0].end)
            kept = torch.cat((system.expand(*chosen.shape[:-1], -1), chosen), dim=-1)
        fuse = self.update == "fusion"
        if self.rule.asks and len(self.plan.spans) > 1:
            every = Kept(self.plan, kept).without_choice(self.rule.share)
            none = torch.empty(0, dtype=torch.int64)
            return ContextSelection(
                kept,
                none if every is None else every,
                None,
                self.rotate,
                fuse,
                asks=every is None,
                closed=self.closed,
            )
        deviation = self.rule.share if self.rule.name == "deviation" else None
        return ContextSelection(
            kept, self.recomputed(kept, analyses), deviation, self.rotate, fuse, closed=self.closed
        )

    def recomputed(
        self, kept: torch.Tensor, analyses: Sequence[Analysis], attention: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the rule chooses among the kept tokens. ``attention``: see `rules.Kept`."""
        if len(self.plan.spans) == 1 and self.rule.needs_analysis:
            return torch.empty(0, dtype=torch.int64)  # no documents
        initial = 1 if self.samkv is None else self.samkv.initial_blocks
        return rules.choose(Kept(self.plan, kept, analyses, initial, attention), self.rule)


@dataclass(frozen=True)
class ModelShape:
    """What strategies need to know of the engine."""

    layers: int
    kv_itemsize: int = 2
    cut: Cut = field(default_factory=Cut)
    profile: Profile = field(default_factory=Profile)


Strategy = Callable[[ContextPlan, ModelShape], PartialSelection]
_registry: dict[str, Strategy] = {}


def strategy(name: str) -> Callable[[Strategy], Strategy]:
    """Register a strategy under a name."""

    def add(function: Strategy) -> Strategy:
        _registry[name] = function
        return function

    return add


def names() -> tuple[str, ...]:
    """Registered strategies, sorted."""
    return tuple(sorted(_registry))


def partial_selection(plan: ContextPlan, shape: ModelShape) -> PartialSelection:
    """The partial_selection for a plan. Raises PlanError for an unknown strategy or bad options."""
    if plan.strategy not in _registry:
        raise PlanError(f"no strategy {plan.strategy!r}: one of {', '.join(names())}")
    made = _registry[plan.strategy](plan, shape)
    if made.kept.dim() == 2 and made.kept.shape[0] != shape.layers:
        raise PlanError(f"kept has {made.kept.shape[0]} rows, the model {shape.layers} layers")
    return made


def select(plan: ContextPlan, layers: int) -> ContextSelection:
    """The selection for a plan that needs nothing else. Raises PlanError as :func:`partial_selection` does,
    and for one that does.
    """
    made = partial_selection(plan, ModelShape(layers))
    if made.needs_analysis:
        raise PlanError(f"strategy {plan.strategy!r} with these options needs the documents' analyses")
    return made.settle()


@strategy("concat")
def _concat(plan: ContextPlan, shape: ModelShape) -> PartialSelection:
    """Documents' KV as it is, moved to its place; nothing recomputed unless ``recompute`` says so."""
    options = _options(plan, "keep", "kept", "rotate", "places", *_COMMON)
    return _reuse(plan, shape, options, "none", rotate=_boolean(options, "rotate", True))


@strategy("epic")
def _epic(plan: ContextPlan, shape: ModelShape) -> PartialSelection:
    """EPIC: the first ``first`` tokens of every document are computed again."""
    return _reuse(plan, shape, _options(plan, "keep", *_COMMON), "first")


@strategy("random")
def _random(plan: ContextPlan, shape: ModelShape) -> PartialSelection:
    """A share of the documents' tokens, drawn with ``seed``: what any rule for choosing must beat."""
    return _reuse(plan, shape, _options(plan, "keep", *_COMMON), "random")


@strategy("cacheblend")
def _cacheblend(plan: ContextPlan, shape: ModelShape) -> PartialSelection:
    """CacheBlend: the ``share`` of the documents' tokens whose values at layer 1 differ most from the cached
    ones.
    """
    return _reuse(plan, shape, _options(plan, *_COMMON), "deviation")


@strategy("samkv")
def _samkv(plan: ContextPlan, shape: ModelShape) -> PartialSelection:
    """SamKV: initial and local blocks, and those that the question and the other documents ask for (METHODS,
    section 1).
    """
    known = (
        "block_size",
        "initial_blocks",
        "local_blocks",
        "selection",
        "personalised",
        "scoring",
        "positions",
        "ask",
        "keep",
        "words",
        "openings",
        "sharpness",
        "length",
        "least",
        "places",
    )
    options = shape.profile.completed(_options(plan, *known, *_COMMON))
    block = _integer(options, "block_size", shape.cut.block, low=0)
    if block and (block & (block - 1) or block > 64):
        raise PlanError("block_size must be 0 (about 1/32 of the document) or a power of two up to 64")
    cut = Cut(block, _integer(options, "local_blocks", shape.cut.local_blocks, low=1))
    scope = _among(options, "selection", SCOPES)
    samkv = SamKv(
        _integer(options, "initial_blocks", 1, low=0),
        scope,
        _boolean(options, "personalised", scope != "sentences"),
        _among(options, "scoring", SENTENCE_SCORINGS if scope == "sentences" else SCORINGS),
        _among(options, "positions", POSITIONS),
        _among(options, "ask", ASKS),
        _share(options, 1.0, name="keep") if "keep" in options else None,
        _weight(options, "words", WORDS),
        _weight(options, "openings", OPENINGS),
        _weight(options, "sharpness", SHARPNESS),
        _weight(options, "length", LENGTH),
        _integer(options, "least", 0 if "keep" in options else LEAST, low=0),
    )
    chosen = ("sentences", _SELECTED_SHARE) if samkv.by_sentence else ("outliers", _SENTENCES_SHARE)
    rule, update = _rule(plan, options, *chosen), _among(options, "update", _UPDATES)
    documents = _documents(plan)
    whole = torch.arange(plan.question_start)
    if not documents:
        return PartialSelection(plan, whole, rule, len(whole), update, cut=cut, samkv=samkv)
    sizes = [cut.size(span.end - span.start, shape.kv_itemsize) for span in documents]
    ends = (0, 0) if samkv.by_sentence else (samkv.initial_blocks, cut.local_blocks)
    blocks = Blocks.build(documents, sizes, initial=ends[0], local=ends[1])
    kept = torch.cat((torch.arange(plan.spans[0].end), blocks.fixed()))
    closed = _closed(options, by_layer=scope == "layers", default="closed" if samkv.by_sentence else "full")
    if samkv.by_sentence and samkv.budget(blocks) == blocks.tokens:  # nothing to select
        return PartialSelection(plan, whole, rule, len(whole), update, cut=cut, samkv=samkv, closed=closed)
    return PartialSelection(
        plan,
        kept,
        rule,
        len(kept) + samkv.budget(blocks),
        update,
        cut=cut,
        samkv=samkv,
        blocks=blocks,
        closed=closed,
    )


def _reuse(
    plan: ContextPlan, shape: ModelShape, options: Mapping[str, Any], rule: str, *, rotate: bool = True
) -> PartialSelection:
    kept = _kept(plan, options)
    update, closed = _among(options, "update", _UPDATES), _closed(options, by_layer=kept.dim() == 2)
    return PartialSelection(
        plan, kept, _rule(plan, options, rule), int(kept.shape[-1]), update, rotate, shape.cut, closed=closed
    )


def _rule(
    plan: ContextPlan, options: Mapping[str, Any], default: str, sentences_share: float = _SENTENCES_SHARE
) -> Rule:
    """``recompute``: a rule's name, or positions. ``sentences_share``: of rule `sentences` where the request
    gives none.
    """
    wanted = options.get("recompute", default)
    default_share = sentences_share if wanted == "sentences" else rules.DEFAULT_SHARE
    share, seed = _share(options, default_share), _integer(options, "seed", 0, low=0)
    first = _integer(options, "first", _SENTENCES_FIRST if wanted == "sentences" else 16, low=0)
    if isinstance(wanted, str):
        if wanted not in rules.names():
            raise PlanError(f"recompute must be a list of positions or one of {', '.join(rules.names())}")
        return Rule(wanted, share, first, seed)
    try:
        positions = torch.tensor(sorted(set(wanted)), dtype=torch.int64)
    except (TypeError, ValueError):
        raise PlanError(
            f"recompute must be a list of positions or one of {', '.join(rules.names())}"
        ) from None
    if len(positions) and (int(positions[0]) < 0 or int(positions[-1]) >= plan.question_start):
        raise PlanError(f"recompute must hold positions below {plan.question_start}")
    return Rule("positions", share, first, seed, positions)


def _closed(options: Mapping[str, Any], *, by_layer: bool, default: Places = "full") -> bool:
    """``places``: whether kept tokens are moved together."""
    closed = _among({"places": default, **options}, "places", _PLACES) == "closed"
    if closed and by_layer:
        raise PlanError("places=closed needs the same tokens in every layer")
    return closed


def _options(plan: ContextPlan, *known: str) -> Mapping[str, Any]:
    unknown = set(plan.options) - set(known)
    if unknown:
        raise PlanError(
            f"strategy {plan.strategy!r} has no option {', '.join(sorted(unknown))}: it has {', '.join(known)}"
        )
    return plan.options


def _documents(plan: ContextPlan) -> tuple[Span, ...]:
    """All spans but the first: the system text is exact as it is, nothing stands before it."""
    return plan.spans[1:]


def _kept(plan: ContextPlan, options: Mapping[str, Any]) -> torch.Tensor:
    if "kept" in options:
        return _explicit_kept(plan, options["kept"])
    keep = _share(options, 1.0, name="keep")
    if keep == 1.0:
        return torch.from_numpy(np.arange(plan.question_start))
    system = np.arange(plan.spans[0].end)
    return torch.from_numpy(np.concatenate((system, _spread(_documents(plan), keep))))


def _spread(documents: tuple[Span, ...], keep: float) -> npt.NDArray[np.int64]:
    """Positions of a share of each document's blocks, at least one, at equal distances from the first to the
    last.
    """
    start, end = (
        np.array(values, dtype=np.int64)
        for values in ([s.start for s in documents], [s.end for s in documents])
    )
    blocks = -(-(end - start) // BLOCK)
    count = np.maximum(1, np.round(keep * blocks).astype(np.int64))
    of = np.repeat(np.arange(len(documents)), count)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    # With at least as many blocks as chosen ones neighbours are a block or more apart: no block comes twice.
    chosen = np.floor(nth * ((blocks - 1) / np.maximum(1, count - 1))[of] + 0.5).astype(np.int64)
    positions = (start[of] + chosen * BLOCK)[:, None] + np.arange(BLOCK)
    return positions[positions < end[of, None]]


def _explicit_kept(plan: ContextPlan, value: Any) -> torch.Tensor:
    """``kept``: positions, or one list of positions per layer, all of the same length; for experiments with
    selectors.
    """
    try:
        kept = torch.tensor(value, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a number beyond 64 bits
        raise PlanError(
            "kept must be a list of positions or equally long lists, one for each layer"
        ) from None
    if kept.dim() not in (1, 2) or kept.shape[-1] == 0:
        raise PlanError("kept must name at least one position")
    if int(kept.min()) < 0 or int(kept.max()) >= plan.question_start or bool((kept.diff(dim=-1) <= 0).any()):
        raise PlanError(f"kept must hold ascending positions below {plan.question_start}")
    return kept


def _share(options: Mapping[str, Any], default: float, name: str = "share") -> float:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise PlanError(f"{name} must be a number above 0 and up to 1")
    return float(value)


def _weight(options: Mapping[str, Any], name: str, default: float) -> float:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise PlanError(f"{name} must be a number from 0 to 1")
    return float(value)


def _integer(options: Mapping[str, Any], name: str, default: int, *, low: int) -> int:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        raise PlanError(f"{name} must be a whole number of at least {low}, of 63 bits at most")
    return value


def _boolean(options: Mapping[str, Any], name: str, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise PlanError(f"{name} must be true or false")
    return value


def _among(options: Mapping[str, Any], name: str, choices: tuple[_T, ...]) -> _T:
    """One of the choices; the first one by default."""
    value = options.get(name, choices[0])
    for choice in choices:
        if value == choice:
            return choice
    raise PlanError(f"{name} must be one of {', '.join(choices)}")
