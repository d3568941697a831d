"""The rule `sentences` against its definition written out token by token, and where there is little to choose
from.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.selection import recompute_rules as rules
from sglang_ext.context.selection.base import ModelShape
from sglang_ext.context.selection.recompute_rules import Kept, Rule
from sglang_ext.context.selection.strategies import partial_selection
from sglang_ext.wire.protocol import ContextPlan
from tests.sentences import chosen, sentences_of
from tests.unit.context.selection.test_samkv import LAYERS, SYSTEM, analysis_of, plan_of

WRITTEN = ["word", " so", ".", '!"', "?) ", "\n", ".'\u201d", "3.5", "<|doc|>", "\u3002"]


class Reader:
    """A tokenizer of ten words."""

    def __call__(self, text: str, **_: object) -> object:
        return type("Encoding", (), {"input_ids": [0] * 20})()

    def batch_decode(self, ids: list[list[int]], **_: object) -> list[str]:
        return [WRITTEN[i] for (i,) in ids]


TEXTS = Texts.of(Reader(), len(WRITTEN))


def analyses_of(words: list[list[int]], seed: int) -> list[Analysis]:
    generator = torch.Generator().manual_seed(seed)
    found = [analysis_of(len(ids), 8, generator) for ids in words]
    for analysis, ids in zip(found, words, strict=True):
        analysis.begins[:] = TEXTS.begins(ids)
        analysis.sensitivity[:] = torch.randint(1, 50, (len(ids),), generator=generator).float()
    return found


def wanted(
    plan: ContextPlan,
    words: list[list[int]],
    kept: torch.Tensor,
    analyses: list[Analysis],
    a: torch.Tensor,
    share: float,
    first: int,
    **limits: Any,
) -> list[int]:
    documents = [
        (s.start, sentences_of([WRITTEN[i] for i in ids]))
        for s, ids in zip(plan.spans[1:], words, strict=True)
    ]
    sensitivity = torch.cat([analysis.sensitivity for analysis in analyses]).double().tolist()
    return chosen(
        documents,
        [set(row) for row in torch.atleast_2d(kept).tolist()],
        {SYSTEM + t: value for t, value in enumerate(sensitivity)},
        {SYSTEM + t: value for t, value in enumerate(a.double().tolist())},
        share,
        first,
        **limits,
    )


LIMITS: list[dict[str, Any]] = [
    {},
    {"most": 7},
    {"top_p": 0.5234},
    {"top_p": 0.8917, "least": 0.3},
    {"top_p": 0.8917, "least": 0.05, "most": 11},
]


@given(
    st.lists(
        st.lists(st.sampled_from([0, 0, 0, 1, *range(len(WRITTEN))]), min_size=1, max_size=150),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 10_000),
    st.sampled_from([0.02, 0.1, 0.37, 1.0]),
    st.sampled_from(["all", "shared", "layers"]),
    st.sampled_from([0, 1, 4, 16]),
    st.sampled_from(LIMITS),
)
def test_the_rule_is_its_definition(
    words: list[list[int]], seed: int, share: float, which: str, first: int, limits: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    plan, n = plan_of([len(ids) for ids in words]), sum(map(len, words))
    analyses = analyses_of(words, seed)
    attention = torch.rand(n, generator=generator) ** 8
    kept = torch.arange(SYSTEM + n)
    if which != "all":
        rows = [
            SYSTEM + torch.randperm(n, generator=generator)[: -(-n // 2)].sort().values
            for _ in range(LAYERS if which == "layers" else 1)
        ]
        kept = torch.stack([torch.cat((torch.arange(SYSTEM), row)) for row in rows])
        kept = kept if which == "layers" else kept[0]
    rule = Rule("sentences", share, first, **limits)
    found = rules.choose(Kept(plan, kept, analyses, attention=attention), rule)
    assert found.tolist() == wanted(plan, words, kept, analyses, attention, share, first, **limits)


def test_a_document_counts_with_its_opening_a_quarter_as_much() -> None:
    words = [[0, 0, 5, 0, 0, 0, 2, 0, 0, 2], [0, 0, 5, 0, 0, 0, 2, 0, 0, 2]]
    plan, analyses = plan_of([10, 10]), analyses_of(words, 1)
    for analysis in analyses:
        analysis.sensitivity[:] = 1.0
    attention = torch.zeros(20)
    attention[8] = 1.0  # the last sentence of the first document: 1, its title: 0.25
    attention[14] = 0.2  # the second sentence of the second document: 0.2, its title: 0.05
    attention[10] = 9.0  # parked on a document's first token
    kept = Kept(plan, torch.arange(25), analyses, attention=attention)
    for count, positions in (
        (3, [12, 13, 14]),
        (6, [5, 6, 7, 12, 13, 14]),
        (10, [5, 6, 7, 12, 13, 14, 18, 19, 20, 21]),
    ):
        assert rules.choose(kept, Rule("sentences", count / 20, first=0)).tolist() == positions
    assert rules.choose(kept, Rule("sentences", 8 / 20, first=0)).tolist() == [5, 6, 7, 12, 13, 14, 18, 19], (
        "the last sentence is cut"
    )


def test_what_the_question_does_not_look_at_is_told_apart_by_sensitivity() -> None:
    words = [[0, 0, 0, 2, 0, 0, 0, 2]]
    plan, analyses = plan_of([8]), analyses_of(words, 2)
    analyses[0].sensitivity[:] = torch.tensor([1.0] * 4 + [2.0] * 4)
    assert rules.choose(
        Kept(plan, torch.arange(13), analyses, attention=torch.zeros(8)), Rule("sentences", 0.5, first=0)
    ).tolist() == [
        9,
        10,
        11,
        12,
    ]


def test_text_without_punctuation_is_cut_every_64_tokens() -> None:
    words = [[0] * 130]
    plan, analyses = plan_of([130]), analyses_of(words, 3)
    analyses[0].sensitivity[:] = 1.0
    attention = torch.zeros(130)
    attention[100] = 1.0
    kept = Kept(plan, torch.arange(135), analyses, attention=attention)
    assert rules.choose(kept, Rule("sentences", 64 / 130, first=0)).tolist() == list(
        range(SYSTEM + 64, SYSTEM + 128)
    )
    assert TEXTS.begins([2] + [0] * 70).nonzero()[:, 0].tolist() == [0, 1, 65]


def test_a_document_of_which_nothing_is_kept_takes_part_in_nothing() -> None:
    words = [[0, 0, 0, 0, 2], [0, 0, 0, 0, 2]]
    plan, analyses = plan_of([5, 5]), analyses_of(words, 4)
    kept = torch.cat((torch.arange(SYSTEM), torch.arange(SYSTEM + 5, SYSTEM + 10)))
    attention = torch.tensor([0, 0, 0, 9.0, 0, 0, 0, 0, 0.1, 0])
    found = rules.choose(Kept(plan, kept, analyses, attention=attention), Rule("sentences", 0.4, first=0))
    assert found.tolist() == [10, 11]


@pytest.mark.parametrize(
    ("options", "positions"),
    [
        ({"share": 1.0}, list(range(SYSTEM, SYSTEM + 12))),
        ({"share": 1.0, "experimental": {"kept": [0, 1, 7, 9]}}, [7, 9]),
        ({"experimental": {"kept": [0, 2]}}, []),
    ],
)
def test_the_question_is_not_asked_where_nothing_is_to_be_chosen(
    options: dict[str, object], positions: list[int]
) -> None:
    plan = plan_of([5, 7])
    made = partial_selection(
        ContextPlan("compose", "n", "concat", plan.spans, {"recompute": "sentences", **options}),
        ModelShape(LAYERS),
    )
    settled = made.settle(analyses_of([[0] * 5, [0] * 7], 5))
    assert not settled.needs_question_attention
    assert settled.recomputed.tolist() == positions


@pytest.mark.parametrize(
    ("strategy", "options", "share"),
    [("concat", {}, 0.1), ("samkv", {"selection": "shared"}, 0.1), ("samkv", {}, 0.66)],
)
def test_without_a_share_a_tenth_is_chosen_or_two_thirds_of_chosen_sentences(
    strategy: str, options: dict[str, str], share: float
) -> None:
    spans = plan_of([300, 300]).spans
    made = partial_selection(
        ContextPlan("compose", "n", strategy, spans, {"recompute": "sentences", **options}),
        ModelShape(LAYERS),
    )
    assert (made.rule.name, made.rule.share, made.rule.first) == ("sentences", share, 4)
    assert made.settle(chosen=SYSTEM + torch.arange(90)).needs_question_attention


@pytest.mark.parametrize(
    ("options", "positions", "reason"),
    [
        ({"share": 0.5}, [6, 8, 9, 10], ""),
        ({"share_top_p": 0.69, "share": 1.0}, [6, 9], "they hold 0.69 of the weight"),
        ({"share_top_p": 0.69, "share": 1.0, "share_least": 0.4}, [6, 8, 9], "the floor: fewer hold 0.69"),
        ({"share_top_p": 0.9}, [6, 9], "the ceiling, option share"),
        ({"share_top_p": 1.0, "share": 1.0}, [5, 6, 8, 9, 10, 12], "they hold 1 of the weight"),
        ({"share_top_p": 0.9, "share": 1.0, "max_recomputed": 1}, [9], "the ceiling, option max_recomputed"),
        ({"share": 0.5, "max_recomputed": 3}, [6, 8, 9], ""),
    ],
)
@pytest.mark.parametrize("name", ["question", "anchors", "sensitivity"])
def test_the_share_follows_from_the_scores_of_tokens(
    name: str, options: dict[str, Any], positions: list[int], reason: str
) -> None:
    plan, analyses = plan_of([3, 5]), analyses_of([[0] * 3, [0] * 5], 6)
    scores = torch.tensor([0.5, 3.0, 0.0, 1.0, 4.0, 1.0, 0.0, 0.5])
    analyses[0].sensitivity[:], analyses[1].sensitivity[:] = scores[:3], scores[3:]
    made = partial_selection(
        ContextPlan("compose", "n", "concat", plan.spans, {"recompute": name, **options}), ModelShape(LAYERS)
    )
    kept = torch.arange(SYSTEM + 8)
    found = made.recomputed(kept, analyses, scores).tolist()
    assert found == positions
    assert made.rule.reason(len(found), 8).startswith(reason)
    assert bool(made.rule.reason(len(found), 8)) == bool(reason)


def test_a_share_that_may_be_all_is_asked_for_only_where_it_follows_from_scores() -> None:
    spans = plan_of([50, 50]).spans

    def settled(**options: Any) -> Any:
        plan = ContextPlan("compose", "n", "concat", spans, {"recompute": "question", **options})
        return partial_selection(plan, ModelShape(LAYERS)).settle()

    assert not settled(share=1.0).needs_question_attention
    assert settled(share=1.0, share_top_p=0.9).needs_question_attention
    assert not settled(share=1.0, share_top_p=0.9, share_least=1.0).needs_question_attention
    assert settled(share=1.0, max_recomputed=99).needs_question_attention


def test_the_number_of_tokens_that_differ_most_is_limited_too() -> None:
    spans = plan_of([50, 50]).spans

    def share(**options: Any) -> float | None:
        plan = ContextPlan("compose", "n", "cacheblend", spans, options)
        return partial_selection(plan, ModelShape(LAYERS)).settle().deviation_share

    assert share() == 0.15
    assert share(share=0.3, max_recomputed=20) == 0.2
    assert share(share=0.3, max_recomputed=40) == 0.3
