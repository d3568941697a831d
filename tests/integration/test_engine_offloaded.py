"""Offloaded decoding on the real engine: the answers of requests whose KV is on the device, and nothing lost.

A row with a lag chooses by its own clock, so its answer does not depend on its batch: offloaded and resident
requests are compared token by token, alone and in a crowd."""

from __future__ import annotations

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any

import httpx
import pytest

from sglang_ext.wire.protocol import DECODE_FIELD, PLAN_FIELD, ContextPlan, DecodeOptions, DecodeReport, Span
from tests.integration import context_client
from tests.integration.context_client import document_plan, result
from tests.integration.engines import PARALLEL_LOGICAL, PARALLEL_PAGE, Server
from tests.integration.offloaded_client import (
    assert_goes_on,
    assert_same,
    generate,
    held,
    idle,
    report,
    verify,
    watched,
)
from tests.integration.prompts import some_ids
from tests.integration.reference import Generated, Reference
from tests.integration.sparse_reference import SparseReference

LAGGING = {"mode": "hierarchical", "budget": 64, "reuse": 4, "lag": 2, "streaming": False}
OFFLOADED = LAGGING | {"offloaded": True}


@pytest.mark.parametrize(("reuse", "resident_blocks"), [(1, 0), (6, 1)], ids=["as-they-take", "fewest"])
def test_offloaded_is_resident_with_the_same_lag_and_the_lag_is_that_of_the_rule(
    parallel_server: Server, reuse: int, resident_blocks: int
) -> None:
    """With resident blocks as working sets take, and with so few that pages are loaded late."""
    client, ids, n_new = parallel_server.client, some_ids(640 + reuse, 3), 40
    resident = generate(client, ids, n_new, **LAGGING | {"reuse": reuse})
    offloaded = generate(
        client, ids, n_new, **OFFLOADED | {"reuse": reuse, "resident_blocks": resident_blocks}
    )
    assert_same(result(offloaded), result(resident))
    verify(client)
    said = report(offloaded)
    assert said.lag == 2
    assert said.offloaded_steps > 25, "it left the device after its first choices"
    assert said.misses > 0
    choice = 64 // PARALLEL_PAGE
    assert said.resident_blocks == choice if resident_blocks else said.resident_blocks > 2 * choice, (
        "random keys: a large working set"
    )
    assert 1 < said.working_set <= len(ids) / PARALLEL_PAGE
    assert said.loaded_bytes == said.misses * 2 * PARALLEL_PAGE * 64 * 4
    assert report(resident).offloaded_steps == report(resident).misses == 0
    assert parallel_server.model is not None
    reference = SparseReference(parallel_server.model, PARALLEL_PAGE, PARALLEL_LOGICAL)
    reference.decode = DecodeOptions(**LAGGING | {"reuse": reuse}, dense_below=0)
    assert_same(result(resident), reference.plain(ids, n_new), 5e-4)
    reference.decode = reference.decode.model_copy(update={"lag": 0})
    at_once, got = reference.plain(ids, n_new), result(resident)
    apart = max(abs(a - b) for a, b in zip(at_once.logprobs, got.logprobs, strict=True))
    assert at_once.ids != got.ids or apart > 0.01, "the test must tell a lag from none"


def test_offloaded_and_resident_rows_in_one_batch_with_shared_prefixes_and_leavers(
    parallel_server: Server,
) -> None:
    client, chance = parallel_server.client, random.Random(4)
    shared = some_ids(400, 5)
    prompts = [shared + some_ids(chance.randrange(20, 200), 80 + i) for i in range(3)]
    jobs = [(ids, chance.randrange(20, 44)) for ids in prompts]
    beside: list[dict[str, Any]] = [
        {"mode": "dense"},
        {"mode": "progressive", "threshold": 0.7, "streaming": False},
        {"mode": "hierarchical", "budget": 96, "reuse": 1, "streaming": True},
    ]

    def leave(ids: list[int], after: int) -> None:
        custom = {DECODE_FIELD: json.dumps(OFFLOADED)}
        sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True, "custom_params": custom}
        body = {"input_ids": ids, "stream": True, "sampling_params": sampling}
        with client.stream("POST", "/generate", json=body) as stream:
            for count, _ in enumerate(stream.iter_lines()):
                if count > after:
                    return
        raise AssertionError("the stream ended by itself")

    with ThreadPoolExecutor(12) as pool:
        pairs = [
            [pool.submit(generate, client, *job, **options) for options in (OFFLOADED, LAGGING)]
            for job in jobs
        ]
        others = [pool.submit(generate, client, shared, 30, **options) for options in beside]
        # as it is copied, as resident blocks are taken and filled, and offloaded; lines of the stream, two a
        # token
        left = [pool.submit(leave, shared + some_ids(90, 7 + i), i) for i in (1, 5, 9, 30)]
        waiting = [*others, *left, *(each for pair in pairs for each in pair)]
        while not all(each.done() for each in waiting):
            verify(client)
            time.sleep(0.5)
        for each in (*others, *left):
            each.result()
    for pair, (ids, n_new) in zip(pairs, jobs, strict=True):
        offloaded, resident = (each.result() for each in pair)
        assert_same(result(offloaded), result(resident))
        assert report(offloaded).offloaded_steps > 0, (len(ids), n_new)
    verify(client)


