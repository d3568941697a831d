"""State of one composed request, from its plan to its released slots."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.compose.gather import needed_blocks
from sglang_ext.context.compose.stage_timer import StageTimer
from sglang_ext.context.recompute.job import RecomputeJob, question_job
from sglang_ext.context.selection.base import ContextSelection, PartialSelection
from sglang_ext.context.selection.recompute_rules import Kept
from sglang_ext.documents.pages.page_format import token_array
from sglang_ext.documents.session_pages import TurnPages
from sglang_ext.kv_offload.host_target import HostTarget
from sglang_ext.tensors.buffers import Ints, upload
from sglang_ext.wire.protocol import ContextPlan, ContextReport


@dataclass(slots=True)
class DocumentOnDevice:
    """A document in SGLang's pool. ``slots`` int64 [tokens], on the device; ``node``: the tree's, locked."""

    slots: torch.Tensor
    node: Any


@dataclass(slots=True)
class DocumentOnHost:
    """A document in pinned host pages. ``pages`` int64 [blocks], -1 where it has none; ``tier``: disk or
    remote, if they were loaded from there for this request.
    """

    key: str
    pages: Ints
    tier: str = "host"


@dataclass(slots=True)
class LocatedDocuments:
    """What a request has found and locked of its documents and its dialogue. Written by `Locator`.

    Attributes:
        sources: of each span, locked.
        tickets: last load from disk, by key.
        loads: of each block (key, number), so far.
        held: leading tokens whose KV the session's key has on the device.
        turns: those behind ``held`` that come from the host.
        pinned_turns: names of those whose host pages are pinned.
        waiting_since: when it began to wait for the disk, in seconds; None: it does not.
    """

    sources: list[DocumentOnDevice | DocumentOnHost] = field(default_factory=list)
    tickets: dict[str, Any] = field(default_factory=dict)
    loads: Counter[tuple[str, int]] = field(default_factory=Counter)
    held: int = 0
    turns: list[TurnPages] = field(default_factory=list)
    pinned_turns: list[str] = field(default_factory=list)
    waiting_since: float | None = None
    load_ms: float = 0.0


@dataclass(slots=True)
class ContextPlace:
    """Where a request's context goes. Written by `Admission`.

    Attributes:
        below_device: documents are taken from host or disk even where the device has them.
        awaits_host: room to read it in its documents is about to come.
        on_host: takes its KV instead of slots; None if its slots do.
    """

    below_device: bool = False
    awaits_host: bool = False
    on_host: HostTarget | None = None


@dataclass(frozen=True, slots=True)
class FillOutcome:
    """What the batch did that filled a request's slots. Made by `Composer`.

    Attributes:
        timer: of that batch, until the report is written.
        by_tier: kept document tokens by tier of origin.
        by_graph: a CUDA graph ran the recompute pass.
        fused: the question was in that pass.
    """

    timer: StageTimer | None = None
    by_tier: dict[str, int] = field(default_factory=dict)
    recomputed: int = 0
    by_graph: bool = False
    fused: bool = False


@dataclass(slots=True)
class ComposedContext:
    """A composed request in the scheduler. ``decided`` is None until its selection is final.

    Fields that are not parts of it are written by `SelectionStage` and its own methods."""

    plan: ContextPlan
    ids: array[int]  # of the whole prompt, int64
    keys: tuple[str, ...]
    partial: PartialSelection
    decided: ContextSelection | None = None
    located: LocatedDocuments = field(default_factory=LocatedDocuments)
    place: ContextPlace = field(default_factory=ContextPlace)
    outcome: FillOutcome = field(default_factory=FillOutcome)
    ids_32: array[int] = field(init=False)  # int32, as the tiers compare them
    failure: str | None = None  # the message that the request ends with
    missing: list[int] = field(default_factory=list)  # spans found in no tier of some rank
    analyses: dict[int, Analysis] = field(default_factory=dict)  # by span; those that the selection needs
    complete: bool = False  # it waits for whole analyses, as what is measured does
    unknown: list[int] = field(default_factory=list)  # spans whose context sensitivity the rule does without
    critical_layers: tuple[int, ...] = ()  # in which the question's attention counts, for rules with anchors
    analysis_ms: float = 0.0
    query_ms: float = 0.0
    select_ms: float = 0.0
    filled: bool = False
    _blocks: tuple[torch.Tensor, list[Ints]] | None = None  # `needed` and its blocks, cached
    _question: torch.Tensor | None = None  # `question` on the device, for its two or three passes

    def __post_init__(self) -> None:
        self.ids_32 = token_array(self.ids)

    def fail(self, message: str) -> None:
        """Let the request end with this message when SGLang asks for it next; the first one counts."""
        self.failure = self.failure or message

    def lack(self, spans: list[int]) -> None:
        """Note the spans that are in no tier of some rank."""
        self.missing = spans

    def settle(self, selection: ContextSelection) -> None:
        """Let its selection be final."""
        self.decided = selection

    def shed_analyses(self) -> None:
        """Let go of the analyses once it has ended to wait for its selection. A rule that chooses by the
        question's attention still reads what of them is not on the device."""
        reads = self.decided is not None and self.decided.needs_question_attention
        self.analyses = {n: each.for_rules() for n, each in self.analyses.items()} if reads else {}

    def admit(self) -> None:
        """Its slots are to be filled before its next forward pass."""
        self.filled = False

    def fill(self, outcome: FillOutcome | None = None) -> None:
        """Its slots have been filled; ``outcome``: None where that failed.

        The selection is final: a request that is retracted is filled by it again, without analyses."""
        self.filled = True
        if outcome is not None:
            self.outcome, self.analyses = outcome, {}

    def end_report(self) -> None:
        """Its report has been written."""
        self.outcome = replace(self.outcome, timer=None)

    @property
    def selection(self) -> ContextSelection:
        """The final selection. Raises RuntimeError before it is settled."""
        if self.decided is None:
            raise RuntimeError("the context's selection is not settled yet")
        return self.decided

    @property
    def needed(self) -> torch.Tensor:
        """Positions whose KV is needed now: the selection's or, before it, the partial selection's."""
        return self.partial.kept if self.decided is None else self.decided.kept

    @property
    def continues_session(self) -> bool:
        """True from the second turn of a session on: the first span is the dialogue so far."""
        return self.plan.session is not None and self.plan.session.held > 0

    @property
    def new_start(self) -> int:
        """The first position that this request fills by its selection: behind the dialogue so far."""
        return self.plan.spans[0].end if self.continues_session else 0

    @property
    def there(self) -> int:
        """Leading tokens of the dialogue so far whose KV is on the device or the host."""
        located = self.located
        return located.turns[-1].end if located.turns else located.held

    @property
    def earlier(self) -> Ints:
        """Positions of the dialogue so far that are neither on the device nor on the host, and which are
        computed again."""
        return np.arange(self.there, self.new_start, dtype=np.int64)

    @property
    def documents(self) -> Sequence[DocumentOnDevice | DocumentOnHost]:
        """The sources without the session's own."""
        sources = self.located.sources
        return sources[1:] if self.continues_session else sources

    @property
    def in_order(self) -> list[Analysis]:
        """The documents' analyses, in the order of the prompt."""
        return [self.analyses[number] for number in sorted(self.analyses)]

    @property
    def question(self) -> Ints:
        """The question's token ids, int64 [q]."""
        return np.array(self.ids[self.plan.question_start :], dtype=np.int64)

    @property
    def question_tokens(self) -> int:
        return len(self.ids) - self.plan.question_start

    @property
    def slots(self) -> int:
        """S; an upper bound before the selection is final."""
        return self.partial.slots if self.decided is None else self.decided.slots

    def blocks(self, number: int, block: int) -> Ints:
        """Blocks of ``block`` tokens of document ``number`` with a token that some layer needs now,
        ascending.
        """
        if self._blocks is None or self._blocks[0] is not self.needed:
            starts, ends = (
                np.array(values, dtype=np.int64)
                for values in zip(*((s.start, s.end) for s in self.plan.spans), strict=True)
            )
            self._blocks = self.needed, needed_blocks(self.needed.numpy(), starts, ends, block)
        return self._blocks[1][number]

    def recompute_rows(self, layers: int) -> int:
        """Rows that recomputing takes of a model of ``layers`` layers, in rows through all layers. An upper
        bound where the question's attention chooses them, which takes the question's rows as well.
        """
        selection, rule = self.selection, self.partial.rule
        documents = selection.slots - self.plan.spans[0].end
        earlier = max(0, self.new_start - self.there)
        if selection.deviation_share is not None:  # all kept tokens go through layer 0 and most of layer 1
            through_two = 2 * (selection.slots - self.new_start) / layers
            return earlier + math.ceil(selection.deviation_share * documents + through_two)
        if selection.needs_question_attention:
            return earlier + rule.bounds(documents)[1] + self.question_tokens
        return earlier + int((selection.recomputed >= self.new_start).sum())

    @property
    def delta(self) -> int:
        """The distance by which positions behind the context are ahead of their slots: the question follows
        the full length, not the kept one."""
        return self.question_at - self.slots

    @property
    def question_at(self) -> int:
        """Position of the question's first token."""
        return self.slots if self.decided is not None and self.decided.compact else self.plan.question_start

    def question_job(self, slots: torch.Tensor, own: torch.Tensor) -> RecomputeJob:
        """The question as rows of a pass over the context in ``slots`` and itself in ``own`` [q]; int64."""
        if self._question is None:
            self._question = upload(self.question, slots.device)
        return question_job(self._question, self.question_at, slots, own)


