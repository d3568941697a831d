"""Progressive sparse attention: attend to ranked blocks until enough attention weight has been seen (PSA,
algorithm 1). See README.md.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch

from ragserve_kernels.dispatch import (
    check_dtype,
    check_last_contiguous,
    check_same_device,
    check_shape,
    use_triton,
)
from ragserve_kernels.paged import KV, check_index, check_paged
from ragserve_kernels.progressive_decode import naive

__all__ = ["Progressive", "progressive_decode"]


class Progressive(NamedTuple):
    out: torch.Tensor
    """[batch, heads, head_dim], q's dtype."""
    blocks_used: torch.Tensor
    """int32 [batch, kv_heads]: ranked blocks attended to."""
    weight: torch.Tensor
    """float32 [batch, heads]: the estimate of the share of the attention weight that those blocks hold; 1
    once all were attended to.
    """


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
    block_size: int | None = None,
    threshold: float | torch.Tensor = 0.95,
    first_round: int = 16,
    growth: float = 2.0,
    forced: int = 2,
    bound: Literal["lowest", "round"] = "lowest",
    scale: float | None = None,
) -> Progressive:
    """One decode step of attention over ranked blocks, in rounds that stop by themselves on the device.

    ``q``, ``k``, ``v``, ``page_table``, ``seq_lens``, ``page_size``, ``block_size``, ``scale``: as in
    ``sparse_decode``. ``index`` int32 [batch, kv_heads, capacity], ``counts`` int32 [batch, kv_heads]: the
    ranking of ``page_select(rank=True)``: distinct blocks that hold a token, the most critical first. Its
    first ``forced`` entries (the first and the newest block) are attended to in the first round, whatever
    their score, and do not enter the bound AS_min, because they were not ranked.

    After each round, P = AS_acc / (AS_acc + AS_min * blocks left), algorithm 1; a (request, KV head) stops
    when P > ``threshold``, in (0, 1], for every query head of its group. A float32 tensor [batch] gives every
    request its own; its values are not checked. AS_min is, with ``bound`` "lowest", the lowest block so far,
    as in the paper; with "round" the mean of the latest round's blocks, which one block ranked too high
    cannot pull down.

    The rounds have ``first_round`` blocks, then ``growth`` (>= 1) times as many each, up to whole tiles of 64
    tokens. The number of launches follows from ``capacity`` alone, so the call can be captured in a CUDA
    graph; nothing waits for the device."""
    block_size = block_size or page_size
    _, bits = check_paged(q, k, v, page_table, seq_lens, page_size=page_size, block_size=block_size)
    batch, _, head_dim = q.shape
    check_index(index, counts, batch, k.shape[1])
    check_same_device(q, index=index, counts=counts)
    if isinstance(threshold, torch.Tensor):
        check_dtype("threshold", threshold, (torch.float32,))
        check_shape("threshold", threshold, (batch,))
        check_last_contiguous("threshold", threshold)
        check_same_device(q, threshold=threshold)
    elif not 0.0 < threshold <= 1.0:
        raise ValueError(f"threshold is {threshold}; expected a share in (0, 1].")
    if first_round < 1 or growth < 1.0 or forced < 0:
        raise ValueError(
            f"first_round, growth and forced are {first_round}, {growth} and {forced}; "
            "expected at least 1 block, a factor of at least 1 and 0 blocks or more."
        )
    first_round = max(first_round, forced, 1)
    if bound not in ("lowest", "round"):
        raise ValueError(f"bound is {bound!r}; expected 'lowest' or 'round'.")
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    arguments: dict[str, Any] = {
        "page_size": page_size,
        "block_size": block_size,
        "threshold": threshold,
        "forced": forced,
        "bound": bound,
        "scale": scale,
    }
    if not batch or not index.shape[2]:
        return Progressive(
            torch.zeros_like(q),
            torch.zeros_like(counts),
            torch.ones(q.shape[:2], dtype=torch.float32, device=q.device),
        )
    ends = naive.round_ends(index.shape[2], first_round, growth, block_size)
    if use_triton(q):
        from ragserve_kernels.progressive_decode import triton as kernels

        return Progressive(
            *kernels.progressive_decode(
                q, k, v, page_table, seq_lens, index, counts, ends=ends, bits=bits, **arguments
            )
        )
    return Progressive(
        *naive.progressive_decode(q, k, v, page_table, seq_lens, index, counts, ends=ends, **arguments)
    )
