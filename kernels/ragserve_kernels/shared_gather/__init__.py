"""Load pages of single KV heads from host pages into shared blocks of a KV pool, of any layer and head."""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import check, use_triton
from ragserve_kernels.kv import KVLayers, check_host_pages
from ragserve_kernels.shared_gather.naive import shared_gather_naive

__all__ = ["shared_gather", "shared_gather_naive"]


def shared_gather(
    host: torch.Tensor,
    dst: KVLayers,
    source: torch.Tensor,
    target: torch.Tensor,
    count: torch.Tensor,
    *,
    programs: int | None = None,
) -> None:
    """Copy one KV head of one layer of a host page into shared block ``target[i]`` of the pool, for i <
    ``count``.

    Nothing waits for the device, and the launch depends on shapes only.

    Args:
        host: ``[pages, 2 (K, V), layers, kv_heads, page, head_dim]`` in host memory, contiguous, pinned if
            ``dst`` is on a GPU.
        dst: the pool; its page p is slots p * page to (p + 1) * page.
        source: int32 ``[n]`` on the device of ``dst``: ``(host page * layers + layer) * kv_heads + head``.
        target: int32 ``[n]``: shared blocks, distinct; numbered like ``source``, by pages of the pool: see
            `ragserve_kernels.progressive_decode.SharedPages`. Values are not checked.
        count: int32 ``[1]``: how many of the entries are used, the first ones.
        programs: of the launch; default 3, which leave the rest of the chip to decode.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    check_host_pages(host, dst)
    check("source", source, torch.int32, (None,), like=dst.k[0])
    check("target", target, torch.int32, source.shape, like=source)
    check("count", count, torch.int32, (1,), like=source)
    if programs is not None and programs < 1:
        raise ValueError(f"programs is {programs}; expected at least 1.")
    if not source.numel() or not len(host):
        return
    if use_triton(dst.k[0]):
        from ragserve_kernels.shared_gather import triton as kernels

        kernels.shared_gather(host, dst, source, target, count, programs=programs)
    else:
        shared_gather_naive(host, dst, source, target, count)
