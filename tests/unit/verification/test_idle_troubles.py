"""Tuning in idle time while something fails: it goes on when that has passed, and no verdict rests on it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

from ragserve.retrieval.retriever import Retriever
from ragserve_index import IndexStore
from tests.unit.verification.idle_engine import fill
from tests.unit.verification.tuned_server import LABELS, Tuned


async def worked(tuned: Tuned, most: int) -> list[Exception]:
    """Take so many steps as an `IdleWorker` does, each after a rest; returns what was raised."""
    retriever = Retriever(tuned.store, tuned.searched)
    tuner, raised = tuned.tuner(retriever), list[Exception]()
    for _ in range(most):
        tuned.now += 60
        work: Any = tuner.work()
        try:
            await work
        except (OSError, sqlite3.Error) as error:
            raised.append(error)
    await retriever.close()
    return raised


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

    assert asyncio.run(worked(tuned, 80)) == [error] * 3
    assert sorted(tuned.gate.verified("notes")) == sorted(LABELS)
