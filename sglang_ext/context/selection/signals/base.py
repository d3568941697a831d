"""Contract of the selection signals: what a signal reads, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.rope import Rotation
from sglang_ext.context.selection.blocks import Blocks
from sglang_ext.context.selection.signals.terms import Term, index_of, terms_of
from sglang_ext.protocol import RetrievalScores
from sglang_ext.request_options import SamKvOptions

TEMPERATURE = 0.1  # of cosines: chosen on questions of SQuAD and MuSiQue


def same(part: torch.Tensor) -> torch.Tensor:
    """The reduction over a single rank."""
    return part


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is known of a request when the sentences of its D documents, of N tokens together, are scored.

    ``analyses``: one a document. ``sentence`` int64 [N] and ``first`` int64 [D]: see
    `sentences.number_sentences`. ``ids`` int64 [N]: the documents' token ids; ``question`` int64: the
    question's. ``texts``: reads token ids. ``query`` f32 [layers, heads, head_dim]: the question's,
    rotated to its position; None if no signal needs it. ``scores``: the retriever's, if the plan has them.
    ``reduce`` sums over ranks, ``highest`` takes the maximum. ``known``: signals, by name, that
    were computed before."""

    options: SamKvOptions
    blocks: Blocks
    analyses: Sequence[Analysis]
    sentence: torch.Tensor
    first: torch.Tensor
    ids: torch.Tensor
    question: torch.Tensor
    texts: Texts
    query: torch.Tensor | None
    question_start: int
    rotation: Rotation
    scores: RetrievalScores | None = None
    reduce: Callable[[torch.Tensor], torch.Tensor] = same
    highest: Callable[[torch.Tensor], torch.Tensor] = same
    known: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def sentences(self) -> int:
        """Number of sentences."""
        return int(self.sentence[-1]) + 1

    @cached_property
    def asked(self) -> dict[Term, None]:
        """The question's terms, in their order: sums over them are the same on every rank."""
        [question] = self.texts.read([self.question.tolist()])
        return dict.fromkeys(terms_of(question))

    @cached_property
    def openings(self) -> list[int]:
        """The number of each document's first sentence."""
        numbers: list[int] = self.sentence[self.first].tolist()
        return numbers

    @cached_property
    def held(self) -> list[Mapping[Term, Sequence[int]]]:
        """`index_of` each document, whose sentences it counts from 0."""
        return [
            index_of(analysis, self.ids[start : start + analysis.n_tokens].tolist(), self.texts)
            for analysis, start in zip(self.analyses, self.first.tolist(), strict=True)
        ]

    def holding(self, term: Term) -> list[int]:
        """The numbers of the sentences that hold a term."""
        documents = zip(self.openings, self.held, strict=True)
        return [first + own for first, index in documents for own in index.get(term, ())]

    def spread(self, by_document: torch.Tensor) -> torch.Tensor:
        """f32 [sentences]: each sentence with the value of its document, ``by_document`` f32 [D]."""
        opening = torch.zeros(self.sentences, dtype=torch.int64)
        opening[self.sentence[self.first]] = 1
        return by_document[opening.cumsum(0) - 1]


Signal = Callable[[Evidence], torch.Tensor | None]
"""Returns f32 [sentences] on the CPU, from 0 to 1, higher for sentences that are more likely to be needed;
None where the request lacks what it reads. Every rank returns the same."""


def scaled(score: torch.Tensor) -> torch.Tensor:
    """``score``, at least 0, over its largest value; zeros where that is 0."""
    return score / score.max().clamp(min=1e-9)


def calibrated(cosine: torch.Tensor) -> torch.Tensor:
    """Cosines as weights: exp((cosine - highest cosine) / TEMPERATURE). A cosine has no zero, and what lies
    far below the best says nothing."""
    return ((cosine - cosine.max()) / TEMPERATURE).exp()
