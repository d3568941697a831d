"""Result types of a strategy: which tokens of a context are kept, and which are computed again.

Every composed request goes through selection, gather, recompute and extend. A strategy decides the two token
sets only. From the plan it makes a :class:`PartialSelection` when the request arrives. Decisions that need
the documents' analyses or the question's queries follow before admission
(`sglang_ext.context.scheduler.selection_stage`); rule `deviation` decides in the recompute pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from sglang_ext.analysis.document_analysis import Analysis, Cut
from sglang_ext.context.selection import recompute_rules as rules
from sglang_ext.context.selection.blocks import Blocks
from sglang_ext.context.selection.profile import Profile
from sglang_ext.context.selection.recompute_rules import Kept, Rule
from sglang_ext.wire.protocol import ContextPlan
from sglang_ext.wire.request_options import SamKvOptions


class Wanted(IntEnum):
    """How much of a document's analysis a selection reads."""

    SENTENCES = 0  # where its sentences begin
    KEYS = 1  # and the means and keys that sentences are scored by
    WHOLE = 2


@dataclass(frozen=True)
class ModelShape:
    """Facts of the engine that strategies depend on."""

    layers: int
    kv_itemsize: int = 2
    cut: Cut = field(default_factory=Cut)
    profile: Profile = field(default_factory=Profile)


@dataclass(frozen=True, slots=True)
class ContextSelection:
    """Positions in the full prompt, ascending, int64 on the CPU.

    ``kept`` is [S], the same in every layer, or [layers, S]; ``recomputed`` is [R]. With ``deviation_share``,
    that share of the document tokens is chosen in the recompute pass instead, by how much their values differ
    at layer 1. ``needs_question_attention``: ``recomputed`` is chosen after the context is composed, by the
    question's attention. ``compact``: kept tokens and the question have the positions of a prompt of these
    tokens alone; ``kept`` is [S] then. ``fuse``: recomputed KV is blended with the cached KV (SamKV, equation
    4) instead of replacing it. ``reason``: why so many tokens are kept, "" where the plan alone says it."""

    kept: torch.Tensor
    recomputed: torch.Tensor
    deviation_share: float | None = None
    fuse: bool = False
    needs_question_attention: bool = False
    compact: bool = False
    reason: str = ""

    @property
    def slots(self) -> int:
        """S: KV slots of the context in every layer."""
        return int(self.kept.shape[-1])

    @property
    def is_copied(self) -> bool:
        """True if the context is its documents' KV, the same tokens in all layers, and nothing of it is
        computed again."""
        computed = self.deviation_share is not None or self.needs_question_attention or len(self.recomputed)
        return self.kept.dim() == 1 and not (computed or self.fuse or self.compact)

    def content(self) -> bytes:
        """All fields as bytes, equal for equal selections."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in ("kept", "recomputed")}
        shape = tuple(self.kept.shape)
        return repr((shape, plain)).encode() + self.kept.numpy().tobytes() + self.recomputed.numpy().tobytes()


@dataclass(frozen=True, eq=False)
class PartialSelection:
    """The part of a selection that the plan alone decides.

    ``kept`` as in ContextSelection. With a ``budget``, ``kept`` holds only the tokens that are kept in any
    case (system text, initial and local blocks); a selector adds at most ``budget`` tokens per layer from
    ``blocks``. ``rotate`` False leaves keys at their documents' own positions (wrong on purpose, for
    ablations). ``cut``: how the documents are cut in their analyses."""

    plan: ContextPlan
    kept: torch.Tensor
    rule: Rule
    fuse: bool
    cut: Cut
    compact: bool = False
    rotate: bool = True
    samkv: SamKvOptions | None = None
    blocks: Blocks | None = None
    budget: int = 0

    @property
    def slots(self) -> int:
        """Largest S that the selection may come to."""
        return int(self.kept.shape[-1]) + self.budget

    @property
    def selects(self) -> bool:
        """A selector has tokens left to choose."""
        return self.budget > 0

    @property
    def needs_query(self) -> bool:
        """The selector reads the question's queries."""
        return self.selects and self.samkv is not None and self.samkv.needs_query

    @property
    def needs_analysis(self) -> bool:
        return self.selects or (self.rule.needs_analysis and len(self.plan.spans) > 1)

    def analysis_wanted(self, *, complete: bool) -> Wanted:
        """How much of an analysis the selection reads, where it reads one. ``complete``: rule `sentences`
        waits for the context sensitivity; else it does without that of documents where it is not known."""
        of_blocks = self.selects and self.samkv is not None and not self.samkv.by_sentence
        whole = of_blocks or self.rule.name in ("sensitivity", "outliers", "anchors")
        if whole or (complete and self.rule.reads_sensitivity):
            return Wanted.WHOLE
        return Wanted.KEYS if self.selects else Wanted.SENTENCES

    def settle(
        self, analyses: Sequence[Analysis] = (), chosen: torch.Tensor | None = None
    ) -> ContextSelection:
        """Complete the selection.

        Args:
            analyses: one per document, if ``needs_analysis``.
            chosen: positions of the kept document tokens that the selector found, [S] or [layers, S].
        """
        kept = self.kept
        if chosen is not None:
            system = torch.arange(self.plan.spans[0].end)
            kept = torch.cat((system.expand(*chosen.shape[:-1], -1), chosen), dim=-1)
        recomputed: torch.Tensor | None
        if self.rule.needs_question_attention and len(self.plan.spans) > 1:
            recomputed = Kept(self.plan, kept).without_choice(self.rule)
        else:
            recomputed = self.recomputed(kept, analyses)
        return ContextSelection(
            kept,
            torch.empty(0, dtype=torch.int64) if recomputed is None else recomputed,
            self._deviation_share(kept) if self.rule.name == "deviation" else None,
            self.fuse,
            needs_question_attention=recomputed is None,
            compact=self.compact,
        )

    def _deviation_share(self, kept: torch.Tensor) -> float:
        share, most = self.rule.share, self.rule.most
        return share if most is None else min(share, most / max(1, Kept(self.plan, kept).tokens))

    def recomputed(
        self, kept: torch.Tensor, analyses: Sequence[Analysis], attention: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Positions that the rule chooses among ``kept``. ``attention``: see `recompute_rules.Kept`."""
        if len(self.plan.spans) == 1 and self.rule.needs_analysis:
            return torch.empty(0, dtype=torch.int64)  # no documents
        initial = 1 if self.samkv is None else self.samkv.initial_blocks
        return rules.choose(Kept(self.plan, kept, analyses, initial, attention), self.rule)


def keeps_all(partial: PartialSelection) -> bool:
    """True if every layer keeps every token at its place in the full prompt."""
    whole = partial.kept.dim() == 1 and len(partial.kept) == partial.plan.question_start
    return whole and not partial.selects and not partial.compact and partial.rotate
