"""Progressive decoding over offloaded pages on the real engine: as requests whose KV is on the device.

What is attended to does not depend on where a page is, so neither resident blocks, lag nor batch change an
answer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.wire.protocol import ContextPlan, Span
from tests.integration import context_client
from tests.integration.context_client import result
from tests.integration.engines import PARALLEL_PAGE, Server
from tests.integration.offloaded_client import (
    assert_goes_on,
    assert_same,
    generate,
    idle,
    report,
    verify,
    watched,
)
from tests.integration.prompts import some_ids

RESIDENT = {"mode": "progressive", "threshold": 0.6, "streaming": False}
OFFLOADED = RESIDENT | {"offloaded": True, "budget": 64, "reuse": 4}


def test_offloaded_is_resident_whatever_the_resident_blocks_hold_and_threshold_one_is_dense(
    parallel_server: Server,
) -> None:
    """With one resident block for each page of a choice; on two ranks."""
    client, ids, n_new = parallel_server.client, some_ids(500, 3), 26
    resident = generate(client, ids, n_new, **RESIDENT)
    offloaded = generate(client, ids, n_new, **OFFLOADED | {"resident_blocks": 1})
    assert_same(result(offloaded), result(resident))
    said = report(offloaded)
    assert said.offloaded_steps > 12, "it left the device after its first choices"
    assert said.resident_blocks == 64 // PARALLEL_PAGE
    assert said.hits + said.misses + said.fills > 0
    assert said.fills > 0, "steps write what they read to resident_blocks"
    assert said.host_reads > said.fills, "resident_blocks hold less than a step attends to"
    assert said.loaded_bytes == (said.misses + said.host_reads) * 2 * PARALLEL_PAGE * 64 * 4
    assert said.weight is not None
    assert said.weight > 0.6
    assert (said.pages, said.weight) == (report(resident).pages, report(resident).weight)
    assert said.pages < said.pages_held, "the threshold is met before all pages are read"
    verify(client)
    all_pages = generate(
        client, ids, n_new, **OFFLOADED | {"threshold": 1.0, "reuse": 1, "resident_blocks": 1}
    )
    assert_same(result(all_pages), result(generate(client, ids, n_new, mode="dense")))
    assert report(all_pages).offloaded_steps > 12
    assert report(all_pages).host_reads > said.host_reads
    verify(client)


def test_offloaded_rows_of_both_modes_in_one_batch(parallel_server: Server) -> None:
    """Two of them share a prefix, and the others have their prompt on the device."""
    client, shared = parallel_server.client, some_ids(400, 5)
    lagging = {"mode": "hierarchical", "budget": 64, "reuse": 4, "lag": 2, "streaming": False}
    jobs = [
        (shared + some_ids(60, 80), 20, OFFLOADED),
        (shared + some_ids(90, 81), 26, OFFLOADED | {"threshold": 0.9, "lag": 4, "reuse": 1}),
        (shared + some_ids(40, 82), 22, lagging | {"offloaded": True}),
    ]
    alone = [
        generate(client, jobs[0][0], jobs[0][1], **RESIDENT),
        generate(client, jobs[1][0], jobs[1][1], **RESIDENT | {"threshold": 0.9}),
        generate(client, jobs[2][0], jobs[2][1], **lagging),
    ]
    beside = [RESIDENT, {"mode": "dense"}, {"mode": "progressive", "threshold": 0.8, "streaming": True}]
    with ThreadPoolExecutor(6) as pool:
        crowd = [pool.submit(generate, client, ids, n_new, **decode) for ids, n_new, decode in jobs]
        others = [pool.submit(generate, client, shared, 20, **decode) for decode in beside]
        while not all(each.done() for each in (*crowd, *others)):
            verify(client)
            time.sleep(0.5)
        for each in others:
            each.result()
    for got, want in zip(crowd, alone, strict=True):
        assert_same(result(got.result()), result(want))
        assert report(got.result()).offloaded_steps > 0
    verify(client)


def test_a_composed_context_is_offloaded_from_the_start(parallel_server: Server) -> None:
    spans = [(0, 230), (230, 480)]
    ids, n_new = some_ids(500, 46), 16
    plan = ContextPlan("compose", "offloaded-progressive", "concat", tuple(Span(a, b) for a, b in spans), {})
    client = parallel_server.client
    for number, (start, end) in enumerate(spans):
        part = context_client.document_plan("offloaded-progressive", number)
        context_client.generate(client, ids[start:end], part, 1)
    values, codes = 4 * 64, 64 + 4  # bytes of a row
    for where, row_bytes in (("used", values), ("in_documents", codes)):
        if where == "in_documents":  # the device has the values, which codes of the host do not stand for
            evicted = client.post("/dumper/ragserve", json={"op": "evict", "tiers": ["device"]})
            assert evicted.status_code == 200, evicted.text
        (offloaded,), seen = watched(
            client,
            [lambda: generate(client, ids, n_new, plan, **OFFLOADED)],
            lambda now, where=where: now[where] == 480 // PARALLEL_PAGE,  # type: ignore[misc]
        )
        most = {name: max(now[name] for now in seen) for name in ("used", "in_documents")}
        assert most == {"used": 0, "in_documents": 0} | {where: 480 // PARALLEL_PAGE}
        assert_same(result(offloaded), result(generate(client, ids, n_new, plan, **RESIDENT)))
        said = report(offloaded)
        assert said.offloaded_steps == said.steps == n_new - 1
        assert said.host_reads > 0
        assert said.loaded_bytes == (said.misses + said.host_reads) * 2 * PARALLEL_PAGE * row_bytes
        verify(client)
        assert idle(client)["used"] == 0


def test_a_request_that_is_retracted_goes_on_as_if_it_had_not_been(stress_server: Server) -> None:
    """Its next token attends in an extend, to pages on the host."""
    decode = OFFLOADED | {"budget": 48, "reuse": 1, "lag": 1}
    assert_goes_on(stress_server.client, [some_ids(300 + 35 * i, 620 + i) for i in range(3)], decode)


@pytest.mark.parametrize(
    ("decode", "reason"),
    [
        (OFFLOADED | {"streaming": True}, "with streaming heads"),
        (OFFLOADED | {"budget": 16}, "the first and the newest page alone take 32"),
        (RESIDENT | {"lag": 2}, "In mode 'progressive', lag requires offloaded=true"),
        (OFFLOADED | {"observe": "prompt"}, "observe is for mode 'hierarchical'"),
    ],
    ids=["streaming", "budget", "lag", "observe"],
)
def test_what_does_not_fit_together_is_refused_with_a_reason(
    parallel_server: Server, decode: dict[str, object], reason: str
) -> None:
    answer = context_client.generate(parallel_server.client, [5] * 40, n_new=2, decode=decode)
    assert reason in answer["error"]["message"]
