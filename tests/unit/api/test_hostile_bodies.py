"""What one request to SGLang's routes may cost, whoever sends it: bodies that SGLang would run, render,
compile or keep without a limit do not reach it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ragserve.api.app import create_app
from ragserve.api.engine_bodies import FIELDS, REFUSED, template_parameters
from ragserve.api.upstream import SERVED
from ragserve.config import Settings
from ragserve.engine.compat import prepare
from ragserve.tenants.key_file import KeyFile
from sglang_ext.wire.measuring import check_measuring
from sglang_ext.wire.protocol import DISTRIBUTION_FIELD, longest_text
from tests.unit.api.scripted_server import Live, ScriptedEngine, asgi_client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/parse_function_call",
            {"text": "[f(" + "a=," * 40, "tools": [], "tool_call_parser": "pythonic"},
        ),
        ("/separate_reasoning", {"text": "<think>" * 40, "reasoning_parser": "qwen3"}),
    ],
)
def test_what_the_client_has_already_is_not_parsed(
    client: httpx.Client, live: Live, path: str, body: dict[str, object]
) -> None:
    """Regular expressions of SGLang's parsers are exponential, and they run in the event loop."""
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "route_not_found")
    assert path != "/parse_function_call" or path in response.json()["error"]["hint"]
    assert live.seen_upstream == []


TEMPLATED = ("/v1/chat/completions", "/invocations", "/tokenize", "/v1/tokenize")
MESSAGES = [{"role": "user", "content": "Who?"}]


@pytest.mark.parametrize("path", TEMPLATED)
@pytest.mark.parametrize(
    "arguments",
    [
        {"chat_template": "{{ 'a' * 10**11 }}"},
        {"tokenize": True},
        {"tools": []},
        {"documents": [{"text": "x"}]},
        {"tokenizer_kwargs": {"padding": "max_length"}},
        {"return_dict": True},
        {"messages": []},
        {"conversation": []},
        {"kwargs": 1},
        {"steps": [1] * 10},
        {"steps": {"a": 1}},
        {"steps": "x" * 257},
        {"steps": 10**12},
        {"steps": -1e300},
        {"a b": 1},
        {"": 1},
        {f"name{i}": 1 for i in range(33)},
        [],
        "x",
    ],
    ids=str,
)
def test_a_chat_template_gets_short_values_of_its_own_names(
    client: httpx.Client, live: Live, path: str, arguments: Any
) -> None:
    """`chat_template` would be the client's own program, run in the event loop."""
    response = client.post(path, json={"messages": MESSAGES, "chat_template_kwargs": arguments})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "chat_template_kwargs")
    assert error["hint"]
    assert live.seen_upstream == []


@pytest.mark.parametrize("path", TEMPLATED)
def test_usual_arguments_of_a_template_pass(client: httpx.Client, path: str) -> None:
    for usual in ({"enable_thinking": False, "effort": "low", "thinking_budget": 512, "x": None}, None):
        body = {"messages": MESSAGES, "chat_template_kwargs": usual}
        assert client.post(path, json=body).json()["upstream"] == path


def test_no_name_of_the_function_that_renders_is_a_clients() -> None:
    assert {"chat_template", "tokenize", "documents", "tools", "messages"} <= template_parameters()


def test_fields_that_nobody_has_looked_at_do_not_reach_sglang(client: httpx.Client, live: Live) -> None:
    """As SGLang's own models ignore names that they do not have. /tokenize would hand them on."""
    for path in FIELDS:
        body: dict[str, Any] = {"model": "default", "new_in_sglang": {"a": 1}, "mm_hashes": ["0"], "n": 2**70}
        assert client.post(path, json=body).status_code == 200, path
        sent = json.loads(live.seen_upstream[-1]["body"])
        assert not sent.keys() - FIELDS[path]
        assert ("n" in sent) == ("n" in FIELDS[path])
        headers = dict(live.seen_upstream[-1]["scope"]["headers"])
        assert int(headers[b"content-length"]) == len(live.seen_upstream[-1]["body"])


