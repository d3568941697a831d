"""The gate's records of an evaluation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ragserve.eval.gate_records import measured
from ragserve.profiles.figures import Figures
from ragserve.profiles.gate import Gate, record

GOOD = Figures(n=500, f1=97.5, f1_vs_full=-1.5, kl=0.3, kept=100.0, recomputed=10.0)


def test_a_report_becomes_a_record(tmp_path: Path) -> None:
    row = {"set": "s", "strategy": "concat", "em": 1.0, "ttft_ms": 3.0, **dataclasses.asdict(GOOD)}
    rows = [
        row,
        {**row, "set": "t"},
        {**row, "strategy": "prefix"},
        {**row, "strategy": "epic:first=2", "f1_vs_full": None},
    ]
    environment = {"gpu": None, "cpu": "a CPU", "date": "2026-01-01", "versions": {"sglang": "0"}}
    found = measured(
        {"rows": rows, "environment": environment, "workload": {"model": "tiny", "dtype": "float32"}}
    )
    assert list(found) == ["concat"]
    record(tmp_path / "gate.json", "abc", found)
    assert Gate([tmp_path / "gate.json"], "abc", model="tiny", dtype="float32").entries() == found
    assert json.loads((tmp_path / "gate.json").read_text())["models"]["abc"]["concat"]["versions"] == {
        "sglang": "0"
    }
