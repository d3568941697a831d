"""Verification in use, as clients see it: `/info` and `/metrics` of a server that compares all answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.profiles.figures import Figures
from ragserve.profiles.gate import FILE_NAME, Entry, record, set_of
from ragserve.verification import answer_watch
from ragserve.verification.answer_watch import WaitingAnswer
from ragserve.verification.background import BackgroundVerification
from ragserve_index import IndexStore
from tests.unit.api.scripted_server import DOCUMENTS, eventually, serving

GOOD = Figures(n=500, f1=99.0, f1_vs_full=0.0, kl=0.01, kept=100.0, recomputed=10.0)


def test_answers_are_compared_when_no_request_is_being_answered(tmp_path: Path, model_path: Path) -> None:
    record(tmp_path / FILE_NAME, "print", {"epic:first=8": Entry({"s": GOOD}, "tiny", "d", "h", "float32")})
    composed = {"strategy": "epic", "strategy_options": {"first": 8}, "namespace": "docs"}
    with serving(tmp_path, model_path, verify_share=1.0) as live, live.client() as client:
        live.index("docs", DOCUMENTS)

        def shown() -> list[dict[str, Any]]:
            return list(client.get("/info").json()["verification"]["in_use"])

        for fields in ({"k": 1}, {}):  # the rates that were recorded say nothing of another search
            asked = {"query": "Who built it?", **composed, **fields}
            assert client.post("/rag/query", json=asked).status_code == 200
        assert client.post("/rag/query", json={"query": "Who built it?", "namespace": "docs"}).is_success
        eventually(lambda: bool(shown()), "the answer is compared")
        eventually(lambda: not client.get("/info").json()["verification"]["waiting"], "all are")
        (found,) = shown()
        assert (found["namespace"], found["strategy"], found["compared"]) == ("docs", "epic:first=8", 1)
        assert (found["different"], found["taken_out"]) == (0.0, False)
        compared = [request for request in live.engine.requests if request.background]
        assert [request.strategy for request in compared] == ["full", "epic"], "exact answers are not"
        metrics = client.get("/metrics").text
        assert 'ragserve_use_compared{namespace="docs",strategy="epic:first=8"} 1.0' in metrics
        assert client.get("/info").json()["verification"]["idle_tuning"] == {"state": "off"}


def test_answers_of_forced_strategies_take_no_place_in_the_queue(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[str] = []

    def waiting(label: str, *rest: Any) -> WaitingAnswer:
        queued.append(label)
        return WaitingAnswer(label, *rest)

    monkeypatch.setattr(answer_watch, "WaitingAnswer", waiting)
    record(tmp_path / FILE_NAME, "print", {"epic:first=8": Entry({"s": GOOD}, "tiny", "d", "h", "float32")})
    with serving(tmp_path, model_path, verify_share=1.0) as live, live.client() as client:
        live.index("docs", DOCUMENTS)
        for first in (4, 8):
            options = {"first": first, "force": True}
            asked = {"query": "Who built it?", "strategy": "epic", "strategy_options": options}
            assert client.post("/rag/query", json=asked | {"namespace": "docs"}).status_code == 200
    assert queued == ["epic:first=8"], "the one that is verified"


def test_a_namespace_takes_its_verdicts_with_it(tmp_path: Path, model_path: Path) -> None:
    own = Entry({set_of("docs"): GOOD, set_of("other"): GOOD}, "tiny", "d", "h", "float32")
    record(tmp_path / FILE_NAME, "print", {"epic:first=8": own})
    with serving(tmp_path, model_path) as live, live.client() as client:
        live.index("docs", DOCUMENTS)

        def measured() -> list[str]:
            return [each["namespace"] for each in client.get("/info").json()["verification"]["measured"]]

        assert measured() == ["docs", "other"]
        assert client.delete("/rag/namespaces/docs").is_success
        assert measured() == ["other"]


def test_a_namespace_that_another_process_drops_takes_its_verdicts_with_it(
    tmp_path: Path, model_path: Path
) -> None:
    """Once it is made again; that of a namespace which is not in the registry stays."""
    with IndexStore(tmp_path) as store:
        store.ensure_namespace("docs", embedder="words", dim=4)
        made_at = store.made_at()["docs"]
    sets = {set_of("docs"): replace(GOOD, made_at=made_at), set_of("gone"): replace(GOOD, made_at=1.0)}
    record(tmp_path / FILE_NAME, "print", {"epic:first=8": Entry(sets, "tiny", "d", "h", "float32")})
    with serving(tmp_path, model_path) as live, live.client() as client:

        def measured() -> list[str]:
            return [each["namespace"] for each in client.get("/info").json()["verification"]["measured"]]

        assert measured() == ["docs", "gone"]
        with IndexStore(tmp_path) as other:
            other.drop_namespace("docs")
            other.ensure_namespace("docs", embedder="words", dim=4)
        eventually(lambda: measured() == ["gone"], "the server hears of it")


def test_a_caller_is_told_of_its_own_namespaces_only() -> None:
    found = SimpleNamespace(figures={"compared": 3})
    entries = {"acme": {"epic:first=8": found}, "beta": {"epic:first=8": found}}
    state = {"state": "verifying", "namespace": "beta", "compared": 2}
    figures = replace(GOOD, score=60.0, margin=4.0, references=350, ttft_ms=60.0, full_ttft_ms=640.0)
    gate = SimpleNamespace(
        namespaces=lambda: ["acme", "beta"],
        verified=lambda namespace: ["epic:first=8"],
        entries=lambda namespace: {
            "epic:first=8": Entry({set_of(namespace): figures}, "tiny", "d", "h", "float32")
        },
    )
    parts: list[Any] = [
        gate,
        SimpleNamespace(entries=lambda: entries),
        SimpleNamespace(waiting=0, dropped=0),
        SimpleNamespace(info=lambda: state),
    ]
    background = BackgroundVerification(*parts)
    told = background.info(lambda namespace: namespace == "acme")
    assert [each["namespace"] for each in told["in_use"]] == ["acme"]
    (measured,) = told["measured"]
    assert (measured["namespace"], measured["verified"], measured["margin"]) == ("acme", True, 4.0)
    assert (measured["ttft_ms"], measured["full_ttft_ms"]) == (60.0, 640.0)
    assert told["idle_tuning"] == {"state": "verifying"}
    assert background.info()["idle_tuning"] == state
