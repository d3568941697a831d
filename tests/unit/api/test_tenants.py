"""API keys with rights: own namespaces only, what belongs to others looks unknown, changes while the server
runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ragserve.api.access import NEEDS
from ragserve.api.app import create_app
from ragserve.config import Settings
from ragserve.tenants.key_file import KeyFile
from ragserve_index import IndexStore
from sglang_ext.wire.cache_scope import CacheScope, confine
from sglang_ext.wire.protocol import ContextPlan, SessionPart, Span, prefix_key, session_key
from tests.unit.api.scripted_server import DOCUMENTS, ScriptedEngine, Tenants, asgi_client, chunk_of, serving
from tests.unit.api.word_embedder import DIM


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Tenants]:
    with serving(tmp_path_factory.mktemp("tenants"), model_path, max_body_bytes=100_000) as live:
        live.index("acme", DOCUMENTS)
        live.index("acme-old", {"bell": DOCUMENTS["bell"]})
        live.index("beta", DOCUMENTS)
        live.services.ingestor.jobs.create("beta", {"kind": "upload"}, ["theirs"])
        found = Tenants(live)
        found.keys.create("first", (), ["admin"])
        yield found


@pytest.fixture(scope="module")
def acme(tenants: Tenants) -> Iterator[httpx.Client]:
    with tenants.client("acme", "read ingest delete", "acme*") as client:
        yield client


@pytest.fixture(scope="module")
def admin(tenants: Tenants) -> Iterator[httpx.Client]:
    with tenants.client("operator", "admin") as client:
        yield client


def test_a_key_sees_its_own_namespaces_only(acme: httpx.Client, admin: httpx.Client) -> None:
    def seen(client: httpx.Client) -> tuple[list[str], list[str], Any, set[str]]:
        return (
            [one["name"] for one in client.get("/rag/namespaces").json()["namespaces"]],
            [one["id"] for one in client.get("/v1/models").json()["data"]],
            client.get("/info").json()["index"]["documents"],
            {job["namespace"] for job in client.get("/rag/jobs").json()["jobs"]},
        )

    assert seen(acme) == (["acme", "acme-old"], ["ragserve/acme", "ragserve/acme-old", "tiny"], 4, set())
    names = ["acme", "acme-old", "beta"]
    assert seen(admin) == (names, [*(f"ragserve/{name}" for name in names), "tiny"], 7, {"beta"})
    assert acme.get("/rag/documents", params={"namespace": "acme"}).status_code == 200
    assert acme.post("/rag/query", json={"query": "Who?", "namespace": "acme-old"}).status_code == 200


def test_what_belongs_to_others_is_answered_as_if_it_did_not_exist(
    tenants: Tenants, acme: httpx.Client
) -> None:
    services = tenants.live.services
    doc = services.store.documents("beta")[0].doc_id
    job = services.ingestor.jobs.list("beta")[0].job_id
    question = {"query": "Who built it?"}
    requests: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/rag/query", {"json": {**question, "namespace": "{ns}"}}),
        ("POST", "/rag/query", {"json": {**question, "namespace": "{ns}", "stream": True}}),
        ("POST", "/rag/query", {"json": {**question, "namespace": "{ns}", "documents": [{"text": "x"}]}}),
        ("POST", "/rag/retrieve", {"json": {**question, "namespace": "{ns}"}}),
        (
            "POST",
            "/v1/chat/completions",
            {"json": {"model": "ragserve/{ns}", "messages": [{"role": "user", "content": "Who?"}]}},
        ),
        ("GET", "/v1/models/ragserve/{ns}", {}),
        ("GET", "/rag/namespaces/{ns}", {}),
        ("DELETE", "/rag/namespaces/{ns}", {}),
        ("GET", "/rag/documents?namespace={ns}", {}),
        ("GET", "/rag/documents/{doc}?namespace={ns}", {}),
        ("GET", "/rag/documents/{doc}?namespace=acme", {}),
        ("GET", "/rag/documents/{doc}/chunks?namespace={ns}", {}),
        ("DELETE", "/rag/documents/{doc}?namespace={ns}", {}),
        ("DELETE", "/rag/documents/{doc}?namespace=acme", {}),
        ("GET", "/rag/jobs/{job}", {}),
        ("DELETE", "/rag/jobs/{job}", {}),
        ("GET", "/rag/jobs?namespace={ns}", {}),
    ]

    def answer(names: dict[str, str], method: str, path: str, options: dict[str, Any]) -> tuple[int, str]:
        sent = json.dumps([path, options])
        for name, value in names.items():
            sent = sent.replace("{" + name + "}", value)
        path, options = json.loads(sent)
        response = acme.request(method, path, **options)
        text = response.text.replace(response.headers["x-request-id"], "ID")
        for name, value in names.items():
            text = text.replace(value, name)
        return response.status_code, text

    # The job that nobody has, and so the rest, as the one of others but for a digit.
    other = doc[:-1] + ("0" if doc[-1] != "0" else "1")
    for one in requests:
        theirs = answer({"ns": "beta", "doc": doc, "job": job}, *one)
        unknown = answer({"ns": "beto", "doc": other, "job": job[:-1] + "x"}, *one)
        assert theirs == unknown, one
        assert theirs[0] == 404 or one[1].startswith("/rag/jobs?"), one
    assert services.ingestor.jobs.get(job).cancel_requested is False
    assert len(services.store.documents("beta")) == 3


def test_each_right_opens_its_routes_and_no_others(tenants: Tenants) -> None:
    probes = {
        "read": ("POST", "/rag/retrieve", {"json": {"query": "lighthouse", "namespace": "acme"}}),
        "ingest": ("POST", "/rag/ingest", {"json": {"namespace": "acme", "texts": []}}),  # 400 with the right
        "delete": ("DELETE", "/rag/documents/none?namespace=acme", {}),  # 404 with the right
        "metrics": ("GET", "/metrics", {}),
        "admin": ("GET", "/server_info", {}),
    }
    for right in probes:
        everywhere = right in ("admin", "metrics")
        with tenants.client(f"only {right}", right, *([] if everywhere else ["acme"])) as client:
            for needed, (method, path, options) in probes.items():
                response = client.request(method, path, **options)
                refused = right not in (needed, "admin")
                assert (response.status_code == 403) == refused, (right, needed, response.text)
                if refused:
                    assert response.json()["error"]["code"] == "missing_right"
                    assert needed in response.json()["error"]["message"]
            assert client.get("/ready").status_code == client.get("/openapi.json").status_code == 200
            assert client.get("/rag/namespaces/acme").status_code == (404 if right == "metrics" else 200)


def test_a_key_for_metrics_sees_nothing_else(tenants: Tenants) -> None:
    with tenants.client("prometheus", "metrics") as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/metrics", headers={"Authorization": ""}).status_code == 401
        assert client.get("/rag/namespaces").json()["namespaces"] == []
        assert client.get("/rag/jobs").json()["jobs"] == []
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["tiny"]
        info = client.get("/info").json()
        assert (info["index"]["documents"], info["index"]["chunks"]) == (0, 0)
        assert client.get("/rag/cache").status_code == client.post("/generate", json={}).status_code == 403


def test_nothing_is_ingested_for_others(acme: httpx.Client) -> None:
    text = {"name": "x", "text": "words"}
    for namespace in ("beta", "new", "acm"):
        for body in (
            {"json": {"namespace": namespace, "texts": [text]}},
            {"files": {"files": ("a.txt", b"words")}, "data": {"namespace": namespace}},
        ):
            response = acme.post("/rag/ingest", **body)  # type: ignore[arg-type]
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "namespace_not_allowed"
    warm = acme.post("/rag/cache/warm", json={"namespace": "beta"})
    assert warm.json()["error"]["code"] == "namespace_not_allowed"
    assert {one["name"] for one in acme.get("/rag/namespaces").json()["namespaces"]} == {"acme", "acme-old"}


def test_every_route_says_what_a_key_needs(tenants: Tenants) -> None:
    """One that does not needs admin; this test makes whoever adds a route choose."""
    ours = {
        f"{method} {route.path}"
        for included in tenants.live.app.routes
        if hasattr(included, "original_router")
        for route in included.original_router.routes
        for method in route.methods
    }
    assert ours == set(NEEDS)


@pytest.mark.parametrize(
    "path", ["/server_info", "/get_load", "/v1/loads", "/v1/responses/resp_1", "/abort_request"]
)
def test_sglangs_administrative_routes_need_admin(
    acme: httpx.Client, admin: httpx.Client, tenants: Tenants, path: str
) -> None:
    tenants.live.seen_upstream.clear()
    method = "POST" if path == "/abort_request" else "GET"
    response = acme.request(method, path, json={"rid": "someone-else"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "missing_right")
    assert not tenants.live.seen_upstream
    assert admin.request(method, path, json={"rid": "someone-else"}).status_code == 200


def test_stored_responses_of_others_cannot_be_continued(acme: httpx.Client) -> None:
    body = {"input": "And then?", "previous_response_id": "resp_1"}
    response = acme.post("/v1/responses", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")
    assert acme.post("/v1/responses", json={"input": "And then?"}).json()["upstream"] == "/v1/responses"


def test_responses_are_stored_for_those_who_may_read_them(
    acme: httpx.Client, admin: httpx.Client, tenants: Tenants
) -> None:
    for asked in ({}, {"store": True, "background": True}, {"store": None, "background": None}):
        for client, expected in ((acme, {"store": False, "background": False}), (admin, asked)):
            assert client.post("/v1/responses", json={"input": "x", **asked}).status_code == 200
            assert json.loads(tenants.live.seen_upstream[-1]["body"]) == {"input": "x", **expected}


def test_control_routes_need_admin_even_where_they_are_on(tmp_path: Path, model_path: Path) -> None:
    asyncio.run(_control_routes(tmp_path, model_path))


def test_sglangs_routes_reach_no_session() -> None:
    key = session_key("acme", "a" * 32)
    plan = ContextPlan("compose", "acme", "concat", (Span(0, 1),), session=SessionPart(key))
    params = {"custom_params": {"ragserve": plan.to_json()}}
    obj = SimpleNamespace(rid="12345678", extra_key=key, sampling_params=params)
    scope = CacheScope("somebody", lambda namespace: True)
    with scope.active(), pytest.raises(ValueError, match="sessions go on over /rag/query"):
        confine(obj)
    assert obj.extra_key == f"somebody:{key}"


@pytest.mark.parametrize("plan", ["", "{", "[]", "1" * 5000, "[" * 100_000], ids=lambda plan: plan[:2])
def test_a_plan_that_cannot_be_read_is_refused(plan: str) -> None:
    obj = SimpleNamespace(rid="1", sampling_params={"custom_params": {"ragserve": plan}})
    with CacheScope("somebody", lambda _: True).active(), pytest.raises(ValueError, match="cannot be read"):
        confine(obj)


def test_sglangs_routes_put_no_document_into_a_namespace() -> None:
    """A key that only reads would write KV to disk that no index knows, and displace that of documents."""
    params = {"custom_params": {"ragserve": ContextPlan("document", "acme").to_json()}}
    for sampling in (params, [{}, params]):
        obj = SimpleNamespace(rid="1", sampling_params=sampling)
        confine(obj)  # the server's own
        with (
            CacheScope("somebody", lambda _: True).active(),
            pytest.raises(ValueError, match="by the server only"),
        ):
            confine(obj)


def test_sglangs_routes_use_the_cache_of_several_namespaces_with_the_right_to_each() -> None:
    spans = (Span(0, 1), Span(1, 2))
    for names, fits in (("acme+acme-old", True), ("acme+beta", False), ("beta+acme", False)):
        owners = tuple(names.split("+"))
        plan = ContextPlan("compose", names, "concat", spans, owners=owners)
        obj = SimpleNamespace(rid="1", extra_key=prefix_key(names), sampling_params=None)
        composed = SimpleNamespace(rid="1", sampling_params={"custom_params": {"ragserve": plan.to_json()}})
        with CacheScope("somebody", lambda name: name.startswith("acme")).active():
            confine(obj)
            assert (obj.extra_key == prefix_key(names)) == fits
            with nullcontext() if fits else pytest.raises(ValueError, match="may not use the cache"):
                confine(composed)


def _through_sglang() -> Starlette:
    """Stands where SGLang's app does; answers with the cache keys that its TokenizerManager would use."""

    async def generate(request: Request) -> Response:
        data = await request.json()
        params = {"custom_params": {"ragserve": data["plan"]}} if "plan" in data else {}
        obj = SimpleNamespace(rid=data.get("rid"), extra_key=data.get("extra_key"), sampling_params=params)

        async def later() -> Any:  # as a stream does: after the route has returned
            try:
                confine(obj)
            except ValueError as error:
                obj.extra_key = f"refused: {error}"
            yield json.dumps([obj.rid, obj.extra_key] if obj.rid else obj.extra_key)

        return StreamingResponse(later())

    async def control(request: Request) -> Response:
        return JSONResponse("flushed")

    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/flush_cache", control, methods=["POST"]),
        ]
    )


