"""KV in 8 or 4 bits, scale and zero point per token and head (LServe, section 3.2; QServe). See README.md."""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import (
    INT_DTYPES,
    check_dtype,
    check_last_contiguous,
    check_same_device,
    check_shape,
    use_triton,
)
from ragserve_kernels.kv import check_head_dim
from ragserve_kernels.quantize_kv import naive
from ragserve_kernels.quantize_kv.naive import dequantize_kv
from ragserve_kernels.quantize_kv.types import QuantizedKV

__all__ = ["QuantizedKV", "dequantize_kv", "quantize_kv"]


def quantize_kv(x: torch.Tensor, slots: torch.Tensor, into: QuantizedKV) -> None:
    """Quantise the rows of ``x`` into the slots of ``into``; write nothing else.

    Args:
        x: ``[tokens, kv_heads, head_dim]``, bf16, fp16 or fp32, finite and within float16's range.
        slots: int32 or int64 ``[tokens]``, distinct; negative ones are skipped (padding of a CUDA graph).
        into: the cache.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    check_dtype("x", x)
    check_shape("x", x, (None, into.shape[1], into.shape[2]))
    check_head_dim(x.shape[2])
    check_last_contiguous("x", x)
    check_dtype("slots", slots, INT_DTYPES)
    check_shape("slots", slots, (x.shape[0],))
    check_last_contiguous("slots", slots)
    check_last_contiguous("into.codes", into.codes)
    check_same_device(x, slots=slots, into=into.codes)
    if use_triton(x):
        from ragserve_kernels.quantize_kv import triton as kernels

        kernels.quantize_kv(x, slots, into)
    else:
        naive.quantize_kv(x, slots, into)
