"""Sparse decoding on two tensor-parallel processes: each mode against a masked reference, all modes in one
batch.
"""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from sglang_ext.attention.pools.streaming_heads import streaming_heads
from sglang_ext.wire.prefill_options import PrefillOptions
from sglang_ext.wire.protocol import (
    DECODE_FIELD,
    MISSING_PREFIX,
    PLAN_FIELD,
    PREFILL_FIELD,
    ContextPlan,
    DecodeOptions,
    DecodeReport,
    PrefillReport,
    Span,
)
from tests.integration import context_client
from tests.integration.context_client import document_plan, result
from tests.integration.engines import GATES, Server
from tests.integration.engines import PARALLEL_LOGICAL as LOGICAL
from tests.integration.engines import PARALLEL_PAGE as PAGE
from tests.integration.prompts import some_ids
from tests.integration.reference import Generated
from tests.integration.sparse_reference import SparseReference

SINK, LOCAL = 64, 256  # the server's defaults
STREAMING = streaming_heads(GATES, 0.5)
TOLERANCE = 5e-4
OF_THE_RULE = some_ids(650, 3)


@pytest.fixture
def sparse(parallel_server: Server) -> Server:
    return parallel_server


@pytest.fixture(scope="module")
def reference(parallel_server: Server) -> SparseReference:
    assert parallel_server.model is not None
    return SparseReference(parallel_server.model, PAGE, LOGICAL, STREAMING, SINK, LOCAL)


def generate(
    client: Any,
    ids: list[int],
    n_new: int = 24,
    plan: ContextPlan | None = None,
    *,
    may_mix: bool = False,
    **decode: Any,
) -> dict[str, Any]:
    """``may_mix``: ask for no logprobs, so that SGLang may put its decode rows into prefill batches."""
    fields = {"return_logprob": False} if may_mix else {}
    return context_client.generate(client, ids, plan, n_new, decode=decode, **fields)


def report(answer: dict[str, Any]) -> DecodeReport:
    return DecodeReport.from_json(answer["meta_info"][DECODE_FIELD][-1])


def worst(got: Generated, want: Generated) -> float:
    assert got.ids == want.ids
    return max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True))


def verify(client: Any) -> None:
    """Check the statistics of all cached pages against their keys, and the accounts of the tiers."""
    answer = client.post("/rag/cache/verify")
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("tokens", [31, 700])
def test_dense_the_whole_budget_and_threshold_one_are_plain_decoding(
    sparse: Any, reference: SparseReference, tokens: int
) -> None:
    ids = some_ids(tokens, tokens)
    dense = result(generate(sparse.client, ids))
    reference.decode = DecodeOptions(mode="dense")
    assert worst(dense, reference.plain(ids, 24)) < TOLERANCE
    whole = generate(sparse.client, ids, mode="hierarchical", budget=8192)
    assert worst(result(whole), dense) < 5e-5
    assert report(whole).sparse_steps == 0
    certain = generate(sparse.client, ids, mode="progressive", threshold=1.0, streaming=False)
    assert worst(result(certain), dense) < TOLERANCE
    assert report(certain).share == report(certain).weight == 1.0


@pytest.fixture(scope="module")
def dense(reference: SparseReference) -> Generated:
    reference.decode = DecodeOptions(mode="dense")
    return reference.plain(OF_THE_RULE, 24)


@pytest.mark.parametrize(
    "decode",
    [
        {"mode": "hierarchical", "budget": 128, "reuse": 1},
        {"mode": "hierarchical", "budget": 64, "reuse": 5, "scores": "bound"},
        {"mode": "hierarchical", "budget": 48, "reuse": 40, "scores": "bound"},
        {"mode": "hierarchical", "budget": 96, "reuse": 3, "streaming": True},
        {"mode": "hierarchical", "budget": 64, "reuse": 5, "observe": "last"},
        {"mode": "hierarchical", "budget": 80, "reuse": 3, "window": 5, "scores": "exact"},
        {"mode": "hierarchical", "budget": 64, "observe": "prompt", "window": 9},
        {"mode": "hierarchical", "budget": 64, "observe": "recent"},
        {"mode": "progressive", "threshold": 0.6},
    ],
    ids=str,
)
def test_decode_steps_read_the_pages_of_the_rule(
    sparse: Any, reference: SparseReference, dense: Generated, decode: dict[str, Any]
) -> None:
    ids = OF_THE_RULE
    options = {"streaming": False} | decode
    reference.decode = DecodeOptions(**options, dense_below=0)
    want = reference.plain(ids, 24)
    got = generate(sparse.client, ids, **options)
    assert worst(result(got), want) < TOLERANCE
    assert dense.ids != want.ids or worst(dense, want) > 0.01, "the test must tell sparse from dense"
    said = report(got)
    assert said.sparse_steps == said.steps == 23
    if decode["mode"] == "progressive":
        assert said.weight is not None
        assert 0.6 < said.weight < 1
        assert said.share < 1
    elif not options["streaming"]:
        asked = decode["budget"] // PAGE
        anew = decode.get("reuse") == 1 or decode.get("observe") == "recent"
        assert said.pages == asked if anew else asked < said.pages < asked + 1, (
            "a page that begins joins those chosen"
        )


