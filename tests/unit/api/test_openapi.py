"""The OpenAPI document: complete, and its examples are true."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from ragserve.api.app import create_app
from ragserve.config import Settings
from tests.unit.api.scripted_server import Live, ScriptedEngine, upstream_app

REPO_MODEL = Path(__file__).resolve().parents[3] / "examples" / "models" / "ragserve-tiny"
SCHEMA: dict[str, Any] = create_app(
    Settings(), ScriptedEngine(REPO_MODEL), upstream=upstream_app([]), serve_metrics=True
).openapi()
OPERATIONS = [
    (f"{method} {path}", operation)
    for path, item in SCHEMA["paths"].items()
    for method, operation in item.items()
]
ROUTES = {
    "post /rag/query",
    "post /rag/retrieve",
    "post /rag/ingest",
    "post /rag/ingest/preview",
    "get /rag/jobs",
    "get /rag/jobs/{job_id}",
    "delete /rag/jobs/{job_id}",
    "get /rag/documents",
    "get /rag/documents/{doc_id}",
    "get /rag/documents/{doc_id}/chunks",
    "put /rag/documents/{doc_id}/labels",
    "get /rag/documents/{doc_id}/chunks/{ordinal}",
    "patch /rag/documents/{doc_id}/chunks/{ordinal}",
    "get /rag/documents/{doc_id}/lost-corrections",
    "delete /rag/documents/{doc_id}/lost-corrections",
    "delete /rag/documents/{doc_id}",
    "get /rag/namespaces",
    "get /rag/namespaces/{name}",
    "delete /rag/namespaces/{name}",
    "get /rag/namespaces/{name}/settings",
    "put /rag/namespaces/{name}/settings",
    "post /rag/feedback",
    "get /rag/feedback",
    "get /rag/unanswered",
    "get /rag/sessions",
    "delete /rag/sessions/{session_id}",
    "post /v1/chat/completions",
    "post /v1/embeddings",
    "post /v1/rerank",
    "post /rerank",
    "get /v1/models",
    "get /v1/models/{model_id}",
    "get /rag/cache",
    "delete /rag/cache",
    "post /rag/cache/verify",
    "post /rag/cache/evict",
    "post /rag/cache/warm",
    "get /info",
    "get /ready",
    "get /metrics",
}


def validate(value: Any, schema: dict[str, Any]) -> None:
    # references point into the document: validate within it
    Draft202012Validator({**schema, "components": SCHEMA["components"]}).validate(value)


def examples(content: dict[str, Any]) -> Iterator[Any]:
    if "example" in content:
        yield content["example"]
    for example in content.get("examples", {}).values():
        assert example["summary"]
        yield example["value"]


def test_every_route_is_there() -> None:
    assert {name for name, _ in OPERATIONS} == ROUTES


@pytest.mark.parametrize(("name", "operation"), OPERATIONS, ids=[name for name, _ in OPERATIONS])
def test_a_route_is_described(name: str, operation: dict[str, Any]) -> None:
    assert operation["summary"]
    assert operation["description"]
    assert operation["tags"]
    statuses = set(operation["responses"])
    assert {"401", "403", "500"} <= statuses
    assert "422" not in statuses
    if "requestBody" in operation:
        assert {"400", "408", "413"} <= statuses
    for parameter in operation.get("parameters", []):
        assert parameter.get("description") or parameter["name"] == "limit", parameter["name"]
    for status, response in operation["responses"].items():
        assert response["description"], status
        assert any(list(examples(content)) for content in response["content"].values()), status
        if status >= "400":
            bodies = response["content"]["application/json"]["schema"]
            assert bodies.get("anyOf", [bodies])[0] == {"$ref": "#/components/schemas/ErrorBody"}


@pytest.mark.parametrize(("name", "operation"), OPERATIONS, ids=[name for name, _ in OPERATIONS])
def test_the_examples_fit_their_schemas(name: str, operation: dict[str, Any]) -> None:
    for response in operation["responses"].values():
        if (content := response["content"].get("application/json")) is not None:
            assert content["schema"]
            for example in examples(content):
                validate(example, content["schema"])
    for content in operation.get("requestBody", {}).get("content", {}).values():
        found = list(examples(content))
        assert found
        for example in found:
            validate(example, content["schema"])


@pytest.mark.parametrize("path", ["/rag/query", "/v1/chat/completions"])
def test_the_example_streams_fit_their_events(path: str) -> None:
    content = SCHEMA["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    seen = set()
    for block in content["example"].strip().split("\n\n"):
        event = dict(line.split(": ", 1) for line in block.split("\n"))
        validate(event, content["itemSchema"])
        if event["data"] == "[DONE]":
            assert path == "/v1/chat/completions"
            continue
        seen.add(event.get("event"))
        (fits,) = [
            one
            for one in content["itemSchema"]["oneOf"]
            if one["properties"].get("event", {}).get("const") == event.get("event")
            and "contentSchema" in one["properties"]["data"]
        ]
        validate(json.loads(event["data"]), fits["properties"]["data"]["contentSchema"])
    wanted = (
        {"search_results", "message", "citation", "final_answer", "done"} if path == "/rag/query" else {None}
    )
    assert seen == wanted


def test_options_are_described() -> None:
    schemas = SCHEMA["components"]["schemas"]
    for body in ("QueryRequest", "ChatRequest"):
        models = schemas[body]["properties"]["strategy_options"]["anyOf"]
        names = [model["$ref"].rpartition("/")[2] for model in models]
        assert names == [
            f"{name}Options" for name in ("CacheBlend", "Concat", "Epic", "Random", "SamKv", "Passages")
        ]
        for name in names:
            assert schemas[name]["additionalProperties"] is False
            assert all(option["description"] for option in schemas[name]["properties"].values())
            assert ("force" in schemas[name]["properties"]) is (name != "PassagesOptions")
    for name in ("DecodeOptions", "PrefillOptions"):
        given = schemas[name]["properties"]
        assert all(option["description"] and "default" not in option for option in given.values())
    options = {"type": "object", "properties": schemas["QueryRequest"]["properties"]}
    validate({"strategy_options": {"keep": 0.2, "experimental": {"lexical_weight": 1}}}, options)
    for wrong in ({"strategy_options": {"keeps": 0.2}}, {"decode": {"mode": "fast"}}):
        with pytest.raises(ValidationError):
            validate(wrong, options)


@pytest.mark.parametrize(("name", "operation"), OPERATIONS, ids=[name for name, _ in OPERATIONS])
def test_a_route_with_bounded_parameters_may_answer_400(name: str, operation: dict[str, Any]) -> None:
    bounds = {"maxLength", "minLength", "maximum", "minimum", "enum", "pattern", "format"}
    schemas = [parameter["schema"] for parameter in operation.get("parameters", [])]
    bounded = any(bounds & each.keys() for one in schemas for each in (one, *one.get("anyOf", ())))
    assert "400" in operation["responses"] or not bounded


def test_references_lead_somewhere() -> None:
    text = json.dumps(SCHEMA)
    names = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert names <= set(SCHEMA["components"]["schemas"])


def test_the_key_is_declared() -> None:
    assert SCHEMA["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert SCHEMA["security"] == [{"key": []}]


def test_real_answers_fit_the_document(live: Live, docs: str) -> None:
    with live.client() as client:
        body = {"query": "Who built the lighthouse?", "namespace": docs}
        chat = {"model": "ragserve/docs", "messages": [{"role": "user", "content": "Who built it?"}]}
        document = client.get("/rag/documents", params={"namespace": docs}).json()["documents"][0]["doc_id"]
        calls = [
            ("post", "/rag/query", "/rag/query", body),
            ("post", "/rag/retrieve", "/rag/retrieve", body),
            ("post", "/v1/chat/completions", "/v1/chat/completions", chat),
            ("get", "/rag/jobs", "/rag/jobs", None),
            ("get", "/rag/documents", "/rag/documents?namespace=docs", None),
            ("get", "/rag/documents/{doc_id}", f"/rag/documents/{document}?namespace=docs", None),
            (
                "get",
                "/rag/documents/{doc_id}/chunks",
                f"/rag/documents/{document}/chunks?namespace=docs",
                None,
            ),
            ("get", "/rag/namespaces", "/rag/namespaces", None),
            ("get", "/rag/namespaces/{name}", "/rag/namespaces/docs", None),
            ("get", "/v1/models", "/v1/models", None),
            ("get", "/v1/models/{model_id}", "/v1/models/ragserve/docs", None),
            ("get", "/info", "/info", None),
            ("get", "/ready", "/ready", None),
        ]
        for method, template, path, sent in calls:
            response = client.request(method.upper(), path, json=sent)
            assert response.status_code == 200, (path, response.text)
            validate(
                response.json(),
                SCHEMA["paths"][template][method]["responses"]["200"]["content"]["application/json"][
                    "schema"
                ],
            )
        served = client.get("/openapi.json").json()
        assert served["paths"].keys() == SCHEMA["paths"].keys()
        assert client.get("/docs").status_code == 200


def test_answers_to_requests_that_go_to_sglang_are_described() -> None:
    """They are its `ChatCompletionResponse` and its `ErrorResponse`."""
    message = {"role": "assistant", "content": "4308", "reasoning_content": None, "tool_calls": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "total_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": None}
    answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]}
    error = {"object": "error", "message": "no", "type": "BadRequestError", "param": None, "code": 400}
    for path, passes in (("/v1/chat/completions", True), ("/rag/query", False)):
        described = SCHEMA["paths"][path]["post"]["responses"]
        for status, theirs in (("200", answer | {"usage": usage}), ("400", error)):
            schema = described[status]["content"]["application/json"]["schema"]
            if passes:
                validate(theirs, schema)
            else:
                with pytest.raises(ValidationError):
                    validate(theirs, schema)
