"""Signal `attention`: what the question's last token looks at, by stored keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.selection.queries import (
    CHUNK_BYTES,
    block_attention,
    block_products,
    document_queries,
    moved,
    of_heads,
    shifts_of,
)
from sglang_ext.context.selection.sentences import SINKS
from sglang_ext.context.selection.signals.base import Evidence, scaled
from sglang_ext.tensors.buffers import Ints, upload
from sglang_ext.tensors.joint import alike

_TILE = 128  # tokens of a document that are multiplied together
_CPU_BYTES = 32 * 2**20  # instead of `CHUNK_BYTES`: malloc keeps no larger pieces, and fresh ones are slow
_JOINT_TILES = 4096  # of the requests that are scored together

Attention = Callable[[], torch.Tensor | None]
"""Ends signal `attention` of a request: on the host."""


def attention(evidence: Evidence) -> torch.Tensor | None:
    """The highest attention to a token of each sentence, to the power of option `attention_power`: the best
    sentence takes nearly all of a head's attention.

    The keys are those of the retrieval heads, by token, or the mean keys of blocks in the upper half of the
    layers (option `scoring`)."""
    if evidence.query is None:
        return None
    if evidence.options.scoring == "keys":
        [best] = _by_key([evidence])
    else:
        best = _by_block(evidence)
    return _signal(evidence, best)


def begin_attention(evidences: Sequence[Evidence]) -> list[Attention]:
    """Begin `attention` for several requests by as few launches as for one, without waiting for the device.
    Returns what gives it for each, on the host; the first one waits, for all."""
    found: list[Attention] = [_none for _ in evidences]
    for numbers in _joint(evidences):
        group = [evidences[number] for number in numbers]
        best = _Fetched(_by_key(group))
        for place, number in enumerate(numbers):
            found[number] = best.signal(group[place], place)
    for number, evidence in enumerate(evidences):
        if evidence.query is not None and evidence.options.scoring != "keys":
            found[number] = _Fetched([_by_block(evidence)]).signal(evidence, 0)
    return found


def _none() -> None:
    """The signal of a request without a query."""


class _Fetched:
    """Values on the device that come to the host together when the first are asked for."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts: Sequence[torch.Tensor] = parts
        self._there = False

    def signal(self, evidence: Evidence, place: int) -> Attention:
        def ended() -> torch.Tensor:
            if not self._there:
                self._parts = torch.cat(list(self._parts)).cpu().split([len(part) for part in self._parts])
                self._there = True
            return _signal(evidence, self._parts[place])

        return ended


