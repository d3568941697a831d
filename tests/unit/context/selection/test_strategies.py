"""Plans and the token sets that strategies choose from them."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.context.selection.base import ContextSelection, ModelShape
from sglang_ext.context.selection.recompute_rules import RULES
from sglang_ext.context.selection.reuse import BLOCK
from sglang_ext.context.selection.strategies import partial_selection
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import (
    ContextPlan,
    ContextReport,
    PlanError,
    RetrievalScores,
    Span,
    document_key,
)
from sglang_ext.wire.request_options import STRATEGY_OPTIONS, RuleName, copies_documents, strategy_options

lengths = st.lists(st.integers(1, 70), min_size=2, max_size=5)


def plan(sizes: list[int], strategy: str = "concat", **options: Any) -> ContextPlan:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    spans = tuple(Span(end - size, end) for end, size in zip(ends, sizes, strict=True))
    return ContextPlan("compose", "n", strategy, spans, options)


def select(plan: ContextPlan, layers: int) -> ContextSelection:
    """The selection of a plan that needs neither analyses nor queries."""
    return partial_selection(plan, ModelShape(layers)).settle()


@given(lengths, st.sampled_from(["concat", "epic", "random", "cacheblend"]))
def test_a_plan_survives_its_journey(sizes: list[int], strategy: str) -> None:
    sent = plan(sizes, strategy)
    assert ContextPlan.from_json(sent.to_json(), sum(sizes) + 1) == sent
    with pytest.raises(PlanError, match="at least one token"):
        ContextPlan.from_json(sent.to_json(), sum(sizes))


@given(lengths, st.floats(0.01, 1.0), st.sampled_from(["concat", "epic", "random"]))
def test_selections_are_ascending_positions_of_the_context(
    sizes: list[int], keep: float, strategy: str
) -> None:
    sent = plan(sizes, strategy, keep=keep)
    chosen = select(sent, layers=4)
    kept = chosen.kept
    assert bool((kept.diff() > 0).all())
    assert kept[: sizes[0]].tolist() == list(range(sizes[0])), "the system text stays whole"
    assert int(kept[0]) >= 0
    assert int(kept[-1]) < sent.question_start
    for span in sent.spans[1:]:
        assert bool(((kept >= span.start) & (kept < span.end)).any()), "every document keeps something"
    assert bool(torch.isin(chosen.recomputed, kept).all())
    assert chosen.slots == len(kept)


@given(lengths)
def test_keeping_everything_is_everything(sizes: list[int]) -> None:
    assert select(plan(sizes, keep=1.0), 2).kept.tolist() == list(range(sum(sizes)))


def test_keep_is_counted_in_blocks_of_each_document() -> None:
    kept = select(plan([4, 8 * BLOCK], keep=0.5), 2).kept
    assert len(kept) == 4 + 4 * BLOCK
    assert kept[4] == 4, "the first block"
    assert kept[-1] == 4 + 8 * BLOCK - 1, "and the last"


def test_epic_recomputes_the_beginnings_of_documents_only() -> None:
    assert select(plan([3, 10, 2], "epic", first=4), 2).recomputed.tolist() == [3, 4, 5, 6, 13, 14]


@given(lengths, st.floats(0.01, 1.0), st.integers(0, 5))
def test_random_draws_its_share_repeatably_and_never_from_the_system_text(
    sizes: list[int], share: float, seed: int
) -> None:
    sent = plan(sizes, "random", share=share, seed=seed)
    first, again = select(sent, 2).recomputed, select(sent, 2).recomputed
    assert torch.equal(first, again)
    documents = sum(sizes[1:])
    assert len(first) == min(documents, max(1, round(share * documents)))
    assert int(first.min()) >= sizes[0]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        *((strategy, {}) for strategy in ("concat", "epic", "random", "cacheblend")),
        *((strategy, {"recompute": "none"}) for strategy in ("concat", "epic", "random", "cacheblend")),
        ("concat", {"keep": 0.5}),
        ("concat", {"recompute": "all"}),
        ("concat", {"update": "fusion"}),
        ("concat", {"kept_positions": "compact"}),
        ("concat", {"experimental": {"kept": [0, 1, 2], "rotate": False}}),
        ("concat", {"experimental": {"kept": [[0, 1, 2], [1, 2, 3]]}}),
    ],
    ids=str,
)
def test_options_tell_whether_a_context_is_its_documents_kv(strategy: str, options: dict[str, Any]) -> None:
    selection = select(plan([20, 40, 33], strategy, **options), layers=2)
    assert copies_documents(strategy_options(strategy, options)) == selection.is_copied


def test_layers_may_keep_different_tokens_but_as_many() -> None:
    chosen = select(plan([4, 4], experimental={"kept": [[0, 1, 5], [2, 3, 7]]}), layers=2)
    assert chosen.kept.shape == (2, 3)
    with pytest.raises(PlanError, match="2 rows, the model 3 layers"):
        select(plan([4, 4], experimental={"kept": [[0, 1, 5], [2, 3, 7]]}), layers=3)


@pytest.mark.parametrize(
    ("strategy", "options", "says"),
    [
        ("concat", {"keep": 0}, "option keep of strategy 'concat' is 0: must be greater than 0"),
        ("concat", {"keep": True}, "option keep of strategy 'concat' is True: must be a valid number"),
        ("concat", {"experimental": {"kept": [[0, 1], [2]]}}, "equally long"),
        ("concat", {"experimental": {"kept": [3, 2]}}, "ascending"),
        ("concat", {"experimental": {"kept": [0, 99]}}, "below 8"),
        (
            "concat",
            {"recompute": "some"},
            "recompute of strategy 'concat' is 'some': must be 'all', .* or must be a valid list",
        ),
        ("concat", {"recompute": [99]}, "below 8"),
        (
            "concat",
            {"experimental": {"rotate": "no"}},
            "option experimental.rotate .* is 'no': must be a valid boolean",
        ),
        ("concat", {"depth": 1}, "no option depth .*: it has .*keep, kept_positions, experimental.rotate"),
        (
            "concat",
            {"experimental": {"kept": [[0, 1], [2, 3]]}, "kept_positions": "compact"},
            "same tokens in every layer",
        ),
        (
            "concat",
            {"experimental": {"rotate": False}, "kept_positions": "compact"},
            "rotate=false needs kept_positions=original",
        ),
        ("samkv", {"selection": "layers", "kept_positions": "compact"}, "same tokens in every layer"),
        ("samkv", {"kept_positions": "shut"}, "must be 'original' or 'compact'"),
        ("cacheblend", {"keep": 0.5}, "no option keep"),
        ("epic", {"experimental": {"rotate": False}}, "no option experimental"),
        ("epic", {"first": 1.5}, "valid integer"),
        ("random", {"seed": -1}, "greater than or equal to 0"),
        ("random", {"share_top_p": 0.9}, "needs one of the rules anchors, .*, and recompute is random"),
        (
            "concat",
            {"recompute": [4], "max_recomputed": 9},
            "needs one of the rules .* recompute is positions",
        ),
        ("concat", {"recompute": "question", "max_recomputed": 0}, "greater than or equal to 1"),
        ("nothing", {}, "one of cacheblend, concat, epic, random, samkv"),
    ],
)
def test_bad_options_say_what_is_wrong(strategy: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        select(plan([4, 4], strategy, **options), layers=2)


@pytest.mark.parametrize("span", [[0, 1.9], ["0", 3], [0, True], [0, 3.0], [0], [0, 3, 5]])
def test_a_span_is_two_whole_numbers(span: list[Any]) -> None:
    sent = json.loads(plan([3]).to_json()) | {"spans": [span]}
    with pytest.raises(PlanError, match="not a context plan"):
        ContextPlan.from_json(json.dumps(sent), 9)


def test_every_option_has_a_description_and_every_rule_its_function() -> None:
    assert list(STRATEGY_OPTIONS) == ["cacheblend", "concat", "epic", "random", "samkv"]
    for model in STRATEGY_OPTIONS.values():
        assert model.__doc__
        experimental = model.model_fields.get("experimental")
        groups = [model.model_fields, experimental.annotation.model_fields if experimental else {}]  # type: ignore[union-attr]
        for fields in groups:
            missing = [name for name, field in fields.items() if not field.description]
            assert set(missing) <= {"experimental"}
    assert set(get_args(RuleName)) == set(RULES) - {"positions"}


@given(st.lists(st.integers(0, 2**31), max_size=20), st.text(max_size=8), st.text(max_size=8))
def test_keys_depend_on_namespace_model_and_tokens(ids: list[int], namespace: str, model: str) -> None:
    key = document_key(namespace, model, ids)
    assert len(key) == 32
    others = {
        document_key(namespace + "x", model, ids),
        document_key(namespace, model + "x", ids),
        document_key(namespace, model, [*ids, 1]),
    }
    assert key not in others
    assert len(others) == 3


def test_a_report_survives_its_journey() -> None:
    report = ContextReport("epic", 100, 90, 16, {"device": 50, "host": 40}, 1.5, 0.0, 2.5)
    assert ContextReport.from_json(report.to_json()) == report
    assert json.loads(report.to_json())["by_tier"] == {"device": 50, "host": 40}


@given(
    st.integers(0, 100_000),
    st.integers(-50_000, 50_000),
    st.sampled_from([True, False]),
    st.integers(0, 2**31),
)
def test_rotations_add_up(position: int, shift: int, neox: bool, seed: int) -> None:
    """Rotating by a, then by b, is rotating by a + b: what lets cached keys move."""
    torch.manual_seed(seed)
    rotation = Rotation(1.0 / (10000.0 ** (torch.arange(0, 16, 2) / 16)), 16, neox=neox)
    k = torch.randn(3, 2, 24)
    moved = rotation.rotate(rotation.rotate(k, torch.full((3,), position)), torch.full((3,), shift))
    torch.testing.assert_close(
        moved, rotation.rotate(k, torch.full((3,), position + shift)), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(moved[..., 16:], k[..., 16:]), "dimensions beyond the rotary ones stay"


SCORED = (Span(0, 4), Span(4, 14), Span(14, 20))


def scored(documents: Any, sentences: Any) -> str:
    plan = json.loads(ContextPlan("compose", "n", "samkv", SCORED).to_json())
    return json.dumps(plan | {"scores": {"documents": documents, "sentences": sentences}})


def test_scores_come_back_with_four_digits() -> None:
    scores = RetrievalScores((0.123456, None), (((0, -1.0), (9, 0.98765)), ()))
    plan = ContextPlan("compose", "n", "samkv", SCORED, scores=scores)
    assert ContextPlan.from_json(plan.to_json(), 30).scores == RetrievalScores(
        (0.1235, None), (((0, -1.0), (9, 0.9877)), ())
    )
    without = ContextPlan("compose", "n", "samkv", SCORED)
    assert ContextPlan.from_json(without.to_json(), 30).scores is None


@pytest.mark.parametrize(
    ("documents", "sentences", "says"),
    [
        ([0.1], [[], []], "1 and 2 scores for 2 documents"),
        ([0.1, 0.2], [[]], "2 and 1 scores for 2 documents"),
        ([0.1, 1.5], [[], []], "from -1 to 1, not 1.5"),
        ([0.1, float("nan")], [[], []], "from -1 to 1, not nan"),
        ([0.1, float("-inf")], [[], []], "from -1 to 1, not -inf"),
        ([0.1, True], [[], []], "from -1 to 1, not True"),
        ([0.1, "0.2"], [[], []], "from -1 to 1, not '0.2'"),
        ([0.1, 0.2], [[[0, None]], []], "from -1 to 1, not None"),
        ([0.1, 0.2], [[[0, 0.1], [0, 0.2]], []], "must ascend"),
        ([0.1, 0.2], [[[3, 0.1], [1, 0.2]], []], "must ascend"),
        ([0.1, 0.2], [[[-1, 0.1]], []], "outside of its document of 10 tokens"),
        ([0.1, 0.2], [[], [[0, 0.1], [6, 0.2]]], "outside of its document of 6 tokens"),
        ([0.1, 0.2], [[[0.5, 0.1]], []], "whole numbers"),
        ([0.1, 0.2], [[[0]], []], "cannot be used"),
        ([0.1, 0.2], [3, []], "cannot be used"),
        (None, [[], []], "cannot be used"),
    ],
)
def test_scores_of_a_client_are_checked(documents: Any, sentences: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        ContextPlan.from_json(scored(documents, sentences), 30)


def test_scores_that_are_no_object_are_refused() -> None:
    plan = json.loads(ContextPlan("compose", "n", "samkv", SCORED).to_json())
    with pytest.raises(PlanError, match="cannot be used"):
        ContextPlan.from_json(json.dumps(plan | {"scores": [1]}), 30)
