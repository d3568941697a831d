"""Composed contexts with multi-head attention, llama3-scaled rotary positions and two tensor-parallel
processes, compared with transformers.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from ragserve.config import Settings
from sglang_ext.wire.protocol import MISSING_PREFIX
from tests.integration.context_client import (
    NEW,
    assert_same,
    composed,
    generate,
    metrics,
    missing_of,
    plan_of,
    report,
    result,
)
from tests.integration.engines import RANKS, Server
from tests.integration.reference import Reference, chosen_sentences

OF_8_BITS = 0.01  # nats: a value at the middle between two codes may get either
DRAW = random.Random(11)
IDS = [DRAW.randrange(10, 8000) for _ in range(420)]
SPANS = [
    (0, 20),
    (20, 120),
    (120, 203),
    (203, 300),
    (300, 316),
    (316, 400),
]  # five documents, not all of whole pages


@pytest.fixture(scope="module")
def reference(parallel_server: Server) -> Reference:
    assert parallel_server.model is not None
    return Reference(parallel_server.model)


@pytest.fixture
def client(parallel_server: Server) -> httpx.Client:
    return parallel_server.client


def files(server: Server, rank: int) -> list[Path]:
    return sorted((server.data_dir / "kv" / f"rank-{rank}-of-{RANKS}").glob("[!.]*/*.pages"))


def settled(client: Any) -> None:
    """Drop everything from device and host, after it is written to disk."""
    assert client.post("/rag/cache/evict", json={"tiers": ["device", "host"]}).status_code == 200


def test_budgets_are_of_the_server(client: Any) -> None:
    figures, defaults = client.get("/rag/cache").json(), Settings()
    assert 0 <= defaults.kv_host_bytes - figures["host"]["budget_bytes"] < 2**17, "whole pages"
    assert figures["disk"]["budget_bytes"] == defaults.kv_disk_bytes
    assert figures["analyses"]["budget_bytes"] == defaults.kv_analysis_bytes


def test_plain_prefill_is_the_references(client: Any, reference: Reference) -> None:
    assert_same(result(generate(client, IDS)), reference.plain(IDS, NEW))


@pytest.mark.parametrize("n_documents", [1, 2, 5])
def test_documents_equal_concatenated_rotated_caches(
    client: Any, reference: Reference, n_documents: int
) -> None:
    spans = SPANS[: n_documents + 1]
    ids = IDS[: spans[-1][1]] + IDS[400:]
    want = reference.composed(ids, spans, NEW)
    answer = composed(client, ids, spans)
    assert_same(result(answer), want)
    assert set(report(answer)["by_tier"]) == {"device"}, "whatever their lengths, in pages of 16"
    unmoved = reference.composed(ids, spans, NEW, rotate=False)
    assert unmoved.ids != want.ids, "the test must tell moved keys from others"
    assert_same(result(composed(client, ids, spans, rotate=False)), unmoved)


@pytest.mark.parametrize(
    ("strategy", "options"), [("concat", {"recompute": "all"}), ("cacheblend", {"share": 1.0})]
)
def test_recomputing_everything_equals_plain_prefill(
    client: Any, reference: Reference, strategy: str, options: dict[str, Any]
) -> None:
    exact = reference.plain(IDS, NEW)
    assert reference.composed(IDS, SPANS, NEW).ids != exact.ids
    answer = composed(client, IDS, SPANS, strategy, **options)
    assert_same(result(answer), exact)
    assert report(answer)["one_pass"] == (strategy == "concat"), "on both ranks, or they would hang"


def test_each_layer_may_keep_other_tokens(client: Any, reference: Reference) -> None:
    kept = [sorted(DRAW.sample(range(SPANS[-1][1]), 150)) for _ in range(reference.layers)]
    assert_same(
        result(composed(client, IDS, SPANS, kept=kept)), reference.composed(IDS, SPANS, NEW, kept=kept)
    )


def test_what_one_process_chooses_by_deviation_the_other_chooses_too(
    client: Any, reference: Reference
) -> None:
    """Each process has half of the heads. Tokens chosen by half of the heads alone would differ, and with
    them the number of rows in a collective."""
    answer = composed(client, IDS, SPANS, "cacheblend", share=0.3)
    assert report(answer)["recomputed"] == round(0.3 * (SPANS[-1][1] - SPANS[0][1]))
    assert result(answer).ids != reference.composed(IDS, SPANS, NEW).ids


def test_requests_and_documents_are_counted_once(client: Any) -> None:
    """Each process has its heads of every document, so counts of both would be twice as many."""
    composed(client, IDS, SPANS, "epic")
    before = metrics(client)
    composed(client, IDS, SPANS, "epic")
    after = metrics(client)
    grown = {
        name: after[name] - before.get(name, 0)
        for name in ("ragserve_contexts_total epic", "ragserve_kv_hits_total device")
    }
    assert grown == {"ragserve_contexts_total epic": 1, "ragserve_kv_hits_total device": len(SPANS)}


def test_a_document_that_one_process_lost_is_missing_for_all(
    parallel_server: Server, client: Any, reference: Reference
) -> None:
    want = reference.composed(IDS, SPANS, NEW)
    assert_same(result(composed(client, IDS, SPANS)), want)
    settled(client)
    ours, theirs = files(parallel_server, 0), files(parallel_server, 1)
    assert [path.name for path in ours] == [path.name for path in theirs]
    for path in theirs:
        path.unlink()
    message = str(generate(client, IDS, plan_of(SPANS))["error"]["message"])
    assert message == MISSING_PREFIX + json.dumps(list(range(len(SPANS)))), (
        "the first process still has every file"
    )
    assert_same(result(composed(client, IDS, SPANS)), want)
    assert client.post("/rag/cache/verify", json={}).json()["bad"] == []


def test_budgets_and_figures_are_of_all_processes(
    parallel_server: Server, client: Any, reference: Reference
) -> None:
    assert result(composed(client, IDS, SPANS)).ids
    settled(client)
    figures = client.get("/rag/cache").json()
    assert figures["disk"]["bytes"] == sum(
        path.stat().st_size for rank in range(RANKS) for path in files(parallel_server, rank)
    )
    assert figures["disk"]["documents"] == len(files(parallel_server, 0))
    assert figures["disk"]["budget_bytes"] == 16 * 2**30
    assert 511 * 2**20 < figures["host"]["capacity_bytes"] <= 512 * 2**20


def test_both_processes_use_the_shared_store(
    parallel_server: Server, client: Any, reference: Reference
) -> None:
    """Each stores and loads its own heads, in pages of 8 bits; what one of them has lost there is computed
    again."""
    storage, namespace, want = parallel_server.storage, "shared", reference.composed(IDS, SPANS, NEW)
    assert storage is not None
    assert parallel_server.model is not None
    quantised = Reference(parallel_server.model, page_bits=8).composed(IDS, SPANS, NEW)

    def stored(rank: int) -> list[Path]:
        return sorted(storage.glob(f"*/rank-{rank}-of-{RANKS}/{namespace}/*.pages"))

    def control(operation: str, **arguments: Any) -> dict[str, Any]:
        while True:
            body = {"op": operation, "keys": keys, "namespace": namespace, **arguments}
            answer = client.post("/dumper/ragserve", json=body)
            assert answer.status_code == httpx.codes.OK, answer.text
            found = dict(answer.json()[0])
            if "pending" not in found:
                return found
            arguments["pending"] = found["pending"]

    def only_in_the_store() -> None:
        control("evict", tiers=["device", "host", "disk"])
        below = control("where", tokens=[0] * len(keys))["below"]
        assert below == ["remote"] * len(SPANS)

    assert_same(result(composed(client, IDS, SPANS, namespace=namespace)), want)
    settled(client)
    keys = [path.stem for path in files(parallel_server, 0) if path.parent.name == namespace]
    only_in_the_store()
    assert [len(stored(rank)) for rank in range(RANKS)] == [len(SPANS)] * RANKS
    answer = composed(client, IDS, SPANS, namespace=namespace)
    assert set(report(answer)["by_tier"]) == {"remote"}
    assert_same(result(answer), quantised, OF_8_BITS)
    only_in_the_store()
    lost = stored(1)[0]
    lost.unlink()
    assert len(missing_of(generate(client, IDS, plan_of(SPANS, namespace=namespace)))) == 1
    assert result(composed(client, IDS, SPANS, namespace=namespace)).ids
    settled(client)
    assert_same(result(generate(client, IDS, plan_of(SPANS, namespace=namespace))), quantised, OF_8_BITS)
    assert client.get("/info").json()["engine"]["page_bits"] == 8
    assert metrics(client)["ragserve_kv_page_bits"] == 8
    assert client.get("/rag/cache").json()["remote"]["budget_bytes"] == 64 * 2**30
    assert "unconfirmed" not in control("remove")
    assert [stored(rank) for rank in range(RANKS)] == [[], []]


def test_a_failure_of_the_second_process_is_reported(parallel_server: Server, client: Any) -> None:
    """The first process answers an operation; its answer must include the failures of the others."""
    settled(client)
    damaged = files(parallel_server, 1)[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    bad = client.post("/rag/cache/verify", json={}).json()["bad"]
    assert len(bad) == 1
    assert damaged.stem in bad[0]
    assert "rank 1" in bad[0]


def test_samkv_selects_the_same_in_every_process(client: Any, reference: Reference) -> None:
    """Each process scores with half of the heads; the choice decides the number of rows in a collective."""
    exact = reference.plain(IDS, NEW)
    assert_same(result(composed(client, IDS, SPANS, "samkv", keep=1.0, recompute="all")), exact, 1e-3)
    for options in (
        {"keep": 0.6, "selection": "layers"},
        {"keep": 0.6},
        {"lexical_weight": 0.3, "scoring": "attention", "personalised": True},
        {"scoring": "raw", "question_query": "mean", "selection": "shared"},
        {"recompute": "sensitivity", "share": 0.4, "selection": "shared"},
        {"recompute": "deviation"},
    ):
        settled(client)  # both read pages of 8 bits
        answer = composed(client, IDS, SPANS, "samkv", **options)
        settled(client)
        assert_same(result(composed(client, IDS, SPANS, "samkv", **options)), result(answer))


def test_sentences_are_chosen_by_the_heads_of_all_processes(
    parallel_server: Server, client: Any, reference: Reference
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(parallel_server.model)
    wanted = chosen_sentences(reference, tokenizer, IDS, SPANS, 0.2)
    by_rule, by_name = (
        result(composed(client, IDS, SPANS, recompute=recompute, share=0.2))
        for recompute in ("sentences", wanted)
    )
    assert by_rule == by_name
    assert by_rule != result(composed(client, IDS, SPANS, recompute=wanted[1:]))
    wanted = chosen_sentences(reference, tokenizer, IDS, SPANS, 1.0, top_p=0.5)
    by_weight = composed(client, IDS, SPANS, recompute="sentences", share=1.0, share_top_p=0.5)
    assert result(by_weight) == result(composed(client, IDS, SPANS, recompute=wanted))
    told = report(by_weight)
    assert (told["recomputed"], told["recompute_reason"]) == (len(wanted), "they hold 0.5 of the weight")


@pytest.mark.parametrize("stage", ["forward", "recompute"])
def test_a_pass_that_fails_on_both_ranks_ends_its_request_and_nothing_else(
    client: httpx.Client, stage: str
) -> None:
    """They vote on a failure between collectives, as that of a recomputation is."""
    plan = plan_of(SPANS, "cacheblend", "faults", share=0.2)
    want = result(composed(client, IDS, SPANS, "cacheblend", "faults", share=0.2))
    injected = client.post("/dumper/ragserve", json={"op": "fault", "stage": stage})
    assert injected.status_code == httpx.codes.OK
    answer = generate(client, IDS, plan)
    assert (answer["object"], answer["type"]) == ("error", "500")
    assert f"injected at {stage!r}" in answer["message"]
    assert_same(result(generate(client, IDS, plan)), want)