async def _control_routes(folder: Path, model: Path) -> None:
    settings = Settings(data_dir=folder, control_routes=True)
    keys = KeyFile(folder)
    reader, operator = keys.create("reader", ["a"], ["read"])[1], keys.create("operator", [], ["admin"])[1]
    app = create_app(settings, ScriptedEngine(model), upstream=_through_sglang())
    async with asgi_client(app, reader) as client:
        assert (await client.post("/flush_cache")).status_code == 403
    async with asgi_client(app, operator) as client:
        assert (await client.post("/flush_cache")).json() == "flushed"


def test_each_key_generates_in_a_cache_of_its_own(tmp_path: Path, model_path: Path) -> None:
    asyncio.run(_caches(tmp_path, model_path))


async def _caches(folder: Path, model: Path) -> None:
    keys = KeyFile(folder)
    (one, first), (two, second) = (keys.create(name, [name], ["read"]) for name in ("one", "two"))
    _, operator = keys.create("operator", [], ["admin"])
    app = create_app(Settings(data_dir=folder), ScriptedEngine(model), upstream=_through_sglang())
    store = IndexStore(folder)
    for name in ("one", "two"):
        store.ensure_namespace(name, embedder="words", dim=DIM)
    app.state.services = SimpleNamespace(store=store)

    async def key_of(secret: str, **body: Any) -> Any:
        async with asgi_client(app, secret) as client:
            return (await client.post("/generate", json=body)).json()

    assert await key_of(first) == f"key:{one.key_id}:"
    assert await key_of(second) == f"key:{two.key_id}:"
    assert await key_of(second, extra_key="mine") == f"key:{two.key_id}:mine"
    assert await key_of(first, extra_key="namespace:one") == "namespace:one"  # as ragserve.programs sends it
    assert await key_of(second, extra_key="namespace:one") == f"key:{two.key_id}:namespace:one"
    both = ["namespace:one", "0" * 32]
    assert await key_of(first, extra_key=both) == ["namespace:one", f"key:{one.key_id}:{both[1]}"]
    assert await key_of(operator, extra_key="namespace:one") == "namespace:one"
    assert await key_of(operator) is None
    # When a client leaves, SGLang ends all requests whose ids begin with that client's.
    assert (await key_of(first, rid="12345678"))[0] == f"key:{one.key_id}:12345678"
    assert (await key_of(operator, rid="12345678"))[0] == "12345678"
    plan = ContextPlan("compose", "one", "concat", (Span(0, 1),)).to_json()
    assert await key_of(first, plan=plan) == f"key:{one.key_id}:"
    assert "namespace 'one'" in await key_of(second, plan=plan)
    document, chunks, vectors = chunk_of("hidden", "A lamp.")
    store.replace_documents("one", [(replace(document, labels=("board",)), chunks, vectors)])
    assert await key_of(first, extra_key="namespace:one") == f"key:{one.key_id}:namespace:one"
    assert "namespace 'one'" in await key_of(first, plan=plan), "its cache would tell of the hidden document"
    assert await key_of(operator, extra_key="namespace:one") == "namespace:one"
    store.close()
    remote = Settings(data_dir=folder, engine_url="http://engine.internal")
    app = create_app(remote, ScriptedEngine(model), upstream=_through_sglang())
    assert "runs elsewhere" in (await key_of(first))["error"]["message"]
    assert await key_of(operator, extra_key="x") == "x"


