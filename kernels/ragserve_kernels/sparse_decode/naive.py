"""Plain torch, accumulated in float64: the blocks of every head, one head at a time."""

from __future__ import annotations

import torch

from ragserve_kernels.paged import KV
from ragserve_kernels.quantize_kv.naive import dequantize_kv
from ragserve_kernels.quantize_kv.types import QuantizedKV

FULL, SELECTED, STREAMING = 0, 1, 2


def head_blocks(
    seq_len: int, block_size: int, kind: int, index: torch.Tensor | None, sink_tokens: int, local_tokens: int
) -> torch.Tensor:
    """Logical blocks (int64) that a head with ``kind`` attends to; ``index`` is its row of the table, cut to
    its count.
    """
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
    """Positions (int64) of the tokens of ``blocks``, in their order."""
    tokens = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
    return tokens[tokens < seq_len]


def gather(cache: KV, head: int, tokens: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Values (float64 [tokens, head_dim]) of one head at positions ``tokens`` of a request whose page table
    row is ``pages``.
    """
    tokens = tokens.to(pages.device)
    slots = pages[tokens // page_size].long() * page_size + tokens % page_size
    if isinstance(cache, QuantizedKV):
        return dequantize_kv(cache, slots)[:, head].double()
    return cache[slots, head].double()


def sparse_decode(
    q: torch.Tensor,
    k: KV,
    v: KV,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    block_size: int,
    index: torch.Tensor | None,
    counts: torch.Tensor | None,
    kinds: torch.Tensor | None,
    sink_tokens: int,
    local_tokens: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out [batch, heads, head_dim] in q's dtype, lse [batch, heads] float32, natural)``."""
    batch, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = torch.zeros_like(q)
    lse = torch.full((batch, heads), -torch.inf, dtype=torch.float32, device=q.device)
    for b in range(batch):
        seq_len = int(seq_lens[b])
        for h in range(kv_heads):
            kind = (
                (FULL if index is None else SELECTED)
                if kinds is None
                else int(kinds[h] if kinds.dim() == 1 else kinds[b, h])
            )
            row = None if index is None or counts is None else index[b, h, : max(0, int(counts[b, h]))]
            tokens = block_tokens(
                head_blocks(seq_len, block_size, kind, row, sink_tokens, local_tokens), block_size, seq_len
            )
            if not len(tokens):
                continue
            rows = slice(h * group, (h + 1) * group)
            scores = q[b, rows].double() @ gather(k, h, tokens, page_table[b], page_size).T * scale
            lse[b, rows] = torch.logsumexp(scores, -1).float()
            out[b, rows] = (torch.softmax(scores, -1) @ gather(v, h, tokens, page_table[b], page_size)).to(
                q.dtype
            )
    return out, lse
