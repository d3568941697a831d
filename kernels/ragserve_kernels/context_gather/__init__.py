"""Load pages of chosen KV heads of a composed context from its documents' host pages, K rotated."""

from __future__ import annotations

import torch

from ragserve_kernels.context_gather.naive import context_gather_naive
from ragserve_kernels.context_gather.types import HostCodes
from ragserve_kernels.dispatch import check, use_triton
from ragserve_kernels.kv import KVLayers, check_head_dim, check_page_size

__all__ = ["HostCodes", "context_gather", "context_gather_naive"]


def context_gather(
    host: torch.Tensor | HostCodes,
    dst: KVLayers,
    tokens: torch.Tensor,
    turns: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    first_layer: int = 0,
    programs: int | None = None,
) -> None:
    """Copy one KV head of one layer of context page ``source[l, h, i]`` into pool page ``target[l, h, i]``,
    each token's K turned by its document's angles (half-split RoPE).

    Nothing waits for the device, and the launch depends on shapes only.

    Args:
        host: the documents' pages, ``[pages, 2 (K, V), layers, kv_heads, block, head_dim]`` in host memory,
            contiguous, pinned if ``dst`` is on a GPU; or pages of codes, which become values of the dtype of
            ``dst``, in float32 until then.
        dst: the pool, of layers ``first_layer`` and following of ``host``; its page p is slots p * page to
            (p + 1) * page.
        tokens: int32 ``[context pages, page, 2]`` on the device of ``dst``: of each token of the context
            where it lies, ``host page * block + place in it``, and its row of ``turns``. Not checked.
        turns: float32 ``[n, 2 (cos, sin), rotary_dim / 2]`` on that device: angles by which keys are turned.
            Dimensions from rotary_dim on are copied.
        source: int32 ``[layers of dst, kv_heads, n]`` on that device: pages of the context. Negative entries
            are skipped, fastest where they come last. Not checked.
        target: like ``source``: pool pages, distinct in each layer and head.
        programs: of the launch; default 3, which leave the rest of the chip to decode, or 8 from codes.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    layers, kv_heads, head_dim, dtype = dst.layout
    if isinstance(host, HostCodes):
        host.check()
        pool, there, block = host.pool, host.layers, host.block
        if (host.kv_heads, host.head_dim) != (kv_heads, head_dim):
            raise ValueError(
                f"host has {host.kv_heads} heads of {host.head_dim}; expected {kv_heads} of {head_dim}."
            )
    else:
        check("host", host, dtype, (None, 2, None, kv_heads, None, head_dim), dense=True)
        pool, there, block = host, host.shape[2], host.shape[4]
    check_page_size(block)
    check_head_dim(head_dim)
    if pool.is_cuda:
        raise TypeError(f"host is on {pool.device}; expected host memory.")
    if dst.device.type == "cuda" and not pool.is_pinned():
        raise ValueError("host is not pinned, so the GPU cannot read it; allocate it with pin_memory=True.")
    if pool.data_ptr() % 16:
        raise ValueError("host must be aligned to 16 bytes.")
    if not 0 <= first_layer <= there - layers:
        raise ValueError(f"dst has {layers} layers, from layer {first_layer} on; host has {there} in all.")
    like = dst.k[0]
    check("tokens", tokens, torch.int32, (None, None, 2), like=like, dense=True)
    check_page_size(tokens.shape[1])
    check("turns", turns, torch.float32, (None, 2, None), like=like, dense=True)
    if not 1 <= turns.shape[2] <= head_dim // 2:
        raise ValueError(
            f"turns has {turns.shape[2]} angles; expected 1 to {head_dim // 2} for head size {head_dim}."
        )
    check("source", source, torch.int32, (layers, kv_heads, None), like=like, dense=True)
    check("target", target, torch.int32, source.shape, like=like, dense=True)
    if programs is not None and programs < 1:
        raise ValueError(f"programs is {programs}; expected at least 1.")
    if not source.numel() or not len(pool) or not len(tokens):
        return
    if use_triton(like):
        from ragserve_kernels.context_gather import triton as kernels

        kernels.context_gather(
            *(host, dst, tokens, turns, source, target), first_layer=first_layer, programs=programs
        )
    else:
        context_gather_naive(host, dst, tokens, turns, source, target, first_layer=first_layer)
