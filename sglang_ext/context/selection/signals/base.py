"""Contract of the selection signals: what a signal reads, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.selection.blocks import Blocks
from sglang_ext.context.selection.sentences import Sentences
from sglang_ext.context.selection.signals.terms import ContextTerms, terms_in, terms_of
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import RetrievalScores
from sglang_ext.wire.request_options import SamKvOptions

TEMPERATURE = 0.1  # of cosines: chosen on questions of SQuAD and MuSiQue


def same(part: torch.Tensor) -> torch.Tensor:
    """The reduction over a single rank."""
    return part


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is known of a request when the S sentences of its D documents, of N tokens together, are scored.

    ``analyses``: one a document. ``ids`` int64 [N]: the documents' token ids; ``question`` int64: the
    question's. ``texts``: reads token ids. ``query`` f32 [layers, heads, head_dim]: the question's,
    rotated to its position; None if no signal needs it. ``scores``: the retriever's, if the plan has them.
    ``reduce`` sums over ranks, ``highest`` takes the maximum. ``known``: signals, by name, that
    were computed before."""

    options: SamKvOptions
    blocks: Blocks
    analyses: Sequence[Analysis]
    sentences: Sentences
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

    @cached_property
    def asked(self) -> list[int]:
        """The question's terms, in their order: sums over them are the same on every rank."""
        [question] = self.texts.read([self.question.tolist()])
        return list(dict.fromkeys(terms_of(question)))

    @cached_property
    def terms(self) -> ContextTerms:
        """The documents' terms."""
        lengths = [analysis.n_tokens for analysis in self.analyses]
        parts = zip(self.analyses, self.ids.split(lengths), strict=True)
        return ContextTerms([terms_in(analysis, ids, self.texts) for analysis, ids in parts], self.sentences)

    def spread(self, by_document: torch.Tensor) -> torch.Tensor:
        """f32 [S]: each sentence with the value of its document, ``by_document`` f32 [D]."""
        return by_document[self.sentences.document]


Signal = Callable[[Evidence], torch.Tensor | None]
"""Returns f32 [S], from 0 to 1, higher for sentences that are more likely to be needed; None where the
request lacks what it reads. Every rank returns the same. A signal that is computed on the model's device
returns it there, so that the host need not wait for it."""


def scaled(score: torch.Tensor) -> torch.Tensor:
    """``score``, at least 0, over its largest value; zeros where that is 0."""
    return score / score.max().clamp(min=1e-9)


def calibrated(cosine: torch.Tensor) -> torch.Tensor:
    """Cosines as weights: exp((cosine - highest cosine) / TEMPERATURE). A cosine has no zero, and what lies
    far below the best says nothing."""
    return ((cosine - cosine.max()) / TEMPERATURE).exp()
