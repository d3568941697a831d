"""The names of what computes, as profiles keep them."""

from __future__ import annotations

import platform
import sys
from functools import cache
from pathlib import Path


def gpu_name() -> str | None:
    """The first GPU; None without one, or in a process that has not loaded torch."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name(0)) if torch is not None and torch.cuda.is_available() else None


@cache
def cpu_name() -> str:
    """The model of the processor."""
    place = Path("/proc/cpuinfo")
    for line in place.read_text().splitlines() if place.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def is_elsewhere(measured_on: str, device: str) -> bool:
    """Whether a profile was measured on other hardware than computes here for an engine of this ``device``
    (`EngineInfo.device`). False where that is not known: no name is kept, or this process cannot see the
    GPU."""
    gpu = gpu_name()
    if not measured_on or (gpu is None and device != "cpu"):
        return False
    return measured_on not in (gpu, cpu_name())  # a process that does not see the GPU keeps the latter
