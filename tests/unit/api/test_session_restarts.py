"""Sessions over restarts of the server: the next turn is that of a server that was never down."""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragserve.answering.sessions import dialogues
from ragserve.answering.sessions.session_store import FILE_NAME
from ragserve.cache.evictions import clean_files
from ragserve.engine.base import GenerateRequest
from ragserve_index import IndexStore
from tests.unit.api.scripted_server import DOCUMENTS, Live, Tenants, eventually, serving
from tests.unit.api.test_sessions import FIRST, THEN, ask, refused

BELL = "And who built the lighthouse of Bell Rock?"
GIVEN = {"title": "Pier", "text": "The pier of Lamlash was built of oak."}


@contextmanager
def server(folder: Path, model: Path, **settings: Any) -> Iterator[tuple[Live, httpx.Client]]:
    with serving(folder, model, **settings) as live, live.client() as client:
        if not live.services.store.namespaces():
            live.index("docs", DOCUMENTS)
        yield live, client


def listed(client: httpx.Client) -> list[dict[str, Any]]:
    return list(client.get("/rag/sessions").json()["sessions"])


def said(request: GenerateRequest | None, name: str) -> list[Any]:
    """All that the engine is told of a turn, and of those before it."""
    if request is None:
        return []
    assert request.session is not None
    session = (request.session.key.replace(name, "NAME"), request.session.held)
    told = (request.input_ids, request.spans, request.strategy, request.options, list(request.unregistered))
    return [(*told, session), *said(request.earlier() if request.earlier else None, name)]


STRATEGIES: dict[str, dict[str, Any]] = {
    "prefix": {},
    "epic": {"strategy": "epic", "strategy_options": {"force": True, "first": 3}, "system": "Be short."},
    "budget": {"session_budget": 8},
    "given": {"documents": [GIVEN], "history": [{"role": "user", "content": "Hello, Ann."}]},
}


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("is_killed", [True, False])
def test_the_third_turn_is_the_same_after_a_restart(
    tmp_path: Path, model_path: Path, kind: str, is_killed: bool
) -> None:
    turns = ((FIRST, STRATEGIES[kind]), (THEN, {}), (BELL, {"k": 2}), ("And Skerryvore?", {"k": 3}))
    wanted: list[Any] = []
    for restarts in (False, True):
        folder, name = tmp_path / f"{restarts}", "new"
        told: list[Any] = []
        for part in (turns[:2], turns[2:]) if restarts else (turns,):
            with server(folder, model_path, session_refresh_turns=3) as (live, client):
                for question, fields in part:
                    answer = ask(client, question, session=name, **fields)
                    name = answer["session"]["id"]
                    figures = answer["session"] | {"id": ""}
                    told.append((said(live.engine.requests[-1], name), figures, answer["citations"]))
                (view,) = listed(client)
                told.append({k: v for k, v in view.items() if k != "id" and not k.endswith("_at")})
                if is_killed:  # what is on disk now is what a kill leaves
                    shutil.copytree(folder, tmp_path / "killed")
            if is_killed:
                shutil.rmtree(folder)
                (tmp_path / "killed").rename(folder)
        if restarts:
            assert told.pop(2)["turns"] == 2, "before the restart"
        wanted = wanted or told
        assert told == wanted


def test_time_passes_while_a_server_is_down(tmp_path: Path, model_path: Path) -> None:
    with server(tmp_path, model_path) as (_, client):
        old = ask(client, FIRST, session="new")["session"]["id"]
        new = ask(client, THEN, session="new")["session"]["id"]
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute(
            "UPDATE sessions SET data = json_set(data, '$.used_at', 1000.0) WHERE id = ?", (old,)
        )
    connection.close()
    with server(tmp_path, model_path) as (live, client):
        refused(client, 404, "session_not_found", session=old)
        assert [each["id"] for each in listed(client)] == [new]
        eventually(lambda: old not in live.services.dialogues._dialogues, "the first look at all sessions")
        assert ask(client, FIRST, session=new)["session"]["turn"] == 2
    assert sessions_in(tmp_path) == [new]


def sessions_in(folder: Path) -> list[str]:
    connection = sqlite3.connect(folder / FILE_NAME)
    try:
        return [name for (name,) in connection.execute("SELECT id FROM sessions ORDER BY used_at")]
    finally:
        connection.close()


