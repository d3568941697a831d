"""Reranking, the floor, neighbours, budget and copies mean the same on every route."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from ragserve.answering.auto import Chooser
from ragserve.answering.key_reranker import KeyReranker
from ragserve.answering.prompt import PromptBuilder
from ragserve.config import DEFAULT_MODEL
from ragserve.engine.document_cache import CachingEngine
from ragserve.programs import Rag
from ragserve_index.types import Chunk, NewChunk, NewDocument
from tests.unit.api.scripted_server import DOCUMENTS, Live, ScriptedEngine, WordEmbedder, serving
from tests.unit.retrieval.tiny_models import cross_encoder

QUESTION = "The lighthouse of Skerryvore was built by whom?"
NOTHING = "Nothing in here."


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cross_encoder(tmp_path_factory.mktemp("reranker") / "model")


@pytest.fixture(scope="module")
def _live(tmp_path_factory: pytest.TempPathFactory, model_path: Path, reranker: str) -> Iterator[Live]:
    data = tmp_path_factory.mktemp("options")
    with serving(data, model_path, rerank_models=f"keys, {reranker}", nothing_found=NOTHING) as live:
        live.index("docs", DOCUMENTS)
        live.index("docs", {"copy": DOCUMENTS["skerryvore"].upper() + " Yes"})
        parts = ["Otters swim.", "They eat fish.", "They sleep."]
        chunks = [NewChunk(text, i, i + 1, 3) for i, text in enumerate(parts)]
        document = NewDocument("otters", "Otters", "1", "text/plain", 1)
        live.services.store.replace_documents("docs", [(document, chunks, WordEmbedder().encode(parts))])
        yield live


def sources(live: Live, **fields: Any) -> list[str]:
    """The passages' sources, the same by `/rag/retrieve`, `/rag/query`, OpenAI's route and a program."""
    with live.client() as client:
        body = {"query": QUESTION, "namespace": "docs", **fields}
        retrieved = client.post("/rag/retrieve", json=body).json()
        asked = client.post("/rag/query", json=body | {"stream": True}).text
        live.engine.requests.clear()
        messages = [{"role": "user", "content": QUESTION}]
        chat = client.post(
            "/v1/chat/completions", json={"model": "ragserve/docs", "messages": messages, **fields}
        ).json()
    rag = Rag(live.url, namespace="docs")
    by_program = rag.retrieve(QUESTION, **fields)
    rag.close()
    found = [passage["source"] for passage in retrieved["results"]]
    assert [passage.source for passage in by_program] == found
    first = asked.partition("\n\n")[0]
    places = [first.index(f'"chunk_id":{passage["chunk_id"]},') for passage in retrieved["results"]]
    assert len(places) == len(found)
    assert chat["ragserve"]["context"]["documents_retrieved"] == len(found)
    assert chat["ragserve"]["reranking"] == retrieved["reranking"]
    return found


def test_options_are_the_same_on_every_route(live: Live) -> None:
    assert sources(live, k=2) == ["skerryvore", "copy"]
    assert sources(live, k=2, dedupe=0.8) == ["skerryvore", "bell"]
    tokens = len(DOCUMENTS["skerryvore"].split())
    assert sources(live, context_tokens=2 * tokens + 1) == ["skerryvore", "copy"]
    assert len(sources(live, k=10)) > 5
    assert sources(live, min_score=0.01, retrieval="lexical", k=1) == ["skerryvore"]


def test_a_reranker_orders_the_candidates(client: httpx.Client, live: Live, reranker: str) -> None:
    from sentence_transformers import CrossEncoder

    body = {"query": QUESTION, "namespace": "docs", "rerank": reranker, "k": 2, "rerank_candidates": 4}
    found = client.post("/rag/retrieve", json=body).json()
    candidates = found["reranking"]["candidates"]
    assert (found["reranking"]["by"], found["reranking"]["scored"], len(candidates)) == (reranker, 4, 4)
    assert found["timings"]["rerank_ms"] > 0
    assert [c["rank"] for c in candidates] == [1, 2, 3, 4]
    assert sorted(c["search_rank"] for c in candidates) == [1, 2, 3, 4]
    assert [c["chunk_id"] for c in candidates[:2]] == [p["chunk_id"] for p in found["results"]]
    model = CrossEncoder(reranker, device="cpu")
    for passage in found["results"]:
        pair = (QUESTION, f"{passage['title']}\n{passage['text']}")
        assert passage["rerank_score"] == pytest.approx(float(model.predict(pair)), abs=1e-4)
    scores = [c["score"] for c in candidates]
    assert scores == sorted(scores, reverse=True)
    assert sources(live, rerank=reranker, k=2, rerank_candidates=4) == [p["source"] for p in found["results"]]
    plain = client.post("/rag/retrieve", json={"query": QUESTION, "namespace": "docs"}).json()
    assert (plain["reranking"], plain["timings"]["rerank_ms"]) == (None, None)
    assert plain["results"][0]["rerank_score"] is None


def test_the_default_reranker_is_loaded_at_the_start_and_others_when_they_are_named(
    reranker: str, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load_model(class_name: str, name: str, *_: Any, **__: Any) -> Any:
        loaded.append(name)
        return SimpleNamespace(predict=lambda pairs, **_: [0.0] * len(pairs))

    monkeypatch.setattr("ragserve.retrieval.reranker.load_model", load_model)
    other = shutil.copytree(reranker, tmp_path / "other")
    options = {"rerank": reranker, "rerank_models": str(other)}
    with serving(tmp_path / "data", model_path, **options) as live, live.client() as client:
        assert loaded == [reranker]
        live.index("docs", DOCUMENTS)
        for rerank in ({}, {}, {"rerank": str(other)}):
            body = {"query": QUESTION, "namespace": "docs", **rerank}
            assert client.post("/rag/retrieve", json=body).status_code == 200
        assert loaded == [reranker, str(other)]


def test_a_reranker_that_the_server_has_not_is_refused(client: httpx.Client, live: Live) -> None:
    for name, says in (
        ("nobody/has-this", "no reranker 'nobody/has-this'"),
        ("keys", "no keys of documents"),
    ):
        for route in ("/rag/retrieve", "/rag/query"):
            error = client.post(route, json={"query": "x", "namespace": "docs", "rerank": name})
            assert error.status_code == 400
            assert says in error.json()["error"]["message"]
            assert error.json()["error"]["param"] == "rerank"


def test_nothing_found_is_said_without_asking_the_model(client: httpx.Client, live: Live) -> None:
    body = {"query": QUESTION, "namespace": "docs", "min_score": 0.999}
    answer = client.post("/rag/query", json=body)
    assert answer.status_code == 200
    said = answer.json()
    assert (said["answer"], said["citations"], said["finish_reason"]) == (NOTHING, [], "stop")
    assert said["context"]["documents_kept"] == said["usage"]["prompt"] == 0
    assert "0.999" in said["context"]["notes"][0]
    assert said["timings"]["engine_ms"] is None
    assert said["timings"]["search_ms"] > 0
    streamed = client.post("/rag/query", json=body | {"stream": True}).text
    names = [line.removeprefix("event: ") for line in streamed.splitlines() if line.startswith("event")]
    assert names == ["search_results", "message", "final_answer", "done"]
    messages = [{"role": "user", "content": QUESTION}]
    chat = {"model": "ragserve/docs", "messages": messages, "min_score": 0.999}
    assert (
        client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"] == NOTHING
    )
    assert client.post("/rag/retrieve", json=body).json()["results"] == []
    assert live.engine.requests == []
    client.post("/rag/query", json=body | {"min_score": -1})
    assert len(live.engine.requests) == 1


@pytest.mark.parametrize(("not_found", "asked"), [("note", True), ("refuse", False), ("off", True)])
def test_where_no_passage_is_found_a_note_says_so_or_the_model_is_not_asked(
    client: httpx.Client, live: Live, not_found: str, asked: bool
) -> None:
    nothing = {"op": "eq", "field": "title", "value": "none has it"}
    body = {"query": QUESTION, "namespace": "docs", "filter": nothing, "not_found": not_found}
    said = client.post("/rag/query", json=body).json()
    assert (len(live.engine.requests), said["answer"] == NOTHING) == (asked, not asked)
    assert any("no passage was found" in note.lower() for note in said["context"]["notes"]) == (
        not_found != "off"
    )


def test_neighbours_are_passages_beside_their_own(client: httpx.Client, live: Live) -> None:
    body = {"query": "They eat fish.", "namespace": "docs", "k": 1, "neighbours": 1}
    found = client.post("/rag/retrieve", json=body).json()["results"]
    assert [p["text"] for p in found] == ["Otters swim.", "They eat fish.", "They sleep."]
    assert [p["index"] for p in found] == [1, 2, 3]
    assert [p["score"] is None for p in found] == [True, False, True]
    answer = client.post("/rag/query", json=body).json()
    assert answer["context"]["documents_kept"] == 3


def test_servers_have_defaults_for_all_of_it(tmp_path: Path, model_path: Path) -> None:
    options: dict[str, Any] = {"min_score": 0.9, "neighbours": 1, "dedupe": 0.8, "context_tokens": 99}
    with serving(tmp_path, model_path, **options) as live, live.client() as client:
        live.index("docs", DOCUMENTS)
        defaults = client.get("/info").json()["defaults"]
        assert defaults.items() >= (options | {"rerank": "off", "rerank_candidates": 50}).items()
        body = {"query": QUESTION, "namespace": "docs"}
        assert client.post("/rag/retrieve", json=body).json()["results"] == []
        assert len(client.post("/rag/retrieve", json=body | {"min_score": 0.1}).json()["results"]) == 3


class Caching(ScriptedEngine):
    """An engine that has analysed documents of an even number of tokens."""

    def __init__(self) -> None:
        super().__init__(Path(DEFAULT_MODEL))
        self.bodies: list[dict[str, Any]] = []

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        self.bodies.append({"op": operation, **arguments})
        return {"scores": [None if len(ids) % 2 else 1.0 for ids in arguments["documents"]]}

    async def warm(self, request: Any) -> None: ...
    async def prefix(self, namespace: str, input_ids: Any) -> int:
        return 0

    async def where(self, namespace: str, documents: Any) -> Any: ...


def test_keys_are_asked_of_the_engine_by_the_documents_of_prompts() -> None:
    engine, prompts = Caching(), PromptBuilder.load(DEFAULT_MODEL)
    assert isinstance(engine, CachingEngine)
    texts = ("a b ", "c " * 40_000)
    chunks = [Chunk(i, "d", i, text, 0, 1, None, 1, "s", "T", {}) for i, text in enumerate(texts)]
    asked = KeyReranker(engine, prompts).scores("space", "Who?", [*chunks, chunks[1]])
    scores = asyncio.run(asked)
    (body,) = engine.bodies
    assert (body["op"], body["namespace"]) == ("score", "space")
    assert body["documents"] == [prompts.document_ids(c.title, c.text) for c in chunks]
    assert body["system"] == prompts.system_ids()
    assert body["question"] == prompts.question_ids("Who?")
    assert [score is None for score in scores] == [*(len(ids) % 2 == 1 for ids in body["documents"]), True]


def test_keys_leave_the_order_behind_a_system_text_that_is_too_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, chunk = Caching(), Chunk(0, "d", 0, "a b ", 0, 1, None, 1, "s", "T", {})
    prompts = PromptBuilder.load(DEFAULT_MODEL, "\u2603" * 2500)  # several tokens a character
    assert len(prompts.system_ids()) > 4096
    assert asyncio.run(KeyReranker(engine, prompts).scores("space", "Who?", [chunk, chunk])) == [None, None]
    assert not engine.bodies
    assert sum("4096 are the most" in line for line in caplog.messages) == 1


def test_what_auto_may_choose_is_found_once_for_a_query(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def ask(strategy: str) -> None:
        body = {"query": QUESTION, "namespace": "docs", "strategy": strategy}
        assert client.post("/rag/query", json=body).status_code == 200

    def find(self: Chooser, namespace: str, query: Any) -> Any:
        looked.append(namespace)
        return whole(self, namespace, query)

    whole = Chooser._candidates
    monkeypatch.setattr(Chooser, "_candidates", find)
    ask("auto")
    assert looked == ["docs"], "reads records and profiles, which may have changed in between"
    ask("prefix")
    assert looked == ["docs"]
