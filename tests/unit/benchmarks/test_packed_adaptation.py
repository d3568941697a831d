"""The work folder of a training that goes on on another machine."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.packed_adaptation import pack


def test_a_packed_run_is_half_as_large_and_has_what_goes_on(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    (work / "checkpoint-4").mkdir(parents=True)
    save_file({"a": torch.ones(3)}, work / "checkpoint-4" / "adapter.safetensors")
    (work / "checkpoint-4" / "optimiser.pt").write_bytes(b"x")
    (work / "latest.json").write_text("{}")
    pack(work, out)
    assert {path.name for path in out.rglob("*") if path.is_file()} == {"adapter.safetensors", "latest.json"}
    assert load_file(out / "checkpoint-4" / "adapter.safetensors")["a"].dtype == torch.bfloat16
