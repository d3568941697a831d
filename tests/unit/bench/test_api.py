"""`ragserve bench api`, whole, at a size that proves nothing but that it works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragserve.bench import api
from ragserve.bench.api import OverheadSample
from ragserve.errors import RagserveError
from tests.unit.api.scripted_server import Live


def test_both_sides_are_asked_the_same(live: Live, tmp_path: Path) -> None:
    written = api.run(tmp_path, quick=True, url=live.url)
    assert json.loads((tmp_path / "api.json").read_text()) == written
    assert written["workload"]["same answers"] == "8 of 8"
    rows = written["rows"]
    latency, loaded = rows[:7], rows[7:]
    load = [row for row in loaded if "queries_s" in row]
    by_server = [row for row in loaded if "queries_s" not in row]
    assert all(row["n"] == 8 and row["p99_ms"] >= row["p50_ms"] for row in latency)
    assert [(row["what"], row["clients"]) for row in load] == [
        (what, clients) for clients in (1, 4, 16) for what in ("/rag/query", "plain SGLang /generate")
    ]
    assert all(row["queries_s"] > 0 for row in load)
    assert [row["clients"] for row in by_server if "our overhead" in row["what"]] == [1, 4, 16]
    assert all(row["n"] == 16 and 0 < row["p50_ms"] <= row["p99_ms"] for row in by_server)
    ours = [request.input_ids for request in live.engine.requests]
    plain = [json.loads(one["body"])["input_ids"] for one in live.seen_upstream if one["path"] == "/generate"]
    assert len(ours) == len(plain) == 8 + 8 + 3 * 16
    assert sorted(ours) == sorted(plain)
    assert live.services.store.namespaces() == []


def test_another_prompt_than_the_rivals_is_an_error(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.settings, "system_prompt", "Something else than the server's own.")
    with pytest.raises(RagserveError, match="differ"):
        api.run(None, quick=True, url=live.url)


def test_what_overhead_means() -> None:
    sample = OverheadSample(ours=100.0, embed=8.0, search=1.0, engine=89.0, plain=90.0, same_answer=True)
    assert (sample.overhead, sample.beyond_plain) == (2.0, 1.0)