def _joint(evidences: Sequence[Evidence]) -> Iterator[list[int]]:
    """Numbers of the requests that are scored by keys together: those of the same heads that are `alike`.
    Personalised queries are made for one request alone."""
    same: dict[bytes, list[int]] = defaultdict(list)
    for number, evidence in enumerate(evidences):
        if evidence.query is None or evidence.options.scoring != "keys":
            continue
        if evidence.options.personalised:
            yield [number]
        else:
            same[evidence.analyses[0].heads.numpy().tobytes()].append(number)
    for numbers in same.values():
        tiles = [
            sum(-(-analysis.n_tokens // _TILE) for analysis in evidences[number].analyses)
            for number in numbers
        ]
        for group in alike(tiles, _JOINT_TILES):
            yield [numbers[place] for place in group]


def _signal(evidence: Evidence, best: torch.Tensor) -> torch.Tensor:
    power: float = evidence.options.experimental.attention_power
    return scaled(best) ** power


def _by_key(evidences: Sequence[Evidence]) -> list[torch.Tensor]:
    """f32 [S] for each request: the highest attention to a token of each sentence."""
    first = evidences[0]
    heads = first.analyses[0].heads.numpy().astype(np.int64)
    if first.options.personalised:
        queries = _document_queries(first, heads)
    else:
        questions = torch.stack([each.query for each in evidences if each.query is not None], dim=1)
        own = of_heads(questions, heads, first.analyses[0].mean_k.shape[2])
        number = np.repeat(np.arange(len(evidences)), [len(each.analyses) for each in evidences])
        shifts = torch.cat([shifts_of(each.options, each.blocks, each.question_start) for each in evidences])
        queries = moved(own[:, upload(number, own.device)], -shifts, first.rotation)
    token = first.reduce(head_attention(queries, [each.analyses for each in evidences]))
    sentences = [each.sentences for each in evidences]
    best = _best(token, np.concatenate([each.length for each in sentences]))
    return list(best.split([len(each) for each in sentences]))


def _by_block(evidence: Evidence) -> torch.Tensor:
    """f32 [S]: the highest attention to the block of a token of each sentence."""
    blocks = evidence.blocks
    products = block_products(_document_queries(evidence), evidence.analyses, blocks, fold=False)
    share = evidence.highest(block_attention(products, blocks))
    token = share[len(share) // 2 :].sum(0).flatten()[blocks.token_block.to(share.device)]
    return _best(token, evidence.sentences.length)


def _document_queries(evidence: Evidence, heads: Ints | None = None) -> torch.Tensor:
    if evidence.query is None:
        raise ValueError("signal `attention` needs the query of the question, which this evidence lacks")
    return document_queries(
        evidence.options,
        evidence.blocks,
        evidence.analyses,
        evidence.query,
        evidence.question_start,
        evidence.rotation,
        evidence.reduce,
        heads,
    )


def _best(token: torch.Tensor, lengths: Ints) -> torch.Tensor:
    """f32 [S]: the largest of each sentence's tokens, by their number in each."""
    sentence = torch.repeat_interleave(upload(lengths, token.device), output_size=len(token))
    best = torch.zeros(len(lengths), device=token.device)
    return best.scatter_reduce(0, sentence, token, "amax")


def head_attention(queries: torch.Tensor, requests: Sequence[Sequence[Analysis]]) -> torch.Tensor:
    """f32 [N]: for every document token of the requests, the largest share of attention over all tokens of
    its request that a query head gives it, summed over this rank's retrieval heads. The first `SINKS` tokens
    of a document get none.

    ``queries`` f32 [found, D, group, head_dim]: each document's, rotated to where its keys are stored.
    ``requests``: the analyses of their documents, of each one's after another's. Queries meet the keys in
    tiles of `_TILE` tokens; a document's last one, and a request of few, are filled up with tokens that get
    none."""
    analyses = [analysis for request in requests for analysis in request]
    device, (found, _, _, dim) = queries.device, queries.shape
    token, offset, length, document = upload(_tiles(requests), device)[..., None]  # [tiles, 1] each
    within = torch.arange(_TILE, device=device)
    offset = offset + within
    counts = (offset >= SINKS) & (offset < length)  # [tiles, _TILE]
    tokens = sum(analysis.n_tokens for analysis in analyses)
    token = (token + within).clamp(max=tokens - 1)
    keys, scale = (
        torch.cat([getattr(a, name).to(device) for a in analyses]).flatten(0, 1)
        for name in ("token_k", "token_k_scale")
    )  # [N * found, head_dim] and [N * found]
    row = token[:, None] * found + torch.arange(found, device=device)[:, None]  # [tiles, found, _TILE]
    parts = []
    most = CHUNK_BYTES if device.type == "cuda" else _CPU_BYTES
    step = max(1, most // (4 * _TILE * max(1, found) * dim))
    for at in range(0, len(row), step):
        chunk = row[at : at + step]
        asked = queries[:, document[at : at + step, 0]].transpose(0, 1)  # [tiles, found, group, head_dim]
        products = asked @ keys[chunk].float().transpose(2, 3)  # [tiles, found, group, _TILE]
        parts.append(products * scale[chunk][:, :, None].float() / dim**0.5)
    logits = torch.cat(parts).masked_fill(~counts[:, None, None], -1e9)
    # [requests, found, group, a request's tiles * _TILE]
    logits = logits.unflatten(0, (len(requests), -1)).permute(0, 2, 3, 1, 4).flatten(3)
    shares = logits.softmax(-1).amax(2).sum(1).flatten() * counts.flatten()
    return torch.zeros(tokens, device=device).index_add(0, token.flatten(), shares)


def _tiles(requests: Sequence[Sequence[Analysis]]) -> Ints:
    """int64 [4, tiles]: the first token of each tile, the same counted in its document, the tokens of the
    document and its number; as many tiles for each request, of which those that fill it up have no tokens.
    """
    lengths = np.array([analysis.n_tokens for request in requests for analysis in request])
    counts = -(-lengths // _TILE)
    document = np.repeat(np.arange(len(lengths)), counts)
    offset = (np.arange(len(document)) - (counts.cumsum() - counts)[document]) * _TILE
    tiles = np.stack(((lengths.cumsum() - lengths)[document] + offset, offset, lengths[document], document))
    own = np.add.reduceat(counts, np.cumsum([0, *map(len, requests[:-1])]))
    place = np.arange(own.max()) + (own.cumsum() - own)[:, None]  # [requests, most tiles]
    inside = np.arange(own.max()) < own[:, None]
    return tiles[:, place.clip(max=len(document) - 1)].reshape(4, -1) * inside.ravel()
