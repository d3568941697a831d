"""Logs of what users ask and say: JSON lines that go with their namespace. Each is off unless a setting gives
it bytes.

Records made before a namespace of that name was made count as removed. They are removed from disk at once
after the server's own removals, and within `SWEEP_S` after those of others."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.errors import RagserveError
from ragserve.rotating_log import RotatingLog, line_of
from ragserve_index.viewers import Viewer

if TYPE_CHECKING:
    from ragserve_index import IndexStore

log = logging.getLogger(__name__)
SWEEP_S = 30.0
FOLDERS = ("queries", "unanswered", "feedback")  # in the data folder, each with a log of its name
_MOST_WAITING = 1024  # records in memory; the oldest go first


class NamespaceLog:
    """A server's writer. Records wait in memory, and a thread writes them; what cannot be written is lost,
    and said once. Belongs to one event loop."""

    name = ""  # of the log, one of `FOLDERS`

    def __init__(self, data_dir: Path, max_bytes: int, store: IndexStore) -> None:
        """0 bytes keep no further records; those that there are go with their namespaces."""
        self._log = RotatingLog(data_dir / self.name, self.name, max_bytes, durable=False)
        self._store = store
        self._waiting: deque[tuple[dict[str, Any], Viewer, set[str]]] = deque(maxlen=_MOST_WAITING)
        self._arrived = asyncio.Event()
        self._known: dict[str, float] | None = None  # namespaces of the latest sweep
        self._open = self._failing = False

    @property
    def is_on(self) -> bool:
        """Whether records are kept."""
        return self._log.file_bytes > 0

    def note(
        self,
        namespace: str,
        question: str,
        began: float,
        viewer: Viewer,
        *,
        asked: Sequence[str] = (),
        **more: Any,
    ) -> None:
        """Note a question, and ``more`` about it; ``began``: when it came (``time.time``).

        What a viewer asks and says may rest on documents that others do not see: it is kept with the labels
        that the viewer has seen in the namespace, and in all that were ``asked``, and shown to those who hold
        them all (`seen_records`)."""
        if self.is_on and question:
            record = {"time": said_at(began), "namespace": namespace, "question": question, **more}
            self._waiting.append((record, viewer, {namespace, *asked}))
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
        """Remove the records of namespaces that are gone, and write those that wait. A failure is logged,
        and the next call tries again."""
        try:
            await asyncio.to_thread(self._pass)
        except Exception as error:  # whatever it is, queries go on
            if not self._failing:
                unknown = None if isinstance(error, (OSError, RagserveError)) else error
                log.warning("the log %s cannot be kept: %s", self.name, error, exc_info=unknown)
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
            _forget_dropped(self._log, self._store)
        self._known = now
        records = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not records:
            return
        with self._log.alone():
            made_at = self._store.made_at()  # of now: a drop's sweep comes before this, or after the lines
            lines = [
                line_of(record | self._labels(viewer, asked))
                for record, viewer, asked in records
                if is_current(record, made_at)
            ]
            for line in lines:
                if len(line) <= self._log.file_bytes:
                    self._log.append(line)
                else:
                    log.warning("the log %s has no room for a record of %d bytes", self.name, len(line))

    def _labels(self, viewer: Viewer, asked: Iterable[str]) -> dict[str, Any]:
        store = self._store.seen_by(viewer)
        labels = sorted({label for name in asked for label in store.labels(name)})
        return {"labels": labels} if labels else {}


def said_at(when: float) -> str:
    """A time (``time.time``) as records have it."""
    return datetime.fromtimestamp(when, UTC).isoformat(timespec="microseconds")


def forget_dropped(data_dir: Path, store: IndexStore) -> None:
    """Remove the records of namespaces that are gone from disk.

    Raises OSError, and Unavailable if another process keeps a log for seconds."""
    for name in FOLDERS:
        _forget_dropped(log_of(data_dir, name), store)


def _forget_dropped(entries: RotatingLog, store: IndexStore) -> None:
    if not entries.folder.exists():
        return
    with entries.alone():
        made_at = store.made_at()
        entries.keep_only(
            lambda line: (record := record_of(line)) is not None and is_current(record, made_at)
        )


def log_of(data_dir: Path, name: str) -> RotatingLog:
    """The log of a folder, to be read and cleaned."""
    return RotatingLog(data_dir / name, name, 0, durable=False)


def records_of(data_dir: Path, name: str, store: IndexStore, namespace: str) -> Iterator[dict[str, Any]]:
    """A namespace's records in a log, file by file from the newest, each from its beginning. A file that
    cannot be read is left out, and logged."""
    made_at = store.made_at()
    for path in log_of(data_dir, name).paths:
        yield from records_in(path, namespace, made_at)


def seen_records(data_dir: Path, name: str, store: IndexStore, namespace: str) -> Iterator[dict[str, Any]]:
    """`records_of` those whose labels the store's viewer holds."""
    for record in records_of(data_dir, name, store, namespace):
        if store.viewer.holds(record.get("labels", ())):
            yield record


def records_in(path: Path, namespace: str, made_at: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """The records of a namespace in one file."""
    part = f'"namespace":{json.dumps(namespace)}'.encode()
    try:
        with path.open("rb") as file:
            for record in (record_of(line) for line in file if part in line):
                if record and record["namespace"] == namespace and is_current(record, made_at):
                    yield record
    except FileNotFoundError:  # there are fewer files, or it has become the next one
        return
    except OSError as error:
        log.warning("%s cannot be read: %s", path, error)


def record_of(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None for one that is torn, or no text."""
    try:
        found = json.loads(line)
        record = found | {name: str(found[name]) for name in ("time", "namespace", "question")}
        datetime.fromisoformat(record["time"])
        record["question"].encode()
    except (ValueError, KeyError, TypeError):
        return None
    return dict(record)


def is_current(record: Mapping[str, Any], made_at: Mapping[str, float]) -> bool:
    """Whether a record was made in a namespace that still is."""
    made = made_at.get(record["namespace"])
    return made is not None and datetime.fromisoformat(record["time"]).timestamp() >= made
