"""Tuning in idle time while something fails: it goes on when that has passed, and no verdict rests on it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.errors import EngineError, Unavailable
from ragserve.profiles.costs import COSTS
from ragserve.profiles.costs import FILE_NAME as COSTS_FILE
from ragserve.profiles.gate import FILE_NAME, record
from ragserve.retrieval.retriever import Retriever
from ragserve.verification.idle_tuner import IdleTuner
from ragserve_index import IndexStore
from tests.unit.verification.idle_engine import FINGERPRINT, entry, fill
from tests.unit.verification.tuned_server import LABELS, Tuned


async def worked(tuned: Tuned, most: int) -> list[Exception]:
    """Take so many steps as an `IdleWorker` does, each after a rest; returns what was raised."""
    retriever = Retriever(tuned.store, tuned.searched)
    raised = await stepped(tuned, tuned.tuner(retriever), most)
    await retriever.close()
    return raised


async def stepped(tuned: Tuned, tuner: IdleTuner, most: int) -> list[Exception]:
    """As `worked`, with a tuner."""
    raised = list[Exception]()
    for _ in range(most):
        tuned.now += 60
        work: Any = tuner.work()
        try:
            await work
        except (OSError, sqlite3.Error) as error:
            raised.append(error)
    return raised


@pytest.mark.usefixtures("_few_questions")
@pytest.mark.parametrize("where", ["engine", "embedder"])
def test_an_outage_takes_three_questions_and_then_an_hour(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Of 30 questions, about 15 of which verify, 20 minutes without an engine, or an embedder, take six."""
    fill(tuned.store, "notes", 30)
    answer, encode = tuned.engine.generate, tuned.searched.encode_queries
    calls = count()

    def here() -> None:
        if 5 <= next(calls) < 25:
            raise Unavailable("it is away")

    def generate(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        here()
        return answer(request)

    def encoded(texts: list[str]) -> np.ndarray:
        here()
        return encode(texts)

    if where == "engine":
        monkeypatch.setattr(tuned.engine, "generate", generate)
    else:
        monkeypatch.setattr(tuned.searched, "encode_queries", encoded)
    assert asyncio.run(worked(tuned, 180)) == []
    assert sorted(tuned.gate.verified("notes")) == sorted(LABELS)


@pytest.mark.usefixtures("_few_questions")
def test_a_namespace_that_is_never_answered_holds_no_other_up(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tuned.store, "broken", 30)
    fill(tuned.store, "notes", 30)
    answer, failed = tuned.engine.generate, count()

    def generate(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if request.namespace == "broken":
            next(failed)
            raise EngineError("it broke")
        return answer(request)

    monkeypatch.setattr(tuned.engine, "generate", generate)
    assert asyncio.run(worked(tuned, 45)) == []
    assert sorted(tuned.gate.verified("notes")) == sorted(LABELS)
    assert 0 < next(failed) < 20


@pytest.mark.parametrize("one_of", [1, 10])
def test_a_strategy_that_fails_is_not_verified_and_leaves_the_others(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, one_of: int
) -> None:
    """Of all questions, or of every tenth; 83 good answers verify."""
    fill(tuned.store, "notes", 99)
    answer, asked = tuned.engine.generate, count()

    def generate(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if request.options.get("share") == 0.15 and next(asked) % one_of == 0:
            raise EngineError("it took too long")
        return answer(request)

    monkeypatch.setattr(tuned.engine, "generate", generate)
    asyncio.run(worked(tuned, 130))
    assert tuned.gate.verified("notes") == [LABELS[1]]


@pytest.fixture
def broken(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Namespaces in which the engine fails."""
    answer, found = tuned.engine.generate, set[str]()

    def generate(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if request.namespace in found:
            raise EngineError("it broke")
        return answer(request)

    monkeypatch.setattr(tuned.engine, "generate", generate)
    return found


def test_a_namespace_that_is_set_aside_comes_at_once_when_it_is_made_again(
    tuned: Tuned, broken: set[str]
) -> None:
    fill(tuned.store, "notes", 30)
    broken.add("notes")

    async def run() -> None:
        retriever = Retriever(tuned.store, tuned.searched)
        tuner = tuned.tuner(retriever)
        await stepped(tuned, tuner, 20)
        assert tuner.info() == {"state": "waiting"}, "it is set aside"
        broken.clear()
        tuned.store.drop_namespace("notes")
        fill(tuned.store, "notes", 30)
        await stepped(tuned, tuner, 2)
        assert tuner.info()["state"] == "verifying"
        await retriever.close()

    asyncio.run(run())


@pytest.mark.usefixtures("_few_questions")
def test_a_namespace_that_is_set_aside_is_not_opened_again(tuned: Tuned, broken: set[str]) -> None:
    """Ten texts decided nothing, and it was set aside when they had changed. Then its users ask enough."""
    fill(tuned.store, "notes", 10)

    async def run() -> None:
        retriever = Retriever(tuned.store, tuned.searched)
        tuner = tuned.tuner(retriever)
        await stepped(tuned, tuner, 15)
        assert tuner.progress("notes") is None, "it ended"
        broken.add("notes")
        fill(tuned.store, "notes", 20)
        await stepped(tuned, tuner, 2)
        assert tuner.info()["state"] == "verifying"
        await stepped(tuned, tuner, 20)
        assert tuner.info() == {"state": "waiting"}, "it is set aside"
        broken.clear()
        await tuned.log([f"Is Corran {number} of granite?" for number in range(20)])
        await stepped(tuned, tuner, 20)
        assert tuner.info() == {"state": "waiting"}
        tuned.now += 3600
        await stepped(tuned, tuner, 30)
        assert sorted(tuned.gate.verified("notes")) == sorted(LABELS)
        await retriever.close()

    asyncio.run(run())


@pytest.mark.usefixtures("_few_questions")
@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), sqlite3.OperationalError("locked")])
def test_a_draw_that_fails_once_is_drawn_again(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fill(tuned.store, "notes", 30)
    read, calls = IndexStore.document_chunks, [0]

    def chunks(store: IndexStore, *given: Any) -> Iterator[Any]:
        calls[0] += 1
        if calls[0] in (1, 6, 7):
            raise error
        return read(store, *given)

    monkeypatch.setattr(IndexStore, "document_chunks", chunks)

    assert asyncio.run(worked(tuned, 35)) == [error] * 3
    assert sorted(tuned.gate.verified("notes")) == sorted(LABELS)


def test_a_strategy_whose_costs_cannot_be_measured_leaves_the_others(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that recomputes least fails always, and the other three times."""
    fill(tuned.store, "notes", 3)
    record(tuned.folder / FILE_NAME, FINGERPRINT, {label: entry() for label in LABELS})
    answer, failures = tuned.engine.generate, Counter[float]()

    def generate(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        share = request.options.get("share")
        if share is not None and (share == 0.15 or failures[share] < 3):
            failures[share] += 1
            raise EngineError("it broke")
        return answer(request)

    monkeypatch.setattr(tuned.engine, "generate", generate)
    asyncio.run(worked(tuned, 120))
    costs = COSTS.load(tuned.folder / COSTS_FILE, FINGERPRINT)
    assert costs is not None
    assert list(costs.composed) == [LABELS[1]]
    assert 4 < failures[0.15] < 9, "it waits twice as long each time, but is not given up"
