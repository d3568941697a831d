"""Plain torch, accumulated in float64: PSA's rounds, one head at a time."""

from __future__ import annotations

import math

import torch

from ragserve_kernels.paged import KV
from ragserve_kernels.sparse_decode.naive import block_tokens, gather

MAX_TILE = 64
"""Tokens of the largest tile; rounds end at whole tiles, so that blocks smaller than a tile are read
together.
"""


def round_ends(capacity: int, first: int, growth: float, block_size: int) -> list[int]:
    """Ranks (exclusive) at which the rounds over ``capacity`` blocks end: rounds of ``first`` blocks, each
    ``growth`` times the one before.

    All ends but the last fall on whole tiles of :data:`MAX_TILE` tokens. At least one round.
    """
    multiple = max(1, MAX_TILE // block_size)
    ends: list[int] = []
    size = float(first)
    while not ends or ends[-1] < capacity:
        step = max(multiple, math.ceil(size / multiple) * multiple)
        ends.append(min(capacity, (ends[-1] if ends else 0) + step))
        size *= growth
    return ends


def block_logs(scores: torch.Tensor, blocks: torch.Tensor, block_size: int, seq_len: int) -> torch.Tensor:
    """Log of each block's sum of exponentials: [heads, blocks] from ``scores`` [heads, tokens] of the tokens
    of ``blocks`` in order.
    """
    sizes = (seq_len - blocks * block_size).clamp(0, block_size).tolist()
    parts = torch.split(scores, sizes, dim=-1)
    return torch.stack([torch.logsumexp(part, -1) for part in parts], -1)


def weight_estimate(logs: torch.Tensor, forced: int, left: int, since: int | None = None) -> torch.Tensor:
    """P per head, from the blocks attended to so far in ranked order (``logs`` [heads, blocks]); the first
    ``forced`` bound nothing.

    A block left is taken to weigh what the lowest of the others does (PSA), or, with ``since``, the rank at
    which the latest round began, what that round's blocks weigh on average."""
    if left <= 0:
        return torch.ones(logs.shape[0], dtype=logs.dtype, device=logs.device)
    ranked = logs[:, max(forced, since or 0) :]
    if not ranked.shape[1]:
        return torch.zeros(logs.shape[0], dtype=logs.dtype, device=logs.device)
    each = ranked.amin(-1) if since is None else torch.logsumexp(ranked, -1) - math.log(ranked.shape[1])
    return torch.sigmoid(torch.logsumexp(logs, -1) - each - math.log(left))


def progressive_decode(
    q: torch.Tensor,
    k: KV,
    v: KV,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    *,
    page_size: int,
    block_size: int,
    threshold: float | torch.Tensor,
    ends: list[int],
    forced: int,
    bound: str,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = torch.zeros_like(q)
    used = torch.zeros(batch, kv_heads, dtype=torch.int32, device=q.device)
    weight = torch.ones(batch, heads, dtype=torch.float32, device=q.device)
    for b in range(batch):
        seq_len = int(seq_lens[b])
        enough = float(threshold[b]) if isinstance(threshold, torch.Tensor) else threshold
        for h in range(kv_heads):
            total = min(max(0, int(counts[b, h])), index.shape[2]) if seq_len else 0
            if not total:
                continue
            rows = slice(h * group, (h + 1) * group)
            blocks = index[b, h, :total].long().cpu()
            tokens = block_tokens(blocks, block_size, seq_len)
            scores = q[b, rows].double() @ gather(k, h, tokens, page_table[b], page_size).T * scale
            logs = block_logs(scores, blocks, block_size, seq_len)
            for start, end in zip([0, *ends], ends, strict=False):
                n = min(end, total)
                estimate = weight_estimate(
                    logs[:, :n], forced, total - n, start if bound == "round" else None
                )
                if bool((estimate > enough).all()) or n == total:
                    break
            kept = len(block_tokens(blocks[:n], block_size, seq_len))
            values = gather(v, h, tokens[:kept], page_table[b], page_size)
            out[b, rows] = (torch.softmax(scores[:, :kept], -1) @ values).to(q.dtype)
            used[b, h] = n
            weight[b, rows] = estimate.float()
    return out, used, weight
