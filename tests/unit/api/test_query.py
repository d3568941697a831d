"""`POST /rag/query` as clients see it: fields, defaults, citations, the account of tokens, streaming."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragserve.answering.prompt import Message, PromptBuilder, PromptDocument
from ragserve.errors import EngineError, TooManyRequests
from ragserve.profiles.costs import COSTS, Costs
from ragserve.profiles.costs import FILE_NAME as COSTS_FILE
from ragserve.profiles.figures import Figures
from ragserve.profiles.gate import FILE_NAME, Entry, record
from tests.unit.api.scripted_server import DOCUMENTS, Live, serving

QUESTION = "Who built the lighthouse of Skerryvore?"


def sse(text: str) -> list[tuple[str, Any]]:
    events = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        events.append((fields["event"], json.loads(fields["data"])))
    return events


def ask(client: httpx.Client, question: str = QUESTION, **fields: Any) -> dict[str, Any]:
    response = client.post("/rag/query", json={"query": question, "namespace": "docs", **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_the_answer_has_the_documented_fields(client: httpx.Client, docs: str) -> None:
    response = client.post("/rag/query", json={"query": QUESTION, "namespace": docs, "k": 2})
    answer = response.json()
    assert answer["answer"] == "Alan Stevenson [1]."
    (citation,) = answer["citations"]
    assert citation | {"score": None, "cosine": None, "bm25": None, "doc_id": None, "chunk_id": None} == {
        "index": 1,
        "namespace": docs,
        "doc_id": None,
        "chunk_id": None,
        "source": "skerryvore",
        "title": "Skerryvore",
        "page": None,
        "page_kind": None,
        "first_page": None,
        "page_name": None,
        "start": 0,
        "end": len(DOCUMENTS["skerryvore"]),
        "header_chars": 0,
        "score": None,
        "cosine": None,
        "bm25": None,
        "search_rank": None,
        "rerank_score": None,
        "text": DOCUMENTS["skerryvore"],
        "basis": "marker",
        "edited": False,
    }
    assert citation["doc_id"]
    assert citation["chunk_id"] > 0
    assert 0 < citation["cosine"] <= 1.001
    assert citation["bm25"] is None
    assert citation["score"] == citation["cosine"]
    assert answer["retrieval"] == "dense"
    assert answer["usage"]["completion"] == 4
    assert set(answer["context"]) >= {
        "strategy",
        "tokens_retrieved",
        "tokens_kept",
        "tokens_recomputed",
        "tokens_by_tier",
    }
    assert answer["timings"]["queue_ms"] == 0.5
    assert answer["timings"]["prefill_ms"] == 1.5
    assert all(answer["timings"][name] >= 0 for name in ("embed_ms", "search_ms", "ttft_ms", "total_ms"))
    assert answer["index_version"] >= 1
    assert answer["finish_reason"] == "stop"
    assert answer["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("given", ["my-id.7:a", "x" * 128])
def test_a_client_may_name_its_request(client: httpx.Client, docs: str, given: str) -> None:
    response = client.post(
        "/rag/query", json={"query": QUESTION, "namespace": docs}, headers={"X-Request-Id": given}
    )
    assert response.headers["x-request-id"] == response.json()["request_id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é".encode().decode("latin-1"), '"}'])
def test_a_senseless_request_id_is_replaced(client: httpx.Client, docs: str, given: str) -> None:
    headers = [(b"X-Request-Id", given.encode("latin-1"))]
    response = client.post("/rag/query", json={"query": QUESTION, "namespace": docs}, headers=headers)
    assert response.status_code == 200
    assert response.headers["x-request-id"] != given
    assert len(response.headers["x-request-id"]) == 32


def test_more_passages_than_there_are(client: httpx.Client, docs: str) -> None:
    assert ask(client, k=64)["context"]["documents_retrieved"] == len(DOCUMENTS)


def test_the_prompt_holds_the_passages_in_order_and_the_history(
    client: httpx.Client, live: Live, docs: str
) -> None:
    found = client.post("/rag/retrieve", json={"query": QUESTION, "namespace": docs, "k": 2}).json()[
        "results"
    ]
    ask(
        client, k=2, history=[{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]
    )
    prompts = PromptBuilder.load(live.settings.model)
    documents = [PromptDocument("", passage["title"], passage["text"]) for passage in found]
    history = [Message("user", "Hello?"), Message("assistant", "Yes.")]
    expected = prompts.build(QUESTION, documents, max_prompt_tokens=1500, history=history)
    request = live.engine.requests[-1]
    assert request.input_ids == expected.input_ids
    assert request.namespace == "docs"


def test_the_engine_is_told_which_texts_no_index_has(client: httpx.Client, live: Live, docs: str) -> None:
    """So that it does not write their KV to disk, where no removal would find it."""
    ask(client, k=2)
    assert list(live.engine.requests[-1].unregistered) == []
    ask(client, k=2, system="Answer in French.")
    assert list(live.engine.requests[-1].unregistered) == [0]
    ask(client, documents=[{"text": "Given."}, {"text": "Another."}])
    assert list(live.engine.requests[-1].unregistered) == [0, 1, 2]


def test_sampling_and_strategy_reach_the_engine(client: httpx.Client, live: Live, docs: str) -> None:
    ask(client, max_new_tokens=7, temperature=0.5, top_p=0.9, seed=3, stop=["\n"], strategy="full")
    request = live.engine.requests[-1]
    assert request.strategy == "full"
    assert (request.sampling.max_new_tokens, request.sampling.temperature, request.sampling.top_p) == (
        7,
        0.5,
        0.9,
    )
    assert (request.sampling.seed, request.sampling.stop) == (3, ("\n",))
    ask(client)
    assert live.engine.requests[-1].sampling.max_new_tokens == live.settings.max_new_tokens
    assert live.engine.requests[-1].strategy == "prefix", "what the default, auto, has chosen"


def test_a_server_answers_by_its_strategy_with_its_options(tmp_path: Path, model_path: Path) -> None:
    """The server's options count if a request names no strategy or the same one; its own options win."""
    with (
        serving(tmp_path, model_path, strategy="epic:share=0.2,first=16", force_strategies=True) as live,
        live.client() as client,
    ):
        live.index("docs", DOCUMENTS)

        def used(route: str = "/rag/query", **fields: Any) -> tuple[str, dict[str, Any]]:
            question: dict[str, Any] = {"query": QUESTION, "namespace": "docs"}
            if route != "/rag/query":
                question = {"model": "ragserve/docs", "messages": [{"role": "user", "content": QUESTION}]}
            assert client.post(route, json=question | fields).status_code == 200
            request = live.engine.requests[-1]
            return request.strategy, dict(request.options)

        for route in ("/rag/query", "/v1/chat/completions"):
            assert used(route) == ("epic", {"first": 16, "share": 0.2})
            assert used(route, strategy="epic", strategy_options={"first": 8}) == (
                "epic",
                {"first": 8, "share": 0.2},
            )
            assert used(route, strategy_options={"seed": 3}) == (
                "epic",
                {"first": 16, "share": 0.2, "seed": 3},
            )
            assert used(route, strategy="full") == ("full", {})
        assert client.get("/info").json()["defaults"]["strategy"] == "epic:first=16,share=0.2"


