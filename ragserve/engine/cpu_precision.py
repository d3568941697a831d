"""The data type in which an engine computes on a CPU."""

from __future__ import annotations

from pathlib import Path

# Names of Linux: x86's AVX-512 and AMX, Arm's extension
_HALF = ("amx_bf16", "avx512_bf16", "bf16")
_INFO = Path("/proc/cpuinfo")


def half_instructions(info: Path = _INFO) -> tuple[str, ...]:
    """The processor's instructions for bfloat16, as Linux names them; none where they are not known."""
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            there = set(flags.split())
            return tuple(flag for flag in _HALF if flag in there)
    return ()


def cpu_dtype(info: Path = _INFO) -> tuple[str, str]:
    """What dtype=auto means on this machine without a GPU, and why."""
    found = half_instructions(info)
    if found:
        return "bfloat16", f"the CPU has {', '.join(found)}"
    return "float32", "the CPU has no instructions for bfloat16, which would be slower"