def is_composed(req: Any) -> bool:
    """True if the prefix of SGLang's request is a composed context."""
    return isinstance(getattr(req, "ragserve", None), ComposedContext)


def report_of(context: ComposedContext) -> ContextReport:
    """The report of a request whose first forward pass has run."""
    outcome = context.outcome
    stages = outcome.timer.stages() if outcome.timer is not None else {}
    return ContextReport(
        strategy=context.plan.strategy,
        document_tokens=context.plan.question_start - context.plan.spans[0].end,
        kept=sum(outcome.by_tier.values()),
        recomputed=outcome.recomputed,
        by_tier=outcome.by_tier,
        compose_ms=stages.get("compose", 0.0),
        load_ms=context.located.load_ms,
        recompute_ms=stages.get("ask", 0.0) + stages.get("recompute", 0.0),
        extend_ms=stages.get("extend", 0.0),
        analysis_ms=context.analysis_ms,
        query_ms=context.query_ms,
        select_ms=context.select_ms,
        ask_ms=stages.get("ask", 0.0),
        recompute_graph=outcome.by_graph,
        one_pass=outcome.fused,
        keep_reason=context.selection.reason,
        recompute_reason=_recompute_reason(context),
        unknown_sensitivity=tuple(sorted(context.unknown)),
        session_held=context.there,
        session_computed=len(context.earlier),
    )


