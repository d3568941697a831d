"""Rows with a lag: when they choose, when they read it, and what is put into a step's tables."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragserve_kernels.paged import PageSelection
from sglang_ext.attention.decode.step_planner import Selects, Step, StepPlanner, Variant
from sglang_ext.attention.decode_runtime import DecodeRuntime
from sglang_ext.attention.offload.lagged_selection import LaggedSelection, may_be_offloaded
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.protocol import DECODE_FIELD, DecodeOptions, PlanError

PAGE = 16
LAGGING = {"mode": "hierarchical", "budget": 64, "dense_below": 0, "lag": 2}


def planner(**config: Any) -> StepPlanner:
    return StepPlanner(AttentionConfig(offload_bytes=2**20, **config), PAGE, 8192)


def request(plan: StepPlanner, **options: Any) -> Any:
    params = SimpleNamespace(custom_params={DECODE_FIELD: json.dumps(LAGGING | options)})
    req = SimpleNamespace(sampling_params=params, origin_input_ids=[0] * 100, output_ids=[])
    plan.admit(req)
    return req


def run(plan: StepPlanner, reqs: list[Any], lengths: list[int]) -> Step:
    step = plan.step(reqs, lengths)
    plan.after(step)
    return step


@pytest.mark.parametrize(("reuse", "every"), [(1, 3), (5, 5), (100, PAGE - 2)])
def test_a_row_chooses_by_its_own_clock_and_reads_its_selection_after_the_lag(reuse: int, every: int) -> None:
    plan = planner()
    req, other = request(plan, reuse=reuse), request(plan, lag=0, reuse=4)
    steps = [run(plan, [req, other], [101 + i, 300 + i]) for i in range(70)]
    made = [i for i, step in enumerate(steps) if step.lagged[0]]
    assert steps[0].active == (True, True)
    assert not any(step.active[0] for step in steps[1:]), "afterwards it chooses for later only"
    assert made == list(range(every, 70, every))
    assert [i for i, step in enumerate(steps) if step.swapped[0]] == [i + 3 for i in made if i + 3 < 70]
    assert not any(step.lagged[1] or step.swapped[1] for step in steps)
    assert all(steps[i].variant in (Variant.REFRESHED, Variant.SELECTED) for i in made)


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_at_most_one_page_begins_while_a_selection_serves(lag: int) -> None:
    plan = planner()
    req = request(plan, lag=lag, reuse=1000)
    chosen, begun = 0, 0
    for tokens in range(101, 400):
        was = req.ragserve_decode.selection.widened
        step = run(plan, [req], [tokens])
        if step.swapped[0]:
            begun = 0
        begun += step.opened[0]
        assert begun <= 1, tokens
        assert not (step.opened[0] and was and not step.swapped[0])
        chosen += step.lagged[0]
    assert chosen > 15


def test_a_request_retracted_chooses_anew() -> None:
    plan = planner()
    req = request(plan, reuse=1)
    for tokens in range(101, 106):
        run(plan, [req], [tokens])
    req.ragserve_decode.forget_selection()
    step = run(plan, [req], [106])
    assert (step.active, step.swapped, step.lagged) == ((True,), (False,), (False,))


def test_a_step_that_becomes_an_extend_is_planned_once() -> None:
    """A request is retracted before a step, or while the overlap scheduler has it running."""
    plan = planner()
    req, other = request(plan, reuse=4), request(plan, lag=0)
    for tokens in range(101, 105):
        run(plan, [other, req], [tokens, tokens])
    state = req.ragserve_decode
    plan.forget(state)
    assert plan.place(state) == -1
    assert plan.again(req, 105) == (False, Selects.LATER, True), "it chooses at the end of this step"
    assert plan.again(req, 105) == (False, Selects.NO, False)
    step = run(plan, [other, req], [105, 106])
    assert (step.active[1], step.kept, step.changed) == (False, (0, -1), True)
    assert plan.place(state) == 1
    run(plan, [other, req], [106, 107])
    assert plan.again(req, 108)[0], "the selection of 105 is read from 108 on"


def test_a_request_with_a_lag_chooses_by_the_last_query_of_its_prompt() -> None:
    plan = planner()
    req, session, document, at_once = (request(plan, reuse=1, lag=lag) for lag in (2, 2, 2, 0))
    session.ragserve = SimpleNamespace(plan=SimpleNamespace(session="s"))
    document.ragserve = SimpleNamespace()
    assert [plan.selects_early(req, end) for end in (60, 100)] == [Selects.NO, Selects.NEXT], (
        "not by a part of it"
    )
    others = (session, document, at_once)
    assert {plan.selects_early(each, 100) for each in others} == {Selects.NO}
    req.ragserve = SimpleNamespace(plan=SimpleNamespace(session=None))
    assert plan.selects_early(req, 100) is Selects.NEXT, "nor is it otherwise with a composed one"
    plan.chosen_early(req, 100)
    step = run(plan, [req], [101])
    assert (step.active, step.swapped, step.lagged) == ((False,), (False,), (False,))
    assert run(plan, [req], [103]).lagged == (True,), "its clock runs from there on"


def test_an_offloaded_progressive_row_chooses_for_its_resident_blocks_by_its_own_clock() -> None:
    plan = planner()
    req = request(plan, mode="progressive", offloaded=True, reuse=5)
    state = req.ragserve_decode
    steps = [run(plan, [req], [101 + i]) for i in range(40)]
    assert (state.selection.first_tokens, state.options.lag_steps) == (101, 2)
    assert all(step.variant is Variant.PROGRESSIVE for step in steps)
    assert not any(step.active[0] or step.opened[0] for step in steps), "it reads what it ranks"
    made = [i for i, step in enumerate(steps) if step.lagged[0]]
    assert made == list(range(5, 40, 5))
    assert [i for i, step in enumerate(steps) if step.swapped[0]] == [i + 3 for i in made if i + 3 < 40]


def test_progressive_rows_without_a_host_have_no_lag() -> None:
    plan = planner()
    options = DecodeOptions(mode="progressive", lag=3)
    assert options.lag_steps == 0
    with pytest.raises(PlanError, match="In mode 'progressive', lag requires offloaded=true"):
        request(plan, mode="progressive")
    with pytest.raises(PlanError, match="the first and the newest page alone take 32"):
        request(plan, mode="progressive", offloaded=True, budget=16)
    exact = planner(options={"scores": "exact"})
    assert request(exact, mode="progressive", offloaded=True).ragserve_decode.options.offloaded, (
        "its scores are bounds"
    )


def test_offloaded_requests_have_a_lag_and_need_memory_on_the_host() -> None:
    assert request(planner(), lag=0, offloaded=True).ragserve_decode.options.lag_steps == 2
    assert DecodeOptions(mode="dense", offloaded=True).lag_steps == 0, "a server's default says nothing of it"
    without = StepPlanner(AttentionConfig(), PAGE, 8192)
    for options in ({}, {"lag": 0, "offloaded": True}):
        with pytest.raises(PlanError, match="kv_offload_bytes"):
            request(without, **options)
    with pytest.raises(
        PlanError, match="lag is for mode 'hierarchical' or 'progressive', and this request's"
    ):
        request(planner(), mode="dense")


def test_a_prompt_is_offloaded_once_the_tree_has_it() -> None:
    plan = planner()
    req = request(plan, offloaded=True)
    (row,) = run(plan, [req], [101]).rows
    assert not may_be_offloaded(row, req, short=True), "with overlap its first token is not known yet"
    req.output_ids.append(7)
    assert may_be_offloaded(row, req, short=False)
    auto = request(plan, offloaded="auto")
    auto.output_ids.append(7)
    (alone,) = run(plan, [auto], [101]).rows
    assert [may_be_offloaded(alone, auto, short=short) for short in (False, True)] == [False, True]
    req.ragserve = SimpleNamespace(plan=SimpleNamespace(session="s"))
    assert not may_be_offloaded(row, req, short=True), "the tree is to have the session's KV"
    req.ragserve.plan.session = None
    assert may_be_offloaded(row, req, short=True)
    req.ragserve = SimpleNamespace()
    assert not may_be_offloaded(row, req, short=True), "the tree is to have the document"


class Backend:
    """Notes what is placed, and gives selections that name the step they were made in."""

    def __init__(self) -> None:
        self.placed: list[tuple[int, int, int | None]] = []
        self.made = 0

    def place(self, row: int, selection: PageSelection, opened: int | None) -> None:
        self.placed.append((row, int(selection.counts), opened))

    def taken(self, row: int, *, wanted: bool) -> PageSelection:
        return PageSelection(torch.zeros(1), torch.tensor(self.made))

    def listed(self, row: int) -> PageSelection:
        return self.taken(row, wanted=True)


def test_tables_that_forgot_a_selection_get_it_again_with_the_page_that_began() -> None:
    plan, backend = planner(), Backend()
    offloaded: Any = SimpleNamespace(statistics_of=None, copy=lambda: None, begin_step=lambda now: None)
    lagged = LaggedSelection(backend, offloaded, PAGE)  # type: ignore[arg-type]
    a, b = request(plan, reuse=6), request(plan, mode="dense", lag=0)

    def step(
        reqs: list[Any], lengths: list[int], in_graph: bool = False
    ) -> list[tuple[int, int, int | None]]:
        backend.placed.clear()
        planned = plan.step(reqs, lengths, in_graph=in_graph)
        lagged.before(planned)
        backend.made = lengths[-1]
        lagged.after(planned, reqs)
        plan.after(planned)
        return list(backend.placed)

    assert step([a], [109]) == []
    assert step([b, a], [50, 110]) == [], "the tables move it along"
    assert step([b, a], [51, 111], in_graph=True) == [(1, 109, None)], "other tables"
    step([b, a], [52, 112], in_graph=True)
    assert step([b, a], [53, 113]) == [(1, 109, 7)], "113 begins page 7"
    for tokens in range(114, 118):
        assert step([b, a], [50, tokens]) == []
    assert step([b, a], [50, 118]) == [(1, 115, None)], "chosen at 115, with the page that began at 113"


def test_pages_of_progressive_rows_are_loaded_by_their_own_clock_and_placed_nowhere() -> None:
    plan, backend, told = planner(), Backend(), list[tuple[str, int]]()

    def load(row: Any, selection: PageSelection, lag: int) -> PageSelection:
        assert lag == 2
        told.append(("load", int(selection.counts)))
        return selection

    def arrive(row: Any, selection: PageSelection) -> bool:
        told.append(("arrive", int(selection.counts)))
        return True

    offloaded: Any = SimpleNamespace(
        statistics_of=None,
        copy=lambda: None,
        begin_step=lambda now: None,
        load=load,
        load_rest=lambda row: None,
        arrive=arrive,
    )
    lagged = LaggedSelection(backend, offloaded, PAGE)  # type: ignore[arg-type]
    a, b = request(plan, mode="progressive", offloaded=True, reuse=4), request(plan, mode="dense", lag=0)
    a.ragserve_decode.offload.begin(SimpleNamespace())

    def step(reqs: list[Any], lengths: list[int]) -> list[tuple[str, int]]:
        told.clear()
        planned = plan.step(reqs, lengths)
        lagged.before(planned)
        backend.made = lengths[-1]
        lagged.after(planned, reqs)
        plan.after(planned)
        assert not backend.placed, "it finds each page where it is"
        return list(told)

    assert [step([a], [tokens]) for tokens in range(109, 113)] == [[]] * 4
    assert step([b, a], [50, 113]) == [("load", 113)]
    assert [step([b, a], [50, tokens]) for tokens in (114, 115)] == [[]] * 2
    assert step([b, a], [50, 116]) == [("arrive", 113)]
    assert step([a], [117]) == [("load", 117)]


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
def test_every_forward_pass_follows_loads_into_resident_blocks_that_were_given_back(decode: bool) -> None:
    told: list[str] = []
    offloaded: Any = SimpleNamespace(statistics_of=None, join=lambda: told.append("join"))
    backend: Any = SimpleNamespace(graph_size=0, begin=lambda step: told.append("begin"))
    statistics: Any = SimpleNamespace(page_size=PAGE, bytes=0)
    runtime = DecodeRuntime(AttentionConfig(offload_bytes=1), planner(), statistics, backend, offloaded)
    mode = SimpleNamespace(is_decode=lambda: decode, is_extend=lambda: not decode, is_mixed=lambda: False)
    batch = SimpleNamespace(forward_mode=mode, reqs=[], seq_lens_cpu=torch.zeros(0), prefix_lens=[])
    runtime.before_forward(batch)
    assert told == ["join", "begin"]
