"""Rules for the kept tokens to compute again: one function per rule, and the table :data:`RULES`.

A rule reads the plan, the kept tokens, the documents' analyses and, for `sentences` and `question`, the
question's attention. Rule `deviation` (CacheBlend) needs the model and decides in the recompute pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.selection.sentences import SINKS, Sentences
from sglang_ext.tensors.buffers import Ints
from sglang_ext.wire.protocol import ContextPlan
from sglang_ext.wire.request_options import SENSITIVE_RULES, ComposedOptions, PlanError, SamKvOptions

_SHARE = 0.15
_SENTENCES_SHARE = 0.1  # more gained nothing on any set measured
# Of chosen sentences most matter: 0.66 is a tenth of all document tokens where 15 % are kept.
_CHOSEN_SENTENCES_SHARE = 0.66
# Ceilings with `share_top_p`
_MOST_SHARE, _MOST_CHOSEN_SENTENCES_SHARE = 0.3, 1.0
_FIRST, _SENTENCES_FIRST = 16, 4  # tokens of each document
_OPENING = 0.25  # a document's first sentence counts with this share of the document's highest attention
_outliers_of: WeakKeyDictionary[Analysis, tuple[Ints, Ints]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule with its parameters. ``share`` refers to the document tokens kept in a layer; ``positions`` is
    the answer of rule `positions`.

    With ``top_p`` the number of tokens follows from the scores: the fewest best ones that hold ``top_p`` of
    the sum of all, at least ``least`` and at most ``share`` of the document tokens kept in a layer. ``most``:
    tokens of any share; None: no limit."""

    name: str
    share: float = _SHARE
    first: int = _FIRST
    seed: int = 0
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    top_p: float | None = None
    least: float = 0.0
    most: int | None = None

    @classmethod
    def of(cls, plan: ContextPlan, options: ComposedOptions) -> Rule:
        """The rule that the options ask for. Raises PlanError for positions behind the context."""
        wanted, first = options.recompute, options.first
        if first is None:
            first = _SENTENCES_FIRST if wanted == "sentences" else _FIRST
        rule = cls(
            "positions" if not isinstance(wanted, str) else wanted,
            _ceiling(options) if options.share is None else options.share,
            first,
            options.seed,
            top_p=options.share_top_p,
            least=options.share_least,
            most=options.max_recomputed,
        )
        if isinstance(wanted, str):
            return rule
        positions = torch.tensor(sorted(set(wanted)), dtype=torch.int64)
        if len(positions) and int(positions[-1]) >= plan.question_start:
            raise PlanError(f"recompute must hold positions below {plan.question_start}")
        return replace(rule, positions=positions)

    def bounds(self, kept: int) -> tuple[int, int]:
        """The fewest and the most of ``kept`` document tokens that the rule chooses; the same two without
        `top_p`."""
        most = min(share_of(self.share, kept), kept if self.most is None else self.most)
        return (most if self.top_p is None else min(most, share_of(self.least, kept))), most

    def reason(self, chosen: int, kept: int) -> str:
        """Why ``chosen`` of ``kept`` document tokens are computed again, "" where the options alone say
        it."""
        least, most = self.bounds(kept)
        if self.top_p is None:
            return ""
        if chosen >= most:
            return f"the ceiling, option {'max_recomputed' if most == self.most else 'share'}"
        if chosen <= least:
            return f"the floor: fewer hold {self.top_p:g} of the weight"
        return f"they hold {self.top_p:g} of the weight"

    @property
    def needs_analysis(self) -> bool:
        return RULES[self.name].needs_analysis

    @property
    def reads_sensitivity(self) -> bool:
        """The rule reads the documents' context sensitivity."""
        return self.name in SENSITIVE_RULES

    @property
    def needs_question_attention(self) -> bool:
        """The rule reads the question's attention, which is known once the context is composed."""
        return RULES[self.name].needs_question_attention

    @property
    def reads_anchors(self) -> bool:
        """The question's attention is measured after it has read each document's anchors only."""
        return RULES[self.name].reads_anchors


