"""How large a prompt may be, by what its request asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ragserve.engine.base import EngineInfo, GenerateRequest, Sampling

RESERVE = 8  # SGLang's
INFO = EngineInfo(
    *("local", "model", "model", "0.5.17", "cuda", "fa3", 100_000, 4096),
    strategies=("full", "concat"),
    offloaded_tokens=8192,
    by_layers=True,
    context_tokens=40_000,
    context_pages=2000,
)
IN_PLACE = {"offloaded": True, "mode": "hierarchical"}


def request(
    strategy: str = "concat", decode: dict[str, Any] | None = None, **options: Any
) -> GenerateRequest:
    return GenerateRequest(
        "r", [], "n", strategy, Sampling(), options=options, decode=IN_PLACE if decode is None else decode
    )


def test_a_context_that_is_read_in_its_documents_is_bounded_by_them_and_by_statistics() -> None:
    assert INFO.prompt_room(request(), 20) == (2000 - 20 - 1) * 16 - RESERVE, (
        "each may end in a page of its own"
    )
    progressive = request(decode=IN_PLACE | {"mode": "progressive"})
    for same in (request(force=True), progressive):
        assert INFO.prompt_room(same, 20) == INFO.prompt_room(request(), 20)
    assert replace(INFO, context_pages=9000).prompt_room(request(), 20) == 40_000 - RESERVE
    small = replace(INFO, context_pages=9000, context_length=5000)
    assert small.prompt_room(request(), 20) == 5000 - RESERVE
    assert replace(INFO, context_pages=100).prompt_room(request(), 90) == 8192 - RESERVE, "a copy is larger"
    server = replace(INFO, decode_mode="hierarchical", offloaded=True)
    assert server.prompt_room(request(decode={}), 20) == INFO.prompt_room(request(), 20)


@pytest.mark.parametrize(
    "asked",
    [
        request("full"),
        request("auto"),
        request("samkv", recompute="none", kept_positions="original"),
        request(recompute="first"),
        request(update="fusion"),
        request(keep=0.5, kept_positions="compact"),
        request(decode={"offloaded": True}),
    ],
    ids=lambda asked: f"{asked.strategy} {asked.options} {asked.decode}",
)
def test_others_are_bounded_by_the_memory_of_prompts(asked: GenerateRequest) -> None:
    assert INFO.prompt_room(asked, 20) == 8192 - RESERVE


def test_what_is_not_offloaded_or_not_prefilled_by_layers_has_to_fit_the_pool() -> None:
    pool = 4096 - RESERVE
    assert INFO.max_prompt_tokens == INFO.prompt_room(request(decode={"mode": "hierarchical"}), 20) == pool
    apart = replace(INFO, by_layers=False, context_tokens=0, context_pages=0)
    assert apart.prompt_room(request("full")) == pool
    assert apart.prompt_room(request(), 20) == 8192 - RESERVE, "a context is copied"
    assert replace(apart, offloaded_tokens=0).prompt_room(request(), 20) == pool