def test_a_composed_strategy_must_be_verified_or_forced(client: httpx.Client, live: Live, docs: str) -> None:
    def answer(**options: Any) -> httpx.Response:
        return client.post(
            "/rag/query",
            json={"query": QUESTION, "namespace": docs, "strategy": "epic", "strategy_options": options},
        )

    refused = answer(first=16)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "strategy_not_verified")
    assert "epic:first=16" in refused.json()["error"]["message"]
    assert live.engine.requests == []
    assert answer(first=16, force=True).status_code == 200
    assert live.engine.requests[-1].options == {"first": 16}, "the engine does not know the gate"
    assert answer(first=16, force=1).status_code == 400
    good = Figures(n=500, f1=99.0, f1_vs_full=-0.5, kl=0.01, kept=100.0, recomputed=12.0)
    record(
        live.settings.data_dir / FILE_NAME,
        live.engine.info.fingerprint,
        {"epic:first=16": Entry({"s": good}, "m", "d", "h", "float32")},
    )
    assert answer(first=16).status_code == 200
    assert answer(first=8).status_code == 400


@pytest.mark.parametrize("route", ["/rag/query", "/v1/chat/completions"])
def test_bad_options_are_refused_before_anything_is_searched(
    client: httpx.Client, live: Live, docs: str, route: str
) -> None:
    question: dict[str, Any] = {"query": QUESTION, "namespace": docs}
    if route != "/rag/query":
        question = {"model": f"ragserve/{docs}", "messages": [{"role": "user", "content": QUESTION}]}
    for options, says in (
        ({"depth": 1, "force": True}, "Strategy 'epic' has no option depth: it has recompute, share"),
        (
            {"share": 2, "force": True},
            "Option share of strategy 'epic' is 2: must be less than or equal to 1.",
        ),
    ):
        refused = client.post(route, json=question | {"strategy": "epic", "strategy_options": options})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (
            400,
            "invalid_request",
            "strategy_options",
        )
        assert error["message"].startswith(says)
    assert live.engine.requests == []
    assert live.embedder.calls == []