@dataclass(frozen=True, eq=False)
class Kept:
    """Input of a rule. ``kept`` int64 [S] or [layers, S]; ``analyses`` one per document, where the rule
    needs them; ``attention`` f32 [document tokens]: the question's (`question_attention`), where the rule
    needs it."""

    plan: ContextPlan
    kept: torch.Tensor
    analyses: Sequence[Analysis] = ()
    initial_blocks: int = 1
    attention: torch.Tensor | None = None

    @property
    def first(self) -> int:
        """Position of the first document token."""
        return self.plan.spans[0].end

    @cached_property
    def sensitivity(self) -> torch.Tensor:
        """f32 [document tokens]: the documents' context sensitivity. Where a document's is not known yet,
        each of its tokens has the mean of the others', or 1."""
        known = [analysis.sensitivity for analysis in self.analyses if analysis.is_whole]
        mean = float(torch.cat(known).mean()) if known else 1.0
        return torch.cat(
            [
                each.sensitivity if each.is_whole else torch.full((each.n_tokens,), mean)
                for each in self.analyses
            ]
        )

    @cached_property
    def live(self) -> tuple[Ints, npt.NDArray[np.float32]]:
        """The document tokens that at least one layer keeps, counted from `first`, ascending, and the share
        of the layers that keep each."""
        rows = np.atleast_2d(self.kept.numpy())
        inside = rows[rows >= self.first] - self.first
        if len(rows) == 1:
            return inside, np.ones(len(inside), dtype=np.float32)
        counts = np.bincount(inside)
        live = np.flatnonzero(counts)
        return live, counts[live].astype(np.float32) / np.float32(len(rows))

    @property
    def tokens(self) -> int:
        """Document tokens kept in a layer, the mean of the layers."""
        return round(float(self.live[1].sum()))

    def best(self, score: torch.Tensor, rule: Rule) -> torch.Tensor:
        """As many of the kept document tokens as the rule takes, with the highest ``score`` [document tokens]
        times weight: positions, ascending."""
        live, weight = (torch.from_numpy(part) for part in self.live)
        least, count = rule.bounds(self.tokens)
        values, order = (score[live] * weight).sort(dim=0, descending=True, stable=True)
        if rule.top_p is not None:
            count = min(count, max(least, _holding(values.numpy(), rule.top_p)))
        return self.first + live[order[:count]].sort().values

    def without_choice(self, rule: Rule) -> torch.Tensor | None:
        """The choice that does not depend on a score: no token if no document token is kept, all if the rule
        takes them in any case, else None."""
        live, _ = self.live
        covered = rule.bounds(self.tokens)[0] >= len(live)
        return torch.from_numpy(self.first + live) if covered else None

    def among(self, positions: torch.Tensor) -> torch.Tensor:
        """The positions that at least one layer keeps."""
        return positions[torch.isin(positions, self.kept)]


def choose(kept: Kept, rule: Rule) -> torch.Tensor:
    """The rule's choice: positions int64, ascending. Empty for `deviation`, which the recompute pass
    decides."""
    return RULES[rule.name].choose(kept, rule)


def share_of(share: float, n: int) -> int:
    """Number of tokens in a share of n: at least one, if there are any."""
    return min(n, max(1, round(share * n))) if n else 0


def _ceiling(options: ComposedOptions) -> float:
    """The default share of a rule, the most with `share_top_p`."""
    chosen = isinstance(options, SamKvOptions) and options.by_sentence and options.recompute == "sentences"
    if options.share_top_p is not None:
        return _MOST_CHOSEN_SENTENCES_SHARE if chosen else _MOST_SHARE
    if options.recompute != "sentences":
        return _SHARE
    return _CHOSEN_SENTENCES_SHARE if chosen else _SENTENCES_SHARE


def _holding(weights: npt.NDArray[np.floating[Any]], p: float) -> int:
    """How many of the first ``weights``, none negative, hold the part ``p`` of their sum; none if it is 0."""
    held = np.cumsum(weights, dtype=np.float64)
    if not len(held) or held[-1] <= 0:
        return 0
    return min(len(held), int(np.searchsorted(held, p * held[-1])) + 1)


def _none(kept: Kept, rule: Rule) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)


def _all(kept: Kept, rule: Rule) -> torch.Tensor:
    """Choose all kept tokens, the system text included: exact where everything is kept."""
    return torch.unique(kept.kept)


def _positions(kept: Kept, rule: Rule) -> torch.Tensor:
    """The positions that the request names, kept or not."""
    return rule.positions


def _first(kept: Kept, rule: Rule) -> torch.Tensor:
    """EPIC: the first ``first`` tokens of every document."""
    parts = [torch.arange(s.start, min(s.end, s.start + rule.first)) for s in kept.plan.spans[1:]]
    return kept.among(torch.cat([torch.empty(0, dtype=torch.int64), *parts]))


def _random(kept: Kept, rule: Rule) -> torch.Tensor:
    """A random share, drawn with ``seed``."""
    generator = torch.Generator().manual_seed(rule.seed)
    return kept.best(torch.rand(kept.plan.question_start - kept.first, generator=generator) + 1e-6, rule)


def _sensitivity(kept: Kept, rule: Rule) -> torch.Tensor:
    """The share whose values depend most on the text before their document (docs/methods.md, section 6)."""
    return kept.best(kept.sensitivity, rule)


def _question(kept: Kept, rule: Rule) -> torch.Tensor:
    """The share that the question attends to most: with rule `question` over layers together, having read the
    whole context (after ProphetKV); with rule `anchors` in the critical layers, having read each document's
    anchors (QCFuse)."""
    attention = torch.zeros(kept.plan.question_start - kept.first)
    return kept.best(attention if kept.attention is None else kept.attention, rule)