@pytest.mark.parametrize("path", FIELDS)
def test_fields_for_clusters_and_sessions_are_refused(client: httpx.Client, live: Live, path: str) -> None:
    for name in REFUSED:
        response = client.post(path, json={name: "x"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert live.seen_upstream == []
    assert client.post(path, json=dict.fromkeys(REFUSED)).status_code == 200


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("content", [b"", b"abc", b"[]", b'"x"', b'{"model": NaN}', b'{"model": "\xff"}'])
def test_what_cannot_be_read_does_not_reach_sglang(
    client: httpx.Client, live: Live, path: str, content: bytes
) -> None:
    assert client.post(path, content=content).status_code == 400
    assert live.seen_upstream == []


NEWER = {
    "/invocations": {"thinking"},
    "/v1/chat/completions": {"thinking"},
    "/v1/responses": {"chat_template_kwargs", "text"},
    "/v1/score": {"temperature"},
    "/v1/tokenize": {"add_generation_prompt"},
    "/tokenize": {"add_generation_prompt"},
    "/vertex_generate": {"rid"},
}
"""Fields of 0.5.23 that are left out of a body there, as clients send them to other servers, too."""


def test_sglang_has_no_field_that_nobody_has_looked_at() -> None:
    """A field that SGLang adds fails here: serve it, within a limit, or refuse it."""
    prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.entrypoints.http_server import app
    for path, fields in FIELDS.items():
        route = next(one for one in app.routes if getattr(one, "path", None) == path)
        (body,) = (one.field_info.annotation for one in route.dependant.body_params)
        theirs = set(inspect.get_annotations(body))
        if hasattr(body, "model_fields"):
            assert not any(one.alias or one.validation_alias for one in body.model_fields.values())
            theirs = set(body.model_fields)
        assert not theirs - fields - REFUSED - NEWER.get(path, set()), path
        assert not fields - theirs - {"reasoning"}, path
        assert not fields & REFUSED, path
    assert set(FIELDS) <= set(SERVED)


@pytest.mark.parametrize(
    ("rights", "control_routes", "measures"),
    [(["read"], False, False), (["read"], True, False), (["admin"], False, False), (["admin"], True, True)],
)
def test_who_may_ask_for_distributions(
    tmp_path: Path, model_path: Path, rights: list[str], control_routes: bool, measures: bool
) -> None:
    """They cost memory and the scheduler's time as nothing else does: an operator's, where control routes are
    open, and the servers' own."""

    async def generate(request: Request) -> Response:
        params = (await request.json())["sampling_params"]

        async def later() -> AsyncIterator[str]:  # as a stream does: after the route has returned
            try:
                check_measuring(params, 1)
            except ValueError as error:
                yield str(error)

        return StreamingResponse(later())

    async def answer(path: str) -> str:
        body = {"sampling_params": {"custom_params": {DISTRIBUTION_FIELD: 2}}}
        async with asgi_client(app, secret) as client:
            return (await client.post(path, json=body)).text

    _, secret = KeyFile(tmp_path).create("somebody", ["a"] if rights == ["read"] else [], rights)  # type: ignore[arg-type]
    settings = Settings(data_dir=tmp_path, control_routes=control_routes)
    upstream = Starlette(routes=[Route("/generate", generate, methods=["POST"])])
    app = create_app(settings, ScriptedEngine(model_path), upstream=upstream)
    refused = "ragserve_distribution is the server's own; omit it"
    assert asyncio.run(answer("/generate")) == ("" if measures else refused)


def test_no_more_is_tokenised_than_a_context_holds(client: httpx.Client, live: Live) -> None:
    """It runs no model, so any key may ask for it, and no limit counts it."""
    longest = longest_text(live.engine.info.context_length)
    half, rest = "x" * (longest // 2), "x" * (longest // 2 + 1)
    messages = [{"role": "user", "content": half}, {"role": "user", "content": rest}]
    tools = [{"function": {"name": half, "description": rest}}]
    for path, body in (
        ("/tokenize", {"prompt": "x" * (longest + 1)}),
        ("/tokenize", {"prompt": [half, rest]}),
        ("/v1/tokenize", {"messages": messages}),
        (
            "/v1/tokenize",
            {"messages": MESSAGES, "tools": tools},
        ),
        ("/v1/messages/count_tokens", {"messages": messages}),
        ("/detokenize", {"tokens": [1] * (2**16 + 1)}),
        ("/v1/detokenize", {"tokens": [[1] * 2**15, [1] * (2**15 + 1)]}),
    ):
        response = client.post(path, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large"), path
    assert live.seen_upstream == []
    for path, body in (
        ("/tokenize", {"prompt": ["x" * (longest - 100), "x"]}),
        ("/detokenize", {"tokens": [[1] * 2**15] * 2}),
        ("/detokenize", {"tokens": 5}),
    ):
        assert client.post(path, json=body).json()["upstream"] == path


def test_names_numbers_and_empty_texts_are_counted_too(client: httpx.Client, live: Live) -> None:
    """Templates write the names and numbers of tools, and each text is a call of the tokenizer."""
    longest = longest_text(live.engine.info.context_length)

    def tool(**parameters: Any) -> dict[str, Any]:
        return {"messages": MESSAGES, "tools": [{"function": {"name": "f", "parameters": parameters}}]}

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * longest}}
    text = {"text": "x" * longest}
    hidden = tool(type="image_url", description="x" * longest)
    for path, body in (
        ("/tokenize", {"prompt": [""] * (longest // 32 + 1)}),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * (longest // 64)}),
        ("/v1/tokenize", tool(**{"k" * longest: 1})),
        ("/v1/tokenize", tool(enum=[1] * (longest // 32))),
        ("/v1/tokenize", tool(input=[1] * (longest // 32))),
        ("/v1/tokenize", hidden),
        ("/v1/chat/completions", hidden),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{}] * (longest // 32)}]}),
        ("/v1/completions", {"prompt": [""] * (longest // 32 + 1)}),
        ("/detokenize", {"tokens": [[]] * (2**16 + 1)}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x" * 2**16}]}),
        ("/api/chat", {"messages": [{"role": "user", "type": "image_url", "content": "x" * 2**16}]}),
        ("/tokenize", {"messages": [{"role": "user", "type": "image", "reasoning_content": "x" * longest}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [image | text]}]}),
        ("/v1/responses", {"input": [image | text]}),
        ("/v1/responses", {"input": [{"content": [1, "x" * longest]}]}),
        ("/tokenize", {"prompt": [1, "x" * longest]}),
        ("/v1/completions", {"prompt": [[1, "x" * longest]]}),
        ("/v1/rerank", {"query": "x", "documents": [[1, "x" * longest]]}),
    ):
        response = client.post(path, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large"), path
    many = client.post("/v1/chat/completions", json=tool(**{f"k{i}": 1 for i in range(longest // 32)}))
    assert (many.status_code, many.json()["error"]["code"]) == (400, "invalid_request")
    assert live.seen_upstream == []
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]}),
        ("/v1/completions", {"prompt": [1] * longest}),
        ("/v1/completions", {"prompt": [[1] * 1_000] * 1_000}),
        ("/api/generate", {"prompt": "x", "context": [1] * longest}),
        ("/tokenize", {"prompt": ["a line of text"] * 10_000}),
    ):
        assert client.post(path, json=body).json()["upstream"] == path


@pytest.mark.parametrize(
    ("path", "many", "before"),
    [
        ("/v1/score", "items", "query"),
        ("/v1/rerank", "documents", "query"),
        ("/v1/rerank", "documents", "instruct"),
    ],
)
def test_a_text_before_each_of_many_is_counted_as_often(
    client: httpx.Client, live: Live, path: str, many: str, before: str
) -> None:
    """SGLang makes all prompts before it counts them: 4 MiB made 300 GB of them."""
    longest = longest_text(live.engine.info.context_length)
    for text in ("x" * (longest // 100), [1] * (longest // 100)):
        body: dict[str, Any] = {"model": "default", "query": "x", before: text}
        response = client.post(path, json=body | {many: ["x"] * 101})
        if before == "query" or isinstance(text, str):
            assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large")
    assert client.post(path, json={"query": "x" * 1_000, many: ["x" * 100] * 100}).status_code == 200
