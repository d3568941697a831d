"""SamKV's static attention analysis (A.1) in pieces, in plain torch and float32: what `block_summary` says of
``token``, ``attention`` and ``exponent``. Nothing has n x n elements, and other work may be done between two
pieces."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

import torch

from ragserve_kernels.block_summary.naive import TINY
from ragserve_kernels.block_summary.plan import BlockPlan

_SCORES = 2**25  # of one product
_TOKENS = 32  # fitted at once, at least: all queries are read for them
_CPU_SCORES = 2**18  # as many on a CPU: what is computed of more leaves the processor's caches


class StaticAttention(NamedTuple):
    """Of each block, as in `BlockSummary`: int32, float32 and float32 [blocks]."""

    token: torch.Tensor
    attention: torch.Tensor
    exponent: torch.Tensor


def static_attention(
    q: torch.Tensor, k: torch.Tensor, plan: BlockPlan, *, scale: float
) -> Generator[int, None, StaticAttention]:
    """Analyse one layer; arguments as of `block_summary`, which must not change until it is done. Yields the
    pairs of query and key of each piece, and returns the result."""
    device = q.device
    token = torch.full((plan.blocks,), -1, dtype=torch.int32, device=device)
    attention, exponent = (torch.full((plan.blocks,), math.inf, device=device) for _ in range(2))
    starts, blocks = plan.doc_start.tolist(), plan.doc_block.tolist()
    for number, (length, size) in enumerate(zip(plan.lengths, plan.block_tokens, strict=True)):
        start, own = starts[number], slice(blocks[number], blocks[number + 1])
        document = _DocumentAttention(
            q[start : start + length], k[start : start + length], plan.query_stride, scale
        )
        if not len(document.rows):
            continue
        mean = yield from document.mean_received(plan.min_queries)
        by_block = mean.new_full(((own.stop - own.start) * size,), -math.inf)
        by_block[:length] = mean
        highest, best = by_block.view(-1, size).max(1)
        fits = (highest > -math.inf).nonzero()[:, 0]
        best = fits * size + best[fits]
        slopes = yield from document.slopes(best)
        token[own.start + fits] = (start + best).int()
        attention[own.start + fits] = highest[fits]
        exponent[own.start + fits] = -slopes
    return StaticAttention(token, attention, exponent)


class _DocumentAttention:
    """One document's queries [sampled, heads, head_dim] and keys [n, kv_heads, head_dim]."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, stride: int, scale: float) -> None:
        self._n, self._kv_heads = len(k), k.shape[1]
        self._group = q.shape[1] // k.shape[1]
        self.rows = torch.arange(self._n // stride, device=q.device) * stride + stride - 1
        self._stride = stride
        self._pairs = (_CPU_SCORES if q.device.type == "cpu" else _SCORES) // self._group  # of one piece
        # [kv_heads, sampled * group, head_dim] and [kv_heads, head_dim, n]
        self._q = (
            (q[self.rows].float() * scale).unflatten(1, (self._kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        )
        self._k = k.float().permute(1, 2, 0)
        self._lse = self._q.new_empty(self._q.shape[:2])

    def mean_received(self, min_queries: int) -> Generator[int, None, torch.Tensor]:
        """Mean attention of strictly later queries, f32 [n]; -inf for tokens with fewer than ``min_queries``.
        Keeps the log-sum-exp of every query."""
        received = self._q.new_zeros(self._n)
        first, count = 0, len(self.rows)
        while first < count:
            # so many rows that rows * keys of the last one stay within the bound
            keys = first * self._stride
            most = (math.sqrt(keys * keys + 4 * self._stride * self._pairs) - keys) / (2 * self._stride)
            last = min(first + max(1, int(most)), count)
            begin, end = int(self.rows[first]), int(self.rows[last - 1]) + 1
            rows = self.rows[first:last].repeat_interleave(self._group)
            part = slice(first * self._group, last * self._group)
            columns = torch.arange(begin, end, device=rows.device)
            for head in range(self._kv_heads):
                scores = self._q[head, part] @ self._k[head, :, :end]
                scores[:, begin:].masked_fill_(columns > rows[:, None], -math.inf)
                highest = scores.amax(1, keepdim=True)
                weights = scores.sub_(highest).exp_()
                total = weights.sum(1)
                self._lse[head, part] = highest[:, 0] + total.log()
                weights[:, begin:].masked_fill_(columns == rows[:, None], 0.0)
                received[:end] += total.reciprocal() @ weights
            yield (last - first) * end
            first = last
        later = count - (torch.arange(self._n, device=received.device) + 1) // self._stride
        mean = received / (self._kv_heads * self._group) / later.clamp(min=1)
        return mean.masked_fill_(later < min_queries, -math.inf)

    def slopes(self, tokens: torch.Tensor) -> Generator[int, None, torch.Tensor]:
        """Slopes of the log-log fits of attention over distance, f32 [tokens], of ``tokens`` int64."""
        found = self._q.new_empty(len(tokens))
        most = max(_TOKENS, self._pairs // len(self.rows))
        for first in range(0, len(tokens), most):
            part = slice(first, first + most)
            found[part] = self._fit(tokens[part])
            yield len(self.rows) * len(found[part])
        return found

    def _fit(self, tokens: torch.Tensor) -> torch.Tensor:
        weights = self._q.new_zeros(len(self.rows), len(tokens))
        for head in range(self._kv_heads):
            scores = self._q[head] @ self._k[head][:, tokens] - self._lse[head][:, None]
            # of queries before the token it may exceed any bound; they are left out below
            weights += scores.clamp_(max=0.0).exp_().unflatten(0, (-1, self._group)).sum(1)
        behind = self.rows[:, None] > tokens
        counts = behind.sum(0)
        distance = (self.rows[:, None] - tokens).clamp_(min=1).float().log_()
        height = (weights / (self._kv_heads * self._group)).clamp_(min=TINY).log_()
        for values in (distance, height):
            values.sub_((values * behind).sum(0) / counts).mul_(behind)
        return (distance * height).sum(0) / distance.square().sum(0)
