"""Which passages a strategy keeps."""

from __future__ import annotations

from typing import Any

import pytest

from ragserve.best_passages import PassagesOptions, choice_of
from ragserve.errors import InvalidRequest
from ragserve.strategy_spec import StrategySpec, check_read_whole, keeps_whole, parse

NAMELESS = [("", "")] * 4


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep": 0.5}, [0, 1]),  # 50 of 100 tokens
        ({"keep": 0.4}, [0, 3]),  # 1 and 2 do not fit behind 0: skipped
        ({"keep": 0.01}, [0]),  # the best in any case
        ({"keep": 1.0}, [0, 1, 2, 3]),
        ({}, [0]),  # a quarter: 20 of 25 tokens
        ({"tokens": 30}, [0, 3]),
        ({"tokens": 1000}, [0, 1, 2, 3]),
        ({"tokens": 30, "keep": 0.2}, [0]),
        ({"tokens": 30, "keep": 0.9}, [0, 3]),
    ],
)
@pytest.mark.parametrize("by", ["score", "links"])
def test_the_best_that_fit_are_kept(options: dict[str, Any], by: str, kept: list[int]) -> None:
    best = PassagesOptions.of({"by": by, **options})
    assert best.chosen("", NAMELESS, [20, 30, 40, 10]) == kept


FILMS = [("Grey Harbour", "A film directed by Mira Valdeno."), ("Ox", "A film."), ("Elm", "A film of oxen.")]
DIRECTOR = ("Mira Valdeno", "She was a child of farmers.")


@pytest.mark.parametrize(("by", "kept"), [("links", [0, 3]), ("score", [0, 1])])
def test_links_are_followed_unless_the_search_s_order_is_asked_for(by: str, kept: list[int]) -> None:
    best = PassagesOptions.of({"keep": 0.5, "by": by})
    question = "Who directed Grey Harbour?"
    assert best.chosen(question, [*FILMS, DIRECTOR], [10] * 4, [0.5, 0.3, 0.3, 0.1]) == kept


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [3, 17]),  # what stands out: it names the director
        ({"keep": 0.05}, [17]),
        ({"keep_least": 0.15}, [0, 3, 17]),
        ({"tokens": 10}, [17]),
    ],
)
def test_an_adaptive_choice_keeps_what_stands_out(options: dict[str, Any], kept: list[int]) -> None:
    passages = [(f"Plant {number}", f"Plant number {number} is green.") for number in range(20)]
    passages[17], passages[3] = FILMS[0], DIRECTOR
    scores = [0.3 - 0.001 * number for number in range(20)]
    scores[17] = 0.6
    best = PassagesOptions.of({"adaptive": True, **options})
    assert best.chosen("Who directed Grey Harbour?", passages, [10] * 20, scores) == kept


def test_none_of_none() -> None:
    assert PassagesOptions.of({}).chosen("", [], []) == []
    assert PassagesOptions.of({"adaptive": True}).chosen("", [], []) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("passages:keep=0", "Option keep of strategy 'passages' is 0: must be greater than 0"),
        ("passages:keep=1.5", "less than or equal to 1"),
        ("passages:tokens=0", "greater than or equal to 1"),
        ("passages:keeps=0.5", "did you mean keep"),
        ("passages:adaptive=true,by=score", "adaptive needs by=links, and by is score"),
        ("passages:keep_least=0.2", "keep_least needs adaptive=true"),
        ("passages:passages.keep=0.2", "has no option passages"),
        (
            "concat:passages.keep=0",
            "Option keep of passages of strategy 'concat' is 0: must be greater than 0",
        ),
        ("concat:passages.keeps=0.5", "did you mean keep"),
        ("concat:passages=0.5", "must be options, as passages.keep=0.25"),
        ("full:passages.keep=0.5", "strategy full takes no options"),
    ],
)
def test_bad_options(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        parse(text, ["passages", "concat", "full"])
    assert says.lower() in str(failure.value).lower()


def test_a_composed_strategy_takes_the_same_options() -> None:
    label = "concat:passages.keep=0.5,passages.tokens=30,recompute=question"
    [spec] = parse(label, ["concat"])
    assert spec.label == label
    best, engine = choice_of(spec.name, spec.options)
    assert best == PassagesOptions(keep=0.5, tokens=30)
    assert engine == {"recompute": "question"}
    inherited = spec.resolve(None, {"passages": {"keep": 0.1}})
    assert inherited.options["passages"] == {"keep": 0.1, "tokens": 30}


def test_without_a_choice_all_options_are_the_engine_s() -> None:
    assert choice_of("concat", {"keep": 0.5}) == (None, {"keep": 0.5})
    assert choice_of("auto", {"passages": {}}) == (None, {"passages": {}})


@pytest.mark.parametrize("text", ["passages:keep=1", "concat:passages.keep=1", "samkv:passages.tokens=9"])
def test_sessions_and_measurements_of_whole_prompts_need_more(text: str) -> None:
    [spec] = parse(text, ["passages", "concat", "samkv"])
    assert spec.chooses_passages
    assert not keeps_whole(spec)
    with pytest.raises(InvalidRequest, match="reads the best passages alone"):
        check_read_whole([StrategySpec("full"), spec])


@pytest.mark.parametrize(
    "text", ["samkv:recompute=all", "samkv:keep=0.5,recompute=all", "concat:passages.keep=1,recompute=all"]
)
def test_what_computes_all_that_it_keeps_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="strategy 'passages' with the same keep"):
        parse(text, ["samkv", "concat"])


@pytest.mark.parametrize("text", ["samkv:keep=1,recompute=all", "concat:recompute=all"])
def test_exactness_of_the_whole_can_be_checked(text: str) -> None:
    parse(text, ["samkv", "concat"])
