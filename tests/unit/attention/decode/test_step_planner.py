"""Which rows are sparse, and when they choose their pages anew."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.attention.decode.step_planner import Step, StepPlanner, Variant
from sglang_ext.wire.attention_config import AttentionConfig, from_environment
from sglang_ext.wire.prefill_options import PrefillOptions
from sglang_ext.wire.protocol import ATTENTION_CONFIG_VARIABLE, DECODE_FIELD, DecodeOptions, PlanError
from sglang_ext.wire.request_options import STRATEGY_OPTIONS, strategy_options


def planner(**options: Any) -> StepPlanner:
    return StepPlanner(AttentionConfig(options=DecodeOptions(**options), max_budget=4096), 16, 8192)


def request(plan: StepPlanner, rid: str, **options: Any) -> Any:
    req = SimpleNamespace(
        rid=rid,
        sampling_params=SimpleNamespace(
            custom_params={DECODE_FIELD: json.dumps(options)} if options else None
        ),
    )
    plan.admit(req)
    return req


def test_dense_up_to_a_length_and_within_the_budget() -> None:
    plan = planner(mode="hierarchical", budget=512, dense_below=1000)
    a, b = request(plan, "a"), request(plan, "b", dense_below=0)
    for lengths, variant in (
        ((1000, 512), Variant.DENSE),
        ((1000, 513), Variant.SELECTED),
        ((1001, 10), Variant.SELECTED),
    ):
        assert plan.step([a, b], lengths).variant is variant
    step = plan.step([a, b], (1000, 600))
    assert [row.sparse for row in step.rows] == [False, True]


def run(plan: StepPlanner, reqs: list[Any], lengths: list[int], *, in_graph: bool = False) -> Step:
    step = plan.step(reqs, lengths, in_graph=in_graph)
    plan.after(step)
    return step


def test_pages_are_chosen_at_once_first_and_then_at_the_end_of_every_reuse_th_step() -> None:
    plan = planner(mode="hierarchical", budget=64, reuse=4, dense_below=0)
    a = request(plan, "a")
    steps = [run(plan, [a], [length]) for length in range(101, 133)]
    assert steps[0].variant is Variant.SELECTED
    assert [i for i, step in enumerate(steps) if step.variant is Variant.REFRESHED] == list(range(3, 32, 4))
    assert all(step.variant is Variant.REUSED for i, step in enumerate(steps) if i and i % 4 != 3)
    assert [step.changed for step in steps] == [True] + [False] * 31
    assert [i for i, step in enumerate(steps) if step.opened[0]] == [12, 28], (
        "113 = 7 * 16 + 1 and 129 begin a page"
    )
    assert not a.ragserve_decode.selection.widened, "chosen anew since"


def test_every_step_chooses_by_itself_where_nothing_is_reused() -> None:
    plan = planner(mode="hierarchical", budget=64, reuse=1, dense_below=0)
    a = request(plan, "a")
    steps = [run(plan, [a], [length]) for length in range(101, 120)]
    assert {(step.variant, step.active, step.opened) for step in steps} == {
        (Variant.SELECTED, (True,), (False,))
    }


def test_a_second_page_that_begins_is_one_too_many() -> None:
    plan = planner(mode="hierarchical", budget=64, reuse=100, dense_below=0, observe="last")
    a = request(plan, "a")
    steps = [run(plan, [a], [length]) for length in range(101, 150)]
    assert [i for i, step in enumerate(steps) if step.opened[0]] == [12, 44]
    assert [i for i, step in enumerate(steps) if step.active[0]] == [0, 28], (
        "at 129 two pages are new since 101"
    )
    assert steps[28].variant is Variant.SELECTED


def test_pages_stay_with_their_row_when_others_come_and_go() -> None:
    plan = planner(mode="hierarchical", budget=64, reuse=8, dense_below=0)
    a, b, dense = request(plan, "a"), request(plan, "b"), request(plan, "c", mode="dense")
    run(plan, [a], [101])
    joined = run(plan, [dense, b, a], [50, 200, 102])
    assert (joined.changed, joined.kept, joined.active) == (True, (-1, -1, 0), (False, True, False))
    assert joined.variant is Variant.SELECTED
    left = run(plan, [a, b], [103, 201])
    assert (left.changed, left.kept, left.active) == (True, (2, 1), (False, False))
    assert left.variant is Variant.REUSED
    run(plan, [b], [202])
    back = run(plan, [a, b], [104, 203])
    assert (back.kept, back.active) == ((-1, 0), (True, False)), "its place was taken meanwhile"
    moved = plan.step([a, b], [105, 204], in_graph=True)
    assert (moved.changed, moved.active) == (True, (True, True)), "the tables are others"
    assert plan.step([a, b], [106, 205], in_graph=True).active == (False, False)


def test_rows_that_are_old_enough_come_along() -> None:
    plan = planner(mode="hierarchical", budget=64, reuse=8, dense_below=0, observe="last")
    a, b, slow = request(plan, "a"), request(plan, "b"), request(plan, "c", reuse=40)
    lengths = [100, 199, 300]
    for step in range(5):
        run(plan, [a, slow], [lengths[0] + step, lengths[2] + step])
    steps = [run(plan, [a, b, slow], [n + step for n in lengths]) for step in range(5, 24)]
    refreshed = {i + 5: step.active for i, step in enumerate(steps) if step.variant is Variant.REFRESHED}
    assert refreshed == {7: (True, True, False), 15: (True, True, True), 23: (True, True, False)}, (
        "b was 3 of 8 steps old, slow 8 of 40"
    )


def test_a_window_is_the_running_mean_of_decoded_queries_and_chooses_after_16_steps_first() -> None:
    plan = planner(mode="hierarchical", budget=64, reuse=40, window=3, dense_below=0)
    a, other = request(plan, "a"), request(plan, "b", mode="dense")
    steps = [run(plan, [a], [4097 + i]) for i in range(2)]
    steps += [run(plan, [other, a], [50, 4099 + i]) for i in range(100)]
    assert [round(step.shares[-1], 4) for step in steps[:4]] == [1, 0.5, 0.3333, 0.3333]
    assert steps[2].shares[0] == 1
    chosen = [i for i, step in enumerate(steps) if step.variant is Variant.REFRESHED]
    assert chosen[0] == 15, "the first selection was by one query"
    assert run(plan, [a], [4300], in_graph=True).shares == (1.0,), "other tables know no earlier query"
    assert run(plan, [a], [4301], in_graph=True).shares == (1 / 2,)
    a.ragserve_decode.forget_selection()
    assert run(plan, [a], [4302], in_graph=True).shares == (1.0,), "it has been retracted"


def test_pages_chosen_by_the_prompt_or_by_nobody_are_not_chosen_again_for_their_age() -> None:
    plan = planner(mode="hierarchical", budget=64, reuse=4, dense_below=0, observe="prompt")
    short, prompt, recent = (
        request(plan, "s", dense_below=500),
        request(plan, "p", window=8),
        request(plan, "r", observe="recent"),
    )
    asked = plan.asked([short, prompt, recent], [(0, 400), (90, 100), (0, 100)])
    assert asked == ((prompt.ragserve_decode.queries, 402, 8),), (
        "of those that decode sparsely, in the batch's order"
    )
    prompt.ragserve_decode.queries.show(torch.zeros(1), 8)
    steps = [run(plan, [prompt, recent], [101 + i, 101 + i]) for i in range(30)]
    assert {step.shares for step in steps} == {(0.0, 1.0)}
    assert [i for i, step in enumerate(steps) if step.active[0]] == [0, 28], "at 129 two pages are new"
    assert [i for i, step in enumerate(steps) if step.active[1]] == [0, 12, 28], "113 and 129 begin a page"
    assert not any(step.opened[1] for step in steps)
    assert {step.variant for step in steps} == {Variant.SELECTED, Variant.REUSED}
    unseen = request(plan, "u")
    assert [run(plan, [unseen], [101 + i]).shares for i in range(3)] == [(1.0,), (0.0,), (0.0,)]


def test_progressive_rows_decide_the_variant() -> None:
    plan = planner(mode="dense", dense_below=0)
    rows = [
        request(plan, "a"),
        request(plan, "b", mode="hierarchical", budget=64),
        request(plan, "c", mode="progressive"),
    ]
    step = plan.step(rows, [500, 500, 500])
    assert step.variant is Variant.PROGRESSIVE
    assert step.active == (False, True, False)
    assert plan.step(rows[:2], [501, 501]).variant is Variant.REUSED
    assert plan.step(rows[:1], [502]).variant is Variant.DENSE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode of sparse decoding is 'fast': must be 'dense'"),
        ({"mode": "hierarchical", "budget": 16}, "the first and the newest page alone take 32"),
        ({"mode": "hierarchical", "budget": 5000}, "largest is 4096"),
        ({"threshold": 0}, "threshold .* is 0"),
        ({"threshold": "high"}, "threshold .* is 'high'"),
        ({"reuse": True}, "reuse .* is True"),
        ({"budgets": 3}, "no option budgets"),
        ({"streaming": True}, "without a pattern file"),
        (
            {"mode": "dense", "observe": "window"},
            "observe is for mode 'hierarchical', and this request's is 'dense'",
        ),
        ({"mode": "hierarchical", "observe": "all"}, "observe .* is 'all': must be 'last', 'window'"),
        ({"mode": "hierarchical", "window": 65}, "window .* is 65"),
    ],
    ids=str,
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        request(planner(), "a", **options)


def test_exact_scores_need_keys_on_the_device_and_of_16_bits() -> None:
    exact = DecodeOptions(mode="hierarchical", scores="exact")
    with pytest.raises(PlanError, match="kv_bits=16"):
        StepPlanner(AttentionConfig(options=exact, kv_bits=8), 16, 8192)
    offloading = AttentionConfig(offload_bytes=2**20)
    for options in ({"scores": "exact"}, {"observe": "recent"}):
        with pytest.raises(PlanError, match="chooses by bounds"):
            request(StepPlanner(offloading, 16, 8192), "a", mode="hierarchical", lag=1, **options)


@pytest.mark.parametrize(
    ("config", "options", "scores"),
    [
        ({}, {}, "exact"),
        ({}, {"scores": "bound"}, "bound"),
        ({"kv_bits": 8}, {}, "bound"),
        ({"offload_bytes": 2**20}, {"lag": 1}, "bound"),
        ({"offload_bytes": 2**20}, {"offloaded": "auto"}, "bound"),
        ({"offload_bytes": 2**20}, {}, "exact"),
        ({}, {"mode": "progressive"}, "bound"),
    ],
    ids=str,
)
def test_scores_that_are_left_open_read_keys_where_they_can(
    config: dict[str, Any], options: dict[str, Any], scores: str
) -> None:
    own = request(StepPlanner(AttentionConfig(**config), 16, 8192), "a", **{"mode": "hierarchical"} | options)
    servers = request(StepPlanner(AttentionConfig(options=DecodeOptions(**options), **config), 16, 8192), "b")
    assert own.ragserve_decode.options.scores == servers.ragserve_decode.options.scores == scores


def test_a_budget_of_the_whole_context_is_dense() -> None:
    plan = planner()
    req = request(plan, "a", mode="hierarchical", budget=8192, dense_below=0)
    assert plan.step([req], [8000]).variant is Variant.DENSE


def test_options_that_are_no_object() -> None:
    for text in ("[1]", "{", '{"budget": ' + "1" * 5000 + "}", "[" * 100_000):
        for options in (DecodeOptions(), PrefillOptions()):
            with pytest.raises(PlanError, match="JSON"):
                options.from_request(text)


def test_no_option_takes_a_number_that_is_too_large_for_arithmetic() -> None:
    for text in ("budget", "reuse", "window", "dense_below", "resident_blocks", "lag", "threshold"):
        with pytest.raises(PlanError, match=text):
            DecodeOptions().from_request(f'{{"{text}": 1{"0" * 400}}}')
    for text in ("alpha", "observe", "dense_last", "dense_below"):
        with pytest.raises(PlanError, match=text):
            PrefillOptions().from_request(f'{{"{text}": 1{"0" * 400}}}')
    for strategy, kind in STRATEGY_OPTIONS.items():
        for name in kind.model_fields:
            with pytest.raises(PlanError, match=name):
                strategy_options(strategy, {name: 10**400})


def test_configuration_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTENTION_CONFIG_VARIABLE, raising=False)
    assert from_environment() is None
    monkeypatch.setenv(
        ATTENTION_CONFIG_VARIABLE,
        json.dumps({"options": {"mode": "progressive"}, "logical_page": 8, "heads": "h.json"}),
    )
    config = from_environment()
    assert config is not None
    assert (config.options.mode, config.logical_page, str(config.heads)) == ("progressive", 8, "h.json")
    monkeypatch.setenv(ATTENTION_CONFIG_VARIABLE, json.dumps({"options": {"budget": 9000}}))
    with pytest.raises(ValueError, match="below the default"):
        from_environment()


@pytest.mark.parametrize("options", [{"offloaded": True}, {"offloaded": "auto"}, {"lag": 2}], ids=str)
def test_a_lag_needs_a_pool_of_16_bits_and_host_pages(options: dict[str, Any]) -> None:
    few = StepPlanner(AttentionConfig(kv_bits=8), 16, 8192)
    with pytest.raises(PlanError, match="needs a KV pool of 16 bits, and this server's has 8"):
        request(few, "a", mode="hierarchical", **options)
    with pytest.raises(PlanError, match="keeps no KV of requests on the host"):
        request(planner(), "a", mode="hierarchical", **options)
