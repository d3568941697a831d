"""Kernel tests: Triton's interpreter where there is no GPU, fresh random inputs on every run, their seed in
the report.

``KERNEL_TEST_SEED=<n>`` repeats a failed run.
"""

from __future__ import annotations

import os
import secrets

import pytest
import torch

INTERPRET = not torch.cuda.is_available()


if INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.interpreter import accelerate, interpret_standard_library

    interpret_standard_library()
    accelerate()


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
