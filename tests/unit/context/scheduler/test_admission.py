"""Admission of composed requests: one decision, and nothing locked or reserved behind any but READY."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_ext.context.compose.request import ComposedContext, DocumentOnDevice
from sglang_ext.context.scheduler.admission import Admission
from sglang_ext.context.selection.strategies import ModelShape, partial_selection
from sglang_ext.protocol import MISSING_PREFIX, ContextPlan, SessionPart, Span, session_key
from sglang_ext.ranks import Ranks

TOTAL = 12  # tokens of the context: system text and one document
QUESTION, ANSWER, PAGE = 3, 10, 4
HELD = 4  # tokens of a session's dialogue so far, all of the first span


class Hosting:
    """Takes contexts in host pages: those that ask for it, all or (``auto``) if the device is full."""

    def __init__(self) -> None:
        self.wanted: bool | str = False
        self.asked: list[int] = []
        self.held = False  # by others that are in no batch
        self.outcome: Any = None  # instead of SGLang's answer, and nothing is admitted
        self.documents: Any = None  # that hold contexts which are read there
        self.found: Any = None

    def reserve(self, req: Any, tokens: int, *, full: bool, find: Any) -> bool:
        self.asked.append(tokens)
        if self.documents is not None:
            self.found = find(self.documents, PAGE)
        return self.wanted is True or (self.wanted == "auto" and full)

    def may_find_room(self, req: Any, tokens: int) -> bool:
        return self.held

    def compose(self, adder: Any, req: Any, add: Any) -> tuple[Any, Any]:
        return (add(), "target") if self.outcome is None else (self.outcome, None)


class Documents:
    """On the host, all but those that are ``missing``."""

    pages = SimpleNamespace(shape=SimpleNamespace(block=16, bits=16))

    def __init__(self, *missing: str) -> None:
        self.missing, self.held = missing, 0
        self.leaving = False  # some that nobody reads any more are still kept

    def hold(self, wanted: Any, namespace: str) -> Any:
        if {each.key for each in wanted} & set(self.missing):
            return None
        self.held += len(wanted)
        return [np.arange(1)] * len(wanted)

    def let_go(self, keys: Any) -> None:
        self.held -= len(keys)


class Divided(Ranks):
    """Another rank lacks what this one has."""

    def all_agree(self, flag: bool) -> bool:
        return False


class Engine:
    """SGLang's queue, tree and allocator around one request, with ``free`` slots."""

    def __init__(
        self, free: int = 100, missing: list[int] | None = None, *, running: bool = False, **options: Any
    ) -> None:
        self.free, self.missing, self.counted = free, missing or [], []
        self.has_dialogue = True  # what the ranks have in common of it is enough
        self.lacks_room = False  # another context waits for it on the host
        self.loading, self.evictable, self.evicted = False, 0, 0
        self.retrieved: list[Any] = []
        session, ranks = options.pop("session", None), options.pop("ranks", Ranks())
        plan = ContextPlan(
            "compose",
            "n",
            options.pop("strategy", "concat"),
            (Span(0, 4), Span(4, TOTAL)),
            options,
            session=session,
        )
        partial = partial_selection(plan, ModelShape(2))
        self.context = ComposedContext(plan, array("q", range(TOTAL + QUESTION)), ("a", "b"), partial)
        self.context.decided = partial.settle()
        self.req: Any = SimpleNamespace(
            ragserve=self.context,
            rid="r",
            origin_input_ids=array("q", [0] * (TOTAL + QUESTION)),
            output_ids=[],
            sampling_params=SimpleNamespace(max_new_tokens=ANSWER),
            to_finish=None,
            init_next_round_input=lambda tree: None,
        )
        batch = SimpleNamespace(is_empty=lambda: not running)
        self.adder: Any = SimpleNamespace(
            can_run_list=[],
            running_batch=batch,
            rem_total_tokens=1000,
            log_hit_tokens=0,
            rem_input_tokens=100,
            rem_chunk_tokens=50,
            prefill_max_requests=None,
            budget_state=lambda: SimpleNamespace(name=f"{self.adder.rem_chunk_tokens} left"),
        )
        allocator = SimpleNamespace(alloc=self.alloc, free=self.give_back, available_size=lambda: self.free)
        tree: Any = SimpleNamespace(token_to_kv_pool_allocator=allocator, page_size=PAGE, evict=self.evict)
        tiers: Any = SimpleNamespace(
            count=lambda tier, n: self.counted.append((tier, n)),
            retrieved=lambda keys, namespace: self.retrieved.append(keys),
        )
        self.hosting = Hosting()
        attention = SimpleNamespace(requests=self.hosting)
        self.admission = Admission(
            tree,
            tiers,
            self,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            ranks,
            layers=2,
            attention=attention,
        )

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > self.free:
            return None
        self.free -= count
        return torch.arange(count)

    def evict(self, params: Any) -> None:
        count = min(params.num_tokens, self.evictable)
        self.evicted += count
        self.free += count

    def give_back(self, slots: torch.Tensor) -> None:
        self.free += len(slots)

    def resolve(self, context: ComposedContext) -> list[int] | None:
        context.sources = [DocumentOnDevice(torch.arange(4), "node")] * (2 - len(self.missing))
        context.held = HELD if context.goes_on else 0
        return None if self.loading else self.missing

    def held(self, context: ComposedContext) -> int:
        return HELD

    def has_turns(self, context: ComposedContext, end: int) -> bool:
        return self.has_dialogue

    def unlock(self, context: ComposedContext) -> None:
        context.sources = []

    def admit(self, *, accepted: bool = True) -> str:
        def add() -> Any:
            if accepted:
                self.adder.can_run_list.append(self.req)
            return SimpleNamespace(name="added")

        return str(self.admission.admit(self.adder, self.req, add).name)


