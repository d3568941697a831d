"""A run of a comparison: one question after the other, or several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from ragserve.verification.comparison import ALONE, Comparison
from ragserve.verification.course import Course
from ragserve.verification.questions import DrawnQuestion
from ragserve_index.types import Chunk

_MISSED = 3  # questions in a row that find the engine or the search away, of as many as are asked at once


async def compare_all(
    comparison: Comparison,
    chunks: Iterable[Chunk],
    questions: Iterable[DrawnQuestion],
    *,
    time_left: Callable[[], bool],
    most: int,
    at_once: int = 1,
    course: Callable[[], Course] | None = None,
) -> bool:
    """Ask ``questions``, then about ``chunks``, until the time is up, ``most`` are compared, or the
    ``course``, which is called after each question, has no strategy left that is to be compared. Questions
    are asked ``at_once``, the first `ALONE` usable ones one at a time. Return whether all have been asked.
    Raises what drawing and writing raise, and why several questions in a row could not be asked."""
    left: Iterator[DrawnQuestion | Chunk] = chain(questions, chunks)
    finished = False

    def may_go_on() -> bool:
        labels = comparison.course.labels
        return not finished and bool(labels) and time_left() and comparison.compared < most

    async def one(*, alone: bool) -> None:
        nonlocal finished
        drawn = next(left, None)
        if drawn is None:
            finished = True
        else:
            away = await comparison.ask_or_make(drawn, alone=alone)
            if away is not None and comparison.away_in_a_row >= _MISSED * (1 if alone else at_once):
                raise away
        if course is not None:
            comparison.steer(course())

    async def several() -> None:
        while may_go_on():
            await one(alone=False)

    if course is not None:
        comparison.steer(course())
    while may_go_on() and (at_once == 1 or comparison.compared < ALONE):
        await one(alone=True)
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once if at_once > 1 else 0):
                tasks.create_task(several())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return finished
