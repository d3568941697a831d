"""A document with a label, and a key of its namespace that lacks the label: whatever the key asks, by any
route or tool, no word of the document comes back, nor anything that was made of it.

A route that is added without a probe fails here, and so does a tool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import mcp
import pytest

from ragserve import mcp_server
from ragserve.api.access import NEEDS
from ragserve.api.openai import WITHOUT_RETRIEVAL
from ragserve.client import Client
from tests.unit.api.scripted_server import Live, Tenants, eventually, serving

SPACE = "ward"
SECRET = "quillmark"
OPEN = {
    "menu": "On Monday the ward serves soup, and on Friday the ward serves fish.",
    "hours": "Visitors come to the ward from two to six.",
}
HIDDEN = {f"payroll-{SECRET}": f"The head of the ward earns {SECRET} a month, which the ward must not know."}
QUESTION = "What does the head of the ward earn a month?"
ASK = {"query": QUESTION, "namespace": SPACE, "k": 9}
CHAT = {"model": f"ragserve/{SPACE}", "messages": [{"role": "user", "content": QUESTION}]}
LOGS = {"query_log_bytes": 2**20, "feedback_bytes": 2**20}
Probe = tuple[str, dict[str, Any]]


class Ward(Tenants):
    """The server, a key with the label, one without it that may do all else, and what there is to guess."""

    def __init__(self, live: Live) -> None:
        super().__init__(live)
        self.keys.create("operator", (), ["admin"])
        every = "read ingest delete"
        self.board = self.client("board", every, SPACE, labels=["board"])
        self.nurse = self.client("nurse", every, SPACE, labels=["staff"])
        self.clients = [self.board, self.nurse]
        live.engine.reply = self._says_its_prompt
        live.index(SPACE, OPEN)
        texts = [{"name": name, "text": text, "labels": ["board"]} for name, text in HIDDEN.items()]
        self.job = self.done(self.board.post("/rag/ingest", json={"namespace": SPACE, "texts": texts}))
        rows = self.board.get("/rag/documents", params={"namespace": SPACE, "limit": 9}).json()["documents"]
        self.hidden = next(row["doc_id"] for row in rows if SECRET in row["title"])
        self.open = next(row["doc_id"] for row in rows if row["doc_id"] != self.hidden)
        answered = self.board.post("/rag/query", json=ASK | {"session": "new"}).json()
        assert SECRET in answered["answer"], "the model repeats what it is given"
        self.session = answered["session"]["id"]
        rating = {
            "query": f"{QUESTION} {SECRET}?",
            "answer": SECRET,
            "rating": "up",
            "documents": [self.hidden],
        }
        self.board.post("/rag/feedback", json={"namespace": SPACE, **rating})
        self.board.post("/rag/query", json=ASK | {"query": f"Who is {SECRET}?", "min_score": 2.0})
        for path in ("/rag/unanswered", "/rag/feedback"):
            eventually(lambda path=path: SECRET in self.told(self.board, path), f"{path} has it")

    def told(self, client: httpx.Client, path: str, **params: Any) -> str:
        return client.get(path, params={"namespace": SPACE, **params}).text

    def done(self, accepted: httpx.Response) -> str:
        """The id of a job that has ended well."""
        assert accepted.status_code == 202, accepted.text
        job = accepted.json()["job_id"]
        jobs = self.live.services.ingestor.jobs
        eventually(lambda: jobs.get(job).finished, "the job ends")
        return str(job)

    def _says_its_prompt(self, request: Any) -> list[str]:
        prompts = self.live.services.answerer._prompts
        return [prompts.words(request.input_ids)]


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Ward]:
    with serving(tmp_path_factory.mktemp("ward"), model_path, **LOGS) as live:
        found = Ward(live)
        yield found
        for client in found.clients:
            client.close()


def where(**more: Any) -> dict[str, Any]:
    return {"params": {"namespace": SPACE, **more}}


def _filters() -> Iterator[dict[str, Any]]:
    yield {}
    for field, value in (("source", f"payroll-{SECRET}"), ("mime", "text/plain")):
        yield {"filter": {"op": "eq", "field": field, "value": value}}
    yield {"filter": {"op": "not", "filter": {"op": "eq", "field": "title", "value": "nothing"}}}


def _searches() -> Iterator[dict[str, Any]]:
    for retrieval in ("dense", "lexical", "hybrid"):
        yield {"retrieval": retrieval, "neighbours": 3, "not_found": "note"}
    yield {"query": "quillmrak?", "spelling": "on"}
    yield {"rerank_candidates": 50, "dedupe": 0.9}
    yield from _filters()
    yield {"history": [{"role": "user", "content": QUESTION}], "follow_ups": "rewrite"}


def _asked(path: str, **more: Any) -> Callable[[Ward], Iterator[Probe]]:
    def probes(ward: Ward) -> Iterator[Probe]:
        for search in _searches():
            yield path, {"json": ASK | search | more}

    return probes


def _query(ward: Ward) -> Iterator[Probe]:
    yield from _asked("/rag/query")(ward)
    yield from _asked("/rag/query", stream=True)(ward)
    for strategy in ("full", "prefix", "samkv", "auto", "passages"):
        yield "/rag/query", {"json": ASK | {"strategy": strategy, "strategy_options": {}}}
    for session in ("new", ward.session):
        yield "/rag/query", {"json": ASK | {"session": session}}
    yield "/rag/query", {"json": ASK | {"documents": [{"text": "The ward is closed."}]}}


def _chat(ward: Ward) -> Iterator[Probe]:
    for more in ({}, {"stream": True}, {"session": "new"}, *_filters()):
        yield "/v1/chat/completions", {"json": CHAT | more}


def _document(suffix: str = "", **more: Any) -> Callable[[Ward], Iterator[Probe]]:
    return lambda ward: iter([(f"/rag/documents/{ward.hidden}{suffix}", where() | more)])


def _listed(ward: Ward) -> Iterator[Probe]:
    for filter in _filters():
        given = {"filter": json.dumps(filter["filter"])} if filter else {}
        yield "/rag/documents", where(**given)
    yield "/rag/documents", where(source_prefix="payroll")


def _ingested(ward: Ward) -> Iterator[Probe]:
    """The same text under the same name, which would tell that it is there, and one in its place."""
    for text in (*HIDDEN.values(), "another text"):
        texts = [{"name": name, "text": text} for name in HIDDEN]
        yield "/rag/ingest", {"json": {"namespace": SPACE, "texts": texts}}
    labelled = [{"name": "mine", "text": "mine", "labels": ["board"]}]
    yield "/rag/ingest", {"json": {"namespace": SPACE, "texts": labelled}}


def _warmed(ward: Ward) -> Iterator[Probe]:
    yield "/rag/cache/warm", {"json": {"namespace": SPACE}}
    for name in (ward.hidden, *HIDDEN):
        yield "/rag/cache/warm", {"json": {"namespace": SPACE, "documents": [name]}}


def _at(path: str, **options: Any) -> Callable[[Ward], Iterator[Probe]]:
    return lambda ward: iter([(path.format(ward=ward), options or where())])


PROBES: dict[str, Callable[[Ward], Iterator[Probe]]] = {
    "POST /rag/query": _query,
    "POST /rag/retrieve": _asked("/rag/retrieve"),
    "POST /v1/chat/completions": _chat,
    "GET /rag/documents": _listed,
    "GET /rag/documents/{doc_id}": _document(),
    "GET /rag/documents/{doc_id}/chunks": _document("/chunks"),
    "GET /rag/documents/{doc_id}/chunks/{ordinal}": _document("/chunks/0"),
    "PATCH /rag/documents/{doc_id}/chunks/{ordinal}": _document(
        "/chunks/0", json={"version": "0" * 16, "text": "Nothing."}
    ),
    "GET /rag/documents/{doc_id}/lost-corrections": _document("/lost-corrections"),
    "DELETE /rag/documents/{doc_id}/lost-corrections": _document("/lost-corrections"),
    "PUT /rag/documents/{doc_id}/labels": _document("/labels", json={"labels": ["staff"]}),
    "DELETE /rag/documents/{doc_id}": _document(),
    "GET /rag/namespaces": _at("/rag/namespaces"),
    "GET /rag/namespaces/{name}": _at(f"/rag/namespaces/{SPACE}"),
    "DELETE /rag/namespaces/{name}": _at(f"/rag/namespaces/{SPACE}"),
    "GET /rag/namespaces/{name}/settings": _at(f"/rag/namespaces/{SPACE}/settings"),
    "PUT /rag/namespaces/{name}/settings": _at(f"/rag/namespaces/{SPACE}/settings", json={}),
    "POST /rag/ingest": _ingested,
    "GET /rag/jobs": _at("/rag/jobs"),
    "GET /rag/jobs/{job_id}": _at("/rag/jobs/{ward.job}"),
    "DELETE /rag/jobs/{job_id}": _at("/rag/jobs/{ward.job}"),
    "POST /rag/cache/warm": _warmed,
    "POST /rag/feedback": _at(
        "/rag/feedback", json={"namespace": SPACE, "query": "x", "answer": "y", "rating": "up"}
    ),
    "GET /rag/feedback": _at("/rag/feedback"),
    "GET /rag/unanswered": _at("/rag/unanswered"),
    "GET /rag/sessions": _at("/rag/sessions"),
    "DELETE /rag/sessions/{session_id}": _at("/rag/sessions/{ward.session}"),
    "GET /info": _at("/info"),
    "GET /v1/models": _at("/v1/models"),
    "GET /v1/models/{model_id:path}": _at(f"/v1/models/ragserve/{SPACE}"),
}
PROBES |= {f"POST {path}": _at(path, json=CHAT) for path in WITHOUT_RETRIEVAL}
NOTHING_OF_DOCUMENTS = frozenset(
    {"GET /ready", "GET /metrics", "POST /rag/ingest/preview"}  # a preview is of what was sent
    | {f"POST {path}" for path in ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank")}
)


def test_every_route_has_a_probe() -> None:
    """Routes that are not in `NEEDS` are for admins alone."""
    open_ = {name for name, need in NEEDS.items() if need not in ("none", "inspect", "operate")}
    assert open_ - NOTHING_OF_DOCUMENTS == set(PROBES), "how is it asked for what is hidden?"


@pytest.mark.parametrize("route", PROBES)
def test_no_word_of_it_comes_back(ward: Ward, route: str) -> None:
    method = route.split()[0]
    for path, options in PROBES[route](ward):
        answer = ward.nurse.request(method, path, **options)
        sent = json.dumps(options)
        shown = answer.text.replace(answer.headers["x-request-id"], "")
        if SECRET not in sent:
            assert SECRET not in shown, (path, options)
        assert not any(text in shown for text in HIDDEN.values()), (path, options)
        if ward.hidden not in path + sent:
            assert ward.hidden not in shown, (path, options)
        assert answer.status_code < 500, shown
        if route == "POST /rag/ingest" and answer.status_code == 202:
            items = ward.nurse.get(f"/rag/jobs/{ward.done(answer)}").json()["items"]
            assert {item["state"] for item in items} <= {"failed"}, "hidden items are not listed, or failed"
    board = ward.board.get(f"/rag/documents/{ward.hidden}", **where())
    assert board.json()["labels"] == ["board"], "it is as it was"
    assert SECRET in ward.board.get(f"/rag/documents/{ward.hidden}/chunks", **where()).text


def test_tools_of_agents_see_what_their_key_sees(ward: Ward) -> None:
    secret = ward.nurse.headers["Authorization"].removeprefix("Bearer ")
    wanted = {"search": {"question": QUESTION, "k": 9}, "ask": {"question": QUESTION}, "list_namespaces": {}}

    async def run(client: Client) -> list[Any]:
        async with mcp.Client(mcp_server.build(client, SPACE)) as agent:
            assert {tool.name for tool in (await agent.list_tools()).tools} == set(wanted)
            return [await agent.call_tool(name, given) for name, given in wanted.items()]

    with Client(ward.live.url, api_key=secret) as client:
        results = [each.structured_content for each in asyncio.run(run(client))]
    assert SECRET not in json.dumps(results)
    assert results[2]["result"] == [{"name": SPACE, "documents": len(OPEN)}]


def test_numbers_are_those_of_a_namespace_without_it(ward: Ward) -> None:
    def told(client: httpx.Client) -> tuple[Any, ...]:
        space = client.get(f"/rag/namespaces/{SPACE}").json()
        found = client.post("/rag/retrieve", json=ASK).json()["results"]
        index = client.get("/info").json()["index"]
        return space["n_documents"], space["n_chunks"], len(found), index["documents"], index["chunks"]

    assert told(ward.nurse) == (2, 2, 2, 2, 2)
    assert told(ward.board) == (3, 3, 3, 3, 3)


def test_k_are_found_where_k_are_seen(ward: Ward) -> None:
    for retrieval in ("dense", "hybrid"):
        found = ward.nurse.post("/rag/retrieve", json=ASK | {"k": 2, "retrieval": retrieval}).json()[
            "results"
        ]
        assert len(found) == 2, "the hidden one is the nearest, and takes no place"


def test_a_key_gives_its_own_labels_only(ward: Ward) -> None:
    for body in (
        {"texts": [{"name": "x", "text": "x", "labels": ["board"]}]},
        {"urls": ["https://example.com/"], "labels": ["board", "staff"]},
    ):
        refused = ward.nurse.post("/rag/ingest", json={"namespace": SPACE, **body})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "label_not_held")
    form = {"files": ("x.txt", b"x")}, {"namespace": SPACE, "labels": '["board"]'}
    assert ward.nurse.post("/rag/ingest", files=form[0], data=form[1]).status_code == 403
    for labels in (["a b"], ["*"], "board", [f"l{i}" for i in range(33)]):
        wrong = ward.nurse.put(f"/rag/documents/{ward.open}/labels", json={"labels": labels}, **where())
        assert wrong.status_code == 400, wrong.text


def test_ingestion_changes_labels_of_what_is_unchanged(ward: Ward) -> None:
    def ingested(*labels: list[str] | None) -> list[tuple[str, list[str]]]:
        found = []
        for own in labels:
            body = {"namespace": SPACE, "texts": [{"name": "memo", "text": "A memo.", "labels": own}]}
            job = ward.done(ward.nurse.post("/rag/ingest", json=body))
            state = ward.nurse.get(f"/rag/jobs/{job}").json()["items"][0]["state"]
            rows = ward.nurse.get("/rag/documents", **where(source_prefix="memo")).json()["documents"]
            found.append((state, rows[0]["labels"]))
        ward.nurse.delete(f"/rag/documents/{rows[0]['doc_id']}", **where())
        return found

    states = ingested(["staff"], None, [], None, ["staff"])
    assert states == [
        ("indexed", ["staff"]), ("unchanged", ["staff"]), ("unchanged", []), ("unchanged", []),
        ("unchanged", ["staff"]),
    ]  # fmt: skip


def test_the_kv_of_ones_own_documents_lies_apart_from_what_is_hidden(ward: Ward) -> None:
    """A cache hit would tell that a hidden document has the same text."""
    guess = {"documents": [{"text": text, "title": name.title()} for name, text in HIDDEN.items()]}
    engine = ward.live.engine
    engine.requests.clear()
    ward.nurse.post("/rag/query", json=ASK | guess)
    ward.board.post("/rag/query", json=ASK | guess)
    ward.nurse.post("/rag/query", json=ASK)
    apart, theirs, found = [request.namespace for request in engine.requests]
    assert theirs == found == SPACE
    assert apart.startswith("apart-")
    ward.nurse.post("/rag/query", json=ASK | guess | {"strategy": "samkv", "session": "new"})
    assert engine.requests[-1].strategy == "prefix", "under the session's own key"


def test_a_label_taken_from_a_key_ends_its_sessions_and_hides_its_documents_at_once(ward: Ward) -> None:
    with ward.client("deputy", "read", SPACE, labels=["board"]) as deputy:
        begun = deputy.post("/rag/query", json=ASK | {"session": "new"}).json()
        going_on = ASK | {"session": begun["session"]["id"], "query": "And a year?"}
        assert SECRET in begun["answer"]
        assert SECRET in deputy.post("/rag/query", json=going_on).json()["answer"]
        ward.keys.relabel("deputy", ["staff"], ["board"])
        ended = deputy.post("/rag/query", json=going_on)
        assert (ended.status_code, ended.json()["error"]["code"]) == (409, "session_outdated")
        for answer in (ended, deputy.get("/rag/sessions"), deputy.post("/rag/query", json=ASK)):
            assert SECRET not in answer.text
        ward.keys.relabel("deputy", ["board"], [])
        assert deputy.post("/rag/query", json=going_on).status_code == 409, "its texts are gone"
        assert SECRET in deputy.post("/rag/query", json=ASK).json()["answer"]


def test_a_label_given_to_a_document_hides_it_at_once(ward: Ward) -> None:
    """Also in a session that rests on it; and a label of the caller's shows it again."""
    with ward.client("visitor", "read", SPACE) as visitor:
        asked = {"query": "When do visitors come?", "namespace": SPACE, "k": 9}
        begun = visitor.post("/rag/query", json=asked | {"session": "new"}).json()
        assert "two to six" in begun["answer"]
        rows = ward.nurse.get("/rag/documents", **where()).json()["documents"]
        doc = next(row["doc_id"] for row in rows if row["source"] == "hours")
        changed = ward.nurse.put(f"/rag/documents/{doc}/labels", json={"labels": ["staff"]}, **where())
        assert changed.json()["labels"] == ["staff"]
        try:
            turn = visitor.post("/rag/query", json=asked | {"session": begun["session"]["id"]})
            assert turn.status_code == 409
            for answer in (
                turn,
                visitor.post("/rag/query", json=asked),
                visitor.get("/rag/documents", **where()),
            ):
                assert "two to six" not in answer.text
                assert "hours" not in answer.text
            assert "two to six" in ward.nurse.post("/rag/query", json=asked).json()["answer"]
        finally:
            ward.nurse.put(f"/rag/documents/{doc}/labels", json={"labels": []}, **where())
        assert "two to six" in visitor.post("/rag/query", json=asked).json()["answer"]