def test_a_request_whose_documents_are_there_gets_its_slots() -> None:
    engine = Engine()
    assert engine.admit() == "added"
    assert engine.free == 100 - TOTAL
    assert len(engine.req.prefix_indices) == engine.req.already_computed == TOTAL
    assert engine.context.sources, "locked until the slots are filled"
    assert engine.counted == [("device", 2)]
    assert engine.retrieved == [("a", "b")]


def test_what_sglang_declines_is_given_back() -> None:
    engine = Engine()
    assert engine.admit(accepted=False) == "added"
    assert engine.free == 100
    assert not engine.context.sources
    assert not len(engine.req.prefix_indices)


def test_a_request_waits_for_its_load_without_locks() -> None:
    engine = Engine()
    engine.loading = True
    assert engine.admit() == "CONTINUE"
    assert not engine.context.sources
    assert engine.free == 100
    assert engine.req.to_finish is None


@pytest.mark.parametrize("output", [[], [7]], ids=["new", "taken back"])
def test_missing_documents_end_the_request(output: list[int]) -> None:
    engine = Engine(missing=[1])
    engine.req.output_ids = output
    assert engine.admit() == "added"
    assert engine.counted == [(None, 1)]
    assert not engine.context.sources
    message = engine.req.to_finish.message
    if output:
        assert "taken back" in message, "its answer cannot be continued from other KV"
        assert engine.req.to_finish.status_code == 503
    else:
        assert message == MISSING_PREFIX + json.dumps([1])


def test_without_room_it_waits_for_others_then_leaves_the_device_then_ends() -> None:
    assert Engine(free=4, running=True).admit() == "NO_TOKEN"
    engine = Engine(free=4)
    assert engine.admit() == "CONTINUE"
    assert engine.context.below_device, "its own documents are in its way"
    assert engine.req.to_finish is None
    engine.resolve = lambda context: []  # type: ignore[method-assign]
    assert engine.admit() == "added"
    assert "more than the pool can give" in engine.req.to_finish.message


def test_it_waits_for_host_pages_of_requests_that_were_taken_back() -> None:
    engine = Engine(free=4)
    engine.resolve = lambda context: []  # type: ignore[method-assign]
    engine.hosting.held = True
    assert engine.admit() == "CONTINUE"
    assert engine.req.to_finish is None
    engine.hosting.held = False
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
    assert not engine.context.sources
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
    assert not engine.context.sources
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


def failing_engine(where: str) -> Engine:
    def broken(*args: Any) -> Any:
        raise OSError("the disk is gone")

    engine = Engine()
    if where == "load":
        engine.resolve = broken  # type: ignore[method-assign]
    elif where == "alloc":
        engine.admission._allocator.alloc = broken
    return engine


