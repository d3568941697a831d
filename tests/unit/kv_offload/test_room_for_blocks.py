"""SGLang admits no prompt into the room that an offloaded request's resident blocks will take, nor do these
take the room of a prompt that it has admitted and prefills in chunks."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang_ext import versions
from sglang_ext.attention.decode.decode_state import DecodeState
from sglang_ext.attention.decode.step_planner import StepPlanner
from sglang_ext.attention.decode_runtime import DecodeRuntime
from sglang_ext.process import hook_functions
from sglang_ext.state import current
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.protocol import DECODE_FIELD, DecodeOptions
from tests.unit import request_shapes
from tests.unit.kv_offload.offloaded_bench import LIMIT, Bench

PAGE = 16


def request(row: Any = None, tokens: int = 1000, **options: Any) -> Any:
    state = DecodeState(DecodeOptions(mode="hierarchical", budget=4 * PAGE, **options))
    state.offload.begin(row)
    return SimpleNamespace(
        ragserve_decode=state, origin_input_ids=[0] * tokens, to_finish=None, finished=lambda: False
    )


def runtime(pending: int = 0) -> DecodeRuntime:
    """``pending``: resident blocks of the largest request that is being copied."""
    config = AttentionConfig(offload_bytes=1)
    statistics: Any = SimpleNamespace(page_size=PAGE, bytes=0)
    offloaded: Any = SimpleNamespace(
        ready=True,
        due_tokens=pending * PAGE,
        resident_blocks_of=lambda selection, resident_blocks: selection * (resident_blocks or 2),
        statistics_of=None,
    )
    backend: Any = SimpleNamespace()
    return DecodeRuntime(config, StepPlanner(config, PAGE, 8192), statistics, backend, offloaded)


def test_the_largest_of_those_to_come_is_kept_free() -> None:
    plain, offloaded, wide = request(), request(offloaded=True), request(offloaded="auto", resident_blocks=3)
    assert runtime().due_tokens([plain]) == 0
    assert runtime().due_tokens([plain, offloaded]) == 8 * PAGE
    assert runtime().due_tokens([offloaded, wide]) == 12 * PAGE
    assert runtime(pending=20).due_tokens([offloaded, wide]) == 20 * PAGE
    assert runtime().due_tokens([request(row=object(), offloaded=True)]) == 0, "its own are no more to come"
    assert runtime().due_tokens([request(tokens=8 * PAGE, offloaded=True)]) == 0, (
        "it takes no more than its resident_blocks"
    )


@pytest.mark.parametrize("fails", [False, True])
def test_admission_counts_it_for_one_request_at_a_time(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    told: list[int] = []

    def add(adder: Any, req: Any) -> str:
        told.append(request_shapes.reserved(adder))
        versions.reserve_tokens(adder, 100)  # of what it admits
        if fails:
            raise ValueError("no")
        return "added"

    monkeypatch.setattr(current, "attention", runtime())
    adder: Any = request_shapes.adder(running_batch=None, can_run_list=[])
    req = request(offloaded=True)
    for running, due in (([], 0), ([request()], 8 * PAGE)):
        adder.running_batch = SimpleNamespace(reqs=running)
        versions.reserve_tokens(adder, 7 - request_shapes.reserved(adder))
        if fails:
            with pytest.raises(ValueError, match="no"):
                hook_functions.around_admission(add, adder, req)
        else:
            assert hook_functions.around_admission(add, adder, req) == "added"
        assert told.pop() == 7 + due, "nothing runs that would make room" if not running else ""
        assert request_shapes.reserved(adder) == 107


def broken(*args: Any) -> None:
    raise OverflowError("cannot convert float infinity to integer")


def test_a_failure_while_room_is_counted_admits_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = runtime()
    monkeypatch.setattr(decoding, "due_tokens", broken)
    monkeypatch.setattr(current, "attention", decoding)
    adder: Any = request_shapes.adder(running_batch=SimpleNamespace(reqs=[request()]), can_run_list=[])
    assert hook_functions.around_admission(lambda adder, req: "added", adder, request()) == "added"
    assert request_shapes.reserved(adder) == 0


def test_a_failure_at_an_admission_ends_that_request_at_its_next_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult

    decoding = runtime()
    monkeypatch.setattr(decoding, "admit", broken)
    monkeypatch.setattr(current, "attention", decoding)
    adder: Any = request_shapes.adder(running_batch=None, can_run_list=[])
    req = request()

    def add(adder: Any, req: Any) -> str:
        return "added"

    assert hook_functions.around_admission(add, adder, req) is AddReqResult.CONTINUE
    assert "'offload admission' failed" in req.to_finish.message
    assert hook_functions.around_admission(add, adder, req) == "added", "SGLang reports the error"


def test_a_failure_before_scheduling_ends_those_that_may_be_offloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoding = runtime()
    monkeypatch.setattr(decoding, "before_schedule", broken)
    monkeypatch.setattr(current, "attention", decoding)
    plain, offloaded = request(), request(offloaded=True)
    hook_functions.before_schedule(SimpleNamespace(), SimpleNamespace(reqs=[plain, offloaded]))
    assert "'offload plan' failed" in offloaded.to_finish.message
    assert plain.to_finish is None


def test_a_failing_wait_for_another_step_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "attention", None)
    monkeypatch.setattr(current, "runtime", SimpleNamespace(composition=SimpleNamespace()))
    monkeypatch.setattr("sglang_ext.context.scheduler.document_pass.waits_for_own_step", broken)
    adder: Any = request_shapes.adder(running_batch=None, can_run_list=[])
    req = request()
    assert hook_functions.around_admission(lambda adder, req: "added", adder, req) == "added"
    assert "'admission' failed" in req.to_finish.message


@pytest.mark.parametrize(
    ("options", "tokens", "refused"),
    [
        ({}, 100 * PAGE, True),
        ({"mode": "dense"}, 100 * PAGE, False),
        ({"dense_below": 200 * PAGE}, 100 * PAGE, False),
        ({"budget": 8192}, 100 * PAGE, False),
    ],
    ids=["offloaded", "dense", "short", "whole"],
)
def test_a_prompt_is_refused_for_its_host_pages_only_if_it_would_take_them(
    options: dict[str, Any], tokens: int, refused: bool
) -> None:
    """The server's default is offloaded, and its host memory holds 50 pages."""
    default = DecodeOptions(mode="hierarchical", budget=4 * PAGE, dense_below=0, offloaded=True)
    config = AttentionConfig(options=default, offload_bytes=1, max_budget=4096)
    offloaded: Any = SimpleNamespace(ready=True, pages=SimpleNamespace(capacity=50), statistics_of=None)
    statistics: Any = SimpleNamespace(page_size=PAGE, bytes=0)
    planner, backend = StepPlanner(config, PAGE, 8192), SimpleNamespace()
    decoding = DecodeRuntime(config, planner, statistics, cast(Any, backend), offloaded)
    params = SimpleNamespace(custom_params={DECODE_FIELD: json.dumps(options)})
    req = SimpleNamespace(
        sampling_params=params, origin_input_ids=[0] * tokens, output_ids=[], extra_key=None
    )
    assert ("the prompt takes 100 host pages" in str(decoding.on_request(req))) == refused


