"""Selection of whole sentences: by the question's words in them, and by what the model's retrieval heads look
at.

    score(S)     = (w * words(S) / max words + (1 - w) * (attention(S) / max attention)^sharpness) /
    tokens(S)^length words(S)     = sum of log(sentences / sentences with t) over the question's tokens and
    pairs of neighbouring tokens t that S holds attention(S) = the most that the question's last token looks
    at a token of S, by the keys of the model's retrieval heads

A name stands out by words and a fact told in other words by attention: each finds what the other misses
(README.md has the measurements). Nothing here reads K or V: the token ids travel with the request, and what
stands for the keys is stored with the documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_ext.analysis.document_analysis import Analysis

SINKS = 3  # first tokens of a document, where models park attention
_SHORTEST = 8  # tokens that a sentence counts with at least
_CHUNK_BYTES = 256 * 2**20  # of queries, one a token, at a time


def numbered(begins: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the number of each token's sentence, counted over all documents; a document's first token
    begins one.

    ``begins`` u8 [N]: 1 where a sentence begins; ``first`` int64 [D]: the documents' first tokens, ascending,
    0 among them."""
    starts = begins.to(torch.int64).clamp(max=1)
    starts[first] = 1
    return starts.cumsum(0) - 1


def words(ids: torch.Tensor, sentence: torch.Tensor, question: torch.Tensor) -> torch.Tensor:
    """f32 [sentences]: how many of the question's tokens and pairs of neighbouring tokens a sentence holds,
    rare ones counting more.

    ``ids`` and ``sentence`` int64 [N]: token and sentence number of every document token, ``question`` int64
    [q]: what counts of it."""
    count = int(sentence[-1]) + 1
    score = torch.zeros(count)
    base = 1 + max(int(ids.max()), int(question.max()) if len(question) else 0)
    whole = sentence[1:] == sentence[:-1]  # a pair does not cross sentences
    pairs = ids[:-1][whole] * base + ids[1:][whole]
    for terms, found, where in (
        (question, ids, sentence),
        (question[:-1] * base + question[1:], pairs, sentence[1:][whole]),
    ):
        known = terms.unique()
        if len(known) == 0:
            continue
        place = torch.searchsorted(known, found).clamp(max=len(known) - 1)
        hit = known[place] == found
        held = torch.zeros(len(known), count, dtype=torch.bool)
        held[place[hit], where[hit]] = True
        weight = (count / held.sum(1).clamp(min=1)).log()
        score += weight @ held.float()
    return score


def scores(
    words: torch.Tensor | None, attention: torch.Tensor | None, weight: float, sharpness: float = 1.0
) -> torch.Tensor:
    """f32 [sentences]: both [sentences], each over its largest value, attention to the power of
    ``sharpness``; ``weight`` is that of words. What is None has no part."""
    parts = [
        share * (score / score.max().clamp(min=1e-9)) ** power
        for share, score, power in ((weight, words, 1.0), (1 - weight, attention, sharpness))
        if score is not None
    ]
    return torch.stack(parts).sum(0)


def by_length(score: torch.Tensor, sentence: torch.Tensor, power: float) -> torch.Tensor:
    """f32 [sentences]: ``score`` over the sentence's tokens to that power: what a sentence brings for the
    room it takes. A heading of few tokens counts as one of eight."""
    return score / torch.bincount(sentence, minlength=len(score)).clamp(min=_SHORTEST) ** power


def opened(score: torch.Tensor, sentence: torch.Tensor, first: torch.Tensor, factor: float) -> torch.Tensor:
    """f32 [sentences]: a document's first sentence, a title where there is one, counts with ``factor`` of the
    best one of its document and of the next, where that is more. "Continued" or "Part 2" say what a document
    goes on from; and what comes before a document that goes on must not seem to be another one. ``first``
    int64 [D] as in :func:`numbered`."""
    opening = sentence[first]
    document = torch.zeros(len(score), dtype=torch.int64)
    document[opening] = 1
    top = torch.zeros(len(first)).scatter_reduce(0, document.cumsum(0) - 1, score, "amax", include_self=False)
    top[:-1] = top[:-1].maximum(top[1:])
    out = score.clone()
    out[opening] = score[opening].maximum(factor * top)
    return out


def best(score: torch.Tensor, sentence: torch.Tensor, budget: int) -> torch.Tensor:
    """int64 [min(budget, N)], ascending: tokens of the sentences with the highest scores, equal ones in the
    order of the text; the last one is cut where it does not fit."""
    return score[sentence].argsort(descending=True, stable=True)[:budget].sort().values


def largest(token: torch.Tensor, sentence: torch.Tensor) -> torch.Tensor:
    """f32 [sentences]: the largest value of a sentence's tokens; ``token`` f32 [N]."""
    return torch.zeros(int(sentence[-1]) + 1).scatter_reduce(0, sentence, token, "amax", include_self=False)


def looked_at(queries: torch.Tensor, analyses: Sequence[Analysis]) -> torch.Tensor:
    """f32 [N]: for every document token the largest share of attention over all N that a head gives it,
    summed over this rank's retrieval heads. ``queries`` f32 [layers, D, heads, head_dim], each document's
    moved to where its keys are stored. The first tokens of a document, where models park attention, have
    none."""
    device, dim = queries.device, queries.shape[-1]
    lengths = torch.tensor([analysis.n_tokens for analysis in analyses], device=device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    parked = torch.arange(len(document), device=device) - (lengths.cumsum(0) - lengths)[document] < SINKS
    group = queries.shape[2] // analyses[0].mean_k.shape[2]
    keys, scale = (
        torch.cat([getattr(a, name).to(device) for a in analyses]) for name in ("token_k", "token_k_scale")
    )
    total = torch.zeros(len(document), device=device)
    step = max(1, _CHUNK_BYTES // (4 * group * dim))
    for number, (layer, head) in enumerate(analyses[0].heads.tolist()):
        asked = queries[layer, :, head * group : (head + 1) * group]  # [D, group, head_dim]
        logits = torch.cat(
            [
                (asked[document[at : at + step]] @ keys[at : at + step, number, :, None].float())[..., 0]
                for at in range(0, len(document), step)
            ]
        )  # [N, group]
        logits = logits * scale[:, number, None].float() / dim**0.5
        total += logits.masked_fill(parked[:, None], -1e9).softmax(0).amax(1)
    return total.masked_fill(parked, 0.0)
