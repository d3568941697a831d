"""Strategies as they are written on the command line."""

from __future__ import annotations

import pytest

from ragserve.errors import InvalidRequest
from ragserve.strategy_spec import StrategySpec, parse, reads_as_many


def test_options_belong_to_the_strategy_before_them() -> None:
    specs = parse(
        "full, epic:first=16 "
        ",cacheblend:share=0.15,samkv:update=fusion,block_size=16,personalised=false,concat:recompute=[1,2],keep=0.5"
    )
    assert specs == [
        StrategySpec("full"),
        StrategySpec("epic", {"first": 16}),
        StrategySpec("cacheblend", {"share": 0.15}),
        StrategySpec("samkv", {"update": "fusion", "block_size": 16, "personalised": False}),
        StrategySpec("concat", {"recompute": [1, 2], "keep": 0.5}),
    ]


def test_a_label_reads_back_as_what_it_labels() -> None:
    for text in (
        "full",
        "samkv:block_size=16,update=fusion",
        "concat:recompute=all",
        "concat:experimental.kept=[[1,2],[3]],keep=0.5",
        "samkv:experimental.lexical_weight=1,experimental.scoring=keys,keep=0.2",
        "a:x=b:c",
    ):
        [spec] = parse(text)
        assert spec.label == text
        assert parse(spec.label) == [spec]


def test_an_option_that_does_not_exist_is_said_to_be_none() -> None:
    with pytest.raises(
        InvalidRequest, match=r"no option shares \(did you mean share\?\): it has .*recompute"
    ):
        parse("concat:shares=0.5", ["concat"])


def test_a_dot_leads_into_a_group_of_options() -> None:
    [spec] = parse("samkv:experimental.lexical_weight=1,keep=0.2,experimental.scoring=keys")
    assert spec.options == {"experimental": {"lexical_weight": 1, "scoring": "keys"}, "keep": 0.2}
    assert parse('samkv:experimental={"lexical_weight":1}')[0].label == "samkv:experimental.lexical_weight=1"


def test_a_request_of_the_server_s_strategy_inherits_its_options() -> None:
    [server] = parse("samkv:keep=0.2,experimental.lexical_weight=1,experimental.scoring=keys")
    asked = {"experimental": {"scoring": "attention"}, "seed": 3, "force": True}
    for name in (None, "samkv"):
        assert server.resolve(name, asked).options == {
            "keep": 0.2,
            "experimental": {"lexical_weight": 1, "scoring": "attention"},
            "seed": 3,
            "force": True,
        }
    assert server.resolve("epic", {"first": 8}) == StrategySpec("epic", {"first": 8})
    assert server.resolve("full", {"force": True}).name == "full"
    for name, options, says in (
        ("epic", {"depth": 1}, "Strategy 'epic' has no option depth: it has"),
        (None, {"keep": 2}, "Option keep of strategy 'samkv' is 2: must be less than or equal to 1"),
        ("concat", {"recompute": "best"}, "Option recompute of strategy 'concat' is 'best': must be 'all'"),
    ):
        with pytest.raises(InvalidRequest, match=says) as refused:
            server.resolve(name, options)
        assert refused.value.param == "strategy_options"


def test_the_same_strategy_is_asked_once() -> None:
    assert [spec.label for spec in parse("epic:first=1,share=2,full,epic:share=2,first=1,full")] == [
        "epic:first=1,share=2",
        "full",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "No strategy"),
        ("first=16", "belongs to no strategy"),
        ("epic:first", "is not an option"),
        ("epic:=3", "is not an option"),
        ("Epic", "Unknown strategy 'Epic'"),
        ("magic", "Unknown strategy 'magic'"),
    ],
)
def test_what_is_no_strategy(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse(text, ("epic", "full"))


@pytest.mark.parametrize(
    ("label", "as_many"),
    [
        ("passages:by=score,count=3", True),
        ("passages:tokens=500", True),
        ("passages:keep=0.5", False),
        ("passages:keep=1,adaptive=true", False),
        ("concat:recompute=question,share=0.15", True),
        ("concat:passages.count=3,recompute=question,share=0.2", True),
        ("concat:passages.keep=0.5,recompute=question,share=0.2", False),
        ("concat:keep=0.5", False),
        ("samkv", False),
    ],
)
def test_what_leaves_out_no_more_of_fewer_passages(label: str, as_many: bool) -> None:
    assert reads_as_many(parse(label)[0]) == as_many
