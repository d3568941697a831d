"""The names of what computes, as profiles keep them."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def _gpus() -> dict[str, str]:
    """The names of all GPUs by index and UUID, by their driver: to ask torch takes hundreds of megabytes of a
    GPU's memory."""
    found: dict[str, str] = {}
    try:
        import pynvml  # comes with SGLang
    except ImportError:
        return found
    with suppress(pynvml.NVMLError):  # no driver
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = str(pynvml.nvmlDeviceGetName(gpu))
            found |= {str(index): name, str(pynvml.nvmlDeviceGetUUID(gpu)): name}
    return found


def gpu_name() -> str | None:
    """The first GPU that CUDA may use. None without one."""
    return _gpus().get(os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip())


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
    (`EngineInfo.device`). False where that is not known: no name is kept, or no GPU has one here."""
    gpus = _gpus().values()  # any: CUDA may count them in another order
    if not measured_on or (not gpus and device != "cpu"):
        return False
    of_cpu = measured_on == cpu_name()  # which is kept where the GPU had no name
    return not (of_cpu or any(_is_same(measured_on, gpu) for gpu in gpus))


def _is_same(one: str, other: str) -> bool:
    """Whether both name one GPU, or one a part of the other: its name, "MIG" and the size."""
    return one == other or one.startswith(f"{other} MIG") or other.startswith(f"{one} MIG")
