"""The REST API on the real engine: ingest, ask, stream, chat, and SGLang's own routes on the same address."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ragserve.answering.prompt import PromptBuilder, PromptDocument
from tests.integration.prompts import rows

ROWS = rows("onehop")[:2]
NAMESPACE = "rest-api"


@pytest.fixture(scope="module")
def namespace(server: Any) -> str:
    """The documents of two questions, ingested over HTTP."""
    texts = [
        {"name": f"{i}/{title}", "title": title, "text": text}
        for i, row in enumerate(ROWS)
        for title, text in row["docs"]
    ]
    response = server.client.post("/rag/ingest", json={"namespace": NAMESPACE, "texts": texts})
    job = server.finished(response)
    assert job["counts"]["indexed"] == len(texts), job
    return NAMESPACE


def events(text: str) -> list[tuple[str, Any]]:
    blocks = [
        dict(line.split(": ", 1) for line in block.split("\n"))
        for block in text.strip().split("\n\n")
        if not block.startswith(":")
    ]
    return [(block["event"], json.loads(block["data"])) for block in blocks]


def test_json_and_stream_give_the_same_answer(server: Any, namespace: str) -> None:
    for row in ROWS:
        body = {"query": row["question"], "namespace": namespace, "k": 4, "max_new_tokens": 24}
        whole = server.client.post("/rag/query", json=body).json()
        assert whole["answer"]
        assert {each["index"] for each in whole["citations"]} == {
            index for sentence in whole["sentences"] for index in sentence["passages"]
        }
        assert whole["usage"]["prompt"] > whole["context"]["tokens_kept"] > 100
        assert whole["timings"]["embed_ms"] > 0
        assert whole["timings"]["prefill_ms"] > 0
        streamed = events(server.client.post("/rag/query", json={**body, "stream": True}).text)
        names = [name for name, _ in streamed]
        assert names[0] == "search_results"
        assert names[-2:] == ["final_answer", "done"]
        final = streamed[-2][1]
        assert (
            "".join(data["text"] for name, data in streamed if name == "message")
            == final["answer"]
            == whole["answer"]
        )
        assert (
            final["citations"]
            == whole["citations"]
            == [data for name, data in streamed if name == "citation"]
        )
        assert final["usage"]["cached"] > 0
        context = final["context"]
        assert context["tokens_recomputed"] + context["tokens_by_tier"]["device"] == context["tokens_kept"]


def test_the_best_passages_alone_are_read_and_composed(server: Any, namespace: str) -> None:
    """Exact and from stored KV the same passages are read, and the composed answer with a whole recomputation
    of them is the exact one."""
    body = {"query": ROWS[0]["question"], "namespace": namespace, "k": 8, "max_new_tokens": 24}
    keep = {"keep": 0.4}
    exact = server.client.post("/rag/query", json={**body, "strategy": "passages", "strategy_options": keep})
    everything = server.client.post("/rag/query", json={**body, "strategy": "full"}).json()
    assert exact.status_code == 200, exact.text
    read = exact.json()["usage"]["prompt"]
    assert read < 0.7 * everything["usage"]["prompt"]
    for own, recomputed in (({}, 0.0), ({"recompute": "question", "share": 1.0}, 1.0)):
        options = {"passages": keep, "force": True, **own}
        asked = {**body, "strategy": "concat", "strategy_options": options}
        answer = server.client.post("/rag/query", json=asked).json()
        assert answer["usage"]["prompt"] == read
        context = answer["context"]
        assert context["strategy"] == "concat"
        assert context["tokens_recomputed"] == pytest.approx(recomputed * context["tokens_kept"], rel=0.3)
    assert answer["answer"] == exact.json()["answer"]


def test_a_question_over_two_namespaces_is_composed_of_each_ones_own_documents(
    quick_server: Any,
) -> None:
    """Their KV is found as each namespace's own questions have left it, the answer is full's, and a document
    that is removed from one goes from what both share."""
    server = quick_server
    names = ["rest-part-a", "rest-part-b"]
    parts = (ROWS[0]["docs"][::2], ROWS[0]["docs"][1::2])
    for name, docs in zip(names, parts, strict=True):
        texts = [{"name": title, "title": title, "text": text} for title, text in docs]
        server.finished(server.client.post("/rag/ingest", json={"namespace": name, "texts": texts}))
    body = {"query": ROWS[0]["question"], "k": 64, "max_new_tokens": 16}
    forced = {"strategy": "concat", "strategy_options": {"force": True}}

    def ask(**more: Any) -> Any:
        reply = server.client.post("/rag/query", json=body | more)
        assert reply.status_code == 200, reply.text
        return reply.json()

    for name in names:
        ask(namespace=name, **forced)
    joint = {"namespaces": names}
    composed = ask(**joint, **forced)["context"]
    assert composed["strategy"] == "concat"
    assert composed["documents_kept"] == sum(map(len, parts))
    assert not composed["tokens_by_tier"].get("computed"), composed
    full = ask(**joint, strategy="full")
    whole = {"force": True, "recompute": "all"}
    assert ask(**joint, strategy="concat", strategy_options=whole)["answer"] == full["answer"]
    assert ask(**joint, strategy="prefix")["answer"] == full["answer"]
    assert ask(**joint, strategy="prefix")["usage"]["cached"] > composed["tokens_kept"]
    # a composed session, whose second turn adds the documents of the other namespace
    other = {"op": "in", "field": "source", "values": [title for title, _ in parts[1]]}
    begun = ask(**joint, **forced, session="new", filter=other)
    again = ask(**joint, session=begun["session"]["id"])
    assert (again["session"]["turn"], again["session"]["documents_added"]) == (2, len(parts[0]))
    assert again["context"]["strategy"] == "concat", again["context"]
    assert not again["context"]["tokens_by_tier"].get("computed"), again["context"]
    found = server.client.post("/rag/retrieve", json={"query": body["query"], "k": 1, **joint}).json()
    (gone,) = found["results"]
    place = f"/rag/documents/{gone['doc_id']}"
    assert server.client.delete(place, params={"namespace": gone["namespace"]}).is_success
    left = ask(**joint, strategy="prefix")
    assert left["usage"]["cached"] == 0
    assert left["context"]["documents_kept"] == sum(map(len, parts)) - 1
    ended = server.client.post("/rag/query", json=body | joint | {"session": begun["session"]["id"]})
    assert ended.json()["error"]["code"] == "session_outdated"


def test_full_answers_as_plain_sglang_does_token_for_token(server: Any, namespace: str) -> None:
    """The prompt rebuilt from /rag/retrieve, sent to SGLang's own route."""
    info = server.client.get("/info").json()
    prompts = PromptBuilder.load(info["tokenizer"], info["system_prompt"])
    row = ROWS[0]
    body = {"query": row["question"], "namespace": namespace, "k": 3}
    found = server.client.post("/rag/retrieve", json=body).json()["results"]
    documents = [PromptDocument("", passage["title"], passage["text"]) for passage in found]
    prompt = prompts.build(row["question"], documents, max_prompt_tokens=4096)
    ours = server.client.post("/rag/query", json={**body, "strategy": "full", "max_new_tokens": 24}).json()
    sampling = {"temperature": 0, "max_new_tokens": 24}
    theirs = server.client.post(
        "/generate", json={"input_ids": prompt.input_ids, "sampling_params": sampling}
    ).json()
    assert ours["answer"] == theirs["text"].strip()
    assert ours["usage"]["prompt"] == len(prompt.input_ids)
    assert ours["usage"]["completion"] == theirs["meta_info"]["completion_tokens"]
    assert ours["usage"]["cached"] == ours["context"]["tokens_by_tier"]["device"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client(server: Any, namespace: str, stream: bool) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        names = {model.id: model.owned_by for model in client.models.list()}
        assert names[f"ragserve/{namespace}"] == "ragserve"
        (theirs,) = [name for name, owner in names.items() if owner == "sglang"]
        messages: list[Any] = [{"role": "user", "content": ROWS[0]["question"]}]
        asked: dict[str, Any] = {
            "model": f"ragserve/{namespace}",
            "messages": messages,
            "max_tokens": 24,
            "extra_body": {"k": 4},
        }
        plain = client.chat.completions.create(
            model=theirs, messages=messages, max_tokens=4
        )  # no documents: SGLang's own route
        assert not hasattr(plain, "citations")
        answer: Any = client.chat.completions.create(**asked)
        content = answer.choices[0].message.content
        if stream:
            chunks: list[Any] = list(
                client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            )
            assert (
                "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == content
            )
            assert chunks[-1].usage.completion_tokens > 0
            answer = chunks[-2]
        supported = {index for each in answer.ragserve["sentences"] for index in each["passages"]}
        assert {each["index"] for each in answer.citations} == supported
        messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": "And who said so in the documents above?"},
        ]
        assert client.chat.completions.create(**asked).usage.prompt_tokens > len(content)


