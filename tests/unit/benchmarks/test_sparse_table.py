"""Tables of sparse attention's answers, and the record that they make."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sparse_table
from benchmarks.lib.sparse_engines import PLAIN, WRONG, matching, sparse_engines, write_heads
from ragserve.profiles.sparse_attention import SPARSE
from sglang_ext.attention.pools.streaming_heads import read_pattern
from sglang_ext.wire.prefill_options import PrefillOptions
from sglang_ext.wire.request_options import DecodeOptions

BUDGETS = [512, 1024, 2048]


def answered(strategy: str, number: int, answer: str, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "set": "lines@4000",
        "id": str(number),
        "strategy": strategy,
        "answer": answer,
        "error": None,
    }
    row |= {"score": float(answer == "7 is it"), "read": 1.0, "blocks": 1.0, "prompt_tokens": 4000}
    return row | more


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = []
    for number in range(100):
        rows.append(answered(f"{PLAIN}/dense", number, "7 is it"))
        rows.append(answered(f"{PLAIN}/budget 1,024", number, "7 is it", read=0.25))
        lost = "7 it was" if number < 50 else "7 is it"
        rows.append(answered(f"{PLAIN}/budget 512", number, lost, read=0.125))
    rows.append(answered("KV of 8 bits/dense", 0, "", error="it broke"))
    (tmp_path / "rows-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.json").write_text(json.dumps({"model": "a-model"}))
    environment = {"gpu": None, "cpu": "a CPU", "date": "2026-11-29"}
    engine = {
        "model": "/a-model",
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "fingerprint": "f",
    }
    about = {"engine": engine, "environment": environment}
    (tmp_path / "engine-plain.json").write_text(json.dumps(about))
    return tmp_path


def test_rows_say_what_was_lost_and_what_holds(folder: Path) -> None:
    dense, held, lost = sparse_table.table(folder)
    assert (dense["setting"], dense["difference"], dense["score"]) == ("dense", None, 100.0)
    assert (held["setting"], held["difference"], held["holds"], held["same"]) == (
        "budget 1,024",
        0.0,
        "yes",
        100.0,
    )
    assert (lost["setting"], lost["difference"], lost["holds"]) == ("budget 512", -50.0, "no")
    assert lost["same"] == 50.0
    assert lost["begins as dense"] == round((50 + 50 / 3) / 1, 1), "one word of three"
    assert lost["interval"] == pytest.approx(9.8, abs=0.01)


def test_an_engine_is_compared_with_its_own_dense_attention(folder: Path) -> None:
    other = "pages of 16"
    rows = [answered(f"{other}/dense", number, "7 it was") for number in range(50, 100)]
    rows += [answered(f"{other}/budget 512", number, "7 is it") for number in range(50, 100)]
    rows += [answered("KV of 8 bits/budget 512", number, "7 it was") for number in range(50, 100)]
    (folder / "rows-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {(row["engine"], row["setting"]): row for row in sparse_table.table(folder)}
    assert found[other, "dense"]["difference"] is None
    assert found[other, "budget 512"]["difference"] == 100.0
    assert found["KV of 8 bits", "budget 512"]["difference"] == -100.0, "from 16 bits"


def test_the_record_has_what_a_server_can_set(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, place = tmp_path / "report.json", tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["sparse_table", str(report), str(folder), "--record", str(place)])
    assert sparse_table.main() == 0
    dense, lost, held = json.loads(report.read_text())["rows"]
    assert (dense["lines"], held["lines"], lost["lines"]) == ("100.0", "+0.0 ± 0.0", "-50.0 ± 9.8")
    assert (held["context"], held["n"], held["mean"], held["holds"]) == ("4k", "100", "+0.0 ± 0.0", "yes")
    assert len(json.loads(report.read_text())["sets"]) == 3
    record = SPARSE.load(place, "f")
    assert record is not None
    best = record.best()
    assert best is not None
    assert best.settings == {
        "decode_mode": "hierarchical",
        "decode_budget": 1024,
        "decode_scores": "bound",
    }
    assert len(record.entries) == 2


def test_a_setting_is_open_where_no_set_counts_and_fails_where_one_does() -> None:
    row = {"model": "m", "engine": "e", "setting": "s", "n": 100, "prompt": 8100, "score": 50.0}
    row |= {"difference": -0.5, "interval": 1.0, "read": 0.3, "blocks": 1.0, "failed": 0}
    sets = [row | {"set": "a_60", "holds": "-"}, row | {"set": "b@30000", "holds": "yes", "prompt": 29000}]
    assert [(each["context"], each["holds"]) for each in sparse_table.merged(sets)] == [
        ("32k", "yes"),
        ("8k", "open"),
    ]
    sets[1] |= {"prompt": 8000, "n": 150}
    (both,) = sparse_table.merged(sets)
    assert (both["holds"], both["n"], both["mean"]) == ("yes", "100 to 150", "-0.5 ± 0.7")
    (both,) = sparse_table.merged([*sets, row | {"set": "c", "holds": "no"}])
    assert both["holds"] == "no"


def test_every_setting_is_one_that_the_engine_takes() -> None:
    engines = sparse_engines(BUDGETS, [0.95])
    for engine in engines.values():
        labels = [each.label for each in engine.asked]
        assert len(set(labels)) == len(labels)
        assert labels[0] == "dense"
        for each in engine.asked:
            DecodeOptions().from_request(json.dumps(dict(each.decode)))
            if each.prefill:
                PrefillOptions().from_request(json.dumps(dict(each.prefill)))


def test_patterns_choose_settings_and_keep_the_dense_one() -> None:
    engines = sparse_engines(BUDGETS, [0.95])
    (found,) = matching(engines, ["KV of 4 bits/budget 1,024"])
    assert [each.label for each in found.asked] == ["dense", "budget 1,024"]
    assert len(matching(engines, ["*"])) == len(engines)
    assert matching(engines, ["nothing"]) == []


def test_wrong_heads_are_the_ones_that_should_not_stream(tmp_path: Path) -> None:
    engines = sparse_engines(BUDGETS, [])
    gates = [[0.0, 0.9], [0.8, 0.1]]
    for name, wanted in (("50 % streaming heads", [[1, 0], [0, 1]]), (WRONG, [[0, 1], [1, 0]])):
        write_heads(tmp_path / "heads.json", gates, engines[name])
        assert read_pattern(tmp_path / "heads.json").int().tolist() == wanted
