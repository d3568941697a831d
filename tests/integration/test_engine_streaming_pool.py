"""Streaming heads with a pool of their own on the real engine: answers compared with masks in transformers,
nothing leaks, and what does not go with it is refused."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.attention.pools.streaming_heads import streaming_heads
from sglang_ext.wire.protocol import PREFILL_FIELD
from tests.integration.context_client import assert_same, generate, plan_of, result
from tests.integration.engines import STREAMING_GATES, STRESS_CHUNK, Server
from tests.integration.prompts import some_ids
from tests.integration.reference import Reference

PAGE, SINKS, LOCAL = 16, 4, 16  # pages, of the server's defaults of 64 and 256 tokens
RING = SINKS + LOCAL + 1
STREAMING = streaming_heads(STREAMING_GATES, 0.75)
NEW = 12
TOLERANCE = 1e-3


class Masked(Reference):
    """The model in transformers; streaming heads see the first pages, the row's own and those before it."""

    def __init__(self, path: Path) -> None:
        from transformers import AttentionInterface

        super().__init__(path)
        AttentionInterface.register("ragserve_streaming_masks", self._attend)
        self.model.set_attn_implementation("ragserve_streaming_masks")

    def _attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        scaling: float,
        **_: Any,
    ) -> Any:
        new, tokens = q.shape[2], k.shape[2]
        key = torch.arange(tokens)[None]
        row = torch.arange(tokens - new, tokens)[:, None]
        near = (key // PAGE < SINKS) | (key // PAGE >= row // PAGE - LOCAL)
        heads = STREAMING[module.layer_idx].repeat_interleave(q.shape[1] // k.shape[1])
        seen = torch.where(heads[:, None, None], near, True) & (key <= row)
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen[None], scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None


@pytest.fixture(scope="module")
def reference(streaming_server: Server) -> Masked:
    assert streaming_server.model is not None
    return Masked(streaming_server.model)


def held(client: Any) -> dict[str, Any]:
    """What requests hold, once none is running."""
    deadline = time.monotonic() + 240
    while True:
        pool = dict(client.get("/info").json()["engine"]["streaming_pool"])
        if not pool["running"]:
            return pool
        assert time.monotonic() < deadline, pool
        time.sleep(0.02)


def test_answers_are_those_of_masks(streaming_server: Server, reference: Masked) -> None:
    """One by one: prompts that end in a page and at its end, of less than a chunk and of several."""
    for tokens in (5, PAGE * RING - 1, 3 * STRESS_CHUNK, 700):
        ids = some_ids(tokens, tokens)
        got = result(generate(streaming_server.client, ids, n_new=NEW))
        assert_same(got, reference.plain(ids, NEW), TOLERANCE)
    assert_differs(ids, got.ids, streaming_server)


def assert_differs(ids: list[int], streamed: list[int], server: Server) -> None:
    """The prompt tells streaming heads from others."""
    assert server.model is not None
    assert Reference(server.model).plain(ids, NEW).ids != streamed


def test_batches_with_retractions_and_decode_rows_in_prefill_answer_the_same(
    streaming_server: Server, reference: Masked
) -> None:
    """More requests than may run at once, some without logprobs, which SGLang mixes into prefill batches."""
    made = random.Random(1)
    prompts = [some_ids(made.randrange(20, 600), seed) for seed in range(12)]

    retractions = []

    def ask(i: int) -> list[int]:
        time.sleep(0.02 * i)
        answer = generate(streaming_server.client, prompts[i], n_new=NEW, return_logprob=i % 3 == 0)
        assert "error" not in answer, answer
        assert answer["meta_info"]["cached_tokens"] == 0
        retractions.append(answer["meta_info"]["num_retractions"])
        return list(answer["output_ids"])

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    assert answers == [reference.plain(ids, NEW).ids for ids in prompts]
    assert sum(retractions) > 0
    assert held(streaming_server.client)["held_pages"] == 0


def test_aborted_requests_give_everything_back(streaming_server: Server) -> None:
    client = streaming_server.client

    def leave(i: int) -> None:
        timeout = 0.05 + 0.05 * (i % 4)
        with pytest.raises(httpx.TimeoutException):
            generate(client, some_ids(500, i), n_new=1500, timeout=timeout)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(8)))
    pool = held(client)
    assert (pool["running"], pool["other_pages"], pool["held_pages"]) == (0, 0, 0)
    checked = client.post("/rag/cache/verify", json={})
    assert checked.status_code == 200, checked.text


def test_the_same_prompt_is_computed_again(streaming_server: Server) -> None:
    ids = some_ids(300, 5)
    first, second = (generate(streaming_server.client, ids, n_new=2) for _ in range(2))
    assert [answer["meta_info"]["cached_tokens"] for answer in (first, second)] == [0, 0]
    assert first["output_ids"] == second["output_ids"]


def test_turns_of_a_session_are_computed_whole(streaming_server: Server) -> None:
    client = streaming_server.client
    body = {"query": "Who?", "documents": [{"text": "Nobody knows. " * 30}], "max_new_tokens": 4}
    session = "new"
    for _ in range(2):
        answer = client.post("/rag/query", json=body | {"strategy": "prefix", "session": session}).json()
        assert answer["usage"]["cached"] == 0, answer
        session = answer["session"]["id"]
    assert client.delete(f"/rag/sessions/{session}").status_code == 200


def test_what_does_not_go_with_it_fails_the_request_with_advice(streaming_server: Server) -> None:
    client, ids = streaming_server.client, some_ids(60, 31)
    for decode in ({"mode": "hierarchical"}, {"mode": "progressive"}, {"streaming": False}):
        assert "decode_heads_pool=shared" in generate(client, ids, decode=decode)["error"]["message"]
    custom = {PREFILL_FIELD: json.dumps({"mode": "vertical_slash"})}
    sampling = {"temperature": 0, "max_new_tokens": 2, "custom_params": custom}
    refused = client.post("/generate", json={"input_ids": ids, "sampling_params": sampling}).json()
    assert "omit prefill" in refused["error"]["message"]
    refused = generate(client, ids, plan_of([(0, 20), (20, 50)]))
    assert "'prefix' or 'full'" in refused["error"]["message"]
    question = {"query": "Who?", "documents": [{"text": "Nobody knows."}], "max_new_tokens": 4}
    for more in (
        {"strategy": "concat"},
        {"decode": {"mode": "hierarchical"}},
        {"prefill": {"mode": "vertical_slash"}},
    ):
        refused = client.post("/rag/query", json=question | more)
        assert refused.status_code == 400
        assert "decode_heads_pool" in json.dumps(refused.json()["error"])
    assert client.post("/rag/query", json=question).status_code == 200
    assert "error" not in generate(client, ids, n_new=2, decode={"mode": "dense"})


def test_info_says_what_the_two_pools_are(streaming_server: Server) -> None:
    engine = streaming_server.client.get("/info").json()["engine"]
    pool = engine["streaming_pool"]
    assert (pool["pages_per_request"], pool["requests"], pool["streaming_heads"]) == (RING, 6, 0.75)
    assert engine["max_total_tokens"] == 4096
    assert (
        pool["ring_bytes"] == 7 * RING * PAGE * 3 * 64 * 2 * 4
    )  # with the row for padding; 3 heads, K and V
