"""The query log: what is kept of users' questions, what goes with a namespace, and what stops no query."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from ragserve.answering.namespace_log import forget_dropped
from ragserve.answering.query_log import LoggedQuestions, QueryLog
from ragserve.client import Client
from ragserve.commands import docs
from ragserve.errors import EngineError
from ragserve.retrieval.search_options import SearchOptions
from ragserve.rotating_log import FILES
from ragserve_index import IndexStore
from ragserve_index.types import NewChunk, NewDocument
from tests.unit.api.scripted_server import DOCUMENTS, Live, eventually, serving
from tests.unit.api.test_follow_ups import FOLLOW_UP, HISTORY, REWRITE, REWRITES, RewritingModel

LOGGER = "ragserve.answering.namespace_log"


def records(data_dir: Path) -> list[dict[str, str]]:
    """All that is kept, oldest first."""
    names = [f"queries.{number}.jsonl" for number in range(FILES - 1, 0, -1)] + ["queries.jsonl"]
    paths = [data_dir / "queries" / name for name in names]
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


def texts(data_dir: Path) -> list[str]:
    return [record["question"] for record in records(data_dir)]


def answered(log: QueryLog, question: str, began: float, namespace: str = "notes") -> None:
    query: Any = SimpleNamespace(
        question=question,
        private=False,
        request=SimpleNamespace(namespace=namespace),
        search=SearchOptions(5),
    )
    log.answered(query, None, began, [namespace])


def write(store: IndexStore, data_dir: Path, *questions: str, max_bytes: int = 2**20) -> None:
    """Have a server that starts and ends log questions of namespace `notes`, of one second after it was
    made."""

    async def run() -> None:
        log = QueryLog(data_dir, max_bytes, store)
        async with log.running():
            for question in questions:
                answered(log, question, store.made_at()["notes"] + 1)

    asyncio.run(run())


def logged(store: IndexStore, data_dir: Path, most: int = 100, namespace: str = "notes") -> list[str]:
    found = LoggedQuestions(data_dir, store, namespace, most)
    return list(iter(found.next, None))


@pytest.fixture
def notes(store: IndexStore) -> IndexStore:
    """A store with two namespaces."""
    for name in ("notes", "others"):
        store.ensure_namespace(name, embedder="words", dim=4)
        document = NewDocument("a.txt", "A", "1", "text/plain", 4, {})
        chunk = NewChunk("text", 0, 4, 1)
        store.replace_documents(name, [(document, [chunk], np.eye(1, 4, dtype=np.float32))])
    return store


@pytest.fixture(scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("log"), model_path, query_log_bytes=2**20) as live:
        yield live


@pytest.fixture
def server(_server: Live) -> Live:
    _server.engine.reset()
    for namespace in ("docs", "more"):
        _server.index(namespace, DOCUMENTS)
    return _server


def ask(client: httpx.Client, question: str, status: int = 200, **fields: Any) -> None:
    headers = fields.pop("headers", {})
    body = {"query": question, "namespace": "docs", **fields}
    reply = client.post("/rag/query", json=body, headers=headers)
    assert reply.status_code == status, reply.text


def chat(client: httpx.Client, question: str, **headers: str) -> None:
    body = {"model": "ragserve/docs", "messages": [{"role": "user", "content": question}]}
    client.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()


def test_questions_are_kept_as_they_were_searched_for_and_nothing_else_is(server: Live) -> None:
    server.engine.reply = RewritingModel(REWRITES)
    with server.client() as client, Client(server.url, no_store=True) as private:
        ask(client, "Who built the lighthouse of Skerryvore?")
        ask(client, "Who built Bell Rock?", stream=True)
        chat(client, "How is the soup made?")
        ask(client, FOLLOW_UP, history=HISTORY)
        ask(client, FOLLOW_UP, history=HISTORY, follow_ups="context")
        ask(client, "What of my own?", documents=[{"text": "It is mine."}])
        ask(client, "In secret?", headers={"Cache-Control": "max-age=0, No-Store"})
        chat(client, "In secret, too?", **{"Cache-Control": "no-store"})
        private.query("In secret by the client?", namespace="docs")
        ask(client, "Of what is not here?", min_score=2.0)
        client.post("/rag/retrieve", json={"query": "Only found?", "namespace": "docs"}).raise_for_status()
        server.engine.error = EngineError("it broke")
        ask(client, "Which is not answered?", 502)
        server.engine.error = None
        ask(client, "The last one?", session="new")
    data_dir = server.settings.data_dir
    expected = ["Who built the lighthouse of Skerryvore?", "Who built Bell Rock?", "How is the soup made?"]
    eventually(lambda: "The last one?" in texts(data_dir), "the last question is written")
    assert texts(data_dir) == [*expected, REWRITE, "The last one?"]
    assert {tuple(record) for record in records(data_dir)} == {("time", "namespace", "question")}
    assert {record["namespace"] for record in records(data_dir)} == {"docs"}
    folder = data_dir / "queries"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "queries.jsonl")}
    assert modes == {"queries": 0o700, "queries.jsonl": 0o600}


def test_a_dropped_namespace_takes_its_questions_along(server: Live) -> None:
    data_dir, store = server.settings.data_dir, server.services.store
    with server.client() as client:
        for namespace in ("docs", "more"):
            ask(client, f"Of {namespace}?", namespace=namespace)
        eventually(lambda: {"Of docs?", "Of more?"} <= set(texts(data_dir)), "both are written")
        client.delete("/rag/namespaces/docs").raise_for_status()
        assert {record["namespace"] for record in records(data_dir)} == {"more"}, "as soon as it is answered"
        server.index("docs", DOCUMENTS)
        ask(client, "Of the new docs?")
        eventually(lambda: "Of the new docs?" in texts(data_dir), "the new namespace has questions")
    assert logged(store, data_dir, namespace="docs") == ["Of the new docs?"]
    commands = typer.Typer()
    docs.register(commands)
    done = CliRunner().invoke(commands, ["docs", "drop", "docs", "--data-dir", str(data_dir)])
    assert done.exit_code == 0, done.output
    assert {record["namespace"] for record in records(data_dir)} == {"more"}, "by a command, too"


def test_a_log_that_cannot_be_written_stops_no_query_and_is_said_once(
    server: Live, caplog: pytest.LogCaptureFixture
) -> None:
    folder = server.settings.data_dir / "queries"
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("in the way")

    def told() -> int:
        return sum("the log queries cannot be kept" in record.getMessage() for record in caplog.records)

    with caplog.at_level(logging.WARNING, LOGGER), server.client() as client:
        ask(client, "One?")
        eventually(lambda: told() > 0, "it is said")
        ask(client, "Two?")
        folder.unlink()
        ask(client, "Three?")
        eventually(lambda: "Three?" in texts(server.settings.data_dir), "it is written again")
        assert told() == 1


def test_two_servers_share_a_log_that_is_bounded(notes: IndexStore, tmp_path: Path) -> None:
    most = FILES * 600
    began = notes.made_at()["notes"] + 1

    async def run() -> None:
        one, two = (QueryLog(tmp_path, most, notes) for _ in range(2))
        async with one.running(), two.running():
            for number in range(100):
                answered((one, two)[number % 2], f"What is number {number}?", began)
                if number % 10 == 9:
                    await asyncio.gather(one.sweep(), two.sweep())
            answered(one, "x" * 600, began)  # longer than a file

    asyncio.run(run())
    files = list((tmp_path / "queries").glob("*.jsonl"))
    assert sum(path.stat().st_size for path in files) <= most
    assert len(files) == FILES
    kept = sorted(int(text.split()[-1][:-1]) for text in texts(tmp_path))
    assert kept[-10:] == list(range(90, 100))
    assert 20 < len(kept) == len(set(kept)) < 100, "the oldest went, and no line is damaged"


def test_questions_are_asked_newest_first_and_once(notes: IndexStore, tmp_path: Path) -> None:
    assert logged(notes, tmp_path) == [], "without a log there are none"
    write(notes, tmp_path, "Who?", "When?", "who? ", "Where?", 'A "quoted"\nline?', "when?")
    newest = ["when?", 'A "quoted"\nline?', "Where?", "who?"]
    assert logged(notes, tmp_path) == newest
    assert logged(notes, tmp_path, most=2) == newest[:2]
    assert logged(notes, tmp_path, namespace="others") == []
    with (tmp_path / "queries" / "queries.jsonl").open("a") as file:
        file.write('{"time":"2026-01-01T00:00:00+00:00","namespace":"notes","question":"tor')
    found = LoggedQuestions(tmp_path, notes, "notes", 100)
    assert found.next() == "when?"
    write(notes, tmp_path, "Meanwhile?")
    assert list(iter(found.next, None)) == ["Meanwhile?", *newest[1:]], "after a torn line"
    write(notes, tmp_path, "None of it?", max_bytes=0)
    assert "None of it?" not in texts_or_torn(tmp_path)


def texts_or_torn(data_dir: Path) -> str:
    return (data_dir / "queries" / "queries.jsonl").read_text()


def test_what_is_deleted_is_gone_even_from_a_full_disk(
    notes: IndexStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(notes, tmp_path, "Whose salary is that?")
    folder = tmp_path / "queries"
    (folder / "queries.tmp").write_text("Whose salary is that?")  # left by a kill
    notes.drop_namespace("notes")
    real = os.fsync

    def full(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    forget_dropped(tmp_path, notes)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_questions_of_before_a_namespace_was_made_are_none_of_it(notes: IndexStore, tmp_path: Path) -> None:
    made = notes.made_at()["notes"]

    async def run() -> None:
        log = QueryLog(tmp_path, 2**20, notes)
        async with log.running():
            answered(log, "Of before?", made - 1)
            answered(log, "Of now?", made + 1)
            answered(log, "Of nothing?", made + 1, "nowhere")

    asyncio.run(run())
    assert texts(tmp_path) == ["Of now?"]