def test_sglangs_routes_are_there(server: Any) -> None:
    client = server.client
    assert client.get("/health").status_code == 200
    assert client.get("/model_info").json()["model_path"]
    completed = client.post(
        "/v1/completions", json={"model": "default", "prompt": "The", "max_tokens": 2}
    ).json()
    assert completed["usage"]["completion_tokens"] >= 1
    metrics = client.get("/metrics").text
    assert "sglang:" in metrics
    assert "ragserve_queries_in_flight" in metrics
    assert "/rag/query" in client.get("/openapi.json").json()["paths"]


def test_refusals_reach_the_client_on_the_real_server(server: Any, namespace: str) -> None:
    body = {"query": "What?", "namespace": namespace}
    cases = [
        ({**body, "namespace": "nowhere"}, 404, "namespace_not_found"),
        ({**body, "k": 0}, 400, "invalid_request"),
        ({**body, "query": "why " * 2**18}, 400, "query_too_long"),
        ({**body, "query": "7 " * 8000}, 400, "prompt_too_long"),
        ({**body, "query": "x" * 5 * 2**20}, 413, "too_large"),
    ]
    for sent, status, code in cases:
        response = server.client.post("/rag/query", json=sent)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    raw = server.client.post(
        "/rag/query", content=b'{"query": "caf\xe9"}', headers={"Content-Type": "application/json"}
    )
    assert (raw.status_code, raw.json()["error"]["code"]) == (400, "invalid_encoding")
    assert server.client.post("/rag/query", json={**body, "k": 64}).status_code == 200
