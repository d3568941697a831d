"""Scores of whole sentences, by the question's words in them and by the attention of retrieval heads.

    score(S)     = (w * words(S) / max words + (1 - w) * (attention(S) / max attention)^p) / tokens(S)^l
    words(S)     = sum of log(sentences / sentences with t) over the question's tokens, and pairs of
                   neighbouring tokens, t that S contains
    attention(S) = highest attention of the question's last token to a token of S, by the keys of the model's
                   retrieval heads
    w, p, l      = options lexical_weight, attention_power, length_penalty

Words find names, attention finds facts in other words; each finds what the other misses. Nothing here reads
K or V: the token ids travel with the request, and quantized keys of the retrieval heads are stored with the
documents' analyses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_ext.analysis.document_analysis import Analysis

SINKS = 3  # first tokens of a document, on which models park attention
_SHORTEST = 8  # tokens: a shorter sentence (a heading) is penalized as one of this length
_CHUNK_BYTES = 256 * 2**20  # of queries, one per token, at a time


def number_sentences(analyses: Sequence[Analysis]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentence number of each of the N document tokens, int64 [N], counted over all documents, and each of
    the D documents' first token, int64 [D]. A document's first token always begins a sentence."""
    lengths = torch.tensor([analysis.n_tokens for analysis in analyses])
    first = lengths.cumsum(0) - lengths
    begins = torch.cat([analysis.begins for analysis in analyses]).to(torch.int64).clamp(max=1)
    begins[first] = 1
    return begins.cumsum(0) - 1, first


def lexical_scores(ids: torch.Tensor, sentence: torch.Tensor, question: torch.Tensor) -> torch.Tensor:
    """f32 [sentences]: words(S). ``ids`` and ``sentence`` int64 [N]: token id and sentence number of every
    document token; ``question`` int64 [q]: the question's tokens that count."""
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
        contains = torch.zeros(len(known), count, dtype=torch.bool)
        contains[place[hit], where[hit]] = True
        weight = (count / contains.sum(1).clamp(min=1)).log()
        score += weight @ contains.float()
    return score


def blend(
    lexical: torch.Tensor | None, attention: torch.Tensor | None, weight: float, power: float
) -> torch.Tensor:
    """f32 [sentences]: both scores [sentences], each over its largest value, ``lexical`` with ``weight`` and
    ``attention`` to the power of ``power``. A score that is None takes no part."""
    parts = [
        share * (score / score.max().clamp(min=1e-9)) ** exponent
        for share, score, exponent in ((weight, lexical, 1.0), (1 - weight, attention, power))
        if score is not None
    ]
    return torch.stack(parts).sum(0)


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


def head_attention(queries: torch.Tensor, analyses: Sequence[Analysis]) -> torch.Tensor:
    """f32 [N]: for every document token, the largest share of attention over all N that a query head gives
    it, summed over this rank's retrieval heads. The first `SINKS` tokens of a document get none.

    ``queries`` f32 [layers, D, heads, head_dim]: each document's, rotated to where its keys are stored."""
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
        grouped = queries[layer, :, head * group : (head + 1) * group]  # [D, group, head_dim]
        logits = torch.cat(
            [
                (grouped[document[at : at + step]] @ keys[at : at + step, number, :, None].float())[..., 0]
                for at in range(0, len(document), step)
            ]
        )  # [N, group]
        logits = logits * scale[:, number, None].float() / dim**0.5
        total += logits.masked_fill(parked[:, None], -1e9).softmax(0).amax(1)
    return total.masked_fill(parked, 0.0)
