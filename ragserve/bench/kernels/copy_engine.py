"""Many copies in one call to the GPU's copy engine (``cudaMemcpyBatchAsync``): what a host load costs when no
program runs for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ragserve.bench.kernels.timing import HEAD_DIM, KV_HEADS, LAYERS
from ragserve.errors import Unavailable

if TYPE_CHECKING:
    import torch

STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
OVERLAP_WITH_COMPUTE = 1  # cudaMemcpyFlagPreferOverlapWithCompute


class _Attributes(ctypes.Structure):
    """``cudaMemcpyAttributes``; the locations are hints for managed memory only, and stay zero."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def batched_copies(sources: torch.Tensor, targets: torch.Tensor, size: int) -> Callable[[], None]:
    """A call that copies ``size`` bytes from each address to its fellow (int64 [n], on the CPU) on the
    current stream, which must not be the default one.

    Raises:
        Unavailable: no CUDA 13 runtime. The call raises it too, if the runtime refuses.
    """
    import torch

    try:
        batch = ctypes.CDLL("libcudart.so.13").cudaMemcpyBatchAsync
    except (OSError, AttributeError) as error:
        raise Unavailable(f"Batched copies need the CUDA 13 runtime: {error}.") from error
    # CUDA 13: dsts, srcs, sizes, count, attributes, the first copy of each attribute, how many attributes,
    # stream
    batch.argtypes = (
        *[ctypes.c_void_p] * 3,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    batch.restype = ctypes.c_int
    sizes = torch.full_like(sources, size)
    attributes = _Attributes(STREAM_ORDER, flags=OVERLAP_WITH_COMPUTE)
    first = ctypes.c_size_t(0)

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        lists = (targets.data_ptr(), sources.data_ptr(), sizes.data_ptr(), len(sources))
        code = batch(*lists, ctypes.addressof(attributes), ctypes.addressof(first), 1, stream)
        if code:
            raise Unavailable(f"cudaMemcpyBatchAsync failed with CUDA error {code}.")

    return call


def staged_compose(
    source: Any, dst: Any, moves: torch.Tensor, slots: Any, shift: Any, inv_freq: Any, *, block: int
) -> Callable[[], None]:
    """The work of ``rotate_gather`` from the host (whole blocks of ``block`` tokens) in two steps: the copy
    engine brings each head's blocks as they are to device memory, and the kernel rotates them into the slots
    from there."""
    import torch

    from ragserve_kernels.rotate_gather import HostSource
    from ragserve_kernels.rotate_gather.triton import rotate_gather_triton

    runs = moves.shape[1]
    size = block * HEAD_DIM * source.k.itemsize
    document, token = moves[..., 0].cpu().long(), moves[..., 1].cpu().long()
    head = (torch.arange(LAYERS)[:, None] * KV_HEADS + torch.arange(KV_HEADS))[
        ..., None
    ]  # [layers, heads, 1]
    capacity = source.capacity.cpu()[document][:, None]  # [layers, 1, runs]
    element = source.base.cpu()[document][:, None] + (head * capacity + token[:, None]) * HEAD_DIM
    staged = [
        torch.empty(LAYERS * KV_HEADS * runs * block * HEAD_DIM, dtype=source.k.dtype, device=dst.k[0].device)
        for _ in "kv"
    ]
    places = torch.arange(LAYERS * KV_HEADS * runs) * size
    origins = torch.cat(
        [arena.data_ptr() + element.flatten() * arena.itemsize for arena in (source.k, source.v)]
    )
    copy = batched_copies(origins, torch.cat([arena.data_ptr() + places for arena in staged]), size)
    # one document of all blocks, in the order of the moves; `moves` keeps naming the documents, for their
    # shifts
    there = HostSource(
        staged[0],
        staged[1],
        torch.zeros_like(source.base),
        torch.full_like(source.capacity, runs * block),
        LAYERS,
        KV_HEADS,
        HEAD_DIM,
    )
    moved = moves.clone()
    moved[..., 1] = (torch.arange(runs, device=moves.device) * block).to(moves.dtype)

    def call() -> None:
        copy()
        rotate_gather_triton(there, dst, moved, slots, shift, inv_freq, tile_tokens=block, programs=1056)

    return call
