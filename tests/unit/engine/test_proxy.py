"""Requests reach the remote engine's own address, whatever target a client sends."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from starlette.requests import ClientDisconnect

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


@pytest.mark.parametrize("key", [None, SecretStr("")])
def test_an_engine_without_a_key_gets_none(seen: list[httpx.Request], key: SecretStr | None) -> None:
    forward(
        ReverseProxy(load(engine_url="http://engine.internal", engine_api_key=key)), b"/generate", "/generate"
    )
    assert "authorization" not in seen[0].headers


@pytest.mark.parametrize("name", [b"authorization", b"Cookie"])
def test_callers_credentials_stay_here(monkeypatch: pytest.MonkeyPatch, name: bytes) -> None:
    """A cookie of single sign-on is good for all that its user may do."""
    seen: list[httpx.Headers] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers)
        return httpx.Response(200, stream=httpx.ByteStream(b""))

    client = Leaving(b"{}")
    headers = [(b"content-length", b"2"), (b"x-other", b"1"), (name, b"__Host-ragserve=session")]
    asyncio.run(client.through(engine_of(monkeypatch, answer), *headers))
    assert seen[0]["x-other"] == "1"
    assert "session" not in str(seen[0].raw)


def test_an_engine_sets_no_cookie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Browsers would send it with requests to the server."""

    async def answer(_: httpx.Request) -> httpx.Response:
        headers = {"Set-Cookie": "__Host-ragserve=other", "X-Other": "1"}
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(b""))

    client = Leaving(b"{}")
    asyncio.run(client.through(engine_of(monkeypatch, answer), (b"content-length", b"2")))
    assert client.headers == [(b"x-other", b"1")]


class Leaving:
    """An ASGI connection whose client sends ``pieces`` of a body, waits until it is told to leave, and never
    receives twice at once. ``status`` and ``headers`` of the answer."""

    def __init__(self, *pieces: bytes, ends: bool = True) -> None:
        self.left = asyncio.Event()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._messages = [
            {"type": "http.request", "body": piece, "more_body": not ends or n < len(pieces) - 1}
            for n, piece in enumerate(pieces)
        ]
        self._receiving = asyncio.Lock()

    async def receive(self) -> dict[str, Any]:
        assert not self._receiving.locked()
        async with self._receiving:
            await asyncio.sleep(0)
            if self._messages:
                return self._messages.pop(0)
            await self.left.wait()
            return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.headers += message.get("headers", [])

    async def through(self, proxy: ReverseProxy, *headers: tuple[bytes, bytes]) -> None:
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers}
        await proxy(scope, self.receive, self.send)


def engine_of(monkeypatch: pytest.MonkeyPatch, answer: Any) -> ReverseProxy:
    """A proxy before an engine that answers by an async function, which reads the body."""
    transport = httpx.AsyncBaseTransport()
    transport.handle_async_request = answer  # type: ignore[method-assign]
    client = httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **options: client(transport=transport, **options))
    return ReverseProxy(load(engine_url="http://engine.internal"))


@pytest.mark.parametrize("pieces", [(), (b"{}",), (b"{", b"}")], ids=len)
def test_a_client_that_leaves_before_the_answers_headers_ends_the_request(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...]
) -> None:
    """Those of an answer that is not streamed come when all of it has been generated."""
    seen: list[Any] = []

    async def run() -> None:
        asked = asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            seen.append(await request.aread())
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("ended")
            raise AssertionError

        client = Leaving(*pieces)
        headers = [(b"transfer-encoding", b"chunked")] if pieces else []
        asking = asyncio.create_task(client.through(engine_of(monkeypatch, answer), *headers))
        await asked.wait()
        client.left.set()
        with pytest.raises(ClientDisconnect):
            await asking

    asyncio.run(asyncio.wait_for(run(), 240))
    assert seen == [b"".join(pieces), "ended"]


def test_a_part_of_a_body_is_not_forwarded_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        seen.append(await request.aread())
        return httpx.Response(200, stream=httpx.ByteStream(b""))

    async def run() -> None:
        client = Leaving(b"{}", ends=False)
        client.left.set()
        with pytest.raises(ClientDisconnect):
            await client.through(engine_of(monkeypatch, answer), (b"content-length", b"9"))

    asyncio.run(asyncio.wait_for(run(), 240))
    assert seen == []


def test_an_engine_may_answer_before_it_has_read_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(413, stream=httpx.ByteStream(b""))

    async def run() -> int:
        client = Leaving(b"{", b"}")
        await client.through(engine_of(monkeypatch, answer), (b"content-length", b"2"))
        return client.status

    assert asyncio.run(asyncio.wait_for(run(), 240)) == 413


def test_an_engine_that_is_gone_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async def run() -> int:
        client = Leaving(b"{}")
        await client.through(engine_of(monkeypatch, answer), (b"content-length", b"2"))
        return client.status

    assert asyncio.run(asyncio.wait_for(run(), 240)) == 503
