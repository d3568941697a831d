"""State of one composed request, from its plan to its released slots."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.buffers import Ints
from sglang_ext.context.compose.gather import needed_blocks
from sglang_ext.context.scheduler.stage_timer import StageTimer
from sglang_ext.context.selection.base import ContextSelection, PartialSelection
from sglang_ext.documents.page_format import token_array
from sglang_ext.protocol import ContextPlan, ContextReport


@dataclass(slots=True)
class DocumentOnDevice:
    """A document in SGLang's pool: slot numbers int64 [tokens on the device], and the tree node that is
    locked meanwhile.
    """

    slots: torch.Tensor
    node: Any


@dataclass(slots=True)
class DocumentOnHost:
    """A document in host pages, pinned meanwhile: page numbers int64 [blocks], -1 where it has none; whether
    they came from disk.
    """

    key: str
    pages: Ints
    from_disk: bool = False


@dataclass(slots=True)
class ComposedContext:
    """A composed request's state in the scheduler, from its arrival to its end."""

    plan: ContextPlan
    ids: array[int]  # of the whole prompt, int64
    keys: tuple[str, ...]
    draft: PartialSelection
    decided: ContextSelection | None = None
    sources: list[DocumentOnDevice | DocumentOnHost] = field(default_factory=list)
    tickets: dict[str, Any] = field(default_factory=dict)  # loads from disk under way, by key
    reloads: int = 0  # how often loaded blocks were evicted again before the request came to them
    ids_32: array[int] = field(init=False)  # int32, as the tiers compare them
    _blocks: tuple[torch.Tensor, list[Ints]] | None = None  # of these positions
    filled: bool = False
    clock: StageTimer | None = None  # of the batch that filled it, until its report is written
    by_tier: dict[str, int] = field(
        default_factory=dict
    )  # kept document tokens by the tier that they came from
    recomputed: int = 0
    by_graph: bool = False  # the pass over them was a CUDA graph
    one_pass: bool = False  # the question was in it
    waiting_since: float | None = None
    below_device: bool = False  # take documents from host or disk even where the device has them
    load_ms: float = 0.0
    missing: list[int] = field(default_factory=list)  # spans found to be nowhere before the selection
    analyses: dict[int, Analysis] = field(default_factory=dict)  # by span, those that the draft needs
    analysis_ms: float = 0.0
    query_ms: float = 0.0
    select_ms: float = 0.0

    def __post_init__(self) -> None:
        self.ids_32 = token_array(self.ids)

    @property
    def selection(self) -> ContextSelection:
        """What is kept and recomputed; RuntimeError before it is settled."""
        if self.decided is None:
            raise RuntimeError("the context's selection is not settled yet")
        return self.decided

    @property
    def needed(self) -> torch.Tensor:
        """Positions whose KV is needed now: those selected or, for the query pass, the draft's."""
        return self.draft.kept if self.decided is None else self.decided.kept

    @property
    def in_order(self) -> list[Analysis]:
        """The documents' analyses."""
        return [self.analyses[number] for number in sorted(self.analyses)]

    @property
    def question(self) -> Ints:
        """int64 [q]: its token ids."""
        return np.array(self.ids[self.plan.question_start :], dtype=np.int64)

    @property
    def question_tokens(self) -> int:
        return len(self.ids) - self.plan.question_start

    @property
    def slots(self) -> int:
        """S; before the selection the most it may be."""
        return self.draft.slots if self.decided is None else self.decided.slots

    def blocks(self, number: int, block: int) -> Ints:
        """Blocks of ``block`` tokens of document ``number`` that hold a token needed now in any layer,
        ascending.
        """
        if self._blocks is None or self._blocks[0] is not self.needed:
            starts, ends = (
                np.array(values, dtype=np.int64)
                for values in zip(*((s.start, s.end) for s in self.plan.spans), strict=True)
            )
            self._blocks = self.needed, needed_blocks(self.needed.numpy(), starts, ends, block)
        return self._blocks[1][number]

    @property
    def delta(self) -> int:
        """What positions after the context are ahead of their slots: the question follows the full length,
        not the kept one.
        """
        return self.question_at - self.slots

    @property
    def question_at(self) -> int:
        """Position of the question's first token."""
        return self.slots if self.decided is not None and self.decided.compact else self.plan.question_start


def report_of(context: ComposedContext) -> ContextReport:
    """What was done for a request whose first forward pass has run."""
    stages = context.clock.stages() if context.clock is not None else {}
    return ContextReport(
        strategy=context.plan.strategy,
        document_tokens=context.plan.question_start - context.plan.spans[0].end,
        kept=sum(context.by_tier.values()),
        recomputed=context.recomputed,
        by_tier=context.by_tier,
        compose_ms=stages.get("compose", 0.0),
        load_ms=context.load_ms,
        recompute_ms=stages.get("ask", 0.0) + stages.get("recompute", 0.0),
        extend_ms=stages.get("extend", 0.0),
        analysis_ms=context.analysis_ms,
        query_ms=context.query_ms,
        select_ms=context.select_ms,
        ask_ms=stages.get("ask", 0.0),
        recompute_graph=context.by_graph,
        one_pass=context.one_pass,
    )


def tokens_by_tier(context: ComposedContext) -> dict[str, int]:
    """Kept document tokens by the tier that their document came from (in the first layer, where layers keep
    different ones).
    """
    kept = context.selection.kept if context.selection.kept.dim() == 1 else context.selection.kept[0]
    spans = context.plan.spans
    counts = np.diff(np.searchsorted(kept.numpy(), [*(span.start for span in spans), spans[-1].end]))
    tiers: dict[str, int] = {}
    for tokens, source in zip(counts[1:].tolist(), context.sources[1:], strict=True):
        tier = tier_of(source)
        tiers[tier] = tiers.get(tier, 0) + tokens
    return tiers


def tier_of(source: DocumentOnDevice | DocumentOnHost) -> str:
    """device, host or disk."""
    return "device" if isinstance(source, DocumentOnDevice) else "disk" if source.from_disk else "host"
