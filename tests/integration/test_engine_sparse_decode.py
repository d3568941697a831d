"""Sparse decoding on the real engine: dense as it was, chosen pages as a masked reference, all modes in one
batch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.attention.streaming_heads import save_pattern, streaming_heads
from sglang_ext.protocol import (
    DECODE_FIELD,
    MISSING_PREFIX,
    PLAN_FIELD,
    ContextPlan,
    DecodeOptions,
    DecodeReport,
    Span,
)
from tests.conftest import MODEL
from tests.integration.reference import Generated
from tests.integration.sparse_reference import SparseReference

PAGE, LOGICAL = 16, 4
SINK, LOCAL = 64, 256  # the server's defaults
GATES = torch.rand(10, 2, generator=torch.Generator().manual_seed(5))
STREAMING = streaming_heads(GATES, 0.5)
TOLERANCE = 5e-4


@pytest.fixture(scope="module")
def sparse(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with pages of 16 tokens and two tensor-parallel processes of a KV head each, dense for
    requests that do not say.
    """
    heads = tmp_path_factory.mktemp("heads") / "heads.json"
    save_pattern(heads, GATES, share=0.5, model="ragserve-tiny")
    with (
        start_server(
            sparse_attention="on",
            decode_mode="dense",
            decode_dense_below=0,
            decode_page_size=PAGE,
            decode_logical_page=LOGICAL,
            decode_budget=128,
            decode_max_budget=256,
            decode_heads=heads,
            tp_size=2,
            engine_args='{"chunked_prefill_size": 256, "enable_mixed_chunk": true}',
            env={"SGLANG_CPU_OMP_THREADS_BIND": "0|0"},
        ) as running,
        running.client() as client,
    ):
        yield SimpleNamespace(client=client, url=running.url)


@pytest.fixture(scope="module")
def reference() -> SparseReference:
    return SparseReference(MODEL, PAGE, LOGICAL, STREAMING, SINK, LOCAL)


def some_ids(n: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 8000) for _ in range(n)]


def generate(
    client: Any,
    ids: list[int],
    n_new: int = 24,
    plan: ContextPlan | None = None,
    *,
    may_mix: bool = False,
    **decode: Any,
) -> dict[str, Any]:
    """``may_mix``: ask for no logprobs, which SGLang serves in batches of decode rows only."""
    custom = {DECODE_FIELD: json.dumps(decode)} if decode else {}
    if plan is not None:
        custom[PLAN_FIELD] = plan.to_json()
    sampling = {
        "temperature": 0,
        "max_new_tokens": n_new,
        "ignore_eos": True,
        "custom_params": custom or None,
    }
    logprobs = not may_mix and (plan is None or plan.operation == "compose")
    return dict(
        client.post(
            "/generate", json={"input_ids": ids, "sampling_params": sampling, "return_logprob": logprobs}
        ).json()
    )


def result(answer: dict[str, Any]) -> Generated:
    assert "error" not in answer, answer
    pairs = answer["meta_info"]["output_token_logprobs"]
    return Generated([token for _, token, _ in pairs], [logprob for logprob, _, _ in pairs])


def report(answer: dict[str, Any]) -> DecodeReport:
    return DecodeReport.from_json(answer["meta_info"][DECODE_FIELD][-1])


def worst(got: Generated, want: Generated) -> float:
    assert got.ids == want.ids
    return max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True))


def verify(client: Any) -> None:
    """Statistics of all cached pages against their keys, and the tiers' accounts."""
    answer = client.post("/rag/cache/verify")
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("tokens", [31, 700])
def test_dense_the_whole_budget_and_threshold_one_are_the_wrapped_backend(
    sparse: Any, server: Any, tokens: int
) -> None:
    ids = some_ids(tokens, tokens)
    plain = result(generate(server.client, ids))
    assert worst(result(generate(sparse.client, ids)), plain) < 5e-5
    whole = generate(sparse.client, ids, mode="hierarchical", budget=8192)
    assert worst(result(whole), plain) < 5e-5
    assert report(whole).sparse_steps == 0
    certain = generate(sparse.client, ids, mode="progressive", threshold=1.0, streaming=False)
    assert worst(result(certain), plain) < TOLERANCE
    assert report(certain).share == report(certain).weight == 1.0


