"""Which engine a record of another precision counts for."""

from __future__ import annotations

_MANTISSA_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}


def as_precise(measured: str, dtype: str) -> bool:
    """Whether an engine of this precision (see `EngineInfo.dtype`) is as precise as the one measured, or
    more."""
    return measured == dtype or _MANTISSA_BITS.get(measured, 99) <= _MANTISSA_BITS.get(dtype, 0)
