"""Ratings become questions for `ragserve eval`, and what was not found is listed, where a server keeps
them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ragserve.client import Client
from ragserve.commands import docs as docs_commands
from ragserve.eval.own_questions import load_own
from tests.unit.api.scripted_server import DOCUMENTS, Live, Tenants, eventually, serving

QUESTION = "Who built the lighthouse of Skerryvore?"


@pytest.fixture(scope="module")
def _kept(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("feedback")
    with serving(folder, model_path, feedback_bytes=2**20, query_log_bytes=2**20) as live:
        yield live


@pytest.fixture
def kept(_kept: Live) -> Live:
    _kept.engine.reset()
    _kept.index("docs", DOCUMENTS)
    return _kept


def run(live: Live, *arguments: str) -> str:
    app = typer.Typer()
    docs_commands.register(app)
    done = CliRunner().invoke(app, ["docs", *arguments, "--data-dir", str(live.settings.data_dir)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_rating_becomes_a_row_for_eval(kept: Live, tmp_path: Path) -> None:
    with Client(kept.url) as client:
        good, bad = (client.query(QUESTION, namespace="docs") for _ in range(2))
        client.rate(good, QUESTION, "down")
        client.rate(bad, QUESTION, "down")
        (row,) = client.rate(good, QUESTION, "up").rows  # who changes their mind is believed
        assert (row.answers, row.rating) == (["Alan Stevenson [1]."], "up")
        eventually(lambda: len(client.ratings("docs")) == 2, "both are written")
        eventually(lambda: client.ratings("docs")[-1].rating == "up", "and the change of mind")
    path = tmp_path / "rows.jsonl"
    path.write_text(run(kept, "ratings", "-n", "docs"), encoding="utf-8")
    wrong, right = load_own(path)
    assert (wrong.question, wrong.answers, wrong.documents) == (QUESTION, (), ())
    assert (right.id, right.answers, right.namespace) == (good.request_id, ("Alan Stevenson [1].",), "docs")
    assert right.documents == (good.citations[0].doc_id,)


def test_ratings_go_with_their_namespace(kept: Live) -> None:
    kept.index("gone", DOCUMENTS)
    file = kept.settings.data_dir / "feedback" / "feedback.jsonl"
    with Client(kept.url) as client:
        client.rate(client.query(QUESTION, namespace="gone"), QUESTION, "up")
        eventually(lambda: file.exists() and "gone" in file.read_text(), "it is written")
        client.drop_namespace("gone")
        assert not file.exists() or "gone" not in file.read_text()


def test_what_was_not_found_is_listed_once(kept: Live) -> None:
    asked = ("What does a ticket cost?", "what does a ticket  cost?", "Who is the king?")
    with Client(kept.url) as client, Client(kept.url, no_store=True) as private:
        for question in asked:
            client.query(question, namespace="docs", min_score=2.0)
        private.query("In secret?", namespace="docs", min_score=2.0)
        client.query(QUESTION, namespace="docs", not_found="off")
        eventually(lambda: len(client.unanswered("docs")) == 2, "both are written")
        newest, oldest = client.unanswered("docs")
        assert (newest.question, newest.asked, oldest.asked) == ("Who is the king?", 1, 2)
        assert "2" in newest.why
    listed = run(kept, "unanswered", "-n", "docs")
    assert "asked 2 times" in listed
    assert json.loads(run(kept, "unanswered", "-n", "docs", "--json"))[0]["question"] == "Who is the king?"


def test_nothing_is_kept_unless_asked_for(live: Live, docs: str) -> None:
    body: dict[str, Any] = {"namespace": docs, "rating": "up", "query": QUESTION, "answer": "Alan"}
    with live.client() as client:
        reply = client.post("/rag/feedback", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "feedback_off")
        client.post(
            "/rag/query", json={"query": "Who?", "namespace": docs, "min_score": 2}
        ).raise_for_status()
        assert client.get("/rag/unanswered", params={"namespace": docs}).json() == {"questions": []}
        assert client.get("/rag/feedback", params={"namespace": docs}).json() == {"rows": []}
    assert not (live.settings.data_dir / "feedback").exists()
    assert not (live.settings.data_dir / "unanswered").exists()


def test_who_reads_may_rate_and_who_ingests_may_list(kept: Live) -> None:
    tenants = Tenants(kept)
    kept.index("theirs", DOCUMENTS)
    body: dict[str, Any] = {"rating": "up", "query": QUESTION, "answer": "Alan"}
    with tenants.client("r", "read", "docs") as reader, tenants.client("w", "ingest", "docs") as writer:
        assert reader.post("/rag/feedback", json=body | {"namespace": "docs"}).status_code == 202
        assert reader.post("/rag/feedback", json=body | {"namespace": "theirs"}).status_code == 404
        assert writer.post("/rag/feedback", json=body | {"namespace": "docs"}).status_code == 403
        for path in ("/rag/feedback", "/rag/unanswered"):
            assert writer.get(path, params={"namespace": "docs"}).status_code == 200
            assert reader.get(path, params={"namespace": "docs"}).status_code == 403
            assert writer.get(path, params={"namespace": "theirs"}).status_code in (403, 404)
