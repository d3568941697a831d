"""Progressive sparse attention: attend to ranked blocks until enough attention weight has been seen (PSA,
algorithm 1). See README.md.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from ragserve_kernels.dispatch import check, use_triton
from ragserve_kernels.paged import KVPair, PagedBatch, PageSelection, check_attention, check_selection
from ragserve_kernels.progressive_decode import naive
from ragserve_kernels.progressive_decode.types import PagePlaces, Progressive, Rounds, SharedPages

__all__ = ["PagePlaces", "Progressive", "Rounds", "SharedPages", "progressive_decode"]


def progressive_decode(
    q: torch.Tensor,
    kv: KVPair,
    batch: PagedBatch,
    ranking: PageSelection,
    *,
    threshold: float | torch.Tensor = 0.95,
    bound: Literal["lowest", "round"] = "lowest",
    rounds: Rounds = Rounds(),
    scale: float | None = None,
    places: PagePlaces | None = None,
) -> Progressive:
    """Attend one decode step over ranked blocks, in rounds that stop by themselves on the device.

    After each round, P = AS_acc / (AS_acc + AS_min * blocks left) (PSA, algorithm 1). A (request, KV head)
    stops when P > ``threshold`` for every query head of its group. The number of launches depends on the
    ranking's capacity only, so a CUDA graph can capture the call; nothing waits for the device.

    Args:
        q: ``[batch, heads, head_dim]``.
        kv: K and V of the layer, ``[slots, kv_heads, head_dim]`` each, in q's dtype or quantised.
        batch: the requests' pages and lengths.
        ranking: ``page_select`` without a budget: distinct blocks that hold a token, the most critical first.
        threshold: in (0, 1]; or float32 ``[batch]``, one per request, whose values are not checked.
        bound: AS_min is "lowest": the lowest block so far, as in the paper; or "round": the mean of the
            latest round's blocks, which one block ranked too high cannot pull down.
        rounds: their sizes, and how many of the first blocks are forced.
        scale: of the scores; default 1 / sqrt(head_dim).
        places: where the pages are that are not in the pool as ``batch`` says; a block is a page then, and K
            and V are plain. Pages on the host are read by the programs that attend to them: those of other
            heads, whose pages are in the pool, run beside them.

    Raises:
        ValueError, TypeError: shapes, sizes, dtypes or devices that do not fit.
    """
    bits = check_attention(q, kv, batch)
    check_selection(ranking, q, kv[0].shape[1])
    if isinstance(threshold, torch.Tensor):
        check("threshold", threshold, torch.float32, (batch.size,), like=q)
    elif not 0.0 < threshold <= 1.0:
        raise ValueError(f"threshold is {threshold}; expected a share in (0, 1].")
    if bound not in ("lowest", "round"):
        raise ValueError(f"bound is {bound!r}; expected 'lowest' or 'round'.")
    if places is not None:
        _check_places(places, q, kv, batch, bits)
    scale = 1.0 / math.sqrt(q.shape[2]) if scale is None else scale
    capacity = ranking.blocks.shape[2]
    if not batch.size or not capacity:
        return Progressive(
            torch.zeros_like(q),
            torch.zeros_like(ranking.counts),
            torch.ones(q.shape[:2], dtype=torch.float32, device=q.device),
            None if places is None else torch.zeros_like(ranking.counts),
        )
    ends = rounds.ends(capacity, batch.block_size)
    if use_triton(q):
        from ragserve_kernels.progressive_decode import triton as kernels

        return kernels.progressive_decode(
            *(q, kv, batch, ranking, threshold, ends, places),
            forced=rounds.forced,
            bound=bound,
            scale=scale,
            bits=bits,
        )
    return naive.progressive_decode(
        q, kv, batch, ranking, threshold, ends, places, forced=rounds.forced, bound=bound, scale=scale
    )


def _check_places(places: PagePlaces, q: torch.Tensor, kv: KVPair, batch: PagedBatch, bits: int) -> None:
    if bits:
        raise ValueError(f"k and v have {bits} bits; host pages need plain ones.")
    if batch.block_size != batch.page_size:
        raise ValueError(f"Blocks of {batch.block_size} tokens are not pages of {batch.page_size}.")
    kv_heads, head_dim = kv[0].shape[1:]
    check("places", places.places, torch.int32, (batch.size, kv_heads, None), like=q)
    if places.places.stride(2) != 1:
        raise ValueError("places must be contiguous in its last dimension.")
    host = places.host
    check("host", host, q.dtype, (None, 2, None, kv_heads, batch.page_size, head_dim), dense=True)
    if host.is_cuda:
        raise TypeError(f"host is on {host.device}; expected host memory.")
    if q.is_cuda and not host.is_pinned():
        raise ValueError("host is not pinned, so the GPU cannot read it; allocate it with pin_memory=True.")
    if not 0 <= places.layer < host.shape[2]:
        raise ValueError(f"layer is {places.layer}; host has {host.shape[2]} layers.")
    if places.shared_blocks is not None:
        of, pool = places.shared_blocks
        numbers = None if places.contexts is None else len(places.contexts.tokens)
        shape = numbers or len(host), host.shape[2], kv_heads
        check("shared_blocks.of", of, torch.int32, shape, like=q, dense=True)
        if pool.layout != (host.shape[2], kv_heads, head_dim, q.dtype) or pool.device != q.device:
            raise ValueError(
                f"shared_blocks.pool has layers, heads and values {pool.layout} on {pool.device}."
            )
        if any(each.stride() != pool.k[0].stride() for each in kv if isinstance(each, torch.Tensor)):
            raise ValueError("k and v must lie as the layers of shared_blocks.pool do.")
    if places.contexts is not None:
        places.contexts.check(kv[0])  # type: ignore[arg-type]
        there, page = places.contexts.sizes[0], places.contexts.tokens.shape[1]
        if (there, page) != (host.shape[2], batch.page_size):
            raise ValueError(
                f"contexts have {there} layers and pages of {page}; "
                f"expected {host.shape[2]} and {batch.page_size}."
            )
