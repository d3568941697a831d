"""Offloaded requests that read composed contexts in their documents' host pages: they answer as from copies
and from the device, with the documents there once, whatever becomes of them meanwhile."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from sglang_ext.wire.protocol import DECODE_FIELD, PLAN_FIELD, ContextPlan, Span
from tests.conftest import EXHAUSTIVE
from tests.integration import context_client
from tests.integration.context_client import result
from tests.integration.engines import Server
from tests.integration.offloaded_client import assert_same, generate, held, idle, report, verify, watched
from tests.integration.prompts import some_ids

HIERARCHICAL = {"mode": "hierarchical", "budget": 64, "reuse": 4, "lag": 2}
PROGRESSIVE = {"mode": "progressive", "threshold": 0.6}
OFFLOADED = HIERARCHICAL | {"offloaded": True}
OFFLOADED_PROGRESSIVE = PROGRESSIVE | {"offloaded": True, "budget": 64, "reuse": 4}
MODES = pytest.mark.parametrize(
    ("decode", "offloaded"),
    [(HIERARCHICAL, OFFLOADED), (PROGRESSIVE, OFFLOADED_PROGRESSIVE)],
    ids=["hierarchical", "progressive"],
)
SPANS = [(0, 37), (37, 278), (278, 401), (401, 700)]
DOCUMENT_PAGES, PAGES = 3 + 16 + 8 + 19, 700 // 16
HEAD_BYTES = 2 * 16 * 64 * 4  # K and V of a page of one layer and head
NAMESPACE = "read-in-place"
PLAN = ContextPlan("compose", NAMESPACE, "concat", tuple(Span(a, b) for a, b in SPANS), {})


def evict(client: Any, *tiers: str) -> None:
    answer = client.post("/dumper/ragserve", json={"op": "evict", "tiers": list(tiers)})
    assert answer.status_code == 200, answer.text


def cache_documents(client: Any, ids: list[int]) -> None:
    for number, (start, end) in enumerate(SPANS):
        plan = context_client.document_plan(NAMESPACE, number)
        context_client.generate(client, ids[start:end], plan, 1)


@MODES
def test_several_requests_hold_the_documents_once_and_answer_as_a_copy_and_the_device(
    stress_server: Server, decode: dict[str, Any], offloaded: dict[str, Any]
) -> None:
    client, n_new = stress_server.client, 32
    context = some_ids(SPANS[-1][1], 51)
    prompts = [context + some_ids(15 + 7 * i, 510 + i) for i in range(3)]
    cache_documents(client, context)
    resident = [generate(client, ids, n_new, PLAN, **decode) for ids in prompts]
    alone, seen = watched(
        client, [lambda: generate(client, prompts[0], n_new, PLAN, **offloaded)], lambda now: True
    )
    assert_same(result(alone[0]), result(resident[0]))
    said = report(alone[0])
    assert said.offloaded_steps == n_new - 1
    assert said.loaded_bytes == (said.misses + said.host_reads) * HEAD_BYTES
    assert (said.host_reads > 0) == (decode is PROGRESSIVE), "attention reads documents by itself"
    assert context_client.report(alone[0])["by_tier"] == {"host": SPANS[-1][1] - SPANS[0][1]}
    assert max(now["used"] for now in seen) == 0, "it has no host pages of its own"
    assert {now["in_documents"] for now in seen if now["in_documents"]} <= {PAGES}
    crowd, seen = watched(
        client,
        [lambda ids=ids: generate(client, ids, n_new, PLAN, **offloaded) for ids in prompts],
        lambda now: now["in_documents"] >= 2 * PAGES,  # several at once
    )
    counted = {(now["documents"], now["document_pages"]) for now in seen if now["in_documents"]}
    assert counted == {(len(SPANS), DOCUMENT_PAGES)}
    assert max(now["used"] for now in seen) < PAGES, "what follows the prompts of those that are retracted"
    for got, want in zip(crowd, resident, strict=True):
        said = report(got)
        if said.resumed + said.steps == n_new - 1:  # never composed again
            assert_same(result(got), result(want))
    verify(client)
    evict(client, "host")  # they are on the device still
    copied, seen = watched(
        client,
        [lambda ids=ids: generate(client, ids, n_new, PLAN, **offloaded) for ids in prompts],
        lambda now: now["used"] >= PAGES,
    )
    for got, want in zip(copied, resident, strict=True):
        said = report(got)
        if said.resumed + said.steps == n_new - 1:
            assert_same(result(got), result(want))
    assert max(now["in_documents"] for now in seen) == 0
    assert idle(client)["used"] == 0


def until(client: Any, ids: list[int], n_new: int, done: Event, offloaded: dict[str, Any]) -> list[int]:
    """Decode at least so many tokens, and until ``done``; return the first ones."""
    custom = {DECODE_FIELD: json.dumps(offloaded), PLAN_FIELD: PLAN.to_json()}
    sampling = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True, "custom_params": custom}
    body = {"input_ids": ids, "stream": True, "sampling_params": sampling}
    with client.stream("POST", "/generate", json=body, timeout=300) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                tokens = json.loads(line.removeprefix("data: "))["output_ids"]
                if done.is_set() and len(tokens) >= n_new:
                    return list(tokens[:n_new])
    raise AssertionError("the answer ended first")


@pytest.mark.parametrize(
    "offloaded",
    [OFFLOADED_PROGRESSIVE, OFFLOADED] if EXHAUSTIVE else [OFFLOADED_PROGRESSIVE],
    ids=lambda offloaded: offloaded["mode"],
)
def test_documents_stay_as_they_are_while_they_are_read(
    stress_server: Server, offloaded: dict[str, Any]
) -> None:
    """They are evicted, removed and put again, and others come, while an answer reads them."""
    client, n_new, done = stress_server.client, 60, Event()
    ids = some_ids(SPANS[-1][1] + 20, 52)
    cache_documents(client, ids)
    want = generate(client, ids, n_new, PLAN, **offloaded)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(until, client, ids, n_new, done, offloaded)
        try:
            while not (held(client)["in_documents"] or asked.done()):
                time.sleep(0.01)
            for becomes in ("evicted", "removed", "put again", "removed"):
                if becomes == "evicted":
                    evict(client, "device", "host")
                elif becomes == "removed":
                    operation = {"op": "remove_namespace", "namespace": NAMESPACE}
                    assert client.post("/dumper/ragserve", json=operation).status_code == 200
                    again = context_client.generate(client, ids, PLAN, 1, decode=offloaded)
                    assert context_client.missing_of(again) == list(range(len(SPANS)))
                else:
                    cache_documents(client, ids)
                for number in range(2):  # others take what pages there are
                    other = some_ids(900, 530 + number)
                    context_client.generate(client, other, ContextPlan("document", "others"), 1)
                evict(client, "device", "host")
                now = held(client)
                assert (now["in_documents"], now["document_pages"]) == (PAGES, DOCUMENT_PAGES), becomes
                verify(client)
        finally:
            done.set()
        assert asked.result() == result(want).ids
    idle(client)
    evict(client, "device", "host")
    verify(client)
