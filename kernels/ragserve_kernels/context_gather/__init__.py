"""Load pages of chosen KV heads of composed contexts from their documents' host pages, K rotated."""

from __future__ import annotations

import torch

from ragserve_kernels.context_gather.naive import context_gather_naive, context_shared_gather_naive
from ragserve_kernels.context_gather.types import HostCodes, HostContexts, check_host, check_turns
from ragserve_kernels.dispatch import check, use_triton
from ragserve_kernels.kv import KVLayers, check_head_dim, check_page_size

__all__ = [
    "HostCodes",
    "HostContexts",
    "context_gather",
    "context_gather_naive",
    "context_shared_gather",
    "context_shared_gather_naive",
]


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
    layers, kv_heads, head_dim, _ = dst.layout
    check_host(host, dst.k[0])
    check_head_dim(head_dim)
    pool = host.pool if isinstance(host, HostCodes) else host
    there = host.layers if isinstance(host, HostCodes) else host.shape[2]
    if not 0 <= first_layer <= there - layers:
        raise ValueError(f"dst has {layers} layers, from layer {first_layer} on; host has {there} in all.")
    like = dst.k[0]
    check("tokens", tokens, torch.int32, (None, None, 2), like=like, dense=True)
    check_page_size(tokens.shape[1])
    check_turns(turns, like)
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


def context_shared_gather(
    contexts: HostContexts,
    dst: KVLayers,
    source: torch.Tensor,
    target: torch.Tensor,
    count: torch.Tensor,
    *,
    programs: int | None = None,
) -> None:
    """Copy one KV head of one layer of a context page into shared block ``target[i]`` of the pool, for i <
    ``count``, each token's K turned: what `ragserve_kernels.shared_gather.shared_gather` does from host
    pages.

    Nothing waits for the device, and the launch depends on shapes only.

    Args:
        contexts: the pages, of all layers of ``dst``.
        dst: the pool; its page p is slots p * page to (p + 1) * page.
        source: int32 ``[n]`` on the device of ``dst``: ``(number of a page * layers + layer) * kv_heads +
            head``. The page is a context's. Not checked.
        target: int32 ``[n]``: shared blocks, distinct; numbered like ``source``, by pages of the pool. Not
            checked.
        count: int32 ``[1]``: how many of the entries are used, the first ones.
        programs: of the launch; default as that of `context_gather`.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    like = dst.k[0]
    contexts.check(like)
    if contexts.sizes[0] != dst.layers:
        raise ValueError(f"contexts have {contexts.sizes[0]} layers; expected {dst.layers}.")
    check("source", source, torch.int32, (None,), like=like)
    check("target", target, torch.int32, source.shape, like=like)
    check("count", count, torch.int32, (1,), like=like)
    if programs is not None and programs < 1:
        raise ValueError(f"programs is {programs}; expected at least 1.")
    if not source.numel() or not len(contexts.pool):
        return
    if use_triton(like):
        from ragserve_kernels.context_gather import context_shared_blocks

        context_shared_blocks.context_shared_gather(contexts, dst, source, target, count, programs=programs)
    else:
        context_shared_gather_naive(contexts, dst, source, target, count)
