"""Admission of composed requests whose context is kept on the host, or is read in its documents there."""

from __future__ import annotations

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_ext.ranks.ranks import Ranks
from tests.unit.context.scheduler.admission_bench import (
    TOTAL,
    Divided,
    Documents,
    Engine,
)


@pytest.mark.parametrize(("wanted", "free"), [(True, 100), ("auto", 4)])
def test_an_offloaded_context_takes_no_slots(wanted: bool | str, free: int) -> None:
    engine = Engine(free=free, running=True)
    engine.offloading.wanted = wanted
    assert engine.admit() == "added"
    assert engine.free == free
    assert engine.context.place.on_host == "target"
    assert engine.context.located.sources, "locked until they have been copied"
    assert engine.counted == [("device", 2)]
    assert engine.req.already_computed == TOTAL


def test_a_context_is_read_in_its_documents_where_all_ranks_have_them() -> None:
    cases = (
        ((), Ranks(), False, 2),
        (("b",), Ranks(), False, 0),
        ((), Divided(), False, 0),
        ((), Ranks(), True, 0),
    )
    for missing, ranks, lacks_room, held in cases:
        engine = Engine(ranks=ranks)
        engine.lacks_room = lacks_room
        engine.offloading.wanted, engine.offloading.documents = True, Documents(*missing)
        assert engine.admit() == "added"
        assert (engine.offloading.found is not None, engine.offloading.documents.held) == (held > 0, held)


@pytest.mark.parametrize("passes", ["leaving", "lacks_room"])
def test_what_is_about_to_make_room_on_the_host_ends_no_context_that_fits_nowhere_else(passes: str) -> None:
    engine = Engine(free=4)
    engine.resolve = lambda context: []  # type: ignore[method-assign]
    engine.offloading.documents = documents = Documents("b")
    where = documents if passes == "leaving" else engine
    setattr(where, passes, True)
    for _ in range(3):
        assert engine.admit() == "CONTINUE", "asked again at the next step"
        assert engine.req.to_finish is None
    setattr(where, passes, False)
    assert engine.admit() == "added"
    assert "documents in half of kv_host_bytes" in engine.req.to_finish.message


def test_a_context_that_fits_or_computes_tokens_again_stays_on_the_device() -> None:
    engine = Engine()
    engine.offloading.wanted = "auto"
    assert engine.admit() == "added"
    assert (engine.free, engine.context.place.on_host) == (100 - TOTAL, None)
    blending = Engine(strategy="cacheblend")
    blending.offloading.wanted = True
    blending.admit()
    assert (blending.free, blending.offloading.asked) == (100 - TOTAL, [])


def test_an_offloaded_context_without_room_for_resident_blocks_waits_then_leaves_the_device_then_ends() -> (
    None
):
    for running, expected in ((True, "NO_TOKEN"), (False, "CONTINUE")):
        engine = Engine(running=running)
        engine.offloading.wanted, engine.offloading.outcome = True, AddReqResult.NO_TOKEN
        assert engine.admit() == expected
        assert not engine.context.located.sources
        assert engine.context.place.below_device is not running
    engine.resolve = lambda context: []  # type: ignore[method-assign]
    assert engine.admit() == "added"
    assert "kv_offload_bytes" in engine.req.to_finish.message
    declined = Engine()
    declined.offloading.wanted, declined.offloading.outcome = True, AddReqResult.OTHER
    assert declined.admit() == "OTHER"
    assert (declined.context.located.sources, declined.req.to_finish) == ([], None)


def test_it_waits_for_host_pages_of_requests_that_were_retracted() -> None:
    engine = Engine(free=4)
    engine.resolve = lambda context: []  # type: ignore[method-assign]
    engine.offloading.held = True
    assert engine.admit() == "CONTINUE"
    assert engine.req.to_finish is None
    engine.offloading.held = False
    assert engine.admit() == "added"
    assert "more than the pool can give" in engine.req.to_finish.message