def test_a_gateway_names_the_labels_of_its_user(ward: Ward) -> None:
    """They count as far as the key has them; without the header there are none."""
    own = {"labels": ["board", "staff"], "labels_header": "X-Labels"}
    with ward.client("gateway", "read", SPACE, **own) as gateway:

        def sees(labels: str | None) -> bool:
            headers = {} if labels is None else {"X-Labels": labels}
            return SECRET in gateway.post("/rag/query", json=ASK, headers=headers).json()["answer"]

        assert [sees(each) for each in ("board", "x y,board", "staff", "", None, "*", "cook")] == [
            True, True, False, False, False, False, False,
        ]  # fmt: skip
        twice = gateway.get("/rag/namespaces", headers=[("X-Labels", "staff"), ("X-Labels", "board")])
        assert (twice.status_code, twice.json()["error"]["code"]) == (400, "invalid_labels")
        board, staff = {"X-Labels": "board"}, {"X-Labels": "staff"}
        begun = gateway.post("/rag/query", json=ASK | {"session": "new"}, headers=board).json()
        name = begun["session"]["id"]
        assert [row["id"] for row in gateway.get("/rag/sessions", headers=board).json()["sessions"]] == [name]
        assert gateway.get("/rag/sessions", headers=staff).json()["sessions"] == []
        assert gateway.post("/rag/query", json=ASK | {"session": name}, headers=staff).status_code == 404
    ordinary = ward.nurse.post("/rag/query", json=ASK, headers={"X-Labels": "board"})
    assert SECRET not in ordinary.text, "the header means nothing with other keys"


def test_what_was_asked_and_rated_is_shown_to_those_who_saw_as_much(ward: Ward) -> None:
    asked = "How many spoons has the ward?"
    ward.nurse.post("/rag/query", json=ASK | {"query": asked, "min_score": 2.0})
    ward.nurse.post(
        "/rag/feedback", json={"namespace": SPACE, "query": asked, "answer": "Nine.", "rating": "up"}
    )
    for path in ("/rag/unanswered", "/rag/feedback"):
        eventually(lambda path=path: asked in ward.told(ward.nurse, path), f"{path} has it")
        assert asked in ward.told(ward.board, path), "the nurse saw no document that the board does not"
        assert SECRET in ward.told(ward.board, path)
        assert SECRET not in ward.told(ward.nurse, path)
