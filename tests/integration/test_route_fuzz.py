"""No request to SGLang's routes ends the server: those that once did, and a short run of the fuzzer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ragserve.api.upstream import SERVED
from tests.conftest import EXHAUSTIVE
from tests.integration import route_fuzz
from tests.integration.engines import Server

AMBIGUOUS = "[a-z]?"
for _ in range(7):
    AMBIGUOUS = f"({AMBIGUOUS * 2})?"
DEADLY: dict[str, tuple[str, dict[str, Any]]] = {
    "an id outside the vocabulary": ("/generate", {"input_ids": [999_999_999, 5]}),
    "one in a batch": ("/generate", {"input_ids": [[5, 6], [7, -1]]}),
    "one in a completion": ("/v1/completions", {"model": "default", "prompt": [5, 10**8]}),
    "a stop id outside it": ("/generate", {"stop_token_ids": [10**7], "min_new_tokens": 2}),
    "a step of zero": ("/generate", {"stream_interval": 0}),
    "half a top_k": ("/generate", {"top_k": 1.5}),
    "a long top_k": ("/generate", {"top_k": 2**40}),
    "text for a flag": ("/generate", {"ignore_eos": "yes"}),
    "nested custom_params": ("/generate", {"custom_params": {"a": {"b": {"c": 1}}}}),
    "the server's own mark": ("/generate", {"custom_params": {"ragserve_background": 256}}),
    "distributions": ("/generate", {"custom_params": {"ragserve_distribution": 2}}),
    "forced tokens": ("/generate", {"custom_params": {"ragserve_forced": "[5]"}}),
    "log-probabilities without end": (
        "/generate",
        {"text": "x", "return_logprob": True, "token_ids_logprob": [5] * 2**15},
    ),
    "a bias that is no number": ("/generate", {"logit_bias": {"5": float("nan")}, "temperature": 0.5}),
    "an endless bias": ("/generate", {"logit_bias": {"5": float("inf")}, "temperature": 0.5}),
    "a regex of NUL": ("/generate", {"regex": "\0"}),
    "an ambiguous regex": ("/generate", {"regex": AMBIGUOUS}),
    "an ambiguous pattern": (
        "/generate",
        {"json_schema": json.dumps({"pattern": AMBIGUOUS})},
    ),
    "endless rules": ("/generate", {"ebnf": 'root ::= a a | "" | [a-z]\na ::= root root | ""'}),
    "a text of 10,000 characters": ("/generate", {"json_schema": '{"type": "string", "maxLength": 10000}'}),
    "a schema of nothing but itself": ("/generate", {"json_schema": '{"$ref": "#"}'}),
    "a client's own template": (
        "/v1/chat/completions",
        {
            "messages": route_fuzz.CHAT,
            "text": "",
            "chat_template_kwargs": {"chat_template": "{{ 10**9 }}"},
        },
    ),
    "the template of a tokenizer": (
        "/tokenize",
        {"messages": route_fuzz.CHAT, "text": "", "chat_template_kwargs": {"chat_template": "x"}},
    ),
    "another's image": ("/generate", {"text": "x", "mm_hashes": ["ab"]}),
    "a deep schema": ("/generate", {"json_schema": "[" * 100_000}),
    "more top tokens than there are": (
        "/generate",
        {"text": "x", "top_logprobs_num": 10**8, "return_logprob": True},
    ),
    "labels of metrics": ("/generate", {"text": "x", "custom_labels": {"a": "b"}}),
    "embeddings at positions": ("/generate", {"text": "x", "positional_embed_overrides": {"a": 1}}),
    "delimiters": ("/generate", {"text": "x", "multi_item_delimiter_indices": [10**6]}),
    "experts": ("/generate", {"text": "x", "return_routed_experts": True}),
    "a list for a processor": (
        "/v1/completions",
        {"model": "default", "prompt": "x", "custom_logit_processor": []},
    ),
    "a session": ("/generate", {"text": "x", "session_params": {"id": 5}}),
}


@pytest.fixture(scope="module")
def server(quick_server: Server) -> Server:
    """None of these answers need be right."""
    return quick_server


@pytest.mark.parametrize("name", DEADLY)
def test_a_deadly_request_is_refused(server: Server, name: str) -> None:
    path, fields = DEADLY[name]
    top = {"text", "input_ids", "prompt"} & fields.keys()
    body = fields if top else {"text": "A lighthouse", "sampling_params": {"max_new_tokens": 6} | fields}
    status = route_fuzz.send(server.client, path, route_fuzz.encoded(body))
    assert status == 400, status
    assert route_fuzz.answers(server.client)


def test_requests_with_and_without_token_ids_may_decode_together(server: Server) -> None:
    """Each is right alone. Together they ended the scheduler."""
    sampling = {"max_new_tokens": 300, "ignore_eos": True, "temperature": 0}
    long = {"input_ids": [5, 6], "return_logprob": True, "stream": True, "sampling_params": sampling}
    with server.client.stream("POST", "/generate", json=long) as stream:
        lines = stream.iter_lines()
        assert "output_token_logprobs" in next(lines)
        body = {"input_ids": [7, 8], "return_logprob": True, "token_ids_logprob": [5, 9]}
        answer = server.client.post(
            "/generate", json=body | {"sampling_params": sampling | {"max_new_tokens": 8}}
        )
        assert [len(row) for row in answer.json()["meta_info"]["output_token_ids_logprobs"]] == [2] * 8
        last = [line for line in lines if line][-2]
    meta = json.loads(last.removeprefix("data: "))["meta_info"]
    assert len(meta["output_token_logprobs"]) == 300


def test_what_the_server_serves_and_leaves_out_are_sglangs_routes() -> None:
    theirs = set(route_fuzz.sglang_document()["paths"])
    undescribed = {"/metrics", "/metrics/", "/v1/realtime", "/tokenize", "/detokenize"}
    of_0_5_17 = {"/get_load", "/get_weight_version", "/weight_version"}
    assert not set(SERVED) - theirs - undescribed - of_0_5_17
    off = {"/flush_cache", "/pause_generation", "/update_weights_from_disk", "/open_session", "/slow_down"}
    assert off <= theirs - set(SERVED)


def test_the_server_outlives_the_fuzzer(server: Server) -> None:
    statuses = route_fuzz.fuzz(server.client, 2026, count=2000 if EXHAUSTIVE else 96)
    assert statuses[200]
    assert statuses[400]