def test_modes_mixed_in_one_batch_with_shared_prefixes_and_leavers(
    sparse: Any, reference: SparseReference
) -> None:
    """Twelve requests at once: some share a prefix, three leave, and statistics are checked meanwhile."""
    chance = random.Random(11)
    shared = some_ids(330, 99)
    modes: list[dict[str, Any]] = [
        {"mode": "dense"},
        {"mode": "hierarchical", "budget": 96, "reuse": 1, "streaming": False},
        {"mode": "hierarchical", "budget": 160, "reuse": 1, "streaming": True},
        {"mode": "progressive", "threshold": 0.7, "streaming": False},
        # chosen anew for its own pages' sake only, so that the batch around it must not matter
        {"mode": "hierarchical", "budget": 80, "reuse": 1000, "observe": "last", "streaming": False},
    ]
    jobs = []
    for i in range(12):
        own = some_ids(chance.randrange(5, 400), 1000 + i)
        jobs.append(
            (
                shared + own if i % 3 == 0 else own + some_ids(60, i),
                modes[i % 5],
                chance.randrange(4, 30),
                i in (2, 5, 8),
            )
        )

    def run(job: tuple[list[int], dict[str, Any], int, bool]) -> dict[str, Any] | None:
        ids, decode, n_new, leaves = job
        if not leaves:
            return generate(sparse.client, ids, n_new, **decode)
        custom = {DECODE_FIELD: json.dumps(decode)}
        sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True, "custom_params": custom}
        body = {"input_ids": ids, "stream": True, "sampling_params": sampling}
        with sparse.client.stream("POST", "/generate", json=body) as stream:
            for count, _ in enumerate(stream.iter_lines()):
                if count > 6:
                    return None
        raise AssertionError("the stream ended by itself")

    with ThreadPoolExecutor(13) as pool:
        answers = [pool.submit(run, job) for job in jobs]
        while not all(answer.done() for answer in answers):
            verify(sparse.client)
            time.sleep(0.3)
        got = [answer.result() for answer in answers]
    for (ids, decode, n_new, leaves), answer in zip(jobs, got, strict=True):
        if leaves:
            continue
        assert answer is not None
        reference.decode = DecodeOptions(**decode, dense_below=0)
        assert worst(result(answer), reference.plain(ids, n_new)) < TOLERANCE, decode
    verify(sparse.client)


def test_decode_rows_in_prefill_batches_are_dense_there_and_sparse_again_after(
    sparse: Any, reference: SparseReference
) -> None:
    """While one request decodes by budget, others are prefilled in chunks that carry its decode row along."""
    reference.decode = DecodeOptions(mode="progressive", threshold=1.0, dense_below=0)
    certain = {"mode": "progressive", "threshold": 1.0, "streaming": False}
    budget = {"mode": "hierarchical", "budget": 64, "reuse": 3, "streaming": False}
    jobs = [(some_ids(300, 51), 40, budget), (some_ids(280, 52), 40, certain)]
    jobs += [(some_ids(700, 60 + i), 4, {"mode": "dense"}) for i in range(2)]
    mixed, deadline = False, time.monotonic() + 240
    while not mixed:  # the first two may have been answered before the others come
        assert time.monotonic() < deadline
        with ThreadPoolExecutor(len(jobs)) as pool:
            ask = partial(pool.submit, generate, sparse.client, may_mix=True)
            first = [ask(*job[:2], **job[2]) for job in jobs[:2]]
            verify(sparse.client)
            later = [ask(*job[:2], **job[2]) for job in jobs[2:]]
            while not all(answer.done() for answer in later):
                verify(sparse.client)
                time.sleep(0.3)
            answers = [answer.result() for answer in (*first, *later)]
        said = report(answers[0])
        assert said.steps == 39
        mixed = said.sparse_steps < said.steps  # some of its steps were in prefill batches
        if not mixed:
            sparse.client.delete("/rag/cache").raise_for_status()
    assert said.sparse_steps > 0
    for (ids, n_new, decode), answer in zip(jobs, answers, strict=True):
        if decode is not budget:
            assert answer["output_ids"] == reference.plain(ids, n_new).ids, decode
    verify(sparse.client)