def test_the_audit_log_has_who_did_what_from_where_and_the_result(
    tenants: Tenants, acme: httpx.Client
) -> None:
    before = len(tenants.audited())
    texts = {"namespace": "acme", "texts": [{"name": "new", "text": "A new lighthouse."}]}
    job = acme.post("/rag/ingest", json=texts, headers={"X-Request-Id": "audited-1"}).json()["job_id"]
    acme.post("/rag/query", json={"query": "Who?", "namespace": "acme"})  # not recorded
    acme.post("/rag/ingest", json={**texts, "namespace": "beta"})
    acme.delete("/rag/documents/none", params={"namespace": "acme"})
    acme.delete("/rag/cache")
    acme.get("/metrics")  # looks only
    records = tenants.audited()[before:]
    told = [(one["what"], one["namespace"], one["result"]) for one in records]
    assert told == [
        ("POST /rag/ingest", "acme", 202),
        ("POST /rag/ingest", "beta", 403),
        ("DELETE /rag/documents/none", "acme", 404),
        ("DELETE /rag/cache", None, 403),
    ]
    key = next(each for each in tenants.keys.read().keys if each.name == "acme")
    first = records[0]
    assert (first["who"], first["key"], first["address"]) == ("acme", key.key_id, "127.0.0.1")
    assert (first["job"], first["documents"], first["request_id"]) == (job, 1, "audited-1")
    assert datetime.fromisoformat(first["time"]).tzinfo == UTC


