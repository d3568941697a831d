"""Answers over question sets without an engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import answer_table, packed_answers
from tests.unit.adapt.tiny_models import make_model, rows


def test_every_question_is_asked_both_ways_and_makes_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sets = make_model(tmp_path / "model"), tmp_path / "sets"
    sets.mkdir()
    for name, count in (("one", 5), ("two", 3)):
        lines = [
            {
                "id": f"{name} {n}",
                "question": row.question,
                "answers": [row.answer],
                "ctxs": [
                    {"title": each.title, "text": each.text, "gold": place in row.gold}
                    for place, each in enumerate(row.passages)
                ],
            }
            for n, row in enumerate(rows(count, passages=3))
        ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (sets / f"{name}.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.setattr(packed_answers, "TOKENS", 3)
    monkeypatch.setattr(sys, "argv", ["", str(model), str(tmp_path / "out"), str(sets), "1000"])
    assert packed_answers.main() == 0
    found = [json.loads(line) for line in (tmp_path / "out" / "rows-0.jsonl").read_text().splitlines()]
    assert len({(row["set"], row["id"], row["strategy"]) for row in found}) == len(found) == 16
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "table.json"), f"base={tmp_path / 'out'}"])
    assert answer_table.main() == 0
    table = json.loads((tmp_path / "table.json").read_text())
    assert {row["strategy"]: (row["n"], row["kept"], row["recomputed"]) for row in table["rows"]} == {
        "full": (8, 100.0, 100.0),
        "concat": (8, 100.0, 0.0),
    }
    assert table["workload"]["engine"].startswith("none")
