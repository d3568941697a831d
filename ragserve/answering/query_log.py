"""The query log: questions that users have asked, for `ragserve tune` and the idle server. JSON lines in
`queries/`, of texts, namespaces and times. It is off unless ``query_log_bytes`` says otherwise.

A namespace's questions go with it: those asked before a namespace of that name was made count as removed, and
are removed from disk at once after the server's own removals, and within `SWEEP_S` after those of others."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.errors import RagserveError
from ragserve.rotating_log import RotatingLog, line_of

if TYPE_CHECKING:
    from ragserve.answering.query import Query
    from ragserve.answering.results import SearchedFor
    from ragserve_index import IndexStore

log = logging.getLogger(__name__)
FOLDER = "queries"  # in the data folder
SWEEP_S = 30.0
_MOST_WAITING = 1024  # questions in memory; the oldest go first


def search_question(question: str, searched_for: SearchedFor | None) -> str | None:
    """What was searched for, as a question that stands alone; None for a follow-up that does not."""
    if searched_for is None:
        return question
    return None if searched_for.follow_up == "context" else searched_for.question


def same_question(question: str) -> str:
    """Equal for questions that differ in case and spaces only."""
    return " ".join(question.casefold().split())


def question_id(question: str) -> str:
    """A digest that is equal for the same questions."""
    return hashlib.sha256(same_question(question).encode()).hexdigest()[:16]


class QueryLog:
    """A server's writer. Questions wait in memory, and a thread writes them; what cannot be written is lost,
    and said once. Belongs to one event loop."""

    def __init__(self, data_dir: Path, max_bytes: int, store: IndexStore) -> None:
        """0 bytes keep no further questions; those that there are go with their namespaces."""
        self._log = RotatingLog(data_dir / FOLDER, "queries", max_bytes, durable=False)
        self._store = store
        self._waiting: deque[dict[str, str]] = deque(maxlen=_MOST_WAITING)
        self._arrived = asyncio.Event()
        self._known: dict[str, float] | None = None  # namespaces of the latest sweep
        self._open = self._failing = False

    def answered(self, query: Query, searched_for: SearchedFor | None, began: float) -> None:
        """Note a question that was searched for and answered; ``began``: when it came (``time.time``)."""
        if not self._log.file_bytes or query.private:
            return
        question = (search_question(query.question, searched_for) or "").strip()
        if question:
            when = datetime.fromtimestamp(began, UTC).isoformat(timespec="microseconds")
            namespace = query.request.namespace
            self._waiting.append({"time": when, "namespace": namespace, "question": question})
            self._arrived.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write what is noted while the block lasts, and what is left at its end."""
        await self.sweep()
        self._open = True
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            self._open = False
            self._arrived.set()
            await task

    async def sweep(self) -> None:
        """Remove the questions of namespaces that are gone, and write those that wait. A failure is logged,
        and the next call tries again."""
        try:
            await asyncio.to_thread(self._pass)
        except Exception as error:  # whatever it is, queries go on
            if not self._failing:
                unknown = None if isinstance(error, (OSError, RagserveError)) else error
                log.warning("the query log cannot be kept: %s", error, exc_info=unknown)
            self._failing = True
        else:
            self._failing = False

    async def _follow(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await self._arrived.wait()
            self._arrived.clear()
            last = not self._open
            await self.sweep()
            if last:
                return

    def _pass(self) -> None:
        now = self._store.made_at()
        if self._known is None or any(now.get(name) != made for name, made in self._known.items()):
            self._known = None
            forget_dropped(self._log.folder.parent, self._store)
        self._known = now
        records = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not records:
            return
        with self._log.alone():
            made_at = self._store.made_at()  # of now: a drop's sweep comes before this, or after the lines
            lines = [line_of(record) for record in records if _is_current(record, made_at)]
            for line in lines:
                if len(line) <= self._log.file_bytes:
                    self._log.append(line)


def forget_dropped(data_dir: Path, store: IndexStore) -> None:
    """Remove the questions of namespaces that are gone from disk.

    Raises OSError, and Unavailable if another process keeps the log for seconds."""
    entries = _log_of(data_dir)
    if not entries.folder.exists():
        return
    with entries.alone():
        made_at = store.made_at()
        entries.keep_only(lambda line: (record := _record(line)) is not None and _is_current(record, made_at))


class LoggedQuestions:
    """A namespace's questions, newest first and each once. What is logged meanwhile is seen. Without a log
    there are none."""

    def __init__(
        self, data_dir: Path, store: IndexStore, namespace: str, most: int, known: Iterable[str] = ()
    ) -> None:
        """``most``: questions that are looked at, the newest ones. ``known``: ids (`question_id`) of those
        that are not given again."""
        self._entries = _log_of(data_dir)
        self._store = store
        self._namespace = namespace
        self._most = most
        self._mark: tuple[int, int] | None = None
        self._left: list[str] = []
        self._given = set(known)

    def next(self) -> str | None:
        """The next question; None while there is none. Reads files."""
        self._read_again()
        if not self._left:
            return None
        self._given.add(question_id(self._left[-1]))
        return self._left.pop()

    def waiting(self) -> int:
        """How many are still to be given. Reads files."""
        self._read_again()
        return len(self._left)

    def _read_again(self) -> None:
        if (mark := self._now()) != self._mark:
            self._mark = mark
            self._left = [text for text in self._read() if question_id(text) not in self._given][::-1]

    def _now(self) -> tuple[int, int] | None:
        """What changes with the log."""
        try:
            found = self._entries.paths[0].stat()
        except OSError:
            return None
        return found.st_ino, found.st_size

    def _read(self) -> list[str]:
        """The newest questions, newest first."""
        made_at = self._store.made_at()
        found: dict[str, str] = {}
        for path in self._entries.paths:
            of_file: dict[str, str] = {}
            for question in self._questions(path, made_at):
                of_file.pop(same_question(question), None)
                of_file[same_question(question)] = question
                if len(of_file) > self._most:
                    del of_file[next(iter(of_file))]
            found |= {same: text for same, text in reversed(of_file.items()) if same not in found}
        return list(found.values())[: self._most]

    def _questions(self, path: Path, made_at: Mapping[str, float]) -> Iterator[str]:
        part = f'"namespace":{json.dumps(self._namespace)}'.encode()
        try:
            with path.open("rb") as file:
                records = (_record(line) for line in file if part in line)
                for record in records:
                    if record and record["namespace"] == self._namespace and _is_current(record, made_at):
                        yield record["question"]
        except FileNotFoundError:  # there are fewer files, or it has become the next one
            return
        except OSError as error:
            log.warning("the query log cannot be read: %s", error)


def _log_of(data_dir: Path) -> RotatingLog:
    """The log of a folder, to be read and cleaned."""
    return RotatingLog(data_dir / FOLDER, "queries", 0, durable=False)


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None for one that is torn, or no text."""
    try:
        found = json.loads(line)
        record = {name: str(found[name]) for name in ("time", "namespace", "question")}
        datetime.fromisoformat(record["time"])
        record["question"].encode()
    except (ValueError, KeyError, TypeError):
        return None
    return record


def _is_current(record: Mapping[str, str], made_at: Mapping[str, float]) -> bool:
    """Whether a question was asked of a namespace that still is."""
    made = made_at.get(record["namespace"])
    return made is not None and datetime.fromisoformat(record["time"]).timestamp() >= made
