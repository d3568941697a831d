"""Background prefills leave the rest of a step to others: the budget that SGLang's adder is shown, and who
may set the mark."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult

from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.engine.prefill import Documents
from sglang_ext import versions
from sglang_ext.sglang_internals import background_prefill
from sglang_ext.sglang_internals.background_prefill import OwnChunk, check_mark
from sglang_ext.wire.protocol import BACKGROUND_FIELD
from tests.unit import request_shapes

PAGE = 16


def adder(room: int | None) -> Any:
    """SGLang's budget of a step, as far as it is read."""
    return request_shapes.adder(
        rem_chunk_tokens=room,
        page_size=PAGE,
        ceil_paged_tokens=lambda tokens: -(-tokens // PAGE) * PAGE,
    )


def request(tokens: int, custom: Any = None, *, composed: object = None) -> Any:
    params = SimpleNamespace(custom_params=custom, max_new_tokens=8)
    made = request_shapes.request(
        sampling_params=params, ragserve=composed, full_untruncated_fill_ids=range(tokens)
    )
    background_prefill.on_request(made)
    return made


def extend(budget: Any, req: Any) -> Any:
    """As SGLang's `add_chunked_req`: all tokens that are left, and the request if there are more."""
    start = versions.extend_end(req)
    stop = min(start + budget.rem_chunk_tokens, len(req.full_untruncated_fill_ids))
    request_shapes.extend(req, 0, stop)
    budget.rem_chunk_tokens -= budget.ceil_paged_tokens(stop - start)
    return req if stop < len(req.full_untruncated_fill_ids) else None


def next_chunk(budget: Any, req: Any) -> Any:
    return background_prefill.around_next_chunk(extend, budget, req)


def admit(budget: Any, req: Any, align: int | None = None) -> Any:
    return background_prefill.admit(budget, req, align, lambda: extend(budget, req))


def test_a_marked_request_takes_a_chunk_of_the_step_and_its_slots_stay_free() -> None:
    budget, own = adder(1024), request(1000, {BACKGROUND_FIELD: 250})
    assert admit(budget, own) is own
    assert (versions.extend_end(own), budget.rem_chunk_tokens) == (240, 784), "whole pages"
    budget = adder(1024)
    assert next_chunk(budget, own) is own
    assert (versions.extend_end(own), budget.rem_chunk_tokens) == (480, 784)
    assert request_shapes.reserved(budget) >= 1000 - 480 + 8
    request_shapes.extend(own, 0, 900)
    budget = adder(1024)
    assert next_chunk(budget, own) is None
    assert request_shapes.reserved(budget) == 0


def test_a_request_that_fits_comes_beside_the_chunk_and_a_longer_one_waits() -> None:
    budget, own = adder(1024), request(2000, {BACKGROUND_FIELD: 256})
    next_chunk(budget, own)
    assert admit(budget, request(768)) is None
    budget = adder(1024)
    next_chunk(budget, own)
    assert admit(budget, request(769)) is AddReqResult.OTHER
    budget = adder(1024)
    next_chunk(budget, own)
    assert budget.rem_chunk_tokens == 0, "for whom it waits, the rest goes on in SGLang's own chunks"


@pytest.mark.parametrize(
    ("custom", "composed"),
    [(None, None), ("x", None), ({BACKGROUND_FIELD: "256"}, None), ({BACKGROUND_FIELD: 256}, object())],
)
def test_other_requests_take_what_a_step_has(custom: Any, composed: object) -> None:
    budget, other = adder(1024), request(2000, custom, composed=composed)
    assert admit(budget, other) is other
    assert budget.rem_chunk_tokens == 0


def test_prompts_that_are_cut_at_multiples_are_left_to_sglang() -> None:
    budget, own = adder(1024), request(2000, {BACKGROUND_FIELD: 256})
    admit(budget, own, align=512)
    assert budget.rem_chunk_tokens == 0


def test_without_chunks_nothing_is_cut() -> None:
    budget, own = adder(None), request(2000, {BACKGROUND_FIELD: 256})
    assert background_prefill.admit(budget, own, None, lambda: budget.rem_chunk_tokens) is None


def test_a_clients_mark_is_refused_and_the_servers_is_sent_on_as_a_number() -> None:
    params: dict[str, Any] = {"custom_params": {BACKGROUND_FIELD: 256}}
    with pytest.raises(ValueError, match="the server's own"):
        check_mark(params)
    params = {"custom_params": {BACKGROUND_FIELD: OwnChunk(256), "a": 1}}
    check_mark(params)
    assert params["custom_params"] == {BACKGROUND_FIELD: 256, "a": 1}
    assert type(params["custom_params"][BACKGROUND_FIELD]) is int


@pytest.mark.parametrize(
    ("chunk", "strategy", "of_the_server", "marked"),
    [
        *((256, "full", True, True), (256, "prefix", True, True), (256, "full", False, False)),
        *(
            (0, "full", True, False),
            (0, "concat", True, False),
            (256, "concat", False, False),
            (256, "concat", True, True),
        ),
    ],
)
def test_requests_of_the_server_are_marked(
    chunk: int, strategy: str, of_the_server: bool, marked: bool
) -> None:
    sent: list[dict[str, Any]] = []

    async def run(fields: dict[str, Any], prompt_tokens: int) -> Any:
        sent.append(fields)
        for none in ():
            yield none

    async def together(all_fields: Any) -> None:
        raise AssertionError("nothing is missing")

    asked = GenerateRequest("a", [1, 2], "n", strategy, background=of_the_server)
    documents = Documents(run, together, background_chunk=chunk)

    async def answer() -> list[GenerateChunk]:
        return [chunk async for chunk in documents.generate(asked)]

    assert asyncio.run(answer()) == []
    assert (BACKGROUND_FIELD in sent[0]["sampling_params"].get("custom_params", {})) == marked
