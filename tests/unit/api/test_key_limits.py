"""Limits of API keys: requests and tokens a minute, requests at once, sizes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ragserve.api.app import create_app
from ragserve.config import Settings
from ragserve.tenants.key_file import KeyFile, KeyLimits
from sglang_ext.wire.token_meter import count_answers, count_prompt
from tests.unit.api.scripted_server import (
    DOCUMENTS,
    ScriptedEngine,
    Tenants,
    asgi_client,
    eventually,
    serving,
)

QUESTION = {"query": "Who built it?", "namespace": "acme"}
CHAT = {"model": "ragserve/acme", "messages": [{"role": "user", "content": "Who built it?"}]}


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Tenants]:
    with serving(tmp_path_factory.mktemp("limits"), model_path) as live:
        live.index("acme", DOCUMENTS)
        yield Tenants(live)


def test_a_key_may_send_so_many_requests_a_minute(tenants: Tenants) -> None:
    with tenants.client("slow", "read", "acme", limits=KeyLimits(requests_per_minute=2)) as client:
        assert [client.get("/info").status_code for _ in range(2)] == [200, 200]
        refused = client.get("/info")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        assert client.get("/health").status_code == 200  # needs no key, and counts for none
    with tenants.client("other", "read", "acme") as other:
        assert other.get("/info").status_code == 200


def test_a_key_may_send_so_many_requests_at_once(tenants: Tenants) -> None:
    body = {"query": "Who built it?", "namespace": "acme"}
    engine = tenants.live.engine
    with tenants.client("narrow", "read", "acme", limits=KeyLimits(concurrent_requests=1)) as client:
        engine.hold.clear()
        try:
            with client.stream("POST", "/rag/query", json={**body, "stream": True}) as stream:
                lines = stream.iter_lines()
                next(lines)
                refused = client.get("/info")
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                engine.hold.set()
                list(lines)
        finally:
            engine.hold.set()
        eventually(lambda: client.get("/info").status_code == 200, "the first request ends")


def test_a_key_may_be_limited_in_size(tenants: Tenants) -> None:
    limits = KeyLimits(max_upload_bytes=500, max_k=2)
    with tenants.client("small", "read ingest", "acme", limits=limits) as client:
        big = client.post("/rag/ingest", files={"files": ("a.txt", b"x" * 501)}, data={"namespace": "acme"})
        assert (big.status_code, big.json()["error"]["code"]) == (413, "too_large")
        question = {"query": "lighthouse", "namespace": "acme"}
        assert len(client.post("/rag/retrieve", json=question).json()["results"]) == 2  # less than top_k
        for path, body in (
            ("/rag/retrieve", question),
            ("/rag/query", question),
            (
                "/v1/chat/completions",
                {"model": "ragserve/acme", "messages": [{"role": "user", "content": "lighthouse"}]},
            ),
        ):
            assert client.post(path, json={**body, "k": 2}).status_code == 200
            refused = client.post(path, json={**body, "k": 3})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "k")
        assert client.get("/info").json()["limits"]["max_k"] == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rag/query", QUESTION),
        ("/rag/query", {**QUESTION, "stream": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
    ],
    ids=["query", "query stream", "chat", "chat stream"],
)
def test_a_key_may_use_so_many_tokens_a_minute(tenants: Tenants, path: str, body: dict[str, Any]) -> None:
    with tenants.client("counting", "read", "acme") as client:
        used = client.post("/rag/query", json=QUESTION).json()["usage"]
    tenants.keys.revoke("counting")
    limits = KeyLimits(tokens_per_minute=used["prompt"] + used["completion"])
    with tenants.client("thrifty", "read", "acme", limits=limits) as client:
        assert client.post(path, json=body).status_code == 200
        for each, asked in ((path, body), ("/generate", {"text": "Who?"})):
            refused = client.post(each, json=asked)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
            assert "tokens of prompts and answers" in refused.json()["error"]["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 2
        retrieve = client.post("/rag/retrieve", json={"query": "lighthouse", "namespace": "acme"})
        assert retrieve.status_code == 200, "what is not generated is not limited"
    tenants.keys.revoke("thrifty")


def test_an_answer_whose_client_left_counts_as_far_as_it_came(tenants: Tenants) -> None:
    engine = tenants.live.engine
    before = len(engine.aborted)
    with tenants.client("thrifty", "read", "acme", limits=KeyLimits(tokens_per_minute=10)) as client:
        engine.hold.clear()
        try:
            with client.stream("POST", "/rag/query", json={**QUESTION, "stream": True}) as stream:
                next(line for line in stream.iter_lines() if line == "event: message")
            eventually(lambda: len(engine.aborted) > before, "the server notices that its client left")
        finally:
            engine.hold.set()
        refused = client.post("/rag/query", json=QUESTION)
    tenants.keys.revoke("thrifty")
    prompt = len(engine.requests[-1].input_ids)
    assert refused.status_code == 429
    assert 0 <= (prompt + 1 - 10 + 1) * 6 - int(refused.headers["retry-after"]) <= 30, "6 s a token"


def test_tokens_of_sglangs_own_routes_count(tmp_path: Path, model_path: Path) -> None:
    asyncio.run(_through_upstream(tmp_path, model_path))


async def _through_upstream(folder: Path, model: Path) -> None:
    limits, keys = KeyLimits(tokens_per_minute=40), KeyFile(folder)
    secrets = [keys.create(right, [], [right], limits=limits)[1] for right in ("read", "admin")]  # type: ignore[list-item]
    app = create_app(Settings(data_dir=folder), ScriptedEngine(model), upstream=_generating())
    for secret in secrets:
        async with asgi_client(app, secret) as client:
            for _ in range(2):  # 10 of the prompt, 5 of each of two answers
                assert (await client.post("/generate", json={})).text == "2 3 5 5 "
            assert (await client.post("/tokenize", json={})).status_code == 200
            refused = await client.post("/generate", json={})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")


def _generating() -> Starlette:
    """Stands where SGLang's app does; counts as its TokenizerManager does."""

    async def outputs() -> AsyncIterator[dict[str, Any]]:
        count_prompt(10)
        for answer, count in (("a", 2), ("b", 3), ("a", 5), ("b", 5)):
            yield {"meta_info": {"id": answer, "completion_tokens": count}}

    async def generate(request: Request) -> Response:
        async def later() -> Any:  # as a stream does: after the route has returned
            async for output in count_answers(outputs()):
                yield f"{output['meta_info']['completion_tokens']} "

        return StreamingResponse(later())

    async def tokenize(request: Request) -> Response:
        return JSONResponse([1])

    routes = [Route("/generate", generate, methods=["POST"]), Route("/tokenize", tokenize, methods=["POST"])]
    return Starlette(routes=routes)
