"""Mistakes and malice of clients: each gets an error that says what is wrong and what to do."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx
import pytest

from tests.unit.api.scripted_server import Live

GOOD = {"query": "Who built the lighthouse?", "namespace": "docs"}
EQ = {"op": "eq", "field": "lang", "value": "en"}


def nested(depth: int) -> dict[str, Any]:
    node: dict[str, Any] = EQ
    for _ in range(depth):
        node = {"op": "not", "filter": node}
    return node


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "code", "param", "hint", "request_id"}
    assert body["error"]["request_id"] == response.headers["x-request-id"]
    assert body["error"]["hint"]
    assert "Traceback" not in response.text
    return dict(body["error"])


@pytest.mark.parametrize("path", ["/rag/query", "/rag/retrieve"])
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": " \n\t"}, "query"),
        ({"query": "a\0b"}, "query"),
        ({"query": None}, "query"),
        ({"query": 7}, "query"),
        ({"query": ["a"]}, "query"),
        ({"k": 0}, "k"),
        ({"k": -1}, "k"),
        ({"k": 65}, "k"),
        ({"k": "many"}, "k"),
        ({"k": 10**30}, "k"),
        ({"namespace": ""}, "namespace"),
        ({"namespace": "../etc"}, "namespace"),
        ({"namespace": "a\0b"}, "namespace"),
        ({"namespace": "x" * 65}, "namespace"),
        ({"top_k": 3}, "top_k"),
        ({"filter": "lang=en"}, "filter"),
        ({"filter": []}, "filter"),
        ({"filter": {}}, "filter"),
        ({"filter": {"op": "like", "field": "a", "value": "b"}}, "filter"),
        ({"filter": {"op": "eq", "field": "a"}}, "filter.eq.value"),
        ({"filter": {"op": "eq", "field": "", "value": 1}}, "filter.eq.field"),
        ({"filter": {"op": "eq", "field": "a\"'; DROP TABLE documents; --", "value": 1}}, "filter.eq.field"),
        ({"filter": {"op": "eq", "field": "a", "value": {"b": 1}}}, "filter.eq.value"),
        ({"filter": {"op": "in", "field": "a", "values": []}}, "filter.in.values"),
        ({"filter": {"op": "in", "field": "a", "values": list(range(1001))}}, "filter.in.values"),
        ({"filter": {"op": "range", "field": "a"}}, "filter.range"),
        ({"filter": {"op": "range", "field": "a", "gt": 1, "lt": "b"}}, "filter.range"),
        ({"filter": {"op": "and", "filters": []}}, "filter.and.filters"),
        ({"filter": {"op": "or", "filters": [EQ] * 65}}, "filter.or.filters"),
        ({"filter": nested(8)}, "filter"),
        ({"filter": {**EQ, "extra": 1}}, "filter.eq.extra"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_bad_field_is_named(
    client: httpx.Client, live: Live, docs: str, path: str, change: dict[str, Any], param: str
) -> None:
    response = client.post(path, json={**GOOD, **change})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "invalid_request"
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param)
    assert live.engine.requests == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"strategy": "magic"}, "strategy"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2048}, "max_new_tokens"),  # the engine's whole context
        ({"max_new_tokens": 40_000}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"system": "s" * 8193}, "system"),
        ({"history": [{"role": "system", "content": "x"}]}, "history[0].role"),
        ({"history": [{"role": "user"}]}, "history[0].content"),
        ({"history": [{"role": "user", "content": "x"}] * 65}, "history"),
        ({"documents": [{"text": " "}]}, "documents[0].text"),
        ({"documents": [{"text": "x"}] * 257}, "documents"),
        ({"documents": [{"text": "x", "body": "y"}]}, "documents[0].body"),
        ({"stream": "perhaps"}, "stream"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_bad_option_is_named(client: httpx.Client, docs: str, change: dict[str, Any], param: str) -> None:
    response = client.post("/rag/query", json={**GOOD, **change})
    assert response.status_code == 400
    assert error_of(response)["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_namespace(client: httpx.Client, stream: bool) -> None:
    response = client.post("/rag/query", json={**GOOD, "namespace": "nowhere", "stream": stream})
    assert response.status_code == 404
    assert error_of(response)["code"] == "namespace_not_found"
    assert client.post("/rag/retrieve", json={**GOOD, "namespace": "nowhere"}).status_code == 404


@pytest.mark.parametrize("path", ["/rag/query", "/rag/retrieve"])
def test_a_query_of_a_megabyte(client: httpx.Client, live: Live, docs: str, path: str) -> None:
    response = client.post(path, json={**GOOD, "query": "why " * 2**18})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("query_too_long", "query")
    assert "1,048,576" in error["message"]
    assert live.embedder.calls == []


def test_a_question_longer_than_the_context(client: httpx.Client, docs: str) -> None:
    response = client.post("/rag/query", json={**GOOD, "query": "7 " * 4000})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("prompt_too_long", "query")


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"query": "caf\xe9", "namespace": "docs"}', "invalid_encoding"),
        (b"\xff\xfe{\x00}\x00", "invalid_encoding"),
        (b'{"query": "\\ud800", "namespace": "docs"}', "invalid_json"),
        (b'{"query": "a"', "invalid_json"),
        (b"{'query': 'a'}", "invalid_json"),
        (b"", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a":' * 100_000, "invalid_json"),
        (b'{"query": "a", "temperature": NaN}', "invalid_json"),
        (b'{"query": "a", "k": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[]", "invalid_request"),
        (b'"a"', "invalid_request"),
        (b"null", "invalid_request"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else value,
)
@pytest.mark.parametrize("path", ["/rag/query", "/rag/retrieve", "/rag/ingest"])
def test_a_body_that_is_no_json_object(client: httpx.Client, path: str, raw: bytes, code: str) -> None:
    response = client.post(path, content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["code"] == code


def test_where_the_encoding_breaks_is_said(client: httpx.Client) -> None:
    response = client.post(
        "/rag/query", content=b'{"query": "caf\xe9"}', headers={"Content-Type": "application/json"}
    )
    assert "byte 0xe9 at position 14" in error_of(response)["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_another_content_type(client: httpx.Client, kind: str | None) -> None:
    response = client.post(
        "/rag/query", content=json.dumps(GOOD), headers={"Content-Type": kind} if kind else {}
    )
    assert response.status_code == 415
    assert "application/json" in error_of(response)["hint"]


def test_an_upload_without_room_names_the_disk_of_temporary_files(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tempfile.SpooledTemporaryFile, "rollover", full)
        response = client.post("/rag/ingest", files={"files": ("a.txt", b"x" * 2**23)})
    assert (response.status_code, error_of(response)["code"]) == (507, "storage_full")
    assert "TMPDIR" in error_of(response)["hint"]
    assert client.get("/ready").status_code == 200


@pytest.mark.parametrize("announced", [True, False], ids=["content-length", "chunked"])
def test_a_body_over_its_limit(client: httpx.Client, live: Live, announced: bool) -> None:
    size = live.settings.max_body_bytes + 2**20

    def pieces() -> Iterator[bytes]:
        for _ in range(size // 2**16):
            yield b"x" * 2**16

    response = client.post(
        "/rag/query",
        content=b"x" * size if announced else pieces(),
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == 413
    assert error_of(response)["code"] == "too_large"
    assert client.get("/ready").status_code == 200


def test_the_wrong_method(client: httpx.Client) -> None:
    response = client.get("/rag/query")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert error_of(response)["code"] == "method_not_allowed"


def test_many_errors_are_told_together_and_not_echoed(client: httpx.Client) -> None:
    response = client.post("/rag/query", json={"query": "", "k": 0, "nonsense": "secret-value"})
    message = error_of(response)["message"]
    assert all(name in message for name in ("query: ", "k: ", "nonsense: is not a known field"))
    assert "secret-value" not in response.text


@pytest.mark.parametrize(
    "path",
    [
        "/rag/documents?namespace=%ff",
        "/rag/documents?namespace=docs&limit=0",
        "/rag/documents?namespace=docs&page=2",
        "/rag/documents?namespace=docs&filter=lang",
        "/rag/documents?namespace=docs&filter=%7B%7D",
        "/rag/documents?namespace=docs&after=%00",
        "/rag/namespaces/..%00",
        "/rag/documents/a%00?namespace=docs",
        "/rag/documents/a%00/chunks?namespace=docs",
        "/rag/jobs/a%00",
        "/rag/jobs?state=lost",
        "/rag/jobs?limit=1001",
    ],
)
def test_bad_parameters(client: httpx.Client, docs: str, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 400
    assert error_of(response)["param"]


@pytest.mark.parametrize(
    "path", ["/rag/documents/a%00?namespace=docs", "/rag/jobs/a%00", "/rag/sessions/a%00"]
)
def test_names_that_no_registry_takes_are_not_looked_for(client: httpx.Client, docs: str, path: str) -> None:
    """Postgres refuses a NUL, which was an answer of 503."""
    response = client.delete(path)
    assert response.status_code == 400
    assert "NUL" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rag/query", GOOD | {f"k{i}": 1 for i in range(200_000)}),
        ("/rag/retrieve", GOOD | {"history": [{f"k{i}": 1 for i in range(100)}] * 1_000}),
        (
            "/v1/chat/completions",
            {"model": "ragserve/docs", "messages": [{f"k{i}": 1 for i in range(100)}] * 1_000},
        ),
        ("/rag/ingest", {"texts": [{"name": "a", "text": "b"}], "x": {f"k{i}": 1 for i in range(200_000)}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_body_of_many_names_is_not_validated_name_by_name(
    client: httpx.Client, docs: str, path: str, body: dict[str, Any]
) -> None:
    """Each unknown name is an error of its own, made in the event loop: 200,000 took two seconds."""
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert "names" in error_of(response)["message"]


@pytest.mark.parametrize(
    "change", [{"documents": [{"text": "1 " * 1_000_000}]}, {"documents": [{"text": "a. " * 5_000}] * 100}]
)
@pytest.mark.parametrize("overflow", ["refuse", "drop", "cut"])
def test_documents_far_over_the_context_are_not_tokenised(
    client: httpx.Client, live: Live, change: dict[str, Any], overflow: str
) -> None:
    builder = live.services.answerer._prompts
    with mock.patch.object(builder._layout, "_plain", wraps=builder._layout._plain) as plain:
        response = client.post("/rag/query", json=GOOD | change | {"documents_overflow": overflow})
    read = sum(len(call.args[0]) for call in plain.call_args_list)
    assert read < 2 * 2**18 + 10_000
    assert (response.status_code == 200) == (overflow == "cut")


def test_a_history_far_over_the_context_is_not_tokenised(client: httpx.Client, live: Live, docs: str) -> None:
    builder = live.services.answerer._prompts
    history = [{"role": "user", "content": "1 " * 30_000}, {"role": "assistant", "content": "x"}] * 30
    with mock.patch.object(builder._layout, "_plain", wraps=builder._layout._plain) as plain:
        response = client.post("/rag/query", json=GOOD | {"history": history, "follow_ups": "alone"})
    assert error_of(response)["code"] == "prompt_too_long"
    assert sum(len(call.args[0]) for call in plain.call_args_list) < 2**18


def test_the_best_are_not_chosen_among_more_than_a_few_contexts(client: httpx.Client, docs: str) -> None:
    body = GOOD | {"documents": [{"text": "a. " * 1_000_000}], "strategy": "passages"}
    assert error_of(client.post("/rag/query", json=body))["code"] == "documents_too_long"


def test_options_in_the_name_of_a_strategy_are_refused_with_their_place(
    client: httpx.Client, docs: str
) -> None:
    body = {"query": "Who?", "namespace": docs, "strategy": "samkv:keep=0.25"}
    chat = {"model": f"ragserve/{docs}", "messages": [{"role": "user", "content": "Who?"}]}
    for reply in (
        client.post("/rag/query", json=body),
        client.post("/v1/chat/completions", json=chat | {"strategy": "samkv:keep=0.25"}),
    ):
        assert reply.status_code == 400
        assert "strategy_options" in reply.json()["error"]["message"]