def test_requests_are_offloaded_by_themselves_when_others_wait_and_more_run_at_once(
    parallel_server: Server,
) -> None:
    """The pool has room for six of these prompts; offloaded ones leave it to the next."""
    client, many, n_new = parallel_server.client, 9, 60
    prompts = [some_ids(1200, 300 + i) for i in range(many)]
    auto = OFFLOADED | {"offloaded": "auto"}
    alone = generate(client, prompts[0], n_new, **auto)
    assert report(alone).offloaded_steps == 0, "nobody waits"
    assert report(alone).lag == 2

    def ask(ids: list[int]) -> tuple[list[int], DecodeReport, float, float]:
        custom = {DECODE_FIELD: json.dumps(auto)}
        sampling = {"temperature": 0, "max_new_tokens": n_new, "ignore_eos": True, "custom_params": custom}
        body = {"input_ids": ids, "stream": True, "sampling_params": sampling}
        times, last = [], {}
        with client.stream("POST", "/generate", json=body, timeout=300) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.monotonic())
                    last = json.loads(line.removeprefix("data: "))
        return last["output_ids"], report(last), times[0], times[-1]

    at_once, deadline = 0, time.monotonic() + 240
    while at_once <= 6:  # more than fit with their prompts; on a busy machine some may ask late
        assert time.monotonic() < deadline, at_once
        with ThreadPoolExecutor(many) as pool:
            got = list(pool.map(ask, prompts))
        assert got[0][0][-n_new:] == result(alone).ids
        at_once = max(sum(first <= at <= last for _, _, first, last in got) for _, _, at, _ in got)
        if at_once <= 6:
            client.delete("/rag/cache").raise_for_status()
    assert sum(said.offloaded_steps > 0 for _, said, _, _ in got) > 2
    verify(client)


@pytest.mark.parametrize("question", [15, 300], ids=["whole", "chunked"])
def test_a_composed_context_is_offloaded_from_the_start(parallel_server: Server, question: int) -> None:
    """Some documents come from the host, and the last one from the device. Then all are on the host, in pages
    of 8 bits that both ranks read in place."""
    spans = [(0, 230), (230, 480), (480, 700)]
    ids, n_new = some_ids(700 + question, 41), 24
    plan = ContextPlan("compose", "offloaded", "concat", tuple(Span(a, b) for a, b in spans), {})
    client = parallel_server.client
    for number, (start, end) in enumerate(spans):
        if number == 2:
            client.post("/dumper/ragserve", json={"op": "evict", "tiers": ["device"]})
        context_client.generate(client, ids[start:end], document_plan("offloaded", number), 1)
    offloaded = generate(client, ids, n_new, plan, **OFFLOADED)
    resident = generate(client, ids, n_new, plan, **LAGGING)
    assert_same(result(offloaded), result(resident))
    assert report(offloaded).offloaded_steps == report(offloaded).steps == n_new - 1
    assert report(resident).offloaded_steps == 0
    verify(client)
    client.post("/dumper/ragserve", json={"op": "evict", "tiers": ["device"]})
    resident = generate(client, ids, n_new, plan, **LAGGING)
    (offloaded,), seen = watched(
        client, [lambda: generate(client, ids, n_new, plan, **OFFLOADED)], lambda now: now["in_documents"] > 0
    )
    assert_same(result(offloaded), result(resident))
    assert max(now["in_documents"] for now in seen) == 700 // PARALLEL_PAGE
    assert max(now["used"] for now in seen) == 0
    verify(client)


