"""Hostile values in every field of every route that a key without admin may call: one clear error each, and
`/health` answers meanwhile. SGLang's app is not behind it; campaign `mixed` has it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from ragserve.api.access import NEEDS
from ragserve.api.upstream import SERVED
from tests import hostile
from tests.conftest import EXHAUSTIVE
from tests.hostile import CLOSED, Hostile, Target
from tests.unit.api.scripted_server import DOCUMENTS, Live, Tenants, serving

SPACE = "docs"
WAIT_S = 60.0  # for /health, beside four clients: what stops the server stops it for longer
ERROR_CHARS = 8_192
OF_A_FIELD = 2  # values that are drawn, unless the tests are exhaustive
NAMES = sorted(
    {name for name, need in NEEDS.items() if need not in CLOSED}
    | {
        f"{'POST' if path in hostile.BODIES else 'GET'} {path}"
        for path, need in SERVED.items()
        if need not in CLOSED and path != "/ping"  # it fails in the scripted server
    }
)


@dataclass
class Open:
    """The server, a client whose key has no admin right, and what there is to attack."""

    live: Live
    client: httpx.Client
    targets: dict[str, Target]


@pytest.fixture(scope="module")
def open_(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Open]:
    folder = tmp_path_factory.mktemp("fields")
    with serving(folder, model_path, url_ingestion="off", serve_metrics=True) as live:
        live.index(SPACE, DOCUMENTS, lang="en")
        with Tenants(live).client("somebody", "read ingest delete", SPACE) as client:
            found = hostile.targets(live.app.openapi(), SPACE)
            yield Open(live, client, {target.name: target for target in found})


def test_every_open_route_is_attacked(open_: Open) -> None:
    assert sorted(open_.targets.keys() - {"GET /ping"}) == [name.replace(":path", "") for name in NAMES]
    ours = {
        f"{method} {route.path}"
        for route in open_.live.app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
        if NEEDS.get(f"{method} {route.path}", "operate") not in CLOSED
    }
    assert ours <= set(NAMES)
    for name in ("POST /rag/query", "POST /rag/retrieve", "POST /v1/chat/completions", "POST /rag/ingest"):
        target = open_.targets[name]
        assert target.bodies
        assert len(target.fields) > 5


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_value_gets_one_clear_error(open_: Open, name: str) -> None:
    target = open_.targets[name.replace(":path", "")]
    waits = []
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(_problem, open_.client, request) for request in _drawn(target)]
        while not all(map(Future.done, asked)) or not waits:
            began = time.monotonic()
            assert open_.client.get("/health").status_code == httpx.codes.OK
            waits.append(time.monotonic() - began)
            time.sleep(0.02)  # or these requests would be most of what the server does
    assert [problem for one in asked if (problem := one.result())] == []
    assert max(waits) < WAIT_S


def _drawn(target: Target) -> Iterator[Hostile]:
    for _, group in groupby(hostile.requests(target), key=lambda one: (one.template, one.url)):
        each = list(group)
        few = not EXHAUSTIVE and len(each) > OF_A_FIELD
        yield from random.Random(each[0].what).sample(each, OF_A_FIELD) if few else each


def _problem(client: httpx.Client, request: Hostile) -> str:
    """What is wrong with the answer to a request; empty if nothing is."""
    try:
        answer = client.request(
            request.method, request.url, content=request.content, headers={"Content-Type": request.type}
        )
    except httpx.HTTPError as error:
        return f"{request.url[:200]}, {request.what}: {error!r}"
    said = f"{request.url[:200]}, {request.what}: {answer.status_code} {answer.text[:400]!r}"
    if answer.status_code >= 500 or "event: error" in answer.text:
        return said
    if answer.status_code < 400 or (answer.status_code == 405 and answer.headers["allow"]):
        return ""
    try:
        error = answer.json()["error"]
        clear = error["message"] and error["code"] and error["type"] and "Traceback" not in answer.text
    except (ValueError, KeyError, TypeError):
        return said
    return "" if clear and len(answer.text) <= ERROR_CHARS else said