@pytest.mark.parametrize(
    "decode",
    [
        {"mode": "hierarchical", "budget": 128, "reuse": 1},
        {"mode": "hierarchical", "budget": 64, "reuse": 5},
        {"mode": "hierarchical", "budget": 48, "reuse": 40},
        {"mode": "hierarchical", "budget": 96, "reuse": 3, "streaming": True},
        {"mode": "progressive", "threshold": 0.6},
    ],
    ids=str,
)
def test_decode_steps_read_the_pages_of_the_rule(
    sparse: Any, reference: SparseReference, decode: dict[str, Any]
) -> None:
    ids = some_ids(650, 3)
    options = {"streaming": False} | decode
    reference.decode = DecodeOptions(**options, dense_below=0)
    want = reference.plain(ids, 24)
    got = generate(sparse.client, ids, **options)
    assert worst(result(got), want) < TOLERANCE
    reference.decode = DecodeOptions()
    dense = reference.plain(ids, 24)
    assert dense.ids != want.ids or worst(dense, want) > 0.01, "the test must tell sparse from dense"
    said = report(got)
    assert said.sparse_steps == said.steps == 23
    if decode["mode"] == "progressive":
        assert said.weight is not None
        assert 0.6 < said.weight < 1
        assert said.share < 1
    elif not options["streaming"]:
        asked = decode["budget"] // PAGE
        assert said.pages == asked if decode["reuse"] == 1 else asked < said.pages < asked + 1, (
            "a page that begins joins those chosen"
        )


def test_modes_mixed_in_one_batch_with_shared_prefixes_and_leavers(
    sparse: Any, reference: SparseReference
) -> None:
    """Twelve requests at once; some share a prefix, three go away in between; statistics are checked
    meanwhile.
    """
    chance = random.Random(11)
    shared = some_ids(330, 99)
    modes: list[dict[str, Any]] = [
        {"mode": "dense"},
        {"mode": "hierarchical", "budget": 96, "reuse": 1, "streaming": False},
        {"mode": "hierarchical", "budget": 160, "reuse": 1, "streaming": True},
        {"mode": "progressive", "threshold": 0.7, "streaming": False},
        # chosen anew for its own pages' sake only, so that the batch around it must not matter
        {"mode": "hierarchical", "budget": 80, "reuse": 1000, "streaming": False},
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
    with ThreadPoolExecutor(len(jobs)) as pool:
        first = [pool.submit(generate, sparse.client, *job[:2], may_mix=True, **job[2]) for job in jobs[:2]]
        verify(sparse.client)
        later = [pool.submit(generate, sparse.client, *job[:2], may_mix=True, **job[2]) for job in jobs[2:]]
        while not all(answer.done() for answer in later):
            verify(sparse.client)
        answers = [answer.result() for answer in (*first, *later)]
    for (ids, n_new, decode), answer in zip(jobs, answers, strict=True):
        if decode is not budget:
            assert answer["output_ids"] == reference.plain(ids, n_new).ids, decode
    said = report(answers[0])
    assert said.steps == 39
    assert 0 < said.sparse_steps < said.steps, "some of its steps were in prefill batches"
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
            generate(sparse.client, ids[slice(*spans[i])], 1, ContextPlan("document", "sparse"))
    reference.decode = DecodeOptions(**decode, dense_below=0)
    want = reference.plain(ids, 20) if recompute == "all" else reference.composed(ids, spans, 20)
    assert worst(result(answer), want) < TOLERANCE
    assert report(answer).sparse_steps == 19
    assert json.loads(answer["meta_info"][PLAN_FIELD][0])["one_pass"] == (recompute == "all"), (
        "both reports arrive"
    )
    verify(sparse.client)


def test_bad_options_end_the_request_with_a_reason(sparse: Any, server: Any) -> None:
    for decode, reason in (
        ({"mode": "fast"}, "decode mode 'fast'"),
        ({"mode": "hierarchical", "budget": 512}, "largest is 256"),
    ):
        assert reason in generate(sparse.client, [5] * 40, **decode)["error"]["message"]
    question = {"query": "Who?", "documents": [{"text": "Nobody knows."}], "max_new_tokens": 4}
    refused = server.client.post("/rag/query", json=question | {"decode": {"mode": "dense"}})
    assert refused.status_code == 400
    assert "--sparse-attention on" in refused.json()["error"]["message"]


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