def test_bad_decode_options_are_fields_at_fault(client: httpx.Client, live: Live, docs: str) -> None:
    for decode, param, says in (
        ({"mode": "fast"}, "decode.mode", "decode.mode: Input should be 'dense', 'hierarchical' or"),
        ({"budgets": 3}, "decode.budgets", "decode.budgets: is not a known field."),
        ({"budget": 0}, "decode.budget", "decode.budget: Input should be greater than or equal to 1."),
    ):
        refused = client.post("/rag/query", json={"query": QUESTION, "namespace": docs, "decode": decode})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param
        assert refused.json()["error"]["message"].startswith(says)
    assert live.engine.requests == []


def test_auto_is_the_default_and_says_what_it_chose_and_why(
    client: httpx.Client, live: Live, docs: str
) -> None:
    def chosen(**options: Any) -> httpx.Response:
        return client.post(
            "/rag/query",
            json={"query": QUESTION, "namespace": docs, "strategy": "auto", "strategy_options": options},
        )

    exact = chosen().json()["context"]
    assert exact["strategy"] == "prefix"
    assert exact["choice"] == "prefix: the engine does not report its cache"
    assert ask(client)["context"] == exact, "without a strategy"
    assert ask(client, strategy="prefix")["context"]["choice"] is None
    assert client.get("/info").json()["defaults"]["strategy"] == "auto"
    assert chosen(first=16).status_code == 400
    good = Figures(n=500, f1=99.0, f1_vs_full=-0.5, kl=0.01, kept=100.0, recomputed=12.0)
    record(
        live.settings.data_dir / FILE_NAME,
        live.engine.info.fingerprint,
        {"epic:first=4": Entry({"s": good}, "m", "d", "h", "float32")},
    )
    costs = Costs((10.0, 1.0, 0.0), {"epic:first=4": {"device": (5.0, 0.0, 0.0)}}, 0.0, "m", "", "d")
    COSTS.save(live.settings.data_dir / COSTS_FILE, live.engine.info.fingerprint, costs)
    assert (
        "does not report its cache" in chosen().json()["context"]["choice"]
    )  # this one has no document cache
    assert live.engine.requests[-1].strategy == "prefix"


def test_filters_restrict_the_search(client: httpx.Client, docs: str) -> None:
    answer = client.post(
        "/rag/retrieve",
        json={"query": QUESTION, "namespace": docs, "filter": {"op": "eq", "field": "name", "value": "soup"}},
    ).json()
    assert [passage["source"] for passage in answer["results"]] == ["soup"]
    assert answer["results"][0]["metadata"] == {"name": "soup", "lang": "en"}
    nothing = ask(client, filter={"op": "eq", "field": "lang", "value": "fr"})
    assert nothing["citations"] == []
    assert nothing["answer"] == "Alan Stevenson."  # its [1] points nowhere


def test_context_given_inline_is_not_searched_for(client: httpx.Client, live: Live) -> None:
    documents = [
        {"title": "One", "text": "It was Bob.", "source": "https://x.org/1"},
        {"text": "It was Alan Stevenson."},
    ]
    live.engine.deltas = ("Alan Stevenson",)
    answer = ask(client, documents=documents, namespace="not-there")
    assert live.embedder.calls == []
    assert answer["index_version"] is None
    assert answer["timings"]["embed_ms"] is None
    assert answer["timings"]["search_ms"] is None
    (citation,) = answer["citations"]
    assert (citation["index"], citation["basis"], citation["source"], citation["score"]) == (
        2,
        "quote",
        None,
        None,
    )
    live.engine.deltas = ("nobody",)
    answer = ask(client, documents=documents)
    assert answer["citations"] == [], "what supports nothing is no citation"
    assert [sentence["supported"] for sentence in answer["sentences"]] == [False]