def test_changes_count_from_the_next_request_on(tmp_path: Path, model_path: Path) -> None:
    with serving(tmp_path, model_path) as live, live.client() as anyone:
        assert anyone.get("/info").status_code == 200
        tenants = Tenants(live)
        with tenants.client("operator", "admin") as client:
            assert anyone.get("/info").status_code == 401  # the first key closes the server
            assert client.get("/info").status_code == 200
            tenants.keys.revoke("operator")
            assert client.get("/info").status_code == 401
            assert anyone.get("/info").status_code == 401  # the last revocation does not open it
        past = datetime.now(UTC) - timedelta(seconds=1)
        with tenants.client("past", "admin", expires_at=past) as client:
            assert "has expired" in client.get("/info").json()["error"]["message"]
        with tenants.client("late", "admin", expires_at=past + timedelta(hours=1)) as client:
            assert client.get("/info").status_code == 200
            good = tenants.keys.path.read_bytes()
            tenants.keys.path.write_bytes(good[:-9])
            broken = client.get("/info")
            assert (broken.status_code, broken.json()["error"]["code"]) == (503, "keys_unreadable")
            tenants.keys.path.unlink()
            assert client.get("/info").status_code == 401
            tenants.keys.path.write_bytes(good)
            assert client.get("/info").status_code == 200