def test_a_full_link_lets_requests_stay_on_the_device_and_is_shown(parallel_server: Server) -> None:
    client, n_new = parallel_server.client, 20
    prompts = [some_ids(340 + 30 * i, 700 + i) for i in range(2)]
    resident = [result(generate(client, ids, n_new, **LAGGING)).ids for ids in prompts]
    few = OFFLOADED | {
        "resident_blocks": 1
    }  # as many as earlier tests have measured might hold the whole prompt
    seen = Event()

    def limit(rate: int) -> None:
        answer = client.post("/dumper/ragserve", json={"op": "budget", "link_bytes": rate})
        assert answer.status_code == 200, answer.text

    def decode(ids: list[int]) -> dict[str, Any]:
        """Decode until the wait has been seen, and at least `n_new` tokens."""
        sampling = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
        sampling["custom_params"] = {DECODE_FIELD: json.dumps(few)}
        body = {"input_ids": ids, "stream": True, "sampling_params": sampling}
        with client.stream("POST", "/generate", json=body, timeout=300) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
                    if seen.is_set() and len(last["output_ids"]) >= n_new:
                        return dict(last)
        raise AssertionError("the answer ended before a request was seen to wait")

    limit(2)  # bytes a second
    try:
        with ThreadPoolExecutor(3) as pool:
            try:
                loading = pool.submit(decode, some_ids(400, 71))
                while not loading.done():
                    now = held(client)  # the share counts once a request is offloaded
                    if now["requests"] and now["link_share"] >= 1:
                        break
                    time.sleep(0.02)
                asked = [pool.submit(decode, ids) for ids in prompts]
                while not any(each.done() for each in [loading, *asked]):
                    if client.get("/info").json()["engine"]["offloaded"]["waiting"]["link"]:
                        break
            finally:
                seen.set()
            loading.result()
            answers = [each.result() for each in asked]
    finally:
        limit(0)
    assert [answer["output_ids"][:n_new] for answer in answers] == resident
    assert 'ragserve_decode_offload_waits{bound="link"' in client.get("/metrics").text
    verify(client)


@pytest.mark.parametrize(
    ("decode", "reason"),
    [
        (OFFLOADED | {"streaming": True}, "with streaming heads"),
        ({"mode": "dense", "offloaded": True}, "offloaded is for mode 'hierarchical' or 'progressive'"),
        (OFFLOADED | {"lag": 8}, "option lag of sparse decoding is 8"),
    ],
    ids=["streaming", "dense", "lag"],
)
def test_what_cannot_be_offloaded_is_refused_with_a_reason(
    parallel_server: Server, decode: dict[str, Any], reason: str
) -> None:
    answer = context_client.generate(parallel_server.client, [5] * 40, n_new=2, decode=decode)
    assert reason in answer["error"]["message"]


def test_a_context_larger_than_the_pool_is_composed_on_the_host(stress_server: Server) -> None:
    """Its question attends to all of it, and requests beside it take it back."""
    length, documents, n_new = 940, 7, 14
    ids = some_ids(length * documents + 40, 43)
    spans = [(i * length, (i + 1) * length) for i in range(documents)]
    plan = ContextPlan("compose", "offloaded", "concat", tuple(Span(a, b) for a, b in spans), {})
    client = stress_server.client
    assert held(client)["pages"] * 16 > len(ids) > client.get("/info").json()["engine"]["max_total_tokens"]
    for number, (start, end) in enumerate(spans):
        context_client.generate(client, ids[start:end], document_plan("offloaded", number), 1)
    decode = {"mode": "hierarchical", "budget": 128, "reuse": 4, "lag": 2}
    refused = context_client.generate(client, ids, plan, n_new, decode=decode)
    assert "error" in refused, "it does not fit the device"
    alone = generate(client, ids, n_new, plan, **decode | {"offloaded": True})
    assert report(alone).offloaded_steps == n_new - 1
    assert stress_server.model is not None
    dense = Reference(stress_server.model).composed(ids, spans, 1)
    assert_same(Generated(result(alone).ids[:1], result(alone).logprobs[:1]), dense, 5e-4)
    with ThreadPoolExecutor(3) as pool:
        beside = [pool.submit(generate, client, some_ids(200, 90 + i), 40) for i in range(2)]
        again = pool.submit(generate, client, ids, n_new, plan, **decode | {"offloaded": "auto"})
        assert_same(result(again.result()), result(alone))
        for each in beside:
            each.result()
    verify(client)
    assert idle(client)["used"] == 0