def test_an_ended_session_stays_ended(tmp_path: Path, model_path: Path) -> None:
    with server(tmp_path, model_path) as (_, client):
        name = ask(client, FIRST, session="new")["session"]["id"]
        client.delete(f"/rag/sessions/{name}").raise_for_status()
        files = b"".join(path.read_bytes() for path in tmp_path.glob(f"{FILE_NAME}*"))
        assert b"Skerryvore" not in files
    with server(tmp_path, model_path) as (_, client):
        refused(client, 404, "session_not_found", session=name)
        assert listed(client) == []


@pytest.mark.parametrize("change", ["removed", "replaced", "dropped", "made again"])
@pytest.mark.parametrize("is_up", [True, False])
def test_a_document_that_was_removed_ends_its_session(
    tmp_path: Path, model_path: Path, change: str, is_up: bool
) -> None:
    def apply(live: Live, client: httpx.Client) -> None:
        if change == "replaced":
            live.index("docs", {"skerryvore": "Skerryvore was built by somebody else."})
        elif change == "removed":
            found = next(d for d in live.services.store.documents("docs") if d.source == "skerryvore")
            client.delete(f"/rag/documents/{found.doc_id}", params={"namespace": "docs"}).raise_for_status()
        else:
            client.delete("/rag/namespaces/docs").raise_for_status()
            if change == "made again":
                live.index("docs", DOCUMENTS)

    with server(tmp_path, model_path) as (live, client):
        name = ask(client, FIRST, session="new")["session"]["id"]
        given = ask(client, FIRST, session="new", documents=[GIVEN])["session"]["id"]
        if is_up:
            apply(live, client)
            refused(client, 409, "session_outdated", session=name)
    if not is_up:  # a server that knows nothing of the sessions
        (tmp_path / FILE_NAME).rename(tmp_path / "away")
        with server(tmp_path, model_path) as (live, client):
            apply(live, client)
        (tmp_path / "away").replace(tmp_path / FILE_NAME)
    with server(tmp_path, model_path) as (live, client):
        if change in ("dropped", "made again"):
            assert (
                "namespace was removed" in refused(client, 409, "session_outdated", session=name)["message"]
            )
            refused(client, 409, "session_outdated", session=given)
        else:
            refused(client, 409, "session_outdated", session=name)
            assert ask(client, THEN, session=given)["session"]["turn"] == 2
        outdated = {each["id"]: each["outdated"] for each in listed(client)}
        assert outdated[name]
    assert b"built by Alan Stevenson." not in (tmp_path / FILE_NAME).read_bytes()


@pytest.mark.parametrize("is_dropped", [True, False])
def test_commands_take_texts_of_removed_documents_from_disk(
    tmp_path: Path, model_path: Path, is_dropped: bool
) -> None:
    with server(tmp_path, model_path) as (live, client):
        name = ask(client, FIRST, session="new")["session"]["id"]
        other = ask(client, THEN, session="new")["session"]["id"]
        settings = live.settings
        clean_files(settings, live.services.store)  # leaves to a server what is its own
        assert ask(client, "And where is it?", session=name)["session"]["turn"] == 2
    with IndexStore(tmp_path) as store:
        if is_dropped:
            store.drop_namespace("docs")
        else:
            found = next(each for each in store.documents("docs") if each.source == "skerryvore")
            store.remove_document("docs", found.doc_id)
        clean_files(settings, store)
    files = b"".join(path.read_bytes() for path in tmp_path.glob(f"{FILE_NAME}*"))
    assert b"built by Alan Stevenson." not in files
    assert (b"leeks" in files) is not is_dropped
    with server(tmp_path, model_path) as (_, client):
        refused(client, 409, "session_outdated", session=name)
        if not is_dropped:
            assert ask(client, FIRST, session=other, k=1)["session"]["turn"] == 2


def test_sessions_of_a_namespace_that_was_never_indexed_go_with_it(tmp_path: Path, model_path: Path) -> None:
    with server(tmp_path, model_path) as (_, client):
        fields = {"namespace": "loose", "documents": [GIVEN]}
        name = ask(client, FIRST, session="new", **fields)["session"]["id"]
        assert client.delete("/rag/namespaces/loose").status_code == 404
        refused(client, 409, "session_outdated", session=name, **fields)