def test_resident_blocks_wait_for_the_chunks_of_a_prompt_that_is_admitted() -> None:
    """SGLang ends where a chunk finds no room."""
    bench = Bench(page=PAGE)
    row = bench.copied()
    config = AttentionConfig(offload_bytes=1)
    statistics: Any = SimpleNamespace(page_size=PAGE, bytes=0)
    planner, backend = StepPlanner(config, PAGE, 8192), SimpleNamespace()
    decoding = DecodeRuntime(config, planner, statistics, cast(Any, backend), bench.rows)
    chunked = request_shapes.request(full_untruncated_fill_ids=[0] * 240)
    scheduler = SimpleNamespace(chunked_req=chunked, is_mixed_chunk=False, max_running_requests=4)
    scheduler.waiting_queue, scheduler.grammar_manager = [], SimpleNamespace(grammar_queue=[])
    batch = SimpleNamespace(reqs=[], batch_is_full=False)
    taken = bench.allocator.alloc(bench.allocator.available_size() - (2 * LIMIT + 10) * PAGE)
    assert taken is not None

    for end in range(0, 240, 48):
        request_shapes.extend(chunked, 0, end)
        rest = (240 - end) // PAGE
        decoding.before_schedule(scheduler, batch)
        assert (row.blocks.slots is None) == (rest >= 10), (
            f"{rest} pages to come, 10 besides those for resident_blocks"
        )
        assert bench.allocator.available_size() >= rest * PAGE

    scheduler.chunked_req = None
    decoding.before_schedule(scheduler, batch)
    assert row.blocks.slots is not None
    bench.allocator.free(taken)
    bench.ended(row)
