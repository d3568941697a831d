"""Composed contexts on the real engine: the tokens and logprobs of plain prefill and of transformers."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from ragserve.answering.prompt import PromptBuilder
from sglang_ext.wire.protocol import PLAN_FIELD
from tests.integration.context_client import (
    NEW,
    assert_same,
    composed,
    generate,
    metrics,
    plan_of,
    report,
    result,
)
from tests.integration.prompts import prompt, rows
from tests.integration.reference import Reference
from tests.monitoring import alerts, exposed, panels, words


def test_documents_prefilled_alone_equal_concatenated_rotated_caches(
    server: Any, builder: PromptBuilder, reference: Reference
) -> None:
    ids, spans = prompt(builder, rows("crossdoc")[0], 3)
    want = reference.composed(ids, spans, NEW)
    got = composed(server.client, ids, spans)
    assert_same(result(got), want)
    exact = reference.plain(ids, NEW)
    assert max(abs(a - b) for a, b in zip(exact.logprobs, want.logprobs, strict=True)) > 0.01, (
        "the test must tell them apart"
    )
    said = report(got)
    assert said["kept"] == said["document_tokens"] == spans[-1][1] - spans[0][1]
    assert said["recomputed"] == 0
    assert got["meta_info"]["cached_tokens"] == 0, "composed tokens are no prefix hits"


def test_one_span_kept_whole_equals_plain_prefill(
    quick_server: Any, builder: PromptBuilder, quick_reference: Reference
) -> None:
    ids, spans = prompt(builder, rows("onehop")[1], 1)
    whole = [(0, spans[-1][1])]
    assert_same(result(composed(quick_server.client, ids, whole)), quick_reference.plain(ids, NEW))


def test_without_rotation_keys_stay_where_their_documents_began(
    quick_server: Any, builder: PromptBuilder, quick_reference: Reference
) -> None:
    ids, spans = prompt(builder, rows("crossdoc")[1], 3)
    assert_same(
        result(composed(quick_server.client, ids, spans, rotate=False)),
        quick_reference.composed(ids, spans, NEW, rotate=False),
    )


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("concat", {"recompute": "all"}), ("cacheblend", {"share": 1.0}), ("random", {"share": 1.0})],
)
def test_recomputing_everything_equals_full(
    quick_server: Any,
    builder: PromptBuilder,
    quick_reference: Reference,
    strategy: str,
    options: dict[str, Any],
) -> None:
    ids, spans = prompt(builder, rows("crossdoc")[2], 4)
    answer = composed(quick_server.client, ids, spans, strategy, **options)
    assert_same(result(answer), quick_reference.plain(ids, NEW))
    assert report(answer)["recomputed"] == spans[-1][1] - spans[0][1]


def test_recomputing_the_last_document_alone_is_exact_for_it(
    quick_server: Any, builder: PromptBuilder, quick_reference: Reference
) -> None:
    """With one document before it, recomputing the second gives what plain prefill gives."""
    ids, spans = prompt(builder, rows("crossdoc")[3], 2)
    joined = [(0, spans[1][1]), spans[2]]  # system and first document as one span
    positions = list(range(*joined[1]))
    assert_same(
        result(composed(quick_server.client, ids, joined, recompute=positions)),
        quick_reference.plain(ids, NEW),
    )


def test_each_layer_may_keep_other_tokens(
    quick_server: Any, builder: PromptBuilder, quick_reference: Reference
) -> None:
    ids, spans = prompt(builder, rows("crossdoc")[4], 3)
    draw = random.Random(7)
    kept = [sorted(draw.sample(range(spans[-1][1]), 150)) for _ in range(quick_reference.layers)]
    assert_same(
        result(composed(quick_server.client, ids, spans, kept=kept)),
        quick_reference.composed(ids, spans, NEW, kept=kept),
    )


def test_kept_tokens_closed_up_are_a_shorter_prompt(
    quick_server: Any, builder: PromptBuilder, quick_reference: Reference
) -> None:
    """With all kept tokens recomputed, the result is that of their plain prefill; with whole documents kept,
    that of composing these documents.
    """
    ids, spans = prompt(builder, rows("onehop")[1], 3)
    question = ids[spans[-1][1] :]
    whole = [*range(spans[0][1]), *range(*spans[2])]
    parts = [
        *range(spans[0][1]),
        *range(spans[1][0] + 5, spans[1][0] + 40),
        *range(spans[3][0] + 17, spans[3][0] + 60),
    ]
    answer = composed(quick_server.client, ids, spans, kept=parts, kept_positions="compact", recompute="all")
    assert_same(result(answer), quick_reference.plain([ids[i] for i in parts] + question, NEW))
    alone = spans[0][1]
    shorter = [ids[i] for i in whole] + question
    want = quick_reference.composed(shorter, [(0, alone), (alone, len(whole))], NEW)
    for _ in ("device", "host"):
        assert_same(
            result(composed(quick_server.client, ids, spans, kept=whole, kept_positions="compact")), want
        )
        assert quick_server.client.post("/rag/cache/evict", json={"tiers": ["device"]}).status_code == 200


def test_plain_requests_are_untouched_by_composed_traffic(
    quick_server: Any, builder: PromptBuilder, quick_reference: Reference
) -> None:
    ids, spans = prompt(builder, rows("onehop")[2], 4)
    before = result(generate(quick_server.client, ids, extra_key="before"))
    assert_same(before, quick_reference.plain(ids, NEW))
    composed(quick_server.client, ids, spans)
    composed(quick_server.client, ids, spans, "epic", first=8)
    after = result(generate(quick_server.client, ids, extra_key="after"))
    assert (before.ids, before.logprobs) == (after.ids, after.logprobs)
    assert generate(quick_server.client, ids, extra_key="after")["meta_info"]["cached_tokens"] == len(ids) - 1


@pytest.mark.parametrize("tiers", [["device"], ["device", "host"]])
def test_every_tier_gives_the_same_answer(
    quick_server: Any, builder: PromptBuilder, tiers: list[str]
) -> None:
    ids, spans = prompt(builder, rows("onehop")[3], 4)
    first = result(composed(quick_server.client, ids, spans))
    assert quick_server.client.post("/rag/cache/evict", json={"tiers": tiers}).status_code == 200
    answer = composed(quick_server.client, ids, spans)
    assert_same(result(answer), first, 1e-6)
    wanted = "host" if tiers == ["device"] else "disk"
    assert set(report(answer)["by_tier"]) == {wanted}


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("{", "not a context plan"),
        (
            '{"v":99,"op":"compose","namespace":"n","strategy":"concat","spans":[[0,2]],"options":{}}',
            "version 99",
        ),
        (
            '{"v":1,"op":"compose","namespace":"n","strategy":"concat","spans":[[0,2],[3,4]],"options":{}}',
            "does not continue",
        ),
        (
            '{"v":1,"op":"compose","namespace":"n","strategy":"concat","spans":[[0,9]],"options":{}}',
            "at least one token",
        ),
        (
            '{"v":1,"op":"compose","namespace":"n","strategy":"magic","spans":[[0,2]],"options":{}}',
            "no strategy 'magic'",
        ),
        (
            '{"v":1,"op":"compose","namespace":"n","strategy":"epic","spans":[[0,2]],"options":{"first":-1}}',
            "option first of strategy 'epic' is -1",
        ),
        (
            '{"v":1,"op":"compose","namespace":"n","strategy":"random","spans":[[0,2]],"options":{"share":7}}',
            "option share of strategy 'random' is 7",
        ),
        (
            '{"v":1,"op":"document","namespace":"../n","strategy":"","spans":[],"options":{}}',
            "namespace a name",
        ),
        (
            '{"v":1,"op":"document","namespace":"n","strategy":"","spans":[],"options":{"analyse":1}}',
            "the options analyse, lasting and first",
        ),
        (
            '{"v":1,"op":"compose","namespace":"n","strategy":"concat","spans":[[0,Infinity]],"options":{}}',
            "not a context plan",
        ),
        (
            '{"v":1,"op":"compose","namespace":"n","strategy":"concat","spans":[[0,2]],"options":{"experimental":'
            '{"kept":[1' + "0" * 30 + "]}}}",
            "option experimental.kept",
        ),
        (
            '{"v":1,"op":"compose","namespace":"n","strategy":"random","spans":[[0,2]],"options":{"seed":1'
            + "0" * 30
            + "}}",
            "option seed of strategy 'random'",
        ),
        ("[" * 100_000, "not a context plan"),
    ],
)
def test_bad_plans_are_refused_with_the_reason(quick_server: Any, plan: str, says: str) -> None:
    body = {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"max_new_tokens": 2, "custom_params": {PLAN_FIELD: plan}},
    }
    answer = quick_server.client.post("/generate", json=body)
    assert answer.status_code == 400
    assert says in answer.text
    after = quick_server.client.post(
        "/generate", json={"input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": 1}}
    )
    assert after.status_code == 200, "the engine goes on"


def test_metrics_tell_tiers_stages_and_tokens_and_no_prefix_hits(
    quick_server: Any, builder: PromptBuilder
) -> None:
    client = quick_server.client
    quick_server.analysed()
    ids, spans = prompt(builder, rows("onehop")[7], 4)
    composed(client, ids, spans, "epic", namespace="metrics")
    before = metrics(client)
    answer = composed(client, ids, spans, "epic", namespace="metrics")
    client.post("/rag/cache/evict", json={"tiers": ["device"]})
    composed(client, ids, spans, "epic", namespace="metrics")
    client.post("/rag/cache/evict", json={"tiers": ["device", "host"]})
    composed(client, ids, spans, "epic", namespace="metrics")
    after = metrics(client)

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert [grown(f"ragserve_kv_hits_total {tier}") for tier in ("device", "host", "disk")] == [
        len(spans)
    ] * 3
    assert grown("ragserve_kv_misses_total") == 0
    assert grown("ragserve_contexts_total epic") == 3
    assert grown("ragserve_context_tokens_total epic") == 3 * (spans[-1][1] - spans[0][1])
    for stage in ("load", "compose", "recompute"):
        assert grown(f"ragserve_context_stage_seconds_count {stage}") == 3
        assert grown(f"ragserve_context_stage_seconds_sum {stage}") > 0
    assert before["ragserve_kv_bytes device"] > 0
    assert after["ragserve_kv_bytes disk"] > 0
    assert grown("sglang:cached_tokens_total") == 0, "composed tokens are no prefix hits"
    assert answer["meta_info"]["cached_tokens"] == 0
    assert not any((answer["meta_info"].get("cached_tokens_details") or {}).values())


def test_deleting_a_document_deletes_its_kv_from_every_tier(server: Any) -> None:
    client = server.client
    text = "The observatory of Quillmark was founded in 1902 by Ada Brandt. " * 4
    texts = [{"name": "quillmark", "text": text}]
    server.finished(client.post("/rag/ingest", json={"namespace": "deletions", "texts": texts}))
    question: dict[str, Any] = {
        "query": "Who founded the observatory of Quillmark?",
        "namespace": "deletions",
        "strategy": "concat",
    }
    sentences = {"recompute": "sentences", "share": 0.05}
    refused = client.post("/rag/query", json=question | {"strategy_options": sentences})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "strategy_not_verified")
    assert "has not been verified for ragserve-tiny" in refused.json()["error"]["message"]
    verified = client.post("/rag/query", json=question | {"strategy_options": sentences | {"share": 0.3}})
    assert verified.json()["context"]["tokens_recomputed"] > 0, "by the record that the model brings"
    server.analysed()
    question["strategy_options"] = {"force": True}
    for _ in range(2):
        answer = client.post("/rag/query", json=question).json()
        assert answer["context"]["tokens_by_tier"] == {"device": answer["context"]["tokens_kept"]}
    assert answer["usage"]["cached"] == 0
    held = client.get("/rag/cache").json()
    assert held["host"]["namespaces"]["deletions"]["documents"] == 2, "the document and the system text"
    (listed,) = client.get("/rag/documents", params={"namespace": "deletions"}).json()["documents"]
    doc_id = listed["doc_id"]
    assert client.delete(f"/rag/documents/{doc_id}", params={"namespace": "deletions"}).status_code == 200
    left = client.get("/rag/cache").json()
    assert left["host"]["namespaces"]["deletions"]["documents"] == 1
    assert left["device"]["documents"] == held["device"]["documents"] - 1
    assert client.delete("/rag/namespaces/deletions").status_code == 200
    gone = client.get("/rag/cache").json()
    assert "deletions" not in gone["host"]["namespaces"]
    assert "deletions" not in gone["disk"]["namespaces"]
    assert gone["device"]["documents"] == left["device"]["documents"] - 1


@pytest.mark.parametrize("beside", [False, True], ids=["composed alone", "a plain request among them"])
def test_requests_of_one_step_get_what_each_gets_alone(
    quick_server: Any, builder: PromptBuilder, beside: bool
) -> None:
    """The scheduler decides which requests share a step; equal timings in their reports show it."""
    cases = [prompt(builder, row, n) for row, n in zip(rows("crossdoc"), (4, 2, 3), strict=False)]
    options: list[dict[str, Any]] = [
        {"recompute": "all"},
        {"recompute": "first", "first": 5},
        {"recompute": "all"},
    ]
    plans = [plan_of(spans, **each) for (_, spans), each in zip(cases, options, strict=True)]
    alone = [
        composed(quick_server.client, ids, spans, **each)
        for (ids, spans), each in zip(cases, options, strict=True)
    ]
    assert all(report(answer)["one_pass"] for answer in alone)
    custom: list[Any] = [{PLAN_FIELD: plan.to_json()} for plan in plans]
    inputs = [ids for ids, _ in cases]
    if beside:
        inputs, custom = [inputs[0], cases[1][0][-40:], *inputs[1:]], [custom[0], None, *custom[1:]]
        alone.insert(1, generate(quick_server.client, inputs[1]))
    together, deadline = False, time.monotonic() + 240
    while not together:
        assert time.monotonic() < deadline, "no two of them have shared a step"
        sampling = [
            {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True, "custom_params": each}
            for each in custom
        ]
        answers = quick_server.client.post(
            "/generate", json={"input_ids": inputs, "sampling_params": sampling, "return_logprob": True}
        ).json()
        for answer, want in zip(answers, alone, strict=True):
            assert_same(result(answer), result(want))
        said = [report(answer) for answer, each in zip(answers, custom, strict=True) if each]
        together |= (
            not all(each["one_pass"] for each in said)
            if beside
            else len({each["compose_ms"] for each in said}) < len(said)
        )
        if not beside:
            assert all(each["one_pass"] for each in said)


def test_the_dashboards_name_metrics_of_sglang(quick_server: Any, builder: PromptBuilder) -> None:
    ids, spans = prompt(builder, rows("onehop")[7], 4)
    composed(quick_server.client, ids, spans, "epic", namespace="metrics")
    names = {name for query in (*panels().values(), *alerts().values()) for name in words(query)}
    wanted = {name for name in names if name.startswith("sglang:")}
    assert wanted
    assert wanted <= exposed(quick_server.client.get("/metrics").text)
