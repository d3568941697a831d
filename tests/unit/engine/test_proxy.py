"""Requests reach the remote engine's own address, whatever target a client sends."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from ragserve.config import load
from ragserve.engine.proxy import ReverseProxy

Sent = tuple[int, bytes]


def forward(proxy: ReverseProxy, target: bytes, decoded: str, query: bytes = b"") -> Sent:
    """Status and body for a GET of ``target``, as uvicorn hands it over."""
    messages: list[dict[str, Any]] = []
    scope = {
        "type": "http",
        "method": "GET",
        "path": decoded,
        "raw_path": target,
        "query_string": query,
        "headers": [],
    }

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        messages.append(message)

    asyncio.run(proxy(scope, receive, send))
    return messages[0]["status"], b"".join(m.get("body", b"") for m in messages[1:])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Request]:
    """Requests that leave the proxy; each is answered with 200."""
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(b"from the engine"))

    client = httpx.AsyncClient
    monkeypatch.setattr(
        httpx, "AsyncClient", lambda **options: client(transport=httpx.MockTransport(answer), **options)
    )
    return requests


@pytest.mark.parametrize(
    "target", [b"@127.0.0.1:9/latest", b".evil.example/", b"http://evil.example/", b"*", b""]
)
def test_a_target_without_a_slash_never_leaves(seen: list[httpx.Request], target: bytes) -> None:
    settings = load(engine_url="http://engine.internal", engine_api_key=SecretStr("secret"))
    status, body = forward(ReverseProxy(settings), target, target.decode())
    assert (status, seen) == (400, [])
    assert b"invalid_target" in body


def test_paths_arrive_as_they_were_sent(seen: list[httpx.Request]) -> None:
    """A question mark or a slash that a client encoded stays a part of the name."""
    settings = load(engine_url="http://engine.internal:30001/base/")
    sent = ((b"/v1/models/a%3Fb%2Fc", "/v1/models/a?b/c", b""), (b"/generate", "/generate", b"x=1&y=%20"))
    for target, decoded, query in sent:
        assert forward(ReverseProxy(settings), target, decoded, query) == (200, b"from the engine")
    assert [str(request.url) for request in seen] == [
        "http://engine.internal:30001/base/v1/models/a%3Fb%2Fc",
        "http://engine.internal:30001/base/generate?x=1&y=%20",
    ]
