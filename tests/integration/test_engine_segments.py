"""Prompts that the pool cannot take, prefilled layer by layer on the real engine: the answers of requests
whose KV is on the device, and nothing lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx

from sglang_ext.wire.protocol import DECODE_FIELD, PREFILL_FIELD, DecodeOptions
from tests.integration import context_client
from tests.integration.context_client import result
from tests.integration.engines import Server
from tests.integration.offloaded_client import assert_same, generate, held, idle, report, verify
from tests.integration.prompts import some_ids
from tests.integration.sparse_reference import SparseReference

LAGGING = {"mode": "hierarchical", "budget": 64, "reuse": 4, "lag": 2, "streaming": False}
OFFLOADED = LAGGING | {"offloaded": True}
PAGE, LOGICAL = 16, 4


def test_a_prompt_larger_than_the_pool_gets_the_answer_of_one_on_the_device(stress_server: Server) -> None:
    """Requests beside it take it back, and its prompt is not prefilled again."""
    client, n_new = stress_server.client, 14
    ids = some_ids(6190, 61)
    assert held(client)["pages"] * PAGE > len(ids) > client.get("/info").json()["engine"]["max_total_tokens"]
    refused = context_client.generate(client, ids, None, n_new, decode=LAGGING)
    assert "exceeds the maximum allowed length" in refused["error"]["message"]
    alone = generate(client, ids, n_new, **OFFLOADED)
    said, meta = report(alone), alone["meta_info"]
    assert said.segmented_tokens == len(ids) // PAGE * PAGE
    assert said.offloaded_steps == said.steps == n_new - 1
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (len(ids), 0)
    assert stress_server.model is not None
    reference = SparseReference(stress_server.model, PAGE, LOGICAL)
    reference.decode = DecodeOptions(**LAGGING, dense_below=0)
    assert_same(result(alone), reference.plain(ids, n_new), 5e-4)
    with ThreadPoolExecutor(3) as pool:
        beside = [pool.submit(generate, client, some_ids(200, 90 + i), 40) for i in range(2)]
        again = pool.submit(generate, client, ids, n_new, **OFFLOADED | {"offloaded": "auto"})
        assert_same(result(again.result()), result(alone))
        for each in beside:
            each.result()
    assert report(again.result()).segmented_tokens == said.segmented_tokens
    verify(client)
    assert idle(client)["used"] == 0
    assert "ragserve_decode_segmented_tokens_total" in client.get("/metrics").text


def test_one_that_fails_or_is_left_on_its_way_leaves_nothing(stress_server: Server) -> None:
    client, ids = stress_server.client, some_ids(6200, 62)
    for stage in ("segments", "offloading", "decode plan", "forward", "statistics"):
        client.post("/dumper/ragserve", json={"op": "fault", "stage": stage})
        answer = context_client.generate(client, ids, None, 6, decode=OFFLOADED)
        assert f"'{stage}'" in answer["message"], stage
        verify(client)
    for patience in (0.05, 0.4):
        with suppress(httpx.TimeoutException):
            sampling = {
                "max_new_tokens": 150,
                "ignore_eos": True,
                "custom_params": {DECODE_FIELD: json.dumps(OFFLOADED)},
            }
            client.post("/generate", json={"input_ids": ids, "sampling_params": sampling}, timeout=patience)
    assert idle(client)["used"] == 0
    assert held(client)["prefilling"] == 0
    verify(client)
    assert stress_server.running.process.poll() is None


def test_what_needs_the_whole_prompt_on_the_device_is_refused(stress_server: Server) -> None:
    client, ids = stress_server.client, some_ids(6200, 63)
    custom = {DECODE_FIELD: json.dumps(OFFLOADED)}
    for fields, extra, what in (
        ({"return_logprob": True, "logprob_start_len": 0}, {}, "log-probabilities of the prompt"),
        ({"return_hidden_states": True}, {}, "hidden states of the prompt"),
        ({}, {PREFILL_FIELD: json.dumps({"mode": "vertical_slash", "dense_below": 0})}, "sparse prefill"),
    ):
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": {"custom_params": custom | extra}}
        answer = client.post("/generate", json=body | fields).json()
        assert f"without {what}" in answer["error"]["message"]


@contextmanager
def decoding(client: httpx.Client, ids: list[int]) -> Iterator[None]:
    """Keep a request on the device that decodes, from its first token to the end of the block."""
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    body = {"input_ids": ids, "stream": True, "sampling_params": sampling}
    with client.stream("POST", "/generate", json=body, timeout=300) as stream:
        lines = stream.iter_lines()  # the stream ends with it
        assert next(lines).startswith("data: {")
        yield


def test_ranks_prefill_by_segments_what_others_leave_no_room_for(parallel_server: Server) -> None:
    """Four requests of 1,580 tokens leave less of the pool than the fifth takes, while all decode. They fit
    with the 400 tokens that each may write, so SGLang admits them whatever it keeps room for."""
    client, n_new, tries = parallel_server.client, 12, 0
    segmented, deadline = 0, time.monotonic() + 240
    while not segmented and time.monotonic() < deadline:
        tries += 1
        ids = some_ids(1900, 64 + tries)
        with ExitStack() as others:
            for i in range(4):
                others.enter_context(decoding(client, some_ids(1580, 640 + 10 * tries + i)))
            offloaded = generate(client, ids, n_new, **OFFLOADED | {"resident_blocks": 1})
        assert_same(result(offloaded), result(generate(client, ids, n_new, **LAGGING)))
        said = report(offloaded)
        segmented = said.segmented_tokens
    assert segmented == (len(ids) - 1) // PAGE * PAGE
    assert said.offloaded_steps == said.steps == n_new - 1
    assert idle(client)["used"] == 0
    verify(client)


def test_what_the_warm_up_of_a_gpu_asks_for(parallel_server: Server) -> None:
    """A prompt that fits is prefilled by segments, once; launches for nobody leave nothing behind."""
    client, n_new, ids = parallel_server.client, 8, some_ids(900, 65)
    resident = result(generate(client, ids, n_new, **LAGGING))
    for op in ("launch", "segment"):
        done = client.post("/dumper/ragserve", json={"op": op})
        assert done.status_code == httpx.codes.OK, done.text
    asked = OFFLOADED | {"resident_blocks": 1}
    answers = [generate(client, ids, n_new, **asked) for _ in range(2)]
    for answer in answers:
        assert_same(result(answer), resident)
    assert [report(answer).segmented_tokens for answer in answers] == [(len(ids) - 1) // PAGE * PAGE, 0]
    kernels = client.post("/dumper/ragserve", json={"op": "compiled"}).json()[0]
    assert kernels == {"count": 0, "seconds": 0.0, "latest": []}, "on a CPU"
    assert idle(client)["used"] == 0
    verify(client)


def test_a_question_over_more_text_than_the_pool_holds_is_answered_offloaded(stress_server: Server) -> None:
    client = stress_server.client
    pool = client.get("/info").json()["engine"]["max_total_tokens"]
    texts = [{"text": " ".join(f"Station {i} has {j} rails." for j in range(140))} for i in range(5)]
    body = {"query": "How many rails?", "documents": texts, "strategy": "prefix", "max_new_tokens": 6}
    refused = client.post("/rag/query", json=body)
    assert refused.json()["error"]["code"] == "documents_too_long"
    offloaded = client.post("/rag/query", json=body | {"decode": OFFLOADED})
    assert offloaded.status_code == httpx.codes.OK, offloaded.text
    answer = offloaded.json()
    assert answer["usage"]["prompt"] > pool
    said = answer["decode"]
    assert said["steps"] == said["sparse_steps"] == said["offloaded_steps"] > 0
    assert said["segmented_tokens"] > pool
    assert said["resident_blocks"] > 0
    chosen = client.post("/rag/query", json=body | {"decode": OFFLOADED, "strategy": "auto"}).json()
    assert chosen["answer"] == answer["answer"]
    assert "larger than the KV pool" in chosen["context"]["choice"]
    verify(client)
