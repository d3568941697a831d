"""Admission of composed requests: one decision, and nothing locked or reserved behind any but READY."""

from __future__ import annotations

import json
from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.context.scheduler import admission
from sglang_ext.stages import stages
from sglang_ext.versions import protected_tokens
from sglang_ext.wire.protocol import MISSING_PREFIX, SessionPart, session_key
from tests.unit.context.scheduler.admission_bench import (
    ANSWER,
    HELD,
    PAGE,
    QUESTION,
    TOTAL,
    Engine,
)
from tests.unit.request_shapes import prefix_of


def test_a_request_whose_documents_are_there_gets_its_slots() -> None:
    engine = Engine()
    assert engine.admit() == "added"
    assert engine.free == 100 - TOTAL
    assert len(prefix_of(engine.req)) == engine.req.already_computed == TOTAL
    assert engine.context.located.sources, "locked until the slots are filled"
    assert engine.counted == [("device", 2)]
    assert engine.retrieved == [["a", "b"]]


def test_a_request_without_its_selection_waits_and_is_not_worked_for() -> None:
    """A step has done that once, before it admits requests."""
    engine = Engine(running=True)
    engine.context.decided = None
    assert engine.admit() == "CONTINUE"
    assert engine.context.failure is None
    assert not engine.counted


def test_what_sglang_declines_is_given_back() -> None:
    engine = Engine()
    assert engine.admit(accepted=False) == "added"
    assert engine.free == 100
    assert not engine.context.located.sources
    assert not len(prefix_of(engine.req))


def test_a_request_waits_for_its_load_without_locks() -> None:
    engine = Engine()
    engine.loading = True
    assert engine.admit() == "CONTINUE"
    assert not engine.context.located.sources
    assert engine.free == 100
    assert engine.req.to_finish is None


def test_a_step_pauses_once_however_many_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(admission, "time", SimpleNamespace(sleep=pauses.append))
    engine = Engine()
    engine.loading = True
    assert [engine.admit() for _ in range(3)] == ["CONTINUE"] * 3
    assert len(pauses) == 1
    engine.adder = copy(engine.adder)
    engine.admit()
    assert len(pauses) == 2, "the next step"
    engine.adder.running_batch.is_empty = lambda: False
    engine.adder = copy(engine.adder)
    engine.admit()
    assert len(pauses) == 2, "others decode"


@pytest.mark.parametrize("output", [[], [7]], ids=["new", "retracted"])
def test_missing_documents_end_the_request(output: list[int]) -> None:
    engine = Engine(missing=[1])
    engine.req.output_ids = output
    assert engine.admit() == "added"
    assert engine.counted == [(None, 1)]
    assert not engine.context.located.sources
    message = engine.req.to_finish.message
    if output:
        assert "retracted" in message, "its answer cannot be continued from other KV"
        assert engine.req.to_finish.status_code == 503
    else:
        assert message == MISSING_PREFIX + json.dumps([1])


def test_without_room_it_waits_for_others_then_leaves_the_device_then_ends() -> None:
    assert Engine(free=4, running=True).admit() == "NO_TOKEN"
    engine = Engine(free=4)
    assert engine.admit() == "CONTINUE"
    assert engine.context.place.below_device, "its own documents are in its way"
    assert engine.req.to_finish is None
    engine.resolve = lambda context: []  # type: ignore[method-assign]
    assert engine.admit() == "added"
    assert "more than the pool can give" in engine.req.to_finish.message


@pytest.mark.parametrize(
    ("strategy", "options", "rows"),
    [
        ("concat", {}, 0),
        ("concat", {"recompute": "all"}, TOTAL),
        ("concat", {"recompute": "first", "first": 2}, 2),
        ("concat", {"recompute": "sentences", "share": 0.5}, 4 + QUESTION),
        ("cacheblend", {"share": 0.5}, 4 + TOTAL),  # all tokens in both layers, and half of the documents'
    ],
    ids=["none", "all", "first", "by attention", "by deviation"],
)
def test_what_is_recomputed_counts_as_prefilled(strategy: str, options: dict[str, Any], rows: int) -> None:
    engine = Engine(strategy=strategy, **options)
    assert engine.admit() == (f"{50 - rows} left" if rows else "added")
    assert engine.adder.rem_input_tokens == 100 - rows
    assert engine.adder.rem_chunk_tokens == 50 - rows


def test_a_burst_is_spread_over_steps() -> None:
    engine = Engine(recompute="all")
    engine.adder.rem_chunk_tokens = TOTAL + QUESTION - 1
    engine.adder.can_run_list = ["another request"]
    assert engine.admit() == "OTHER"
    assert engine.free == 100
    assert not engine.context.located.sources
    engine.adder.can_run_list = []
    assert engine.admit() == f"{QUESTION - 1} left", "alone it is admitted, however much it recomputes"


def declined(engine: Engine, why: str) -> None:
    if why == "chunk":
        engine.adder.rem_chunk_tokens = PAGE - 1
    elif why == "requests":
        engine.adder.prefill_max_requests, engine.adder.can_run_list = 1, ["another request"]
    else:  # the slots would fit, but not the question and the answer beside them
        engine.adder.rem_total_tokens = TOTAL + QUESTION + ANSWER + PAGE


