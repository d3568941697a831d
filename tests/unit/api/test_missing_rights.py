"""A key without the right for a route is refused whatever it sends, and the audit log has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.unit.api.scripted_server import Tenants, serving


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("rights")
    with serving(folder, model_path, max_body_bytes=100_000) as live:
        yield Tenants(live)


@pytest.fixture(scope="module")
def reader(tenants: Tenants) -> Iterator[httpx.Client]:
    with tenants.client("reader", "read", "acme") as client:
        yield client


@pytest.mark.parametrize(
    ("content", "kind"), [(b"{", "application/json"), (b"{}", "text/plain"), (b"x" * 100_001, None)]
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/rag/namespaces/acme/settings"),
        ("PUT", "/rag/documents/bell/labels"),
        ("PATCH", "/rag/documents/bell/chunks/0"),
        ("POST", "/rag/cache/evict"),
        ("POST", "/rag/cache/warm"),
    ],
)
def test_a_missing_right_is_answered_and_recorded_before_the_body_is_read(
    tenants: Tenants, reader: httpx.Client, method: str, path: str, content: bytes, kind: str | None
) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    refused = reader.request(method, path, content=iter([content]), headers=headers)  # of unsaid length
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_right")
    last = tenants.audited()[-1]
    assert (last["what"], last["result"]) == (f"{method} {path}", 403)
    assert last["request_id"] == refused.headers["X-Request-Id"]