def test_the_servers_own_key_has_all_rights_beside_others(tmp_path: Path, model_path: Path) -> None:
    KeyFile(tmp_path).create("acme", ["acme"], ["read"])
    app = create_app(
        Settings(data_dir=tmp_path, api_key="sesame"), ScriptedEngine(model_path), upstream=_through_sglang()
    )

    async def run() -> None:
        async with asgi_client(app, "sesame") as client:
            assert (await client.get("/rag/cache")).status_code == 503  # admitted; not started
            assert (await client.post("/generate", json={"extra_key": "x"})).json() == "x"
            KeyFile(tmp_path).path.write_text("broken")
            assert (await client.get("/rag/cache")).status_code == 503

    asyncio.run(run())


def test_a_websocket_needs_the_right_to_read(tenants: Tenants) -> None:
    def messages(rights: str) -> list[dict[str, Any]]:
        _, secret = tenants.keys.create(f"socket {rights}", ["acme"], [rights])  # type: ignore[list-item]
        sent: list[dict[str, Any]] = []
        scope = {
            "type": "websocket",
            "path": "/v1/realtime",
            "headers": [(b"authorization", f"Bearer {secret}".encode())],
            "query_string": b"",
            "subprotocols": [],
        }

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(tenants.live.app(scope, receive, send))
        return sent

    assert messages("read")[0]["type"] == "websocket.accept"
    refused = messages("ingest")[0]
    assert (refused["type"], refused["status"]) == ("websocket.http.response.start", 403)
