"""The table of adapted models: margins by set, over what all variants have answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.adapted_answers import pack, table


def rows(part: str, f1: dict[tuple[str, float], float], questions: int) -> list[dict]:
    names = ("variant", "recomputed") if part == "all" else ("rule", "share")
    return [
        {"set": "squad10", "question": n, "f1": value, **dict(zip(names, key, strict=True))}
        for key, value in f1.items()
        for n in range(questions)
    ]


def test_margins_are_of_the_base_and_of_common_questions(tmp_path: Path) -> None:
    for model, composed in (("base", 0.2), ("adapted", 0.56)):
        whole = {("full", 1.0): 0.6, ("fixed 512", 0.0): composed, ("fixed 512", 0.02): 0.59}
        best = {("exact", 1.0): 0.65, ("none", 0.0): 0.64, ("full", 1.0): 0.6}
        for part, f1, questions in (("all", whole, 5), ("best", best, 4)):
            path = tmp_path / f"{model}-{part}-0.json"
            path.write_text(json.dumps({"rows": rows(part, f1, questions)}))
    one, mean = table(tmp_path)
    assert (one["set"], one["n"], one["recovered"]) == ("squad10", 4, 0.9)
    assert (one["composed_vs_full"], one["recomputed_vs_full"], one["quarter_vs_exact"]) == (-4.0, -1.0, -1.0)
    assert mean["recovered"] == 0.9
    (tmp_path / "base-best-0.json").unlink()
    with pytest.raises(SystemExit, match="no question"):
        table(tmp_path)


def test_a_packed_run_is_half_as_large_and_has_what_goes_on(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    (work / "checkpoint-4").mkdir(parents=True)
    save_file({"a": torch.ones(3)}, work / "checkpoint-4" / "adapter.safetensors")
    (work / "checkpoint-4" / "optimiser.pt").write_bytes(b"x")
    (work / "latest.json").write_text("{}")
    pack(work, out)
    assert {path.name for path in out.rglob("*") if path.is_file()} == {"adapter.safetensors", "latest.json"}
    assert load_file(out / "checkpoint-4" / "adapter.safetensors")["a"].dtype == torch.bfloat16
