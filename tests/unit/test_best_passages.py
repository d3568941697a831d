"""Which passages strategy `passages` keeps."""

from __future__ import annotations

from typing import Any

import pytest

from ragserve.best_passages import PassagesOptions
from ragserve.errors import InvalidRequest
from ragserve.strategy_spec import keeps_whole, parse


@pytest.mark.parametrize(
    ("options", "ranking", "kept"),
    [
        ({"keep": 0.5}, None, [0, 1]),  # 50 of 100 tokens
        ({"keep": 0.5}, [3, 0, 1, 2], [0, 3]),  # in the order of the prompt
        ({"keep": 0.4}, None, [0, 3]),  # 1 and 2 do not fit behind 0: skipped
        ({"keep": 0.01}, [2, 0, 1, 3], [2]),  # the best in any case
        ({"keep": 1.0}, None, [0, 1, 2, 3]),
        ({}, None, [0]),  # a quarter: 20 of 25 tokens
        ({"tokens": 30}, None, [0, 3]),
        ({"tokens": 1000}, None, [0, 1, 2, 3]),
        ({"tokens": 30, "keep": 0.2}, None, [0]),
        ({"tokens": 30, "keep": 0.9}, None, [0, 3]),
    ],
)
def test_the_best_that_fit_are_kept(
    options: dict[str, Any], ranking: list[int] | None, kept: list[int]
) -> None:
    assert PassagesOptions.of(options).chosen([20, 30, 40, 10], ranking) == kept


def test_none_of_none() -> None:
    assert PassagesOptions.of({}).chosen([]) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("passages:keep=0", "Option keep of strategy 'passages' is 0: must be greater than 0"),
        ("passages:keep=1.5", "less than or equal to 1"),
        ("passages:tokens=0", "greater than or equal to 1"),
        ("passages:keeps=0.5", "did you mean keep?"),
    ],
)
def test_bad_options(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as failure:
        parse(text, ["passages"])
    assert says in str(failure.value)


def test_sessions_need_more() -> None:
    [spec] = parse("passages:keep=1", ["passages"])
    assert not keeps_whole(spec)
