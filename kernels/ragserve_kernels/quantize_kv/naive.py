"""The truth of ``quantize_kv`` in plain torch, and the way back."""

from __future__ import annotations

import torch

from ragserve_kernels.quantize_kv.types import QuantizedKV


def quantize(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(codes int64 [..., head_dim], params float16 [..., 2])`` for ``x`` [..., head_dim].

    Codes are computed against the scale and zero point as stored, so that rounding those to float16 costs
    next to nothing."""
    half = 1 << (bits - 1)
    values = x.float()
    low, high = values.amin(-1), values.amax(-1)
    # Divide by a tensor: by a number CUDA multiplies with its reciprocal, which can round to another float16.
    scale = ((high - low) / torch.full_like(high, 2 * half - 1)).half()
    zero = (low + half * scale.float()).half()
    steps = (values - zero.float()[..., None]) / scale.float().clamp_min(torch.finfo(torch.float32).tiny)[
        ..., None
    ]
    codes = (steps + 0.5).floor().clamp(-half, half - 1)
    codes = torch.where(scale[..., None] > 0, codes, torch.zeros_like(codes))
    return codes.long(), torch.stack((scale, zero), -1)


def quantize_kv(x: torch.Tensor, slots: torch.Tensor, into: QuantizedKV) -> None:
    """See :func:`ragserve_kernels.quantize_kv.quantize_kv`."""
    keep = slots >= 0
    target = slots[keep].long()
    codes, params = quantize(x[keep], into.bits)
    if into.bits == 4:
        low, high = (codes + 8).chunk(2, -1)
        into.codes[target] = (low | (high << 4)).to(torch.uint8)
    else:
        into.codes[target] = codes.to(torch.int8)
    into.params[target] = params


def dequantize_kv(cache: QuantizedKV, slots: torch.Tensor | None = None) -> torch.Tensor:
    """Return the values, float32 ``[slots, kv_heads, head_dim]``: all, or those of the named ``slots``."""
    codes, params = (
        (cache.codes, cache.params) if slots is None else (cache.codes[slots], cache.params[slots])
    )
    if cache.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), -1).to(torch.int8) - 8
    return dequantize(codes, params)


def dequantize(codes: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """Return the values, float32 [..., head_dim], of ``codes`` [..., head_dim] with ``params`` [..., 2]."""
    scale, zero = params.float().unbind(-1)
    return codes.float() * scale[..., None] + zero[..., None]