@pytest.mark.parametrize("strategy", ["full", "prefix", None])
def test_options_that_an_exact_strategy_does_not_have_are_refused(
    client: httpx.Client, live: Live, docs: str, strategy: str | None
) -> None:
    body = {"query": QUESTION, "namespace": docs, "strategy": strategy, "strategy_options": {"share": 0.1}}
    response = client.post("/rag/query", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "strategy_options"
    assert not live.engine.requests
    assert ask(client, strategy=strategy, strategy_options={"force": True})["context"]["strategy"]


def test_no_context_at_all(client: httpx.Client) -> None:
    answer = ask(client, documents=[])
    assert answer["citations"] == []
    assert answer["context"]["tokens_kept"] == 0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_tokens_add_up(client: httpx.Client, live: Live, docs: str, share: float) -> None:
    ask(client)
    prompt = len(live.engine.requests[-1].input_ids)
    live.engine.cached = int(prompt * share)
    answer = ask(client)
    context = answer["context"]
    assert answer["usage"]["cached"] == live.engine.cached
    assert context["tokens_recomputed"] + context["tokens_by_tier"]["device"] == context["tokens_kept"] > 0
    assert (context["tokens_by_tier"]["device"] == 0) == (share == 0)
    assert sum(context["tokens_by_tier"].values()) == context["tokens_kept"], (
        "what was in no tier is computed"
    )
    assert (context["tokens_by_tier"]["computed"] == 0) == (share == 1)
    assert (context["tokens_recomputed"] == 0) == (share == 1)


def test_the_stream_has_the_documented_order_and_the_same_answer(
    client: httpx.Client, live: Live, docs: str
) -> None:
    live.engine.deltas = (" Alan", " [", "1", "] or [", "9", "9] Robert [7", "] Steven", "son. ")
    whole = ask(client, k=2)
    response = client.post("/rag/query", json={"query": QUESTION, "namespace": docs, "k": 2, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    events = sse(response.text)
    names = [name for name, _ in events]
    messages = [data["text"] for name, data in events if name == "message"]
    assert names == ["search_results", *["message"] * len(messages), "citation", "final_answer", "done"]
    assert len(messages) > 2
    final = events[-2][1]
    assert "".join(messages) == final["answer"] == whole["answer"] == "Alan [1] or Robert Stevenson."
    assert all(
        final[name] == whole[name]
        for name in ("citations", "usage", "context", "index_version", "finish_reason")
    )
    assert set(final) == set(whole)
    assert events[-3][1] == final["citations"][0]
    assert [passage["source"] for passage in events[0][1]["results"]] == ["skerryvore", "bell"]
    assert {data["request_id"] for name, data in events if "request_id" in data} == {
        response.headers["x-request-id"]
    }


def test_the_error_event_has_the_body_of_the_http_error(client: httpx.Client, live: Live, docs: str) -> None:
    live.engine.error = EngineError("The engine failed: on fire.", hint="Put it out.")
    headers = {"X-Request-Id": "the-same"}
    body = {"query": QUESTION, "namespace": docs}
    plain = client.post("/rag/query", json=body, headers=headers)
    assert plain.status_code == 502
    live.engine.error_after = 2
    events = sse(client.post("/rag/query", json={**body, "stream": True}, headers=headers).text)
    assert [name for name, _ in events] == ["search_results", "message", "message", "error"]
    assert events[-1][1] == plain.json()
    assert plain.json()["error"]["message"] == "The engine failed: on fire. Put it out."


def test_an_engine_that_breaks_off_is_an_error(client: httpx.Client, live: Live, docs: str) -> None:
    live.engine.finish_reason = "abort"
    response = client.post("/rag/query", json={"query": QUESTION, "namespace": docs})
    assert (response.status_code, response.json()["error"]["code"]) == (502, "aborted")


def test_a_full_engine_says_when_to_retry(client: httpx.Client, live: Live, docs: str) -> None:
    live.engine.error = TooManyRequests("The engine's queue is full.")
    response = client.post("/rag/query", json={"query": QUESTION, "namespace": docs})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_foresaw_is_logged_and_not_told(
    client: httpx.Client, live: Live, docs: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    live.embedder.error = RuntimeError("secret detail")
    with caplog.at_level(logging.ERROR, logger="ragserve"):
        response = client.post(
            "/rag/query",
            json={"query": QUESTION, "namespace": docs, "stream": stream},
            headers={"X-Request-Id": "look-for-me"},
        )
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert response.json()["error"]["request_id"] == "look-for-me"
    assert "secret" not in response.text
    (record,) = [record for record in caplog.records if "look-for-me" in record.getMessage()]
    assert record.exc_info is not None
    assert "secret detail" in str(record.exc_info[1])


def test_the_retriever_s_scores_are_read_and_sent_for_the_strategy_that_uses_them(
    client: httpx.Client, live: Live, docs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(
        type(live.services.store),
        "sentence_vectors",
        lambda self, namespace, ids: read.append(namespace) or {},
    )
    ask(client, k=2, strategy="samkv", strategy_options={"force": True})
    assert read == [docs]
    ask(client, k=2, strategy="epic", strategy_options={"force": True})
    ask(client, k=2, strategy="prefix")
    ask(client, k=2, strategy="auto")
    assert read == [docs]
    ask(
        client,
        strategy="samkv",
        strategy_options={"force": True},
        documents=[{"text": "The lighthouse was built by Alan Stevenson."}],
    )
    retrieved, *others = (request.scores for request in live.engine.requests[-5:])
    assert others == [None] * 4, "of the last one the documents were given"
    assert retrieved is not None
    assert len(retrieved.documents) == len(live.engine.requests[-5].spans) - 1 == 2
    first, second = retrieved.documents
    assert first is not None
    assert second is not None
    assert 1.001 >= first >= second >= -1
