"""Load pages of chosen KV heads from host pages into pages of a KV pool, all layers in one launch."""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import check, use_triton
from ragserve_kernels.kv import KVLayers, check_host_pages
from ragserve_kernels.resident_gather.naive import resident_gather_naive

__all__ = ["resident_gather", "resident_gather_naive"]


def resident_gather(
    host: torch.Tensor,
    dst: KVLayers,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    programs: int | None = None,
) -> None:
    """Copy one KV head of one layer of host page ``source[l, h, i]`` into pool page ``target[l, h, i]``.

    Nothing waits for the device, and the launch depends on shapes only.

    Args:
        host: ``[pages, 2 (K, V), layers, kv_heads, page, head_dim]`` in host memory, contiguous, pinned if
            ``dst`` is on a GPU.
        dst: the pool; its page p is slots p * page to (p + 1) * page.
        source: int32 ``[layers, kv_heads, n]`` on the device of ``dst``: host pages. Negative entries are
            skipped, fastest where they come last. Values are not checked.
        target: like ``source``: pool pages, distinct in each layer and head.
        programs: of the launch; default 3, which leave the rest of the chip to decode.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    check_host_pages(host, dst)
    check("source", source, torch.int32, (dst.layers, dst.kv_heads, None), like=dst.k[0], dense=True)
    check("target", target, torch.int32, source.shape, like=source, dense=True)
    if programs is not None and programs < 1:
        raise ValueError(f"programs is {programs}; expected at least 1.")
    if not source.numel() or not len(host):
        return
    if use_triton(dst.k[0]):
        from ragserve_kernels.resident_gather import triton as kernels

        kernels.resident_gather(host, dst, source, target, programs=programs)
    else:
        resident_gather_naive(host, dst, source, target)
