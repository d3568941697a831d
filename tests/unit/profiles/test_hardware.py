"""What GPU a process computes on, as far as its driver says."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from ragserve.profiles.hardware import cpu_name, gpu_name, is_elsewhere

NAMES = {0: "GPU zero", 1: "GPU one", "GPU-5e1f": "GPU one"}


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        (None, "GPU zero"),
        ("1", "GPU one"),
        ("1,0", "GPU one"),
        ("GPU-5e1f", "GPU one"),
        ("", None),
        ("-1", None),
        ("7", None),
    ],
)
def test_the_first_visible_gpu_is_named(
    visible: str | None, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SimpleNamespace(
        NVMLError=KeyError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetName=NAMES.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_name.__wrapped__() == name


def test_a_profile_is_of_this_gpu_or_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragserve.profiles.hardware.gpu_name", lambda: "GPU zero")
    assert is_elsewhere("GPU one", "cuda")
    assert not is_elsewhere("GPU zero", "cuda")
    assert not is_elsewhere(cpu_name(), "cuda"), "measured where the GPU had no name"
    assert not is_elsewhere("", "cuda"), "an earlier version's"
    monkeypatch.setattr("ragserve.profiles.hardware.gpu_name", lambda: None)
    assert not is_elsewhere("GPU one", "cuda"), "who knows"
    assert is_elsewhere("GPU one", "cpu")
