"""A server without an API key answers no web page but its own, and controls of SGLang's are off."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.api.scripted_server import Live, serving

CONTROL = [
    "/flush_cache",
    "/pause_generation",
    "/continue_generation",
    "/release_memory_occupation",
    "/start_profile",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/load_lora_adapter",
    "/load_lora_adapter_from_tensors",
    "/set_internal_state",
    "/set_trace_level",
    "/open_session",
    "/configure_logging",
    "/scale_elastic_ep",
    "/dumper/step",
    "/hicache/storage-backend",
    "/anything/else",
    "//generate",
    "/docs/",
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    """A server that names a page, a host and opens the control routes."""
    options = {
        "cors_origins": "https://App.example.com:443/, http://bücher.example",
        "allowed_hosts": "rag.lan, Rag.local:30000, [fd00::1], fd00::2, [fd00::3]:80, bücher.lan",
    }
    folder = tmp_path_factory.mktemp("opened")
    with serving(folder, model_path, control_routes=True, body_timeout_s=1, **options) as live:
        yield live


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize(
    "host", ["evil.com", "evil.com:30000", "127.0.0.1.evil.com", "localhost.evil", "[::2]:1", "["]
)
@pytest.mark.parametrize("path", ["/rag/documents", "/generate", "/health", "/nothing"])
def test_a_host_that_is_not_ours_is_refused(client: httpx.Client, live: Live, host: str, path: str) -> None:
    live.seen_upstream.clear()
    assert code(client.get(path, headers={"Host": host})) == (403, "host_not_allowed")
    assert not live.seen_upstream


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:30000", "127.0.0.1", "[::1]:30000", "[::1]"])
def test_loopback_has_its_names(client: httpx.Client, host: str) -> None:
    assert client.get("/ready", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.com", "null", "http://localhost:1", "http://127.0.0.1", "x", "http://["]
)
def test_pages_of_other_origins_are_refused(client: httpx.Client, live: Live, origin: str) -> None:
    live.seen_upstream.clear()
    files = {"files": ("planted.txt", b"text", "text/plain")}
    for response in (
        client.post("/rag/ingest", files=files, data={"namespace": "n"}, headers={"Origin": origin}),
        client.post("/generate", content=b"{}", headers={"Origin": origin, "Content-Type": "text/plain"}),
        client.get("/v1/models", headers={"Origin": origin}),
    ):
        assert code(response) == (403, "origin_not_allowed")
        assert not any(name.startswith("access-control") for name in response.headers)
    assert not live.seen_upstream
    assert client.get("/rag/namespaces/n").status_code == 404


def test_our_own_page_may_call(client: httpx.Client, live: Live) -> None:
    assert client.get("/rag/namespaces", headers={"Origin": live.url}).status_code == 200
    assert client.post("/generate", content=b"{}", headers={"Origin": live.url}).status_code == 200
    assert b"origin" not in dict(live.seen_upstream[-1]["scope"]["headers"]), "SGLang would allow any"


def test_named_pages_and_hosts_may_call(opened: Live) -> None:
    page = {"Origin": "https://app.example.com"}
    with opened.client() as client:
        named = {"Origin": "http://xn--bcher-kva.example"}
        assert client.get("/ready", headers=named).headers["access-control-allow-origin"] == named["Origin"]
        preflight = client.options(
            "/rag/query",
            headers={
                **page,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "content-type",
            },
        )
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == page["Origin"]
        for answer in (client.get("/rag/namespaces", headers=page), client.post("/generate", headers=page)):
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == page["Origin"]
            assert "access-control-allow-credentials" not in answer.headers
        refused = client.get("/rag/documents?namespace=nowhere", headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (404, page["Origin"])
        assert client.get("/ready", headers={"Origin": "https://other.example.com"}).status_code == 403
        ours = ("rag.lan:30000", "rag.local", "[fd00::1]:7", "[fd00::2]", "[fd00::3]", "xn--bcher-kva.lan")
        for host in ours:
            assert client.get("/ready", headers={"Host": host}).status_code == 200, host
        assert client.get("/ready", headers={"Host": "[fd00::4]"}).status_code == 403


def test_with_a_key_other_hosts_are_served(tmp_path: Path, model_path: Path) -> None:
    with serving(tmp_path, model_path, api_key="k") as live, live.client() as client:
        headers = {"Authorization": "Bearer k", "Host": "rag.example.com", "Origin": "https://x.example.com"}
        answer = client.get("/ready", headers=headers)
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
        assert code(client.post("/flush_cache", headers=headers)) == (404, "route_not_found")


@pytest.mark.parametrize("path", CONTROL)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_routes_that_control_the_engine_are_off(
    client: httpx.Client, live: Live, opened: Live, method: str, path: str
) -> None:
    live.seen_upstream.clear()
    response = client.request(method, f"{live.url}{path}")
    assert code(response) == (404, "route_not_found")
    assert "--control-routes" in response.json()["error"]["hint"]
    assert not live.seen_upstream
    with opened.client() as allowed:
        assert allowed.request(method, f"{opened.url}{path}").json()["upstream"] == path


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"rid": ""},
        {"rid": "a"},
        {"rid": None},
        {"rid": ["x" * 20]},
        {"rid": "x" * 20, "abort_all": True},
        [],
    ],
)
def test_nobody_aborts_the_requests_of_others(client: httpx.Client, live: Live, body: Any) -> None:
    live.seen_upstream.clear()
    assert code(client.post("/abort_request", json=body))[0] == 400
    assert not live.seen_upstream
    assert client.post("/abort_request", json={"rid": "x" * 20}).json()["upstream"] == "/abort_request"


def test_bodies_for_sglang_are_limited(client: httpx.Client, live: Live) -> None:
    live.seen_upstream.clear()
    larger = {"/generate": live.settings.max_upload_bytes, "/tokenize": live.settings.max_body_bytes}
    for path, limit in larger.items():
        assert code(client.post(path, content=b"x" * (limit + 1))) == (413, "too_large")
        assert not live.seen_upstream


@pytest.mark.parametrize("path", ["/generate", "/rag/query", "/rag/ingest", "/v1/chat/completions"])
def test_an_upload_that_stalls_is_given_up(opened: Live, path: str) -> None:
    """The broken body is answered alike by routes of ours and of SGLang's app."""
    address = ("127.0.0.1", int(opened.url.rpartition(":")[2]))
    began = time.monotonic()
    with socket.create_connection(address, timeout=240) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f'{head}Content-Length: 1000\r\n\r\n{{"query": '.encode())
        answer = b""
        while b'"request_timeout"' not in answer and (piece := connection.recv(65536)):
            answer += piece  # head and body may come one after the other
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"request_timeout"' in answer
    assert time.monotonic() - began > 0.5