def test_sessions_belong_to_their_keys_and_count_as_before(tmp_path: Path, model_path: Path) -> None:
    with server(tmp_path, model_path, max_sessions=1) as (live, _):
        tenants = Tenants(live)
        with tenants.client("one", "read", "docs") as one, tenants.client("two", "read", "docs") as two:
            name = ask(one, FIRST, session="new")["session"]["id"]
            headers = {each: client.headers["authorization"] for each, client in (("one", one), ("two", two))}
    secret = headers["one"].removeprefix("Bearer ").encode()
    assert secret not in (tmp_path / FILE_NAME).read_bytes()
    with server(tmp_path, model_path, max_sessions=1) as (live, _):
        one, two = (live.client(headers={"Authorization": headers[each]}) for each in ("one", "two"))
        with one, two:
            refused(two, 404, "session_not_found", session=name)
            assert two.delete(f"/rag/sessions/{name}").status_code == 404
            assert listed(two) == []
            refused(one, 429, "too_many_sessions", session="new")
            assert ask(one, THEN, session=name)["session"]["turn"] == 2


@pytest.mark.parametrize("change", [{"system_prompt": "Be brief."}, {"model": "another"}])
def test_sessions_of_another_model_or_template_are_forgotten(
    tmp_path: Path, model_path: Path, change: dict[str, str]
) -> None:
    with server(tmp_path, model_path) as (_, client):
        name = ask(client, FIRST, session="new")["session"]["id"]
    model = model_path
    if "model" in change:  # the same weights with another tokenizer
        model = tmp_path / "model"
        shutil.copytree(model_path, model)
        read = json.loads((model / "tokenizer.json").read_text())
        words = read["model"]["vocab"]
        words["Ġlife"], words["Ġlead"] = words["Ġlead"], words["Ġlife"]
        (model / "tokenizer.json").write_text(json.dumps(read))
    settings = {name: value for name, value in change.items() if name != "model"}
    with server(tmp_path, model, **settings) as (_, client):
        refused(client, 404, "session_not_found", session=name)
    assert sessions_in(tmp_path) == []


def test_in_memory_only(tmp_path: Path, model_path: Path) -> None:
    with server(tmp_path, model_path) as (_, client):
        name = ask(client, FIRST, session="new")["session"]["id"]
    with server(tmp_path, model_path, sessions_on_disk=False) as (_, client):
        hint = refused(client, 404, "session_not_found", session=name)["hint"]
        assert "memory only" in hint
        assert ask(client, FIRST, session="new")["session"]["turn"] == 1
        assert not list(tmp_path.glob(f"{FILE_NAME}*"))
    with server(tmp_path, model_path) as (_, client):
        assert listed(client) == []


class FullDisk(sqlite3.Connection):
    """A connection that cannot write while it is told so."""

    full = threading.Event()

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        if self.full.is_set() and sql.lstrip().startswith(("BEGIN", "INSERT", "COMMIT")):
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(sql, parameters)


def test_an_answer_does_not_need_the_disk(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **kw: connect(*args, **{"factory": FullDisk, **kw}))
    monkeypatch.setattr(dialogues, "_SWEEP_S", 0.05)
    caplog.set_level(logging.INFO)
    FullDisk.full.set()
    try:
        with server(tmp_path / "data", model_path) as (_, client):
            name = ask(client, FIRST, session="new")["session"]["id"]
            FullDisk.full.clear()
            eventually(lambda: "can be written again" in caplog.text, "it is tried again")
            assert ask(client, THEN, session=name)["session"]["turn"] == 2
            FullDisk.full.set()
            assert ask(client, BELL, session=name)["session"]["turn"] == 3
            FullDisk.full.clear()
            eventually(lambda: caplog.text.count("can be written again") == 2, "and again")
        assert caplog.text.count("cannot be written") == 2
    finally:
        FullDisk.full.clear()
    with server(tmp_path / "data", model_path) as (_, client):
        assert ask(client, FIRST, session=name)["session"]["turn"] == 4


def test_a_session_that_does_not_begin_takes_no_place(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(tmp_path, model_path, max_sessions=1) as (_, client):
        with monkeypatch.context() as broken:
            broken.setattr(IndexStore, "made_at", lambda _: 1 / 0)
            ask(client, FIRST, 500, session="new")
        ask(client, FIRST, session="new")
        refused(client, 429, "too_many_sessions", session="new")
