"""Move chosen tokens of documents' KV into request slots, K rotated; all layers at once."""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import INT_DTYPES, check, next_power_of_2, use_triton
from ragserve_kernels.kv import KVLayers, check_head_dim
from ragserve_kernels.rotate_gather.kv_sources import DeviceSource, HostSource
from ragserve_kernels.rotate_gather.naive import rotate_gather_naive

__all__ = ["DeviceSource", "HostSource", "rotate_gather", "rotate_gather_naive"]


def rotate_gather(
    source: DeviceSource | HostSource,
    dst: KVLayers,
    moves: torch.Tensor,
    slots: torch.Tensor,
    shift: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    block_tokens: int,
    programs: int | None = None,
) -> None:
    """Copy documents' K and V into ``dst``, K rotated by its document's shift in positions (half-split RoPE).

    Args:
        source: where the documents' KV lies: slots of a device pool, or host memory that the kernel reads
            over the link. 8-bit codes become values of the dtype of ``dst``, in float32 until then.
        dst: the pool written to. Its slots must not overlap the source's, unless a token moves onto itself.
        moves: int32 ``[layers, n, 4]``: (document, first token in the document, tokens, position in ``slots``
            of the first token), each a run of at most ``block_tokens`` tokens; per layer its own list. A
            negative document is an unused entry, so that a captured CUDA graph serves any number of moves up
            to n. Values are not checked.
        slots: int32 or int64 ``[total]``: the requests' destination slots, the same in every layer; not
            checked.
        shift: int32 or int64 ``[documents]``: positions that each document moves by; negative moves towards
            zero.
        inv_freq: float32 or float64 ``[rotary_dim / 2]``: RoPE's inverse frequencies in radians per position.
            Dimensions from rotary_dim on are copied. Angles are reduced to one turn in float64, so that large
            shifts lose nothing.
        block_tokens: the longest run in ``moves``; a longer one would be cut there.
        programs: of the launch, each looping over runs. Default: one per run from the device; 3 from the
            host, which saturate the link, 8 from codes there. With fewer a concurrent decode step loses less
            time, and loading is slower (README.md).

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    compared = 4 if source.pairs is None else 3  # codes become values of any dtype
    if source.layout[:compared] != dst.layout[:compared]:
        held, wanted = ("{} layers of {} x {} {}".format(*each.layout) for each in (source, dst))
        raise ValueError(f"The source holds {held}; dst holds {wanted}.")
    check_head_dim(dst.head_dim)
    out = dst.k[0]
    check("moves", moves, torch.int32, (dst.layers, None, 4), like=out, dense=True)
    check("slots", slots, INT_DTYPES, (None,), like=out)
    check("shift", shift, INT_DTYPES, (source.documents,), like=out)
    check("inv_freq", inv_freq, (torch.float32, torch.float64), (None,), like=out)
    check("source", source.arguments[-1], torch.int64, (None,), like=out)
    if not 1 <= inv_freq.numel() <= dst.head_dim // 2:
        raise ValueError(
            f"inv_freq has {inv_freq.numel()} entries; expected 1 to {dst.head_dim // 2} for head size "
            f"{dst.head_dim}."
        )
    if not 1 <= block_tokens <= 128:
        raise ValueError(f"block_tokens is {block_tokens}; expected 1 to 128. Split longer runs.")
    if programs is not None and programs < 1:
        raise ValueError(f"programs is {programs}; expected at least 1.")
    if moves.shape[1] == 0 or slots.numel() == 0 or source.documents == 0:
        return
    if use_triton(dst.k[0]):
        from ragserve_kernels.rotate_gather.triton import rotate_gather_triton

        rotate_gather_triton(
            source,
            dst,
            moves,
            slots,
            shift,
            inv_freq,
            tile_tokens=next_power_of_2(block_tokens),
            programs=programs,
        )
    else:
        rotate_gather_naive(source, dst, moves, slots, shift, inv_freq, precision=torch.float32)
