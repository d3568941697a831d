"""The comparison of one namespace by an idle server, and what is left of it when it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ragserve.answering.query_log import LoggedQuestions
from ragserve.errors import RagserveError
from ragserve.verification import MOST_QUESTIONS, rows
from ragserve.verification.comparison import ALONE, Comparison
from ragserve.verification.giving_way import GivingWay
from ragserve.verification.questions import DrawnQuestion, asked
from ragserve.verification.tuned_queries import TunedQueries
from ragserve_index.types import Chunk

USELESS = 50  # questions of which none is usable, before a namespace is given up
_MOST_NEW = 400
NEW_QUESTIONS = 20  # of users, at least, before a namespace is opened again


@dataclass(eq=False)
class NamespaceRun:
    """The comparison of one namespace. ``drawn``: what to ask next, which a thread draws. ``chunks`` draws
    them from the first on; None where users' questions alone are asked, and decide, after ``least`` of
    them."""

    namespace: str
    version: int
    engine: GivingWay
    comparison: Comparison
    queries: TunedQueries
    labels: list[str]
    margin: float
    logged: LoggedQuestions
    chunks: Callable[[], Iterator[Chunk]] | None
    left: Iterator[Chunk] | None = None  # of the chunks
    least: int = 0
    checked: int = -1  # version of the documents that its rows are known to be about
    drawn: asyncio.Task[DrawnQuestion | Chunk | None] | None = None
    decided: dict[str, str] = field(default_factory=dict)  # by label
    margins: dict[str, float] = field(default_factory=dict)  # recorded, by label
    asked: int = 0
    tries: int = 0  # of the question that was drawn last
    failed: int = 0  # questions in a row that found the engine or the search away each time
    pace: float = 0.0  # seconds of the latest usable questions, the mean

    def draw(self) -> DrawnQuestion | Chunk | None:
        """The newest question of a user that has not been asked yet, else the next chunk; None without any.
        Reads files. After an error it may be called again, and begins with the first chunk."""
        question = next(asked(self.logged), None)
        if question or self.chunks is None:
            return question
        self.left = self.left or self.chunks()
        try:
            return next(self.left, None)
        except BaseException:  # which ends a generator
            self.left = None
            raise

    async def ask(self, drawn: DrawnQuestion | Chunk) -> RagserveError | None:
        """Ask a user's question, or one about a chunk; return what `Comparison.ask` does. The first usable
        ones are timed, where some are."""
        alone = self.engine.timed = self.comparison.compared < ALONE and self.asked < 3 * ALONE
        return await self.comparison.ask_or_make(drawn, alone=alone)

    @property
    def rows(self) -> list[rows.Row]:
        """The rows that decide."""
        return self.comparison.rows if self.chunks is not None else self.comparison.rows_of("asked")

    @property
    def over(self) -> bool:
        """As much has been asked as may be, or nothing that was asked is usable."""
        compared = self.comparison.compared
        if self.chunks is None:
            return self.asked >= MOST_QUESTIONS
        return compared >= MOST_QUESTIONS or (not compared and self.asked >= USELESS)

    def took(self, seconds: float) -> None:
        """Note the seconds of a usable question."""
        self.pace = seconds if not self.pace else 0.8 * self.pace + 0.2 * seconds

    @property
    def usable(self) -> int:
        """The number of questions that decide."""
        return len({row["id"] for row in self.rows if row.get("usable")})


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A namespace's last run: ``usable`` questions decided, or left it open. ``logged``: its users'
    questions; None where there is no candidate. ``retriever``: what brought the passages."""

    version: int
    retriever: str
    usable: int
    logged: LoggedQuestions | None

    @property
    def least(self) -> int:
        """New questions of users for another run: as many as were usable, so that runs become rare, but no
        more than a run looks at."""
        return min(max(self.usable, NEW_QUESTIONS), _MOST_NEW)

    def opens_again(self) -> bool:
        """Tell whether so many have been logged. Reads files."""
        return self.logged is not None and self.logged.waiting() >= self.least
