"""Load scattered blocks from pinned host memory into device blocks with one kernel (SparseServe, 3.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragserve_kernels.dispatch import INT_DTYPES, check, use_triton
from ragserve_kernels.gather_h2d.naive import gather_h2d_naive

__all__ = ["gather_h2d", "gather_h2d_naive"]


def gather_h2d(
    host: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    index: torch.Tensor,
    out_index: torch.Tensor,
    *,
    programs: int | None = None,
) -> None:
    """Copy ``out[a][out_index[i]] = host[a][index[i]]`` for all i with index[i] >= 0.

    There are one or two arenas a: K and V.

    Args:
        host: one or two arenas ``[blocks, ...]`` in host memory, contiguous, pinned if ``out`` is on a GPU.
            Usually ``[blocks, block_tokens, head_dim]``: one block of one KV head is contiguous. A block has
            a multiple of 16 bytes.
        out: as many tensors ``[device_blocks, ...]`` of the same dtype and block shape, contiguous.
        index: int32 or int64 ``[n]`` on the device of ``out``: host blocks. Negative entries are skipped, so
            that a captured CUDA graph serves any number of blocks up to n. Values are not checked.
        out_index: like ``index``: device blocks, all different.
        programs: of the launch; default 4, which saturate the link and leave the rest of the chip to decode.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    if len(host) != len(out) or len(host) not in (1, 2):
        raise ValueError(f"Got {len(host)} host arenas and {len(out)} outputs; expected one of each, or two.")
    for i, (arena, target) in enumerate(zip(host, out, strict=True)):
        if arena.dim() < 2 or arena.shape[1:] != host[0].shape[1:]:
            raise ValueError(
                f"host[{i}] has shape {list(arena.shape)}; expected [blocks, ...] with the same block "
                "shape in all arenas."
            )
        check(f"out[{i}]", target, arena.dtype, (None, *arena.shape[1:]), like=out[0], dense=True)
        check(f"host[{i}]", arena, host[0].dtype, arena.shape, dense=True)
        if arena.is_cuda:
            raise TypeError(f"host[{i}] is on {arena.device}; expected host memory.")
        if target.is_cuda and not arena.is_pinned():
            raise ValueError(
                f"host[{i}] is not pinned, so the GPU cannot read it; allocate it with pin_memory=True."
            )
        if arena.data_ptr() % 16 or target.data_ptr() % 16:
            raise ValueError(f"host[{i}] and out[{i}] must be aligned to 16 bytes.")
    block_bytes = host[0][0].nbytes if host[0].shape[0] else 16
    if block_bytes == 0 or block_bytes % 16:
        raise ValueError(f"A block has {block_bytes} bytes; expected a multiple of 16.")
    check("index", index, INT_DTYPES, (None,), like=out[0])
    check("out_index", out_index, INT_DTYPES, index.shape, like=out[0])
    if programs is not None and programs < 1:
        raise ValueError(f"programs is {programs}; expected at least 1.")
    if index.numel() == 0 or host[0].shape[0] == 0:
        return
    if use_triton(out[0]):
        from ragserve_kernels.gather_h2d.triton import gather_h2d_triton

        gather_h2d_triton(host, out, index, out_index, programs=programs)
    else:
        gather_h2d_naive(host, out, index, out_index)
