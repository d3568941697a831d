"""The names of what computes, as profiles keep them."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


@cache
def gpu_name() -> str | None:
    """The first GPU that CUDA would see, by its driver: to ask torch takes hundreds of megabytes of the GPU's
    memory. None without one."""
    try:
        import pynvml  # comes with SGLang
    except ImportError:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    by = pynvml.nvmlDeviceGetHandleByIndex if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetName(by(int(first) if first.isdigit() else first)))
    except pynvml.NVMLError:  # no driver, or no such GPU
        return None


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
    (`EngineInfo.device`). False where that is not known: no name is kept, or the GPU has none here."""
    gpu = gpu_name()
    if not measured_on or (gpu is None and device != "cpu"):
        return False
    return measured_on not in (gpu, cpu_name())  # where the GPU had no name, the latter was kept
