"""Which of the kept tokens are computed again: one function a rule, over the plan, what is kept and the
documents' analyses.

A rule that needs the model at query time (`deviation`: CacheBlend's) is left to the recompute pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.selection.sentences import SINKS
from sglang_ext.protocol import ContextPlan

Ints = npt.NDArray[np.int64]
DEFAULT_SHARE = 0.15
# of the question's attention in a sentence's score; README.md has the measurements behind this and OPENING
POWER = 1.0
OPENING = 0.25  # of the attention to a document's tokens that its first sentence counts with


@dataclass(frozen=True, eq=False)
class Rule:
    """``share`` is of the document tokens kept in a layer. ``positions``: the answer itself, for rule
    `positions`.
    """

    name: str
    share: float = DEFAULT_SHARE
    first: int = 16
    seed: int = 0
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def needs_analysis(self) -> bool:
        return self.name in _ANALYSED

    @property
    def asks(self) -> bool:
        """Whether the rule wants to know what the question attends to, which is known once the context is
        composed.
        """
        return self.name in _ASKING


@dataclass(frozen=True, eq=False)
class Kept:
    """What a rule chooses from. ``kept`` int64 [S] or [layers, S]; ``analyses`` one a document, only where
    the rule needs them.
    """

    plan: ContextPlan
    kept: torch.Tensor
    analyses: Sequence[Analysis] = ()
    initial_blocks: int = 1
    attention: torch.Tensor | None = None
    """f32 [document tokens]: what the question attends to (`ask.attention`); only where the rule asks."""

    @property
    def first(self) -> int:
        return self.plan.spans[0].end

    def weight(self) -> torch.Tensor:
        """f32 [document tokens]: the share of the layers that keep each."""
        rows = np.atleast_2d(self.kept.numpy())
        inside = rows[rows >= self.first] - self.first
        counts = np.bincount(inside, minlength=self.plan.question_start - self.first)
        return torch.from_numpy(counts.astype(np.float32) / np.float32(len(rows)))

    def best(self, score: torch.Tensor, share: float) -> torch.Tensor:
        """Positions, ascending, of the share of the kept document tokens with the highest ``score`` [document
        tokens] times weight.
        """
        weight = self.weight()
        candidates = weight.nonzero()[:, 0]
        count = share_of(share, round(float(weight.sum())))
        order = (score * weight)[candidates].argsort(dim=0, descending=True, stable=True)
        return self.first + candidates[order[:count]].sort().values

    def without_choice(self, share: float) -> torch.Tensor | None:
        """What every score would choose: nothing where no document token is kept, all where ``share`` covers
        all; else None.
        """
        weight = self.weight().numpy()
        candidates = np.flatnonzero(weight)
        covered = share_of(share, round(float(weight.sum()))) >= len(candidates)
        return torch.from_numpy(self.first + candidates) if covered else None

    def among(self, positions: torch.Tensor) -> torch.Tensor:
        """Those of the positions that some layer keeps."""
        return positions[torch.isin(positions, self.kept)]


Chooser = Callable[[Kept, Rule], torch.Tensor]
_rules: dict[str, Chooser] = {}
_ANALYSED: set[str] = set()
_ASKING: set[str] = set()
_outliers_of: WeakKeyDictionary[Analysis, tuple[Ints, Ints]] = WeakKeyDictionary()


def rule(name: str, *, analysed: bool = False, asks: bool = False) -> Callable[[Chooser], Chooser]:
    """Register a rule: positions int64, ascending, of the tokens to compute again."""

    def add(function: Chooser) -> Chooser:
        _rules[name] = function
        if analysed:
            _ANALYSED.add(name)
        if asks:
            _ASKING.add(name)
        return function

    return add


def names() -> tuple[str, ...]:
    """Rules a request may ask for by name, sorted."""
    return tuple(sorted({*_rules, "deviation"} - {"positions"}))


def choose(kept: Kept, wanted: Rule) -> torch.Tensor:
    """The tokens that the rule chooses. `deviation` has none before the recompute pass."""
    return (
        torch.empty(0, dtype=torch.int64) if wanted.name == "deviation" else _rules[wanted.name](kept, wanted)
    )


def share_of(share: float, n: int) -> int:
    """How many of n tokens a share is: at least one."""
    return min(n, max(1, round(share * n))) if n else 0


@rule("none")
def _none(kept: Kept, wanted: Rule) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)


@rule("all")
def _all(kept: Kept, wanted: Rule) -> torch.Tensor:
    """Everything kept, the system text too: exact where everything is kept."""
    return torch.unique(kept.kept)


@rule("positions")
def _positions(kept: Kept, wanted: Rule) -> torch.Tensor:
    """Those the request names, kept or not."""
    return wanted.positions


@rule("first")
def _first(kept: Kept, wanted: Rule) -> torch.Tensor:
    """EPIC: the first ``first`` tokens of every document."""
    parts = [torch.arange(s.start, min(s.end, s.start + wanted.first)) for s in kept.plan.spans[1:]]
    return kept.among(torch.cat([torch.empty(0, dtype=torch.int64), *parts]))


@rule("random")
def _random(kept: Kept, wanted: Rule) -> torch.Tensor:
    """A share drawn with ``seed``: what any rule must beat."""
    generator = torch.Generator().manual_seed(wanted.seed)
    return kept.best(
        torch.rand(kept.plan.question_start - kept.first, generator=generator) + 1e-6, wanted.share
    )


@rule("sensitivity", analysed=True)
def _sensitivity(kept: Kept, wanted: Rule) -> torch.Tensor:
    """The share whose values depend most on what stands before their document (METHODS, section 6)."""
    return kept.best(torch.cat([analysis.sensitivity for analysis in kept.analyses]), wanted.share)


@rule("sentences", analysed=True, asks=True)
def _sentences(kept: Kept, wanted: Rule) -> torch.Tensor:
    """Whole sentences that depend on what stands before their document, the more the question attends to
    them.

    Score of sentence S: mean sensitivity of its kept tokens * (highest attention of the question to one of
    them)^POWER. A document's first sentence, its title where it has one, counts with OPENING of the attention
    to any token of the document where that is more: "Continued", "Part 2", "It" link what the document holds
    to another one. Sentences are taken by score until the share is spent, equal ones in the order of the
    text; the last one is cut. Where the question attends to nothing that is kept, sensitivity alone decides.

    Before all sentences come the first ``first`` tokens of every document, as EPIC has it, or so many of each
    as the share pays for: keys that a document alone parks attention on draw the question's, too, when there
    are several of them."""
    weight = kept.weight().numpy()
    live = weight > 0
    lengths = np.array([analysis.n_tokens for analysis in kept.analyses])
    start = np.cumsum(lengths) - lengths  # of documents
    begin = np.flatnonzero(torch.cat([analysis.begins for analysis in kept.analyses]).numpy())  # of sentences
    attention = np.zeros_like(weight) if kept.attention is None else kept.attention.numpy() * live
    for sink in range(SINKS):
        attention[start[sink < lengths] + sink] = 0.0
    looked_at = np.maximum.reduceat(attention, begin)
    opening = np.searchsorted(begin, start)
    looked_at[opening] = np.maximum(looked_at[opening], OPENING * np.maximum.reduceat(attention, start))
    sensitivity = torch.cat([analysis.sensitivity for analysis in kept.analyses]).numpy() * weight
    held = np.add.reduceat(live, begin, dtype=np.int64)
    score = np.add.reduceat(sensitivity, begin) / np.maximum(held, 1)
    if (looked_at > 0).any():
        score *= looked_at**POWER
    sentence = np.repeat(np.arange(len(begin)), np.diff(begin, append=len(live)))
    budget = share_of(wanted.share, round(float(weight.sum())))
    opened = np.zeros_like(live)
    for offset in range(min(wanted.first, budget // len(lengths))):
        opened[start[offset < lengths] + offset] = True
    opened &= live
    rest = live & ~opened
    held = np.add.reduceat(rest, begin, dtype=np.int64)
    order = np.argsort(-score, kind="stable")
    quota = np.zeros_like(held)
    before = np.cumsum(held[order]) - held[order]
    quota[order] = np.clip(budget - int(opened.sum()) - before, 0, held[order])
    nth = np.cumsum(rest) - 1
    nth -= (np.cumsum(held) - held)[sentence]  # of the sentence's tokens that are left
    return torch.from_numpy(kept.first + np.flatnonzero(opened | (rest & (nth < quota[sentence]))))


@rule("outliers", analysed=True)
def _outliers(kept: Kept, wanted: Rule) -> torch.Tensor:
    """SamKV, section 3.3: initial and local blocks, and the outlier tokens of a layer's static analysis that
    the layer keeps.
    """
    n = kept.plan.question_start - kept.first
    held = np.zeros((len(kept.kept) if kept.kept.dim() == 2 else 1, n), dtype=bool)
    for row, positions in zip(held, np.atleast_2d(kept.kept.numpy()), strict=True):
        row[positions[positions >= kept.first] - kept.first] = True
    chosen = np.zeros(n, dtype=bool)
    for span, analysis in zip(kept.plan.spans[1:], kept.analyses, strict=True):
        own, part = (
            chosen[span.start - kept.first : span.end - kept.first],
            held[:, span.start - kept.first : span.end - kept.first],
        )
        layer, token = _flagged(analysis)
        own[token[part[layer if len(held) > 1 else 0, token]]] = True
        own[: kept.initial_blocks * analysis.block] = True
        own[max(0, analysis.blocks - analysis.local_blocks) * analysis.block :] = True
    return torch.from_numpy(kept.first + np.flatnonzero(chosen & held.any(0)))


def _flagged(analysis: Analysis) -> tuple[Ints, Ints]:
    """Layers and tokens of an analysis' outliers; found once, because they never change."""
    if analysis not in _outliers_of:
        layer, token = analysis.outliers().numpy().nonzero()
        _outliers_of[analysis] = layer, token
    return _outliers_of[analysis]
