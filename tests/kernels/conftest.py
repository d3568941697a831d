"""Kernel tests: Triton's interpreter where there is no GPU, fresh random inputs on every run, their seed in
the report.

``KERNEL_TEST_SEED=<n>`` repeats a failed run.
"""

from __future__ import annotations

import os
import secrets
import sys

import pytest
import torch

INTERPRET = not torch.cuda.is_available()


def _interpret_standard_library() -> None:
    """Triton's own device functions (tl.sum, tl.zeros, ...) were decorated for the compiler if another test
    imported triton earlier.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for name, module in list(sys.modules.items()):
        if name.startswith("triton.language"):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, attribute, InterpretedFunction(value.fn))


if INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton  # noqa: F401  (decorated as interpreted, if this is the first import)

    _interpret_standard_library()


def pytest_collection_finish() -> None:
    if INTERPRET:  # servers started by other tests must not inherit it
        os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRET:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    """CUDA where there is one, else the CPU with Triton's interpreter."""
    return torch.device("cpu" if INTERPRET else "cuda")


@pytest.fixture(autouse=True)
def seed() -> int:
    """A fresh seed for torch's generators; pytest shows the printed line when the test fails."""
    value = int(os.environ.get("KERNEL_TEST_SEED") or secrets.randbits(31))
    torch.manual_seed(value)
    print(f"KERNEL_TEST_SEED={value}")
    return value
