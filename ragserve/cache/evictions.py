"""Eviction of the KV of removed texts from every tier of the document cache.

The transaction that removes a text logs it in the registry (`ragserve_index.evictions`). A server reads that
log: at once after its own removals and jobs, and within `POLL_S` after those of other processes. If no server
runs, the removing command cleans the files on disk. A crash loses nothing: rows stay until they have been
acted on, and acting twice only costs a recomputation. Until then the KV is unused, because the text is no
longer retrieved."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.answering.prompt import PromptBuilder
from ragserve.answering.sessions.session_store import forget_lost
from ragserve.cache import folder, lock
from ragserve.config import Settings
from ragserve.engine.base import Engine
from ragserve.errors import RagserveError, Unavailable
from ragserve.files import write_json
from ragserve.metrics import metrics
from ragserve_index import Eviction, EvictionLog, IndexStore
from ragserve_index.evictions import by_namespace
from sglang_ext.wire.joint_names import names_of

if TYPE_CHECKING:
    from ragserve.answering.in_flight import InFlight

__all__ = ["Evictor", "clean_files", "note_engine"]

log = logging.getLogger(__name__)
POLL_S = 0.25
GRACE_S = 60.0
"""A query that retrieved a text before its removal may still cache its KV, so each row is acted on once more
after this time.
"""
SHARED_KEPT_S = 7 * 24 * 3600.0
"""Age until which rows are kept on a registry that servers share, for one that was away meanwhile."""
_BATCH = 256
_ALL = 2**62  # over every id of a row
_NOTE = "engine.json"
WORKERS = "workers"


class Evictor:
    """A server's reader of the log. Runs on the server's event loop.

    ``queries`` are those in flight, a set that changes: they may hold texts that were removed since.
    ``dropped`` is called in a thread with namespaces that were dropped, which may have been made again."""

    def __init__(
        self,
        store: IndexStore,
        engine: Engine,
        prompts: PromptBuilder,
        queries: Set[InFlight] = frozenset(),
        dropped: Callable[[Set[str]], None] = lambda _: None,
    ) -> None:
        self._dropped = dropped
        self._queries = queries
        self._left_behind: dict[int, list[InFlight]] = {}  # by row of a dropped namespace
        self._store = store
        self._log = EvictionLog(store.database)
        self._engine = engine
        self._prompts = prompts
        self._lock = asyncio.Lock()
        self._first = self._second = 0  # last ids acted on at once, and again after GRACE_S
        self._mark: int | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Act on the present rows, then follow the log while the block lasts."""
        await self.drain()
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def drain(self) -> None:
        """Evict everything removed so far. Failures are logged and retried by the next poll."""
        try:
            async with self._lock:
                self._first = await self._act(self._first)
        except Exception as error:  # noqa: BLE001 - whatever it is, removals that follow must be seen
            self._mark = None
            _log_failure("KV of removed documents could not be evicted yet", error)

    async def _follow(self) -> None:
        settle_at = 0.0
        while True:
            await asyncio.sleep(POLL_S)
            try:
                mark = self._log.mark()
            except Exception as error:  # noqa: BLE001 - as in drain, which looks for itself
                _log_failure("The log of removed documents could not be looked at", error)
                mark = None
            if mark is None or mark != self._mark:
                self._mark = mark
                await self.drain()
            if time.monotonic() >= settle_at:
                settle_at = time.monotonic() + GRACE_S / 4
                await self._settle()

    async def _settle(self) -> None:
        """Act again on rows older than the grace time and than every query in flight, and delete those twice
        as old, which other servers on the folder have read by then; on a shared registry those of a week ago.
        """
        now = time.time()
        try:
            async with self._lock:
                before = min([now - GRACE_S, *(query.began for query in self._queries)])
                self._second = await self._act(self._second, before=before)
                if self._second:
                    kept = SHARED_KEPT_S if self._store.database.shared else 2 * GRACE_S
                    await asyncio.to_thread(self._log.forget, self._second, before=now - kept)
        except Exception as error:  # noqa: BLE001 - as in drain
            _log_failure("The log of removed documents could not be pruned", error)

    async def _act(self, last_id: int, *, before: float | None = None) -> int:
        """Evict the texts of the rows behind ``last_id``; returns the last row's id."""
        while rows := await asyncio.to_thread(self._log.after, last_id, _BATCH, before=before):
            if dropped := {row.namespace for row in rows if row.text is None}:
                await asyncio.to_thread(self._forget_dropped, dropped, again=before is not None)
            for namespace, gone in by_namespace(rows).items():
                if drops := [row.id for row in gone if row.text is None]:
                    await self._act_on_drops(namespace, drops, again=before is not None)
                if texts := [row for row in gone if row.text is not None]:
                    ids = await asyncio.to_thread(_token_ids, self._prompts, texts)
                    await self._engine.forget(namespace, ids)
            last_id = rows[-1].id
        return last_id

    def _forget_dropped(self, dropped: Set[str], *, again: bool) -> None:
        """Free what else belonged to dropped namespaces. A failure must not keep their KV."""
        try:
            if not again:
                self._dropped(dropped)
            self._store.forget_dropped()
        except Exception as error:  # noqa: BLE001 - as in drain
            _log_failure("What belonged to dropped namespaces could not all be removed", error)

    async def _act_on_drops(self, namespace: str, rows: list[int], *, again: bool) -> None:
        """Evict all of a namespace. If it was made anew meanwhile, its new KV stays when rows are acted on
        ``again``, and only what queries of before the drop had in their prompts is evicted."""
        if not again:
            in_flight = [each for each in self._queries if namespace in names_of(each.namespace)]
            self._left_behind.setdefault(rows[-1], in_flight)  # as it was at the first attempt
            metrics().forget_namespace(namespace)
            await self._engine.forget(namespace, None)
            return
        ended = [query for row in rows for query in self._left_behind.get(row, ())]
        infos = await asyncio.to_thread(self._store.namespaces)
        if namespace not in {info.name for info in infos}:
            await self._engine.forget(namespace, None)
        elif documents := [ids for query in ended for ids in query.documents]:
            await self._engine.forget(namespace, documents)
        for row in rows:
            self._left_behind.pop(row, None)