@pytest.mark.parametrize("why", ["chunk", "requests", "total"])
def test_nothing_is_evicted_for_a_request_that_sglang_would_decline(why: str) -> None:
    engine = Engine(free=4, running=True)
    engine.evictable = 100
    declined(engine, why)
    assert engine.admit() == ("NO_TOKEN" if why == "total" else "OTHER")
    assert (engine.evicted, engine.free) == (0, 4)
    assert not engine.context.located.sources
    engine.adder.rem_chunk_tokens, engine.adder.prefill_max_requests = 50, None
    engine.adder.rem_total_tokens += 1
    assert engine.admit() == "added"
    assert engine.evicted == TOTAL - 4


def test_a_request_that_can_never_fit_beside_its_answer_ends_instead_of_waiting_for_ever() -> None:
    engine = Engine()
    declined(engine, "total")
    assert engine.admit() == "CONTINUE"
    engine.resolve = lambda context: []  # type: ignore[method-assign]
    assert engine.admit() == "added"
    assert "ask for fewer tokens" in engine.req.to_finish.message


def broken(*args: Any, **kwargs: Any) -> Any:
    raise OSError("the disk is gone")


def failing_engine(where: str, monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    if where == "load":
        engine.resolve = broken  # type: ignore[method-assign]
    elif where == "alloc":
        engine.admission._allocator.alloc = broken
    elif where == "prefix":  # once SGLang has been shown the slots
        monkeypatch.setattr(ComposedContext, "admit", broken)
    return engine


@pytest.mark.parametrize("where", ["load", "alloc", "prefix", "add"])
def test_an_admission_that_fails_ends_the_request_and_gives_everything_back(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = failing_engine(where, monkeypatch), []

    def add() -> Any:
        calls.append(engine.req.to_finish)
        if where == "add" and len(calls) == 1:
            raise RuntimeError("SGLang is at a loss")
        return SimpleNamespace(name="added")

    assert engine.admission.admit(engine.adder, engine.req, add).name == "added"
    assert engine.req.to_finish.status_code == 500
    assert calls[-1] is engine.req.to_finish, "SGLang admits the request once more to report its end"
    assert engine.free == 100
    assert not len(prefix_of(engine.req)), "its slots are others' by now"
    assert not engine.context.located.sources


@pytest.mark.parametrize("where", ["reserve", "alloc", "compose", "add"])
def test_a_rank_that_fails_alone_once_they_have_agreed_ends_the_server(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others admit the request, and would wait for this one in its first pass."""
    engine = Engine()
    engine.offloading.wanted = where in ("reserve", "compose")
    if where == "alloc":
        engine.admission._allocator.alloc = broken
    elif where != "add":
        monkeypatch.setattr(engine.offloading, where, broken)
    monkeypatch.setattr(stages, "_alike", lambda error: False)
    with pytest.raises(stages.RanksDivided):
        engine.admission.admit(engine.adder, engine.req, broken)


def test_a_failed_request_that_was_retracted_is_not_composed_again() -> None:
    engine, dropped = Engine(), []
    engine.admission._stage = SimpleNamespace(drop=dropped.append)  # type: ignore[assignment]
    engine.req.to_finish = SimpleNamespace(message="ragserve: stage 'forward' failed", status_code=500)
    assert engine.admit() == "added"
    assert dropped == [engine.context]
    assert engine.free == 100
    assert engine.req.to_finish.message == "ragserve: stage 'forward' failed"
    assert engine.req.ragserve is None


SESSION = SessionPart(session_key("n", "s"), 3)


def test_a_turn_of_a_session_gets_slots_for_what_is_new_only() -> None:
    engine = Engine(session=SESSION, recompute="all")
    assert engine.admit() == f"{50 - (TOTAL - HELD)} left", "the dialogue so far is not computed again"
    assert engine.free == 100 - (TOTAL - HELD)
    assert prefix_of(engine.req).tolist() == [*range(HELD), *range(TOTAL - HELD)]
    assert (engine.req.last_node, protected_tokens(engine.req)) == ("node", HELD)
    assert engine.req.already_computed == TOTAL - HELD, "SGLang counts the rest as found in the cache"
    assert engine.counted == [("device", 1)], "the dialogue is no document"
    assert engine.retrieved == [["b"]]


def test_a_dialogue_that_another_rank_has_less_of_is_missing() -> None:
    engine = Engine(session=SESSION)
    engine.has_dialogue = False
    assert engine.admit() == "added", "it ends with an error"
    assert engine.context.missing == [0]
    assert (engine.free, engine.context.located.sources) == (100, [])


def test_a_declined_turn_leaves_no_lock_and_no_slots() -> None:
    engine = Engine(session=SESSION)
    engine.req.last_node = "root"
    assert engine.admit(accepted=False) == "added"
    assert engine.free == 100
    assert not engine.context.located.sources
    assert not len(prefix_of(engine.req))
    assert (engine.req.last_node, protected_tokens(engine.req)) == ("root", 0)


def test_a_dialogue_in_the_way_of_its_own_turn_ends_it_with_the_reason() -> None:
    """Its new document is taken from host, the dialogue itself is nowhere else."""
    engine = Engine(free=4, session=SESSION)
    assert engine.admit() == "CONTINUE"
    held = engine.resolve

    def from_host(context: ComposedContext) -> list[int] | None:
        held(context)
        context.located.sources = context.located.sources[:1]
        return []

    engine.resolve = from_host  # type: ignore[method-assign]
    assert engine.admit() == "added"
    assert "more than the pool can give" in engine.req.to_finish.message
