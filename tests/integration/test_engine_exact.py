"""Exact is exact: whatever a server has computed before, in whatever way, an exact request answers as one
that finds an empty cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.conftest import EXHAUSTIVE
from tests.integration.context_client import generate
from tests.integration.engines import Server
from tests.integration.exactness import HIERARCHICAL, LONG, Way, by_decoding, check
from tests.integration.prompts import some_ids

TOLERANCE = 5e-4
ON_DEVICE = {
    **by_decoding(64),
    "offloaded": Way(HIERARCHICAL | {"offloaded": True}),
    "lagging": Way(HIERARCHICAL | {"lag": 2, "offloaded": False}),
    "vertical_slash": Way(prefill={"mode": "vertical_slash", "alpha": 0.5}),
    "block_sparse": Way(HIERARCHICAL, {"mode": "block_sparse", "alpha": 0.1, "dense_last": 0}),
    "concat": Way(strategy="concat", options={"recompute": "none"}),
    "half": Way(strategy="concat", options={"keep": 0.5}),
    "samkv": Way(strategy="samkv"),
    "composed and sparse": Way(HIERARCHICAL, strategy="concat"),
    "composed in a session": Way(strategy="concat", in_session=True),
    "composed and sparse in a session": Way(HIERARCHICAL, strategy="concat", in_session=True),
}
STREAMING = {"streaming": Way(HIERARCHICAL | {"streaming": True})}


def test_an_exact_request_finds_nothing_approximate(stress_server: Server) -> None:
    """With requests that are retracted and resumed all the time, and sessions that go to the host."""
    check(stress_server.client, ON_DEVICE, TOLERANCE, both=EXHAUSTIVE)


def test_nor_with_streaming_heads_and_ranks(parallel_server: Server) -> None:
    ways = {"dense": Way()} | STREAMING
    check(parallel_server.client, ways, TOLERANCE, prompt=LONG)  # twice what such heads see


def test_the_same_seed_draws_the_same_answer(stress_server: Server) -> None:
    """On SGLang's route, retracted and resumed, alone and beside others."""

    def drawn(seed: int | None) -> list[int]:
        sampling = {"temperature": 1.5, "top_p": 0.95, "max_new_tokens": 24, "ignore_eos": True}
        if seed is not None:
            sampling["sampling_seed"] = seed
        return list(generate(stress_server.client, ids, sampling_params=sampling)["output_ids"])

    ids = some_ids(90, 42)
    alone = drawn(7)
    with ThreadPoolExecutor(4) as pool:
        beside = list(pool.map(drawn, (None, 7, 8, 7)))
    assert beside[1] == beside[3] == alone
    assert len({*map(tuple, beside)}) == 3
    body = {"query": "Who keeps it?", "documents": [{"text": "Anna keeps it."}], "max_new_tokens": 12}
    answers = [
        stress_server.client.post("/rag/query", json=body | {"temperature": 1.5, "seed": 7}).json()["answer"]
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
