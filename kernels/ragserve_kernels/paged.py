"""What the decode operations share on the host: their paged KV, its checks, and the sizes of their launches."""

from __future__ import annotations

from functools import lru_cache

import torch

from ragserve_kernels.dispatch import (
    check_dtype,
    check_head_dim,
    check_last_contiguous,
    check_page_size,
    check_same_device,
    check_shape,
    next_power_of_2,
    query_group,
)
from ragserve_kernels.quantize_kv.types import QuantizedKV

KV = torch.Tensor | QuantizedKV
"""K or V of one layer: ``[slots, kv_heads, head_dim]`` (SGLang's ``MHATokenToKVPool``), or the same
quantised.
"""

CPU_PROGRAMS = 6
"""Programs per launch in Triton's interpreter: enough that requests are split and merged."""


def check_block_size(block_size: int) -> None:
    if block_size < 1 or block_size & (block_size - 1) or block_size > 512:
        raise ValueError(f"Block size {block_size} is not supported; expected a power of two up to 512.")


def check_paged(
    q: torch.Tensor,
    k: KV,
    v: KV,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    block_size: int,
) -> tuple[int, int]:
    """Check one decode batch; returns ``(query group, bits)`` with bits 0 for plain K and V.

    Raises ``ValueError`` or ``TypeError`` that name the argument.
    """
    check_page_size(page_size)
    check_block_size(block_size)
    check_dtype("q", q)
    check_shape("q", q, (None, None, None))
    batch, query_heads, head_dim = q.shape
    check_head_dim(head_dim)
    check_last_contiguous("q", q)
    if isinstance(k, QuantizedKV) != isinstance(v, QuantizedKV):
        raise TypeError("k and v must both be quantised or both be plain tensors.")
    if isinstance(k, QuantizedKV) and isinstance(v, QuantizedKV):
        if k.bits != v.bits:
            raise ValueError(f"k has {k.bits} bits and v has {v.bits}; expected the same.")
        bits, first, second = k.bits, k.codes, v.codes
    else:
        if not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor):
            raise TypeError("k and v must be tensors or QuantizedKV.")
        check_dtype("k", k, (q.dtype,))
        check_dtype("v", v, (q.dtype,))
        check_shape("k", k, (None, None, head_dim))
        bits, first, second = 0, k, v
    if tuple(k.shape) != tuple(v.shape) or k.shape[2] != head_dim:
        raise ValueError(
            f"k and v have shapes {list(k.shape)} and {list(v.shape)}; expected the same, ending in {head_dim}."
        )
    check_last_contiguous("k", first)
    check_last_contiguous("v", second)
    check_table("page_table", page_table, batch)
    check_lens(seq_lens, batch)
    check_same_device(q, k=first, v=second, page_table=page_table, seq_lens=seq_lens)
    return query_group(query_heads, k.shape[1]), bits


def check_table(name: str, table: torch.Tensor, batch: int) -> None:
    check_dtype(name, table, (torch.int32,))
    check_shape(name, table, (batch, None))
    check_last_contiguous(name, table)


def check_lens(seq_lens: torch.Tensor, batch: int) -> None:
    check_dtype("seq_lens", seq_lens, (torch.int32,))
    check_shape("seq_lens", seq_lens, (batch,))
    check_last_contiguous("seq_lens", seq_lens)


def check_index(index: torch.Tensor, counts: torch.Tensor, batch: int, kv_heads: int) -> None:
    """An index table: int32 ``[batch, kv_heads, capacity]`` of logical blocks and int32 ``[batch,
    kv_heads]``, how many of them count.
    """
    check_dtype("index", index, (torch.int32,))
    check_shape("index", index, (batch, kv_heads, None))
    check_dtype("counts", counts, (torch.int32,))
    check_shape("counts", counts, (batch, kv_heads))
    if not index.is_contiguous() or not counts.is_contiguous():
        raise ValueError("index and counts must be contiguous.")


def kv_arguments(cache: KV) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
    """``(values, parameters, slot stride, head stride, parameter slot stride, parameter head stride)``; plain
    caches repeat the values.
    """
    if isinstance(cache, QuantizedKV):
        packed = cache.params.view(torch.int32)[
            ..., 0
        ]  # scale and zero of a token and head in one 4-byte load
        return (
            cache.codes,
            packed,
            cache.codes.stride(0),
            cache.codes.stride(1),
            packed.stride(0),
            packed.stride(1),
        )
    return cache, cache, cache.stride(0), cache.stride(1), 0, 0


def code_precision(dtype: torch.dtype, bits: int) -> str:
    """The matrix products' precision: with quantised KV and float16 queries, codes are multiplied as
    bfloat16.
    """
    from ragserve_kernels.dot import dot_precision  # imports Triton

    return dot_precision(torch.bfloat16 if bits and dtype == torch.float16 else dtype)


def tile_rows(group: int) -> int:
    """Rows of a query tile: the matrix units want at least 16."""
    return max(16, next_power_of_2(group))


def tile_tokens(head_dim: int, itemsize: int) -> int:
    """Tokens of a K tile: as many as give 16 KiB, from 16 to 128."""
    return max(16, min(128, 16384 // (head_dim * itemsize)))


@lru_cache(maxsize=16)
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def resident_programs(tensor: torch.Tensor, per_multiprocessor: int) -> int:
    """Programs that run at once on ``tensor``'s device."""
    if not tensor.is_cuda:
        return CPU_PROGRAMS
    return _multiprocessors(tensor.device.index or 0) * per_multiprocessor
