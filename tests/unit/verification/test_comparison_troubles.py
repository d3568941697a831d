"""Comparing strategies while the engine, the search or a strategy fails, and what ends a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.errors import ModelUnavailable, NotFound, RagserveError, Unavailable
from ragserve.retrieval.passage_search import FoundPassages
from ragserve.verification.comparison import ALONE
from ragserve.verification.rows import Row
from ragserve.verification.verdicts import verdict
from ragserve_index.types import Chunk
from tests.unit.verification.compared import CHUNKS, Busy, Searched, Speaker, by_key, compared


class Away(Busy):
    """Is away for as many requests as ``lasts``, from the composed one after so many on; ``after`` -1: from
    the first request on."""

    def __init__(self, builder: PromptBuilder, after: int, lasts: int) -> None:
        super().__init__(builder)
        self.after, self.lasts, self.composed = after, lasts, 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.composed += request.strategy in ("concat", "epic")
        if self.lasts and self.composed > self.after:
            self.lasts -= 1
            raise Unavailable("The engine has died.")
        async for chunk in super().generate(request):
            yield chunk


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("usable", [-1, 15])
def test_an_engine_that_is_away_ends_the_run(builder: PromptBuilder, at_once: int, usable: int) -> None:
    away = Away(builder, usable, 1000)
    with pytest.raises(Unavailable, match="has died"):
        compared(builder, away, CHUNKS[3:], "concat", at_once=at_once)
    assert 1000 - away.lasts <= 1 + 4 * at_once


def test_what_was_asked_before_does_not_hide_that_the_engine_is_away(builder: PromptBuilder) -> None:
    """Every second question is known."""
    rows, _ = compared(builder, Speaker(builder, writes=True), CHUNKS[3::2], "concat")
    away = Away(builder, -1, 1000)
    with pytest.raises(Unavailable, match="has died"):
        compared(builder, away, CHUNKS[3:], "concat", known=by_key(rows))
    assert 1000 - away.lasts == 3


def test_failures_of_an_outage_are_no_failures_of_a_strategy(builder: PromptBuilder) -> None:
    """The engine goes while the third question is asked under the first strategy, and misses two more."""
    every: list[Row] = []
    compared(builder, Away(builder, 2 * 3, 4), CHUNKS[3:12], "concat,epic", every=every)
    failed = [row["strategy"] for row in every if row["error"]]
    assert failed == ["full", "full"]
    assert sum(row["strategy"] == "concat" for row in every) == 9 - 3
    both = [verdict(label, [row | {"part": "verify"} for row in every]) for label in ("concat", "epic")]
    assert [one and one.figures.failed for one in both] == [0, 0]


def test_a_part_of_the_search_that_is_away_is_no_search(
    builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be compared is the order without it."""
    found = Searched.search

    async def search(*given: Any, **options: Any) -> FoundPassages:
        return replace(await found(*given, **options), **missing)

    monkeypatch.setattr(Searched, "search", search)
    for name in ("not_reranked", "by_words_alone"):
        missing, every = {name: "The model gives no answer."}, list[Row]()
        with pytest.raises(ModelUnavailable, match="gives no answer"):
            compared(builder, Speaker(builder, writes=True), CHUNKS[3:12], "concat", every=every)


def test_a_question_under_a_strategy_that_fails_has_been_asked(builder: PromptBuilder) -> None:
    rows, finished = compared(builder, Speaker(builder, writes=True), CHUNKS[3:9], "random,concat", most=2)
    assert not finished
    assert [row["strategy"] for row in rows] == ["full", "random", "concat"] * 2
    busy = Busy(builder)
    compared(builder, busy, CHUNKS[3:30], "random", at_once=4)
    assert max(busy.at_once) == 4


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("error", [NotFound("Namespace notes does not exist."), OSError(28, "No space left")])
def test_what_ends_a_run_is_raised_as_it_is(
    builder: PromptBuilder, at_once: int, error: RagserveError | OSError
) -> None:
    """The command shows it without the log, however many questions are in flight."""

    def draw() -> Iterator[Chunk]:
        yield from CHUNKS[3 : ALONE + 8]
        raise error

    with pytest.raises(type(error)) as raised:
        compared(builder, Busy(builder), draw(), "concat", at_once=at_once)
    assert raised.value is error