def test_answers_of_a_dialogue_are_found_with_their_statistics(
    sparse: Any, reference: SparseReference
) -> None:
    """Decoded tokens enter the prefix cache page by page; the next turn chooses among their pages."""
    ids = some_ids(200, 21)
    decode = {"mode": "hierarchical", "budget": 64, "reuse": 1, "streaming": False}
    for turn in range(3):
        first = result(generate(sparse.client, ids, 40))
        ids = ids + first.ids + some_ids(5, turn)
        verify(sparse.client)
        reference.decode = DecodeOptions(**decode, dense_below=0)
        answer = generate(sparse.client, ids, 10, **decode)
        assert worst(result(answer), reference.plain(ids, 10)) < TOLERANCE
        assert answer["meta_info"]["cached_tokens"] >= (len(ids) - 6) // PAGE * PAGE
    verify(sparse.client)


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_composed_contexts_are_read_sparsely(sparse: Any, reference: SparseReference, recompute: str) -> None:
    spans = [(0, 20), (20, 230), (230, 471), (471, 700)]
    ids = some_ids(700 + 15, 31)
    plan = ContextPlan(
        "compose", "sparse", "concat", tuple(Span(a, b) for a, b in spans), {"recompute": recompute}
    )
    decode = {"mode": "hierarchical", "budget": 96, "reuse": 4, "streaming": False}
    for _ in range(3):
        answer = generate(sparse.client, ids, 20, plan, **decode)
        message = str(answer.get("error", {}).get("message", ""))
        if not message.startswith(MISSING_PREFIX):
            break
        for i in json.loads(message.removeprefix(MISSING_PREFIX)):
            generate(sparse.client, ids[slice(*spans[i])], 1, document_plan("sparse", i))
    reference.decode = DecodeOptions(**decode, dense_below=0)
    want = reference.plain(ids, 20) if recompute == "all" else reference.composed(ids, spans, 20)
    assert worst(result(answer), want) < TOLERANCE
    assert report(answer).sparse_steps == 19
    assert json.loads(answer["meta_info"][PLAN_FIELD][0])["one_pass"] == (recompute == "all"), (
        "both reports arrive"
    )
    verify(sparse.client)


def test_bad_options_end_the_request_with_a_reason(sparse: Any) -> None:
    for decode, reason in (
        ({"mode": "fast"}, "option mode of sparse decoding is 'fast'"),
        ({"mode": "hierarchical", "budget": 512}, "largest is 256"),
    ):
        assert reason in generate(sparse.client, [5] * 40, **decode)["error"]["message"]


def test_a_query_says_what_it_read_and_metrics_count_it(sparse: Any) -> None:
    documents = [{"text": f"The keeper of lighthouse {i} is called Anna {i}. " * 10} for i in range(4)]
    body = {"query": "Who keeps lighthouse 2?", "documents": documents, "max_new_tokens": 12}
    decode = {"mode": "hierarchical", "budget": 64, "reuse": 2, "streaming": False}
    answer = sparse.client.post("/rag/query", json=body | {"decode": decode}).json()
    assert answer["decode"]["mode"] == "hierarchical"
    assert 4 <= answer["decode"]["pages"] < 5, "a page that begins joins the four of the budget"
    assert 0 < answer["decode"]["share"] < 0.5
    assert sparse.client.post("/rag/query", json=body).json()["decode"] is None, (
        "dense requests have nothing to say"
    )
    metrics = sparse.client.get("/metrics").text
    assert 'ragserve_decode_steps_total{mode="hierarchical",sparse="yes"' in metrics
    assert 'ragserve_decode_pages_total{kind="read",mode="progressive"' in metrics


# sparse prefill


def prefilled(client: Any, ids: list[int], n_new: int = 8, **prefill: Any) -> dict[str, Any]:
    """Generate with options of sparse prefill."""
    custom = {PREFILL_FIELD: json.dumps({"dense_below": 0} | prefill)}
    sampling = {"temperature": 0, "max_new_tokens": n_new, "ignore_eos": True, "custom_params": custom}
    return context_client.generate(client, ids, sampling_params=sampling)


def sparse_prefix(answer: dict[str, Any]) -> PrefillReport:
    return PrefillReport.from_json(answer["meta_info"][PREFILL_FIELD][-1])


