"""Hosted requests to a server by SGLang's own route, and what the server says of them."""

from __future__ import annotations

import time
from typing import Any

import httpx

from sglang_ext.protocol import DECODE_FIELD, ContextPlan, DecodeReport
from tests.integration import context_client
from tests.integration.reference import Generated


def generate(client: Any, ids: list[int], n_new: int, plan: ContextPlan | None = None, **decode: Any) -> Any:
    answer = context_client.generate(client, ids, plan, n_new, decode=decode)
    assert "error" not in answer, answer
    return answer


def report(answer: dict[str, Any]) -> DecodeReport:
    return DecodeReport.from_json(answer["meta_info"][DECODE_FIELD][-1])


def assert_same(got: Generated, want: Generated, tolerance: float = 5e-5) -> None:
    assert got.ids == want.ids
    assert max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True)) < tolerance


def held(client: httpx.Client) -> dict[str, Any]:
    answer = client.post("/dumper/ragserve", json={"op": "info"}).json()
    return dict(answer[0]["decode"]["hosted"])


def idle(client: httpx.Client) -> dict[str, Any]:
    """Wait until nobody holds host pages: who has left is not gone at once."""
    deadline = time.monotonic() + 240
    while (now := held(client))["used"] and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


def verify(client: Any) -> None:
    """Check host pages, columns and the statistics of all pages, also of those that are cached."""
    answer = client.post("/rag/cache/verify")
    assert answer.status_code == 200, answer.text
