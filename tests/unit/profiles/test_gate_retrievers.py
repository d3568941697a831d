"""Verdicts of one namespace with several searches: each counts for servers that search so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ragserve.config import Settings
from ragserve.engine.base import EngineInfo
from ragserve.errors import InvalidRequest
from ragserve.profiles.figures import Figures
from ragserve.profiles.gate import FILE_NAME, Entry, Gate, record, set_of
from ragserve.profiles.in_use import InUseRecord, RecordedRates
from ragserve.verification.tuned_queries import TunedQueries
from ragserve.verification.verdicts import record_verdicts, verdict

GOOD = Figures(500, None, None, 0.3, 100.0, 10.0, references=350, margin=4.0, different=12.0)
BAD = dataclasses.replace(GOOD, margin=20.0)
INFO = EngineInfo("local", "tiny", "tiny", "0", "cpu", "", 1, 1, (), "f", dtype="float32")


def row(score: float) -> dict[str, object]:
    figures = {
        "score": score,
        "full_score": 1.0,
        "different": score < 1,
        "ttft_ms": 4.0,
        "fallback": None,
        "error": None,
    }
    return {"strategy": "concat", "document_tokens": 9, "kept": 9, "recomputed": 0, **figures}


def settings(folder: Path, retrieval: str) -> Settings:
    return Settings(data_dir=folder, model="tiny", embedder="words", retrieval=retrieval)  # type: ignore[arg-type]


def gate(folder: Path, retrieval: str = "dense") -> Gate:
    return Gate.of(settings(folder, retrieval), **INFO.gate_identity)


def tune(folder: Path, retrieval: str, score: float, n: int = 90, **decides: Any) -> list[str]:
    """Decide as `ragserve tune --retrieval` does, by ``n`` questions."""
    own = settings(folder, retrieval)
    found = verdict("concat", [row(score)] * n)
    assert found is not None
    queries = TunedQueries.of(own, "a", 8, version=decides.pop("version", 3))
    return record_verdicts(own, INFO, queries, [found], **decides)


def test_a_run_with_another_search_leaves_the_verdict_of_the_servers(tmp_path: Path) -> None:
    tune(tmp_path, "dense", 1.0)
    tune(tmp_path, "hybrid", 0.0)
    assert (gate(tmp_path).verified("a"), gate(tmp_path, "hybrid").verified("a")) == (["concat"], [])
    rates = [gate(tmp_path, each).recorded("concat", "a").different for each in ("dense", "hybrid")]
    assert rates == [(0.0, 90), (1.0, 90)]
    assert gate(tmp_path).margins("a")
    assert gate(tmp_path).namespaces() == ["a"]
    tune(tmp_path, "hybrid", 1.0)
    tune(tmp_path, "dense", 0.0)
    assert (gate(tmp_path).verified("a"), gate(tmp_path, "hybrid").verified("a")) == ([], ["concat"])
    with pytest.raises(InvalidRequest, match="fell short"):
        gate(tmp_path).check("concat", "a")
    with pytest.raises(InvalidRequest, match="with another retriever than the server has"):
        gate(tmp_path, "lexical").check("concat", "a")


def test_fewer_questions_replace_no_verdict_by_more_unless_the_documents_changed(tmp_path: Path) -> None:
    assert tune(tmp_path, "dense", 1.0) == []
    assert tune(tmp_path, "dense", 0.0, 20) == ["concat"], "a short run of another file of questions"
    assert gate(tmp_path).verified("a") == ["concat"]
    assert tune(tmp_path, "dense", 0.0, 20, version=4) == []
    assert gate(tmp_path).verified("a") == []
    assert tune(tmp_path, "dense", 1.0, 100, version=4) == []
    assert gate(tmp_path).verified("a") == ["concat"]
    assert tune(tmp_path, "dense", 0.0, 20, version=4, replaces={"concat"}) == [], "use has taken it out"
    assert gate(tmp_path).verified("a") == []


def test_records_that_name_no_search_count_until_there_is_one_of_the_servers(tmp_path: Path) -> None:
    place = tmp_path / FILE_NAME
    record(place, "f", {"concat": Entry({set_of("a"): GOOD}, "tiny", "d", "h", "float32")})
    assert gate(tmp_path).verified("a") == ["concat"]
    tune(tmp_path, "hybrid", 0.0)
    assert (gate(tmp_path).verified("a"), gate(tmp_path, "hybrid").verified("a")) == (["concat"], [])
    tune(tmp_path, "dense", 0.0)
    assert gate(tmp_path).verified("a") == []


def test_a_record_of_another_search_does_not_stand_above_question_sets(tmp_path: Path) -> None:
    where = ("tiny", "d", "h", "float32")
    record(
        tmp_path / FILE_NAME,
        "f",
        {"concat": Entry({"set": dataclasses.replace(GOOD, margin=None, kl=0.001)}, *where)},
    )
    tune(tmp_path, "hybrid", 0.0)
    assert (gate(tmp_path).verified("a"), gate(tmp_path, "hybrid").verified("a")) == (["concat"], [])


def test_what_use_has_shown_is_of_the_servers_search(tmp_path: Path) -> None:
    def in_use(retrieval: str) -> InUseRecord:
        return InUseRecord.of(settings(tmp_path, retrieval), **INFO.gate_identity)

    for _ in range(12):
        in_use("dense").add("a", "concat", True, recorded=RecordedRates(), made_at={"a": 1.0})
    assert (in_use("dense").taken_out("a"), in_use("hybrid").taken_out("a")) == ({"concat"}, set())
    in_use("hybrid").clear("a", ["concat"])
    assert in_use("dense").taken_out("a") == {"concat"}
    in_use("dense").clear("a", ["concat"])
    assert in_use("dense").taken_out("a") == set()


def test_each_namespace_has_the_search_of_its_own_settings(tmp_path: Path) -> None:
    def usual(namespace: str) -> Settings:
        return settings(tmp_path, "hybrid" if namespace == "b" else "dense")

    where = ("tiny", "d", "h", "float32")
    dense = dataclasses.replace(GOOD, retriever="words, dense, k 5")
    sets = {set_of(name, dense.retriever): dense for name in "ab"}
    record(tmp_path / FILE_NAME, "f", {"concat": Entry(sets, *where)})
    found = Gate.of(settings(tmp_path, "dense"), usual, **INFO.gate_identity)
    assert (found.verified("a"), found.verified("b")) == (["concat"], [])
    assert found.searched_by(dense.retriever).verified("b") == ["concat"]
    assert "concat" in found.to_price()
    record(tmp_path / FILE_NAME, "f", {"epic": Entry({set_of("b", dense.retriever): dense}, *where)})
    assert "epic" in found.to_price(), "by whatever search it was verified"
    assert found.searched_by(dense.retriever).verified("b") == ["concat", "epic"], "it is read again"

    in_use = InUseRecord.of(settings(tmp_path, "dense"), usual, **INFO.gate_identity)
    for name in "ab":
        for _ in range(12):
            in_use.add(name, "concat", True, recorded=RecordedRates(), made_at={"a": 1.0, "b": 1.0})
    server = InUseRecord.of(settings(tmp_path, "dense"), **INFO.gate_identity)
    assert (in_use.taken_out("a"), in_use.taken_out("b")) == ({"concat"}, {"concat"})
    assert (server.taken_out("a"), server.taken_out("b")) == ({"concat"}, set())
    assert in_use.taken_out("b", dense.retriever) == set()
    assert sorted(in_use.entries()["b"]) == ["concat"]