def _log_failure(what: str, error: Exception) -> None:
    unknown = None if isinstance(error, RagserveError) else error
    log.warning("%s, will retry: %s", what, error, exc_info=unknown)


def note_engine(settings: Settings, tokenizer: str, *, elsewhere: bool = False) -> None:
    """Record in the cache folder what `clean_files` needs without a server: the backend and the
    tokenizers. ``elsewhere``: workers have the KV, so only a server in front of them can remove it.
    """
    if not (settings.kv_disk_bytes or settings.shared_store or elsewhere):
        return
    path = _folder(settings) / _NOTE
    tokenizers = list(dict.fromkeys([*_noted(path).get("tokenizers", []), tokenizer]))
    storage = WORKERS if elsewhere else settings.kv_storage
    write_json(path, {"storage": storage, "tokenizers": tokenizers})


def clean_files(settings: Settings, store: IndexStore) -> bool:
    """Remove the files of logged texts, and the texts in sessions on disk, if no server runs. False, keeping
    the log, where a server has to do it.
    """
    forget_lost(settings.data_dir, store)
    entries = EvictionLog(store.database)
    try:
        if store.database.shared:  # servers elsewhere read the log, too, but none may prune it
            entries.forget(_ALL, before=time.time() - SHARED_KEPT_S)
            return False
        if not len(entries):
            return True
        with lock.alone(settings.data_dir) as nobody_else:
            return nobody_else and _clean(settings, entries)
    except (RagserveError, OSError) as error:  # must not fail the removal, which is done and durable
        log.warning("KV of removed documents is still on disk, the next server removes it: %s", error)
        return False


def _clean(settings: Settings, entries: EvictionLog) -> bool:
    root = _folder(settings)
    note = _noted(root / _NOTE)
    if note.get("storage", "file") != "file":
        return False  # only a server can reach that backend
    cached = folder.stat(root)["namespaces"]
    builders: list[PromptBuilder] | None = None
    last_id = 0
    try:
        while rows := entries.after(last_id, _BATCH):
            for namespace, gone in by_namespace(rows).items():
                if namespace not in cached:
                    continue
                if any(row.text is None for row in gone):
                    folder.clear(root, namespace=namespace)
                if texts := [row for row in gone if row.text is not None]:
                    if builders is None:
                        builders = _builders(settings, note.get("tokenizers", []))
                    ids = [ids for builder in builders for ids in _token_ids(builder, texts)]
                    folder.remove_texts(root, ids, namespace=namespace)
            last_id = rows[-1].id
    except folder.FolderInUse:
        return False
    entries.forget(last_id)
    return True


def _builders(settings: Settings, tokenizers: Sequence[str]) -> list[PromptBuilder]:
    """A builder for each tokenizer that a server has used on this folder. Raises Unavailable if
    none loads.
    """
    found, missing = [], []
    for name in tokenizers or [settings.tokenizer or settings.model]:
        try:
            found.append(PromptBuilder.load(name))
        except Unavailable as error:
            missing.append(str(error))
    if not found:
        raise Unavailable("; ".join(missing))
    for reason in missing:
        log.warning("KV of a tokenizer that is gone stays on disk until it is evicted or cleared: %s", reason)
    return found


def _token_ids(prompts: PromptBuilder, rows: Sequence[Eviction]) -> list[list[int]]:
    return [prompts.document_ids(row.title, row.text or "") for row in rows]


def _folder(settings: Settings) -> Path:
    return settings.data_dir / "kv"


def _noted(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):  # no note, as in a folder of an earlier version, or not ours
        return {}