def test_a_context_that_fails_or_is_left_on_its_way_to_the_host_leaves_nothing(stress_server: Server) -> None:
    client, spans = stress_server.client, [(0, 400), (400, 800)]
    ids = some_ids(830, 44)
    plan = ContextPlan("compose", "offloaded", "concat", tuple(Span(a, b) for a, b in spans), {})
    decode = {"mode": "hierarchical", "budget": 64, "offloaded": True}
    for number, (start, end) in enumerate(spans):
        context_client.generate(client, ids[start:end], document_plan("offloaded", number), 1)
    right = generate(client, ids, 6, plan, **decode)
    for stage in ("decode plan", "gather", "forward", "statistics"):
        client.post("/dumper/ragserve", json={"op": "fault", "stage": stage})
        answer = context_client.generate(client, ids, plan, 6, decode=decode)
        assert f"'{stage}'" in answer["message"]
        verify(client)
    for patience in (0.05, 0.3):
        with suppress(httpx.TimeoutException):
            sampling = {
                "max_new_tokens": 150,
                "ignore_eos": True,
                "custom_params": {DECODE_FIELD: json.dumps(decode), PLAN_FIELD: plan.to_json()},
            }
            body = {"input_ids": ids, "sampling_params": sampling}
            client.post("/generate", json=body, timeout=patience)
    assert idle(client)["used"] == 0
    assert_same(result(generate(client, ids, 6, plan, **decode)), result(right))
    verify(client)
    assert stress_server.running.process.poll() is None


def test_an_offloaded_request_that_is_retracted_goes_on_as_if_it_had_not_been(stress_server: Server) -> None:
    decode = {"mode": "hierarchical", "budget": 64, "reuse": 4, "lag": 2, "offloaded": True}
    assert_goes_on(stress_server.client, [some_ids(300 + 35 * i, 600 + i) for i in range(3)], decode)


def test_retraction_eviction_and_leavers_lose_no_slot_and_no_page(stress_server: Server) -> None:
    """Every third decode step all requests but one are retracted; the engine checks its slots in each."""
    client, crowd = stress_server.client, 8
    decode = {"mode": "hierarchical", "budget": 48, "reuse": 1, "lag": 1, "offloaded": True}
    jobs = [(some_ids(300 + 40 * i, 50 + i), 24 + i) for i in range(crowd)]

    def leave(ids: list[int]) -> None:
        with suppress(httpx.TimeoutException):
            sampling = {
                "max_new_tokens": 300,
                "ignore_eos": True,
                "custom_params": {DECODE_FIELD: json.dumps(decode)},
            }
            client.post("/generate", json={"input_ids": ids, "sampling_params": sampling}, timeout=1)

    resumed, deadline = 0, time.monotonic() + 240
    while not resumed:  # one that is retracted before its first decode step is prefilled anew
        assert time.monotonic() < deadline
        with ThreadPoolExecutor(crowd + 3) as pool:
            answers = [pool.submit(generate, client, *job, **decode) for job in jobs]
            left = [pool.submit(leave, some_ids(350, 90 + i)) for i in range(2)]
            while not all(each.done() for each in (*answers, *left)):
                client.post("/dumper/ragserve", json={"op": "evict", "tiers": ["device"]})
                verify(client)
                time.sleep(0.2)
            got = [each.result() for each in answers]
        assert [len(answer["output_ids"]) for answer in got] == [n_new for _, n_new in jobs]
        assert sum(report(answer).offloaded_steps for answer in got) > 0
        resumed = sum(report(answer).resumed for answer in got)
    now = idle(client)
    assert (now["used"], now["requests"], now["copying"], now["retracted"]) == (0, 0, 0, 0)
    verify(client)
    metrics = client.get("/metrics").text
    counters = ('offloaded_pages_total{kind="hit"', 'offloaded_pages_total{kind="miss"', "loaded_bytes_total")
    for counter in (*counters, "resumed_total", "lag_count"):
        counted = re.search(rf"^ragserve_decode_{counter}\S* (\S+)", metrics, re.MULTILINE)
        assert counted is not None, counter
        assert float(counted[1]) > 0
    kinds = [f'requests{{kind="{kind}"' for kind in ("offloaded", "copying", "resident")]
    host = [f'host_pages{{kind="{kind}"' for kind in ("own", "context", "document")]
    for gauge in (
        *kinds,
        *host,
        'resident_blocks{state="held"',
        'resident_blocks{state="due"',
        "link_share",
    ):
        assert f"\nragserve_decode_{gauge}" in metrics, gauge
    assert stress_server.running.process.poll() is None
