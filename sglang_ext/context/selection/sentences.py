"""Whole sentences of documents: their places, and which are kept by their scores (`signals` makes these)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.tensors.buffers import Ints

SINKS = 3  # first tokens of a document, on which models park attention
_SHARPNESS = 2  # exponent that makes a score a weight
_SHORTEST = 8  # tokens: a shorter sentence (a heading) is penalized as one of this length


@dataclass(frozen=True, eq=False)
class Sentences:
    """The S sentences of D documents, numbered over all of them, and their N tokens; int64 on the host.

    ``begin`` [S]: each sentence's first token. ``opening`` [D]: each document's first sentence. ``tokens``:
    N."""

    begin: Ints
    opening: Ints
    tokens: int

    @classmethod
    def of(cls, analyses: Sequence[Analysis]) -> Sentences:
        """Those of documents one after another. A document's first token always begins a sentence."""
        ends = np.cumsum([analysis.n_tokens for analysis in analyses])
        begins = torch.cat([analysis.begins for analysis in analyses]).numpy() != 0
        first = np.append(0, ends[:-1])
        begins[first] = True
        begin = np.flatnonzero(begins)
        return cls(begin, np.searchsorted(begin, first), len(begins))

    def __len__(self) -> int:
        """S."""
        return len(self.begin)

    @cached_property
    def length(self) -> Ints:
        """[S]: tokens of each sentence."""
        return np.diff(self.begin, append=self.tokens)

    @cached_property
    def first(self) -> Ints:
        """[D]: each document's first token."""
        return self.begin[self.opening]

    @cached_property
    def counts(self) -> Ints:
        """[D]: sentences of each document."""
        return np.diff(self.opening, append=len(self))

    @cached_property
    def document(self) -> Ints:
        """[S]: the document that each sentence stands in."""
        return np.repeat(np.arange(len(self.opening)), self.counts)

    @cached_property
    def number(self) -> Ints:
        """[N]: the sentence that each token stands in."""
        return np.repeat(np.arange(len(self)), self.length)

    def best(self, token: torch.Tensor) -> torch.Tensor:
        """f32 [S]: largest value of each sentence's tokens; ``token`` f32 [N]."""
        return torch.from_numpy(np.maximum.reduceat(token.numpy(), self.begin))


def penalize_length(score: torch.Tensor, sentences: Sentences, power: float) -> torch.Tensor:
    """f32 [S]: ``score`` divided by the sentence's tokens to that power: gain per slot."""
    return score / torch.from_numpy(sentences.length).clamp(min=_SHORTEST) ** power


def lift_titles(score: torch.Tensor, sentences: Sentences, factor: float) -> torch.Tensor:
    """f32 [S]: a document's first sentence scores at least ``factor`` of the best sentence of its own and of
    the next document.

    "Continued" or "Part 2" say which document this one continues; and the text before a continuation must not
    look like another document."""
    opening, out = sentences.opening, score.numpy().copy()
    top = np.maximum.reduceat(out, opening)
    top[:-1] = np.maximum(top[:-1], top[1:])
    out[opening] = np.maximum(out[opening], np.float32(factor) * top)
    return torch.from_numpy(out)


def take_best(score: torch.Tensor, sentences: Sentences, budget: int) -> torch.Tensor:
    """int64 [min(budget, N)], ascending: tokens of the best sentences, equal scores in text order. The last
    sentence is cut where it does not fit."""
    order = score.argsort(descending=True, stable=True).numpy()
    length = sentences.length[order]
    taken = np.zeros_like(length)
    taken[order] = (budget - (length.cumsum() - length)).clip(0, length)
    shift = sentences.begin - (taken.cumsum() - taken)
    return torch.from_numpy(np.arange(taken.sum()) + np.repeat(shift, taken))


def tokens_of_weight(score: torch.Tensor, sentences: Sentences, p: float) -> int:
    """Tokens of the fewest best sentences that hold ``p`` of the weight of all. A sentence weighs its tokens
    times its ``score`` [S] to the power of `_SHARPNESS`."""
    tokens = torch.from_numpy(sentences.length)
    order = score.argsort(descending=True, stable=True)
    weight = (tokens * score.clamp(min=0).double() ** _SHARPNESS)[order].cumsum(0)
    needed = int(torch.searchsorted(weight, p * weight[-1])) + 1
    return int(tokens[order][:needed].sum())
