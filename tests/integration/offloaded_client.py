"""Offloaded requests to a server by SGLang's own route, and what the server says of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from sglang_ext.wire.protocol import DECODE_FIELD, ContextPlan, DecodeReport
from tests.integration import context_client
from tests.integration.context_client import result
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
    return dict(answer[0]["decode"]["offloaded"])


def watched(
    client: Any, asks: list[Callable[[], Any]], enough: Callable[[dict[str, Any]], bool]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Ask, and look at what offloaded requests hold until all have been answered; again until a look has seen
    ``enough``: answers may pass between two looks."""
    seen: list[dict[str, Any]] = []
    deadline = time.monotonic() + 240
    with ThreadPoolExecutor(len(asks)) as pool:
        while True:
            asked = [pool.submit(ask) for ask in asks]
            while not all(each.done() for each in asked):
                seen.append(held(client))
                time.sleep(0.03)
            if any(map(enough, seen)):
                return [each.result() for each in asked], seen
            assert time.monotonic() < deadline, seen


def idle(client: httpx.Client) -> dict[str, Any]:
    """Wait until nobody holds host pages or documents: who has left is not gone at once."""
    deadline = time.monotonic() + 240
    while (now := held(client))["used"] + now["in_documents"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (now["in_documents"], now["documents"], now["document_pages"]) == (0, 0, 0)
    return now


def verify(client: Any) -> None:
    """Check host pages, resident blocks and the statistics of all pages, also of those that are cached."""
    answer = client.post("/rag/cache/verify")
    assert answer.status_code == 200, answer.text


def assert_goes_on(client: httpx.Client, prompts: list[list[int]], decode: dict[str, Any]) -> None:
    """Requests that are retracted in a crowd answer from their host pages as alone, where none is taken
    back. One that is before its first decode step is prefilled anew, so ask until another one is."""
    n_new = 24
    alone = [generate(client, ids, n_new, **decode) for ids in prompts]
    assert all(report(answer).resumed == 0 for answer in alone)
    compared, deadline = 0, time.monotonic() + 240
    while not compared and time.monotonic() < deadline:
        with ThreadPoolExecutor(len(prompts)) as pool:
            crowd = list(pool.map(lambda ids: generate(client, ids, n_new, **decode), prompts))
        for got, want in zip(crowd, alone, strict=True):
            said = report(got)
            if said.resumed and said.resumed + said.steps == n_new - 1:  # never prefilled again
                assert_same(result(got), result(want))
                compared += 1
    assert compared
    verify(client)
    assert (idle(client)["used"], held(client)["retracted"]) == (0, 0)
