"""The truth of ``sparse_decode`` in plain torch, accumulated in float64: the blocks of one head at a time."""

from __future__ import annotations

import torch

from ragserve_kernels.paged import KV, KVPair, PagedBatch, PageSelection
from ragserve_kernels.quantize_kv.naive import dequantize_kv
from ragserve_kernels.quantize_kv.types import QuantizedKV
from ragserve_kernels.sparse_decode.types import FULL, SELECTED, STREAMING, HeadKinds


def head_blocks(
    seq_len: int, block_size: int, kind: int, index: torch.Tensor | None, sink_tokens: int, local_tokens: int
) -> torch.Tensor:
    """Return the logical blocks (int64) that a head attends to; ``index``: its selection, cut to size."""
    total = -(-seq_len // block_size)
    if kind == SELECTED and index is not None:
        blocks = index.long().cpu()
        return blocks[(blocks >= 0) & (blocks < total)]
    if kind == STREAMING:
        sink = min(-(-sink_tokens // block_size), total)
        local = max(max(seq_len - local_tokens, 0) // block_size, sink)
        return torch.cat((torch.arange(sink), torch.arange(local, total)))
    return torch.arange(total)


def block_tokens(blocks: torch.Tensor, block_size: int, seq_len: int) -> torch.Tensor:
    """Return the positions (int64) of the tokens of ``blocks``, in their order."""
    tokens = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
    return tokens[tokens < seq_len]


def gather(cache: KV, head: int, tokens: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return one head's values, float64 [tokens, head_dim]; ``pages``: the request's page table row."""
    tokens = tokens.to(pages.device)
    slots = pages[tokens // page_size].long() * page_size + tokens % page_size
    if isinstance(cache, QuantizedKV):
        return dequantize_kv(cache, slots)[:, head].double()
    return cache[slots, head].double()


def sparse_decode(
    q: torch.Tensor,
    kv: KVPair,
    batch: PagedBatch,
    *,
    selection: PageSelection | None,
    heads: HeadKinds | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(out [batch, heads, head_dim] in q's dtype, lse [batch, heads] float32, natural)``."""
    kv_heads = kv[0].shape[1]
    group = q.shape[1] // kv_heads
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    kinds, sink, local = heads if heads is not None else (None, 0, 0)
    for b in range(batch.size):
        seq_len, pages = int(batch.seq_lens[b]), batch.page_table[b]
        for h in range(kv_heads):
            kind = FULL if selection is None else SELECTED
            if kinds is not None:
                kind = int(kinds[h] if kinds.dim() == 1 else kinds[b, h])
            index = (
                None if selection is None else selection.blocks[b, h, : max(0, int(selection.counts[b, h]))]
            )
            blocks = head_blocks(seq_len, batch.block_size, kind, index, sink, local)
            tokens = block_tokens(blocks, batch.block_size, seq_len)
            if not len(tokens):
                continue
            rows = slice(h * group, (h + 1) * group)
            k, v = (gather(cache, h, tokens, pages, batch.page_size) for cache in kv)
            scores = q[b, rows].double() @ k.T * scale
            lse[b, rows] = torch.logsumexp(scores, -1).float()
            out[b, rows] = (torch.softmax(scores, -1) @ v).to(q.dtype)
    return out, lse
