"""Which rows are sparse, and when they choose their pages anew."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.attention.config import AttentionConfig, from_environment
from sglang_ext.attention.requests import Planner, Variant
from sglang_ext.protocol import ATTENTION_CONFIG_VARIABLE, DECODE_FIELD, DecodeOptions, PlanError


def planner(**options: Any) -> Planner:
    return Planner(AttentionConfig(options=DecodeOptions(**options), max_budget=4096), 16, 8192)


def request(plan: Planner, rid: str, **options: Any) -> Any:
    req = SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(custom_params={DECODE_FIELD: json.dumps(options)} if options else None))
    plan.admit(req)
    return req


def test_dense_up_to_a_length_and_within_the_budget() -> None:
    plan = planner(mode="hierarchical", budget=512, dense_below=1000)
    a, b = request(plan, "a"), request(plan, "b", dense_below=0)
    for lengths, variant in (((1000, 512), Variant.DENSE), ((1000, 513), Variant.SELECTED), ((1001, 10), Variant.SELECTED)):
        assert plan.step([a, b], lengths).variant is variant
    step = plan.step([a, b], (1000, 600))
    assert [row.sparse for row in step.rows] == [False, True]


def test_selections_are_reused_until_a_page_begins_or_the_batch_changes() -> None:
    plan = planner(mode="hierarchical", budget=64, reuse=4, dense_below=0)
    a, b = request(plan, "a"), request(plan, "b", reuse=3)
    steps = [plan.step([a], [length]) for length in range(101, 121)]
    # new batch at 101, every 4th step; 113 = 7 * 16 + 1 begins a page (and is a 4th step as well)
    assert [i for i, step in enumerate(steps) if step.variant is Variant.SELECTED] == [0, 4, 8, 12, 16]
    assert all(step.variant is Variant.REUSED for i, step in enumerate(steps) if i % 4)
    assert [step.changed for step in steps] == [True] + [False] * 19
    assert plan.step([a], [129]).active == (True,), "its newest page is a new one"
    assert plan.step([a, b], [130, 99]).active == (True, True)
    assert [plan.step([a, b], [131 + i, 100 + i]).active for i in range(4)] == [
        (False, False),
        (False, False),
        (False, True),
        (True, False),
    ]
    plan.forget()
    assert plan.step([a, b], [135, 104]).active == (True, True), "another forward ran in between"


def test_progressive_rows_decide_the_variant() -> None:
    plan = planner(mode="dense", dense_below=0)
    rows = [request(plan, "a"), request(plan, "b", mode="hierarchical", budget=64), request(plan, "c", mode="progressive")]
    step = plan.step(rows, [500, 500, 500])
    assert step.variant is Variant.PROGRESSIVE
    assert step.active == (False, True, False)
    assert plan.step(rows[:2], [501, 501]).variant is Variant.SELECTED
    assert plan.step(rows[:1], [502]).variant is Variant.DENSE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "decode mode 'fast'"),
        ({"mode": "hierarchical", "budget": 16}, "the first and the newest page alone take 32"),
        ({"mode": "hierarchical", "budget": 5000}, "largest is 4096"),
        ({"threshold": 0}, "threshold is 0"),
        ({"threshold": "high"}, "threshold is 'high'"),
        ({"reuse": True}, "reuse is True"),
        ({"budgets": 3}, "no decode option budgets"),
        ({"streaming": True}, "without a pattern file"),
    ],
    ids=str,
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        request(planner(), "a", **options)


def test_a_budget_of_the_whole_context_is_dense() -> None:
    plan = planner()
    req = request(plan, "a", mode="hierarchical", budget=8192, dense_below=0)
    assert plan.step([req], [8000]).variant is Variant.DENSE


def test_options_that_are_no_object() -> None:
    for text in ("[1]", "{"):
        with pytest.raises(PlanError, match="JSON"):
            DecodeOptions().from_request(text)


def test_configuration_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTENTION_CONFIG_VARIABLE, raising=False)
    assert from_environment() is None
    monkeypatch.setenv(ATTENTION_CONFIG_VARIABLE, json.dumps({"options": {"mode": "progressive"}, "logical_page": 8, "heads": "h.json"}))
    config = from_environment()
    assert config is not None
    assert (config.options.mode, config.logical_page, str(config.heads)) == ("progressive", 8, "h.json")
    monkeypatch.setenv(ATTENTION_CONFIG_VARIABLE, json.dumps({"options": {"budget": 9000}}))
    with pytest.raises(ValueError, match="below the default"):
        from_environment()
