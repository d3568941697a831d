"""What was compared on texts that are gone says nothing of those that have taken their place."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.retrieval.retriever import Retriever
from ragserve.verification.questions import DrawnQuestion
from ragserve.verification.rows import Row
from tests.unit.verification.compared import CHUNKS, Speaker, by_key, compared
from tests.unit.verification.idle_engine import fill
from tests.unit.verification.tuned_server import LABELS, Tuned, steps


def test_a_question_counts_while_its_chunk_and_its_best_passages_are_there(builder: PromptBuilder) -> None:
    """Lighthouse 1 is the second passage of all, and the questions of users are about number 7."""
    users = (DrawnQuestion("u", "asked", "Who built the one with number 7 here?"),)
    rows, _ = compared(builder, Speaker(builder, writes=True), CHUNKS[3:5], "concat", questions=users)

    def left(present: Collection[int], known: list[Row] = rows) -> list[str]:
        every: list[Row] = []
        given = {"known": by_key(known), "every": every, "present": lambda wanted: {*wanted} & {*present}}
        compared(builder, Speaker(builder, writes=True), [], "concat", **given)
        assert len(every) == 2 * len({row["id"] for row in every}), "under full and the strategy"
        return [row["id"] for row in every if row["strategy"] == "full"]

    assert left(range(60)) == ["u", "3", "4"]
    assert left({1, 3, 7}) == ["u", "3"]
    assert left({1, 3, 4}) == ["3", "4"]
    assert left({3, 4, 7}) == [], "all have read number 1"
    earlier = [{name: value for name, value in row.items() if name != "passages"} for row in rows]
    assert left({3, 7}, earlier) == ["3"], "which did not say what users' questions read"


@pytest.mark.usefixtures("_few_questions")
def test_an_idle_server_verifies_on_what_is_there(tuned: Tuned) -> None:
    """Ten of the twelve questions that verify have been asked when all documents are replaced."""
    fill(tuned.store, "notes", 30)

    async def run() -> None:
        retriever = Retriever(tuned.store, tuned.searched)
        tuner = tuned.tuner(retriever)
        states = await steps(tuner, 11)
        assert states[-1]["compared"] == 10
        fill(tuned.store, "notes", 30)
        await steps(tuner, 7)
        assert tuned.gate.verified("notes") == [], "seven questions are too few"
        await steps(tuner)
        assert sorted(tuned.gate.verified("notes")) == sorted(LABELS)
        await retriever.close()

    asyncio.run(run())


@pytest.mark.usefixtures("_few_questions")
def test_what_was_refused_is_opened_again_when_all_documents_are_replaced(tuned: Tuned) -> None:
    fill(tuned.store, "notes", 30)
    tuned.engine.wrong = {"concat"}

    async def run() -> None:
        retriever = Retriever(tuned.store, tuned.searched)
        tuner = tuned.tuner(retriever)
        await steps(tuner)
        assert set(tuned.gate.entries("notes")) == set(LABELS), "refused"
        tuned.engine.wrong = set()
        fill(tuned.store, "notes", 30)
        tuned.now += 60
        await steps(tuner)
        assert sorted(tuned.gate.verified("notes")) == sorted(LABELS)
        await retriever.close()

    asyncio.run(run())
