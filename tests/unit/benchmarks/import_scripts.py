"""Imports scripts of benchmarks/ by their names, as a program of its own: some have effects on those that
import them."""

from __future__ import annotations

import importlib
import sys

OF_GPU_MACHINES = ("flashinfer", "cutlass", "sgl_kernel", "quack")
"""Packages that other machines may lack."""

if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            importlib.import_module(f"benchmarks.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in OF_GPU_MACHINES:
                raise
