"""Whole sentences of documents: their numbers, and which are kept by their scores (`signals` makes these)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_ext.analysis.document_analysis import Analysis

SINKS = 3  # first tokens of a document, on which models park attention
_SHARPNESS = 2  # exponent that makes a score a weight
_SHORTEST = 8  # tokens: a shorter sentence (a heading) is penalized as one of this length


def number_sentences(analyses: Sequence[Analysis]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentence number of each of the N document tokens, int64 [N], counted over all documents, and each of
    the D documents' first token, int64 [D]. A document's first token always begins a sentence."""
    lengths = torch.tensor([analysis.n_tokens for analysis in analyses])
    first = lengths.cumsum(0) - lengths
    begins = torch.cat([analysis.begins for analysis in analyses]).to(torch.int64).clamp(max=1)
    begins[first] = 1
    return begins.cumsum(0) - 1, first


def penalize_length(score: torch.Tensor, sentence: torch.Tensor, power: float) -> torch.Tensor:
    """f32 [sentences]: ``score`` divided by the sentence's tokens to that power: gain per slot."""
    return score / torch.bincount(sentence, minlength=len(score)).clamp(min=_SHORTEST) ** power


def lift_titles(
    score: torch.Tensor, sentence: torch.Tensor, first: torch.Tensor, factor: float
) -> torch.Tensor:
    """f32 [sentences]: a document's first sentence scores at least ``factor`` of the best sentence of its
    own and of the next document.

    "Continued" or "Part 2" say which document this one continues; and the text before a continuation must not
    look like another document. ``first`` int64 [D] as in :func:`number_sentences`."""
    opening = sentence[first]
    document = torch.zeros(len(score), dtype=torch.int64)
    document[opening] = 1
    top = torch.zeros(len(first)).scatter_reduce(0, document.cumsum(0) - 1, score, "amax", include_self=False)
    top[:-1] = top[:-1].maximum(top[1:])
    out = score.clone()
    out[opening] = score[opening].maximum(factor * top)
    return out


def take_best(score: torch.Tensor, sentence: torch.Tensor, budget: int) -> torch.Tensor:
    """int64 [min(budget, N)], ascending: tokens of the best sentences, equal scores in text order. The last
    sentence is cut where it does not fit."""
    return score[sentence].argsort(descending=True, stable=True)[:budget].sort().values


def max_per_sentence(token: torch.Tensor, sentence: torch.Tensor) -> torch.Tensor:
    """f32 [sentences]: largest value of each sentence's tokens; ``token`` f32 [N]."""
    return torch.zeros(int(sentence[-1]) + 1).scatter_reduce(0, sentence, token, "amax", include_self=False)


def tokens_of_weight(score: torch.Tensor, sentence: torch.Tensor, p: float) -> int:
    """Tokens of the fewest best sentences that hold ``p`` of the weight of all. A sentence weighs its tokens
    times its ``score`` [sentences] to the power of `_SHARPNESS`."""
    tokens = torch.bincount(sentence, minlength=len(score))
    order = score.argsort(descending=True, stable=True)
    weight = (tokens * score.clamp(min=0).double() ** _SHARPNESS)[order].cumsum(0)
    needed = int(torch.searchsorted(weight, p * weight[-1])) + 1
    return int(tokens[order][:needed].sum())