def _sentences(kept: Kept, rule: Rule) -> torch.Tensor:
    """Whole sentences that depend on the text before their document and that the question attends to.

    Score of a sentence: mean sensitivity of its kept tokens times the question's highest attention to one of
    them. A document's first sentence, often its title, counts with at least `_OPENING` of the question's
    highest attention to the document: "Continued", "Part 2" or "It" link the document to another one.
    Sentences are taken by score until the share is spent, equal scores in text order; the last one is cut.
    If the question attends to no kept token, sensitivity alone decides. Between documents whose sensitivity
    is not known yet, the question's attention alone does.

    Before all sentences come the first ``first`` tokens of every document (EPIC), or as many of each as the
    share pays for: keys on which a single document parks attention also draw the question's attention when
    there are several documents.

    With `top_p` the share is that of the fewest best sentences, each of which weighs its tokens times its
    score, that hold it, together with those first tokens."""
    live, weight = kept.live
    whole = Sentences.of(kept.analyses)
    number = whole.number[live]
    begin = np.flatnonzero(np.diff(number, prepend=-1))  # in ``live``, of each sentence that it has
    sentence = number[begin]
    tokens = np.diff(begin, append=len(live))
    document = whole.document[sentence]
    offset = live - np.repeat(whole.first[document], tokens)  # in the document
    attention = np.zeros_like(weight) if kept.attention is None else kept.attention.numpy()[live]
    attention[offset < SINKS] = 0.0
    relevance = np.maximum.reduceat(attention, begin)
    leading = np.flatnonzero(np.diff(document, prepend=-1))  # each document's first sentence that is kept
    highest = np.maximum.reduceat(relevance, leading)
    opens = sentence[leading] == whole.opening[document[leading]]
    opening = leading[opens]
    relevance[opening] = np.maximum(relevance[opening], _OPENING * highest[opens])
    sensitivity = kept.sensitivity.numpy()[live] * weight
    score = np.add.reduceat(sensitivity, begin) / tokens
    if (relevance > 0).any():
        score *= relevance
    least, budget = rule.bounds(kept.tokens)
    first = offset < min(rule.first, budget // len(kept.analyses))
    order = np.argsort(-score, kind="stable")
    if rule.top_p is not None:
        holds = np.zeros(len(order), dtype=bool)
        holds[order[: _holding((tokens * score)[order], rule.top_p)]] = True
        budget = min(budget, max(least, int((first | np.repeat(holds, tokens)).sum())))
    left = tokens - np.add.reduceat(first, begin, dtype=np.int64)
    quota = np.zeros_like(left)
    before = np.cumsum(left[order]) - left[order]
    quota[order] = np.clip(budget - int(first.sum()) - before, 0, left[order])
    nth = np.cumsum(~first) - 1
    nth -= np.repeat(np.cumsum(left) - left, tokens)  # among the remaining tokens of its sentence
    return torch.from_numpy(kept.first + live[first | (nth < np.repeat(quota, tokens))])


def _outliers(kept: Kept, rule: Rule) -> torch.Tensor:
    """SamKV, section 3.3: initial and local blocks, and a layer's static outlier tokens that the layer
    keeps."""
    n = kept.plan.question_start - kept.first
    rows = np.atleast_2d(kept.kept.numpy())
    live = np.zeros((len(rows), n), dtype=bool)
    for row, positions in zip(live, rows, strict=True):
        row[positions[positions >= kept.first] - kept.first] = True
    chosen = np.zeros(n, dtype=bool)
    for span, analysis in zip(kept.plan.spans[1:], kept.analyses, strict=True):
        document = slice(span.start - kept.first, span.end - kept.first)
        own, part = chosen[document], live[:, document]
        layer, token = _flagged(analysis)
        own[token[part[layer if len(rows) > 1 else 0, token]]] = True
        own[: kept.initial_blocks * analysis.block] = True
        own[max(0, analysis.blocks - analysis.local_blocks) * analysis.block :] = True
    return torch.from_numpy(kept.first + np.flatnonzero(chosen & live.any(0)))


def _flagged(analysis: Analysis) -> tuple[Ints, Ints]:
    """Layers and tokens of an analysis' outliers; computed once, because they never change."""
    if analysis not in _outliers_of:
        layer, token = analysis.outliers().numpy().nonzero()
        _outliers_of[analysis] = layer, token
    return _outliers_of[analysis]


class RuleEntry(NamedTuple):
    """A row of :data:`RULES`."""

    choose: Callable[[Kept, Rule], torch.Tensor]
    needs_analysis: bool = False
    needs_question_attention: bool = False
    reads_anchors: bool = False


RULES = {
    "all": RuleEntry(_all),
    "anchors": RuleEntry(_question, needs_analysis=True, needs_question_attention=True, reads_anchors=True),
    "deviation": RuleEntry(_none),
    "first": RuleEntry(_first),
    "none": RuleEntry(_none),
    "outliers": RuleEntry(_outliers, needs_analysis=True),
    "positions": RuleEntry(_positions),
    "question": RuleEntry(_question, needs_question_attention=True),
    "random": RuleEntry(_random),
    "sensitivity": RuleEntry(_sensitivity, needs_analysis=True),
    "sentences": RuleEntry(_sentences, needs_analysis=True, needs_question_attention=True),
}