@pytest.mark.parametrize("where", ["load", "alloc", "add"])
def test_an_admission_that_fails_ends_the_request_and_gives_everything_back(where: str) -> None:
    engine, calls = failing_engine(where), []

    def add() -> Any:
        calls.append(engine.req.to_finish)
        if where == "add" and len(calls) == 1:
            raise RuntimeError("SGLang is at a loss")
        return SimpleNamespace(name="added")

    assert engine.admission.admit(engine.adder, engine.req, add).name == "added"
    assert engine.req.to_finish.status_code == 500
    assert calls[-1] is engine.req.to_finish, "SGLang admits the request once more to report its end"
    assert engine.free == 100
    assert not engine.context.sources


def test_a_failed_request_that_was_taken_back_is_not_composed_again() -> None:
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
    assert engine.req.prefix_indices.tolist() == [*range(HELD), *range(TOTAL - HELD)]
    assert (engine.req.last_node, engine.req.cache_protected_len) == ("node", HELD)
    assert engine.req.already_computed == TOTAL - HELD, "SGLang counts the rest as found in the cache"
    assert engine.counted == [("device", 1)], "the dialogue is no document"
    assert engine.retrieved == [("b",)]


def test_a_dialogue_that_another_rank_has_less_of_is_missing() -> None:
    engine = Engine(session=SESSION)
    engine.has_dialogue = False
    assert engine.admit() == "added", "it ends with an error"
    assert engine.context.missing == [0]
    assert (engine.free, engine.context.sources) == (100, [])


def test_a_declined_turn_leaves_no_lock_and_no_slots() -> None:
    engine = Engine(session=SESSION)
    engine.req.last_node, engine.req.cache_protected_len = "root", 0
    assert engine.admit(accepted=False) == "added"
    assert engine.free == 100
    assert not engine.context.sources
    assert not len(engine.req.prefix_indices)
    assert (engine.req.last_node, engine.req.cache_protected_len) == ("root", 0)


def test_a_dialogue_in_the_way_of_its_own_turn_ends_it_with_the_reason() -> None:
    """Its new document is taken from host, the dialogue itself is nowhere else."""
    engine = Engine(free=4, session=SESSION)
    assert engine.admit() == "CONTINUE"
    held = engine.resolve

    def from_host(context: ComposedContext) -> list[int] | None:
        held(context)
        context.sources = context.sources[:1]
        return []

    engine.resolve = from_host  # type: ignore[method-assign]
    assert engine.admit() == "added"
    assert "more than the pool can give" in engine.req.to_finish.message


@pytest.mark.parametrize(("wanted", "free"), [(True, 100), ("auto", 4)])
def test_a_hosted_context_takes_no_slots(wanted: bool | str, free: int) -> None:
    engine = Engine(free=free, running=True)
    engine.hosting.wanted = wanted
    assert engine.admit() == "added"
    assert engine.free == free
    assert engine.context.on_host == "target"
    assert engine.context.sources, "locked until they have been copied"
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
        engine.hosting.wanted, engine.hosting.documents = True, Documents(*missing)
        assert engine.admit() == "added"
        assert (engine.hosting.found is not None, engine.hosting.documents.held) == (held > 0, held)


@pytest.mark.parametrize("passes", ["leaving", "lacks_room"])
def test_what_is_about_to_make_room_on_the_host_ends_no_context_that_fits_nowhere_else(passes: str) -> None:
    engine = Engine(free=4)
    engine.resolve = lambda context: []  # type: ignore[method-assign]
    engine.hosting.documents = documents = Documents("b")
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
    engine.hosting.wanted = "auto"
    assert engine.admit() == "added"
    assert (engine.free, engine.context.on_host) == (100 - TOTAL, None)
    blending = Engine(strategy="cacheblend")
    blending.hosting.wanted = True
    blending.admit()
    assert (blending.free, blending.hosting.asked) == (100 - TOTAL, [])


def test_a_hosted_context_without_room_for_columns_waits_then_leaves_the_device_then_ends() -> None:
    for running, expected in ((True, "NO_TOKEN"), (False, "CONTINUE")):
        engine = Engine(running=running)
        engine.hosting.wanted, engine.hosting.outcome = True, AddReqResult.NO_TOKEN
        assert engine.admit() == expected
        assert not engine.context.sources
        assert engine.context.below_device is not running
    engine.resolve = lambda context: []  # type: ignore[method-assign]
    assert engine.admit() == "added"
    assert "kv_hosted_bytes" in engine.req.to_finish.message
    declined = Engine()
    declined.hosting.wanted, declined.hosting.outcome = True, AddReqResult.OTHER
    assert declined.admit() == "OTHER"
    assert (declined.context.sources, declined.req.to_finish) == ([], None)
