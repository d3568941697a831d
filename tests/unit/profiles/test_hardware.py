"""What GPU a process computes on, as far as its driver says."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from ragserve.profiles import hardware
from ragserve.profiles.hardware import cpu_name, gpu_name, is_elsewhere

NAMES = ("GPU zero", "GPU one")


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(
        NVMLError=KeyError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=NAMES.__getitem__,
        nvmlDeviceGetUUID="GPU-{}".format,
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(hardware, "_gpus", hardware._gpus.__wrapped__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        (None, "GPU zero"),
        ("1", "GPU one"),
        ("1,0", "GPU one"),
        ("GPU-1", "GPU one"),
        ("", None),
        ("-1", None),
        ("7", None),
    ],
)
def test_the_first_visible_gpu_is_named(
    visible: str | None, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_name() == name


def test_a_profile_is_of_this_machine_or_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_elsewhere("GPU two", "cuda")
    assert not is_elsewhere("GPU one", "cuda"), "whichever CUDA counts first"
    assert not is_elsewhere("GPU zero MIG 1g.5gb", "cuda"), "a part of one"
    assert not is_elsewhere(cpu_name(), "cuda"), "measured where the GPU had no name"
    assert not is_elsewhere("", "cuda"), "an earlier version's"
    monkeypatch.setattr(hardware, "_gpus", lambda: {"0": "GPU zero MIG 1g.5gb"})
    assert not is_elsewhere("GPU zero", "cuda"), "measured on the whole"
    assert is_elsewhere("GPU zero MIG 2g.10gb", "cuda")
    monkeypatch.setattr(hardware, "_gpus", dict)
    assert not is_elsewhere("GPU two", "cuda"), "who knows"
    assert is_elsewhere("GPU two", "cpu")
    assert gpu_name() is None


def test_a_name_that_begins_like_another_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_gpus", lambda: {"0": "NVIDIA L4"})
    assert is_elsewhere("NVIDIA L40", "cuda")
    assert is_elsewhere("NVIDIA L", "cuda")
    assert is_elsewhere(f"{cpu_name()} v2", "cuda")
    monkeypatch.setattr(hardware, "_gpus", dict)
    assert is_elsewhere(f"{cpu_name()} v2", "cpu")
    assert not is_elsewhere(cpu_name(), "cpu")