@pytest.mark.parametrize(
    "prefill",
    [
        {"mode": "vertical_slash", "alpha": 0.5, "observe": 32},
        {"mode": "block_sparse", "alpha": 0.2, "streaming": True},  # a server with a pattern file has it so
    ],
    ids=str,
)
def test_prefill_attends_to_the_chosen_blocks_and_its_kv_stays_apart(
    sparse: Any, reference: SparseReference, prefill: dict[str, Any]
) -> None:
    ids = some_ids(1300, 72 + (prefill["mode"] == "vertical_slash"))
    reference.decode, chunks = DecodeOptions(mode="dense"), list(range(0, 1300, 256))
    dense = reference.plain(ids, 8)
    reference.prefill, reference.starts = PrefillOptions(**prefill), chunks
    try:
        want, blocks = reference.plain(ids, 8), reference.blocks
    finally:
        reference.prefill, reference.starts = PrefillOptions(), [0]
    assert dense.ids != want.ids or worst(dense, want) > 0.01, "the test must tell sparse from dense"
    got = prefilled(sparse.client, ids, **prefill)
    assert worst(result(got), want) < TOLERANCE
    said = sparse_prefix(got)
    assert (said.mode, said.tokens) == (prefill["mode"], 1300)
    assert 0.1 < said.share < 0.9
    assert abs(said.share - float(blocks[0] / blocks[1])) < 0.01
    # exact requests neither find this KV nor are they found
    after = generate(sparse.client, ids, 8)
    assert after["meta_info"]["cached_tokens"] == 0
    assert worst(result(after), dense) < TOLERANCE
    other = prefilled(sparse.client, ids, mode=prefill["mode"], share=0.4, dense_last=0)
    assert other["meta_info"]["cached_tokens"] == 0
    assert 0.2 < sparse_prefix(other).share < 0.7
    again = prefilled(sparse.client, ids, **prefill)
    assert again["meta_info"]["cached_tokens"] == 1300 // PAGE * PAGE - (PAGE if 1300 % PAGE == 0 else 0)
    assert sparse_prefix(again).tokens == 1300 % PAGE
    verify(sparse.client)


def test_a_later_turn_begins_from_the_lines_of_the_turn_before(
    sparse: Any, reference: SparseReference
) -> None:
    ids, first = some_ids(1500, 79), 1280  # whole chunks and pages
    prefill = {"mode": "vertical_slash", "alpha": 0.5, "observe": 32}
    reference.decode = DecodeOptions(mode="dense")
    reference.prefill, reference.starts = PrefillOptions(**prefill), list(range(0, 1500, 256))
    try:
        anew = reference.plain(ids, 4)
        reference.turn = first
        want = reference.plain(ids, 4)
    finally:
        reference.prefill, reference.starts, reference.turn = PrefillOptions(), [0], 0
    assert anew.ids != want.ids or worst(anew, want) > 2 * TOLERANCE, "the test must tell the two apart"
    before = sparse_prefix(prefilled(sparse.client, ids[:first], 4, **prefill))
    assert before.reused_lines == 0 < before.new_lines
    got = prefilled(sparse.client, ids, 4, **prefill)
    assert got["meta_info"]["cached_tokens"] == first
    assert worst(result(got), want) < TOLERANCE
    assert sparse_prefix(got).reused_lines > 0
    verify(sparse.client)


def test_prefill_of_all_blocks_and_of_short_prompts_is_exact(sparse: Any, reference: SparseReference) -> None:
    ids = some_ids(450, 78)
    reference.decode = DecodeOptions(mode="dense")
    want = reference.plain(ids, 8)
    with ThreadPoolExecutor(3) as pool:  # one batch of sparse and dense requests
        whole = pool.submit(prefilled, sparse.client, ids, mode="vertical_slash", alpha=1.0)
        dense = pool.submit(generate, sparse.client, ids, 8)
        decoding = pool.submit(generate, sparse.client, ids[:200], 30, may_mix=True)
        assert worst(result(whole.result()), want) < TOLERANCE
        assert sparse_prefix(whole.result()).share == 1.0
        assert worst(result(dense.result()), want) < TOLERANCE
        assert decoding.result()["output_ids"] == reference.plain(ids[:200], 30).ids
    short = prefilled(sparse.client, ids, mode="block_sparse", dense_below=450)
    assert PREFILL_FIELD not in short["meta_info"]
    assert short["meta_info"]["cached_tokens"] > 400, "it shares the exact cache"


def test_prefill_options_are_refused_with_a_reason(sparse: Any) -> None:
    for prefill, reason in (
        ({"mode": "fast"}, "option mode of sparse prefill is 'fast'"),
        ({"mode": "block_sparse", "observe": 8}, "observe is for mode 'vertical_slash'"),
    ):
        assert reason in prefilled(sparse.client, [5] * 40, **prefill)["error"]["message"]
    plan = ContextPlan("document", "sparse")
    custom = {PREFILL_FIELD: '{"mode": "vertical_slash"}', PLAN_FIELD: plan.to_json()}
    refused = context_client.generate(sparse.client, [7] * 40, sampling_params={"custom_params": custom})
    assert "documents are prefilled densely" in refused["error"]["message"]
    key = PrefillOptions(mode="vertical_slash").sparse_key("a")
    assert "is one of sparse prefill" in generate_as(sparse.client, key)["error"]["message"]


def generate_as(client: Any, extra_key: str) -> dict[str, Any]:
    body = {"input_ids": [9] * 40, "sampling_params": {"max_new_tokens": 1}, "extra_key": extra_key}
    return dict(client.post("/generate", json=body, timeout=300).json())
