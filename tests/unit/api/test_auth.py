"""The API key covers every route but /health, ours and SGLang's; /ready and failed starts say what is
missing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from ragserve.api.app import create_app
from ragserve.config import Settings
from ragserve.engine.base import EngineInfo
from ragserve.errors import Unavailable
from tests.unit.api.scripted_server import Live, ScriptedEngine, WordEmbedder, serving, upstream_app

KEY = "correct-horse"
ROUTES = [
    ("POST", "/rag/query"),
    ("POST", "/rag/retrieve"),
    ("POST", "/rag/ingest"),
    ("GET", "/rag/jobs"),
    ("GET", "/rag/documents"),
    ("GET", "/rag/namespaces"),
    ("DELETE", "/rag/namespaces/docs"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("POST", "/generate"),
    ("GET", "/metrics"),
    ("GET", "/info"),
    ("GET", "/ready"),
    ("GET", "/openapi.json"),
    ("GET", "/health/"),
    ("GET", "/health_generate"),
    ("GET", "//health"),
    ("GET", "/nothing"),
]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("locked"), model_path, api_key=KEY) as live:
        yield live


WRONG = [
    None,
    "Bearer wrong",
    f"Bearer {KEY}x",
    f"Bearer {KEY[:-1]}",
    "Bearer",
    f"Basic {KEY}",
    KEY,
    "Bearer \xe9",
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nothing_without_the_key(locked: Live, method: str, path: str) -> None:
    with locked.client() as client:
        for wrong in WRONG:
            headers = [] if wrong is None else [(b"Authorization", wrong.encode("latin-1"))]
            response = client.request(
                method, f"{locked.url}{path}", headers=headers, content=b"not even read"
            )
            assert response.status_code == 401, wrong
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert error["code"] == "invalid_api_key"
            assert error["request_id"] == response.headers["x-request-id"]
            assert KEY not in response.text
    assert locked.seen_upstream == []


def test_the_page_of_the_routes_opens_without_the_key_and_asks_for_it(locked: Live) -> None:
    """A browser cannot send the key with its first request. The page itself says nothing about the server."""
    with locked.client() as client:
        page = client.get("/docs")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "API key" in page.text
        assert client.get("/openapi.json").status_code == 401
        assert client.get("/docs/").status_code == 401


def test_the_page_of_the_routes_loads_nothing_from_elsewhere(locked: Live) -> None:
    with locked.client() as client:
        page = client.get("/docs")
    assert not re.findall(r"""(?:https?:)?//[\w.-]+\.\w|\bsrc=|\bimport\b|<link""", page.text)
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"] == "'unsafe-inline'"


def test_health_is_open(locked: Live) -> None:
    with locked.client() as client:
        assert client.get("/health").json()["upstream"] == "/health"
    locked.seen_upstream.clear()


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_everything_with_the_key(locked: Live, scheme: str) -> None:
    with locked.client(headers={"Authorization": f"{scheme} {KEY}"}) as client:
        assert client.get("/ready").json() == {"ready": True, "missing": []}
        assert client.get("/info").status_code == 200
        assert client.get("/rag/namespaces").json() == {"namespaces": []}
        assert client.post("/generate", content=b"x").json()["upstream"] == "/generate"
        metrics = client.get("/metrics").text
        assert 'ragserve_requests_total{route="/ready",status="200"}' in metrics
        assert 'ragserve_requests_total{route="upstream",status="200"}' in metrics
    locked.seen_upstream.clear()


@pytest.mark.parametrize(("key", "admitted"), [(None, False), ("wrong", False), (KEY, True)])
def test_websockets_want_it_too(locked: Live, key: str | None, admitted: bool) -> None:
    sent: list[dict[str, Any]] = []
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {
        "type": "websocket",
        "path": "/v1/realtime",
        "headers": headers,
        "query_string": b"",
        "subprotocols": [],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(locked.app(scope, receive, send))
    assert sent[0]["type"] == ("websocket.accept" if admitted else "websocket.close")
    assert admitted or sent == [
        {"type": "websocket.close", "code": 1008, "reason": "wrong or missing API key"}
    ]


def test_without_a_key_only_this_machine(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="api-key"):
        Settings(data_dir=tmp_path, host="0.0.0.0")
    assert Settings(data_dir=tmp_path, host="0.0.0.0", api_key=KEY).api_key is not None


def test_not_ready_says_what_is_missing(live: Live) -> None:
    live.engine.is_ready = False
    with live.client() as client:
        response = client.get("/ready")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["ready"] is False
    assert response.json()["missing"] == ["the engine does not serve requests"]
    assert response.json()["error"]["code"] == "not_ready"


def test_before_its_start_the_app_says_so(tmp_path: Path, model_path: Path) -> None:
    app = create_app(Settings(data_dir=tmp_path), ScriptedEngine(model_path), upstream=upstream_app([]))

    async def run() -> None:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://localhost"
        ) as client:
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["missing"]) == (
                503,
                ["the server is starting or stopping"],
            )
            query = await client.post("/rag/query", json={"query": "x"})
            assert (query.status_code, query.json()["error"]["code"]) == (503, "unavailable")
            assert query.headers["retry-after"] == "1"

    asyncio.run(run())


def test_a_part_that_cannot_start_stops_the_start(tmp_path: Path, model_path: Path) -> None:
    class Dead(ScriptedEngine):
        async def start(self) -> EngineInfo:
            raise Unavailable("The engine is gone.", hint="Start it.")

    left: list[str] = []

    @asynccontextmanager
    async def upstream_lifespan() -> AsyncIterator[None]:
        try:
            yield
        finally:
            left.append("upstream")

    app = create_app(
        Settings(data_dir=tmp_path, model=str(model_path)),
        Dead(model_path),
        upstream=upstream_app([]),
        upstream_lifespan=upstream_lifespan,
        embedder=lambda _: WordEmbedder(),
    )

    async def run() -> None:
        with pytest.raises(Unavailable, match="The engine is gone"):
            async with app.router.lifespan_context(app):
                pass

    asyncio.run(run())
    assert app.state.services is None
    assert left == ["upstream"]
