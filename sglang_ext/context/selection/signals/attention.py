"""Signal `attention`: what the question's last token looks at, by stored keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.buffers import Ints, upload
from sglang_ext.context.selection.queries import (
    CHUNK_BYTES,
    block_attention,
    block_products,
    document_queries,
)
from sglang_ext.context.selection.sentences import SINKS
from sglang_ext.context.selection.signals.base import Evidence, scaled

_TILE = 128  # tokens of a document that are multiplied together
_CPU_BYTES = 32 * 2**20  # instead of `CHUNK_BYTES`: malloc keeps no larger pieces, and fresh ones are slow


def attention(evidence: Evidence) -> torch.Tensor | None:
    """The highest attention to a token of each sentence, to the power of option `attention_power`: the best
    sentence takes nearly all of a head's attention.

    The keys are those of the retrieval heads, by token, or the mean keys of blocks in the upper half of the
    layers (option `scoring`)."""
    if evidence.query is None:
        return None
    options, blocks, analyses = evidence.options, evidence.blocks, evidence.analyses
    by_key = options.scoring == "keys"
    queries = document_queries(
        options,
        blocks,
        analyses,
        evidence.query,
        evidence.question_start,
        evidence.rotation,
        evidence.reduce,
        analyses[0].heads.tolist() if by_key else None,
    )
    if by_key:
        token = evidence.reduce(head_attention(queries, analyses))
    else:
        products = block_products(queries, analyses, blocks, fold=False)
        share = evidence.highest(block_attention(products, blocks))
        token = share[len(share) // 2 :].sum(0).flatten()[blocks.token_block.to(share.device)]
    lengths = upload(evidence.sentences.length, token.device)
    sentence = torch.repeat_interleave(lengths, output_size=len(token))
    best = torch.zeros(len(lengths), device=token.device).scatter_reduce(0, sentence, token, "amax")
    return scaled(best) ** options.experimental.attention_power


def head_attention(queries: torch.Tensor, analyses: Sequence[Analysis]) -> torch.Tensor:
    """f32 [N]: for every document token, the largest share of attention over all N that a query head gives
    it, summed over this rank's retrieval heads. The first `SINKS` tokens of a document get none.

    ``queries`` f32 [found, D, group, head_dim]: each document's, rotated to where its keys are stored. They
    meet the keys in tiles of `_TILE` tokens; a document's last one is filled up with tokens that get none."""
    device, (found, _, _, dim) = queries.device, queries.shape
    token, offset, length, document = upload(_tiles(analyses), device)[..., None]  # [tiles, 1] each
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
    logits = torch.cat(parts).permute(1, 2, 0, 3).flatten(2)  # [found, group, tiles * _TILE]
    shares = logits.masked_fill(~counts.flatten(), -1e9).softmax(-1).amax(1).sum(0) * counts.flatten()
    return torch.zeros(tokens, device=device).index_add(0, token.flatten(), shares)


def _tiles(analyses: Sequence[Analysis]) -> Ints:
    """int64 [4, tiles]: the first token of each tile, the same counted in its document, the tokens of the
    document and its number."""
    lengths = np.array([analysis.n_tokens for analysis in analyses])
    counts = -(-lengths // _TILE)
    document = np.repeat(np.arange(len(lengths)), counts)
    offset = (np.arange(len(document)) - (counts.cumsum() - counts)[document]) * _TILE
    return np.stack(((lengths.cumsum() - lengths)[document] + offset, offset, lengths[document], document))