def _recompute_reason(context: ComposedContext) -> str:
    """Why so many tokens were computed again, "" where the options alone say it."""
    rule = context.partial.rule
    if rule.top_p is None:
        return ""
    kept = Kept(context.plan, context.selection.kept).tokens
    return rule.reason(len(context.selection.recomputed), kept)


def tokens_by_tier(context: ComposedContext) -> dict[str, int]:
    """Kept document tokens by the tier that their KV comes from, "computed" where it was in none and has been
    computed for this request; the first layer's, where layers differ."""
    kept = context.selection.kept if context.selection.kept.dim() == 1 else context.selection.kept[0]
    spans = context.plan.spans
    counts = np.diff(np.searchsorted(kept.numpy(), [*(span.start for span in spans), spans[-1].end]))
    tiers: dict[str, int] = {}
    computed = set(context.plan.computed)
    for number, (tokens, source) in enumerate(
        zip(counts[1:].tolist(), context.located.sources[1:], strict=True), 1
    ):
        tier = "computed" if number in computed else tier_of(source)
        if tier == "device" and context.place.on_host is not None and context.place.on_host.is_there:
            tier = "host"  # where it is read, though the device has it, too
        tiers[tier] = tiers.get(tier, 0) + tokens
    return tiers


def tier_of(source: DocumentOnDevice | DocumentOnHost) -> str:
    """Return "device", "host", "disk" or "remote"."""
    return "device" if isinstance(source, DocumentOnDevice) else source.tier
