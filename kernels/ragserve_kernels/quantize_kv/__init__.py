"""KV in 8 or 4 bits, scale and zero point per token and head (LServe, section 3.2; QServe). See README.md."""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import FLOAT_DTYPES, INT_DTYPES, check, use_triton
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
    check("x", x, FLOAT_DTYPES, (None, *into.shape[1:]))
    check_head_dim(x.shape[2])
    check("slots", slots, INT_DTYPES, (x.shape[0],), like=x)
    check("into.codes", into.codes, into.codes.dtype, into.codes.shape, like=x)
    if use_triton(x):
        from ragserve_kernels.quantize_kv import triton as kernels

        kernels.quantize_kv(x, slots, into)
    else:
        naive.quantize_kv(x, slots, into)
