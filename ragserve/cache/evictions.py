"""Delete means delete: the KV of texts that are no longer indexed leaves every tier of the document cache.

Each removal is noted in the registry by the transaction that removes (`ragserve_index.evictions`), whoever
does it. A server reads that log: at once after its own removals and jobs, and within `POLL_S` after those of
other processes. Where no server runs, the command that removed cleans the files on disk. Nothing is lost by a
crash, for rows stay until they have been acted on, and acting twice is harmless: KV that is evicted too often
is computed again. Until then nobody is served from it, because nobody retrieves the text."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ragserve.answering.prompt import PromptBuilder
from ragserve.cache import lock as serving
from ragserve.config import Settings
from ragserve.engine.base import Engine
from ragserve.errors import NotFound, RagserveError, Unavailable
from ragserve.files import write_json
from ragserve_index import Eviction, EvictionLog, IndexStore
from ragserve_index.evictions import rows_of

__all__ = ["Evictor", "clean_files", "note_engine"]

log = logging.getLogger(__name__)
POLL_S = 0.25
GRACE_S = 60.0
"""A query that had retrieved a text before it was removed may still cache its KV; so each row is acted on
once more after this time.
"""
_BATCH = 256
_NOTE = "engine.json"


class Evictor:
    """A server's reader of the log. Its methods run on the server's event loop."""

    def __init__(self, store: IndexStore, engine: Engine, prompts: PromptBuilder) -> None:
        self._store = store
        self._log = EvictionLog(store.database)
        self._engine = engine
        self._prompts = prompts
        self._lock = asyncio.Lock()
        self._first = self._second = 0  # ids up to which rows were acted on at once, and again after GRACE_S
        self._mark: int | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Act on what is there, then follow the log while the block lasts."""
        await self.drain()
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def drain(self) -> None:
        """Evict all that has been removed so far. What fails is logged and tried again by the next poll."""
        try:
            async with self._lock:
                self._first = await self._act(self._first)
        except RagserveError as error:
            self._mark = None
            log.warning("KV of removed documents could not be evicted yet, trying again: %s", error)

    async def _follow(self) -> None:
        settle_at = 0.0
        while True:
            await asyncio.sleep(POLL_S)
            mark = self._log.mark()
            if mark is None or mark != self._mark:
                self._mark = mark
                await self.drain()
            if time.monotonic() >= settle_at:
                settle_at = time.monotonic() + GRACE_S / 4
                await self._settle()

    async def _settle(self) -> None:
        """Rows past their grace are acted on again; those twice as old go: other servers on the folder have
        read them by then.
        """
        now = time.time()
        try:
            async with self._lock:
                self._second = await self._act(self._second, before=now - GRACE_S)
                if self._second:
                    await asyncio.to_thread(self._log.forget, self._second, before=now - 2 * GRACE_S)
        except RagserveError as error:
            log.warning("The log of removed documents could not be tidied, trying again: %s", error)

    async def _act(self, last_id: int, *, before: float | None = None) -> int:
        """Evict what rows behind ``last_id`` stand for; the last of their ids."""
        while rows := await asyncio.to_thread(self._log.after, last_id, _BATCH, before=before):
            for namespace, gone in rows_of(rows).items():
                if any(row.text is None for row in gone) and (
                    before is None or not await asyncio.to_thread(self._exists, namespace)
                ):
                    await self._engine.forget(namespace, None)
                if texts := [row for row in gone if row.text is not None]:
                    await self._engine.forget(
                        namespace, await asyncio.to_thread(_token_ids, self._prompts, texts)
                    )
            last_id = rows[-1].id
        return last_id

    def _exists(self, namespace: str) -> bool:
        try:
            self._store.namespace(namespace)
        except NotFound:
            return False
        return True


def note_engine(settings: Settings, tokenizer: str) -> None:
    """Remember in the cache's folder what `clean_files` needs to know when no server runs: its backend, and
    whose token ids it holds.
    """
    if not settings.kv_disk_bytes:
        return
    path = _folder(settings) / _NOTE
    tokenizers = list(dict.fromkeys([*_noted(path).get("tokenizers", []), tokenizer]))
    write_json(path, {"storage": settings.kv_storage, "tokenizers": tokenizers})


def clean_files(settings: Settings, store: IndexStore) -> bool:
    """Without a server: remove the files of what the log says. False, and the log stays, where that is left
    to a server.
    """
    entries = EvictionLog(store.database)
    if not len(entries):
        return True
    try:
        with serving.alone(settings.data_dir) as nobody_else:
            return nobody_else and _clean(settings, entries)
    except (
        RagserveError,
        OSError,
    ) as error:  # the removal itself is done and durable: it must not fail for this
        log.warning("KV of removed documents is still on disk, the next server removes it: %s", error)
        return False


def _clean(settings: Settings, entries: EvictionLog) -> bool:
    from ragserve.cache import folder as offline

    root = _folder(settings)
    note = _noted(root / _NOTE)
    if note.get("storage", "file") != "file":
        return False  # only its own server can reach that backend
    held = offline.stat(root)
    builders: list[PromptBuilder] | None = None
    last_id = 0
    try:
        while rows := entries.after(last_id, _BATCH):
            for namespace, gone in rows_of(rows).items():
                if namespace not in held["namespaces"]:
                    continue
                if any(row.text is None for row in gone):
                    offline.clear(root, namespace=namespace)
                if texts := [row for row in gone if row.text is not None]:
                    builders = (
                        _builders(settings, note.get("tokenizers", [])) if builders is None else builders
                    )
                    ids = [ids for builder in builders for ids in _token_ids(builder, texts)]
                    offline.remove_texts(root, ids, namespace=namespace)
            last_id = rows[-1].id
    except offline.FolderInUse:
        return False
    entries.forget(last_id)
    return True


def _builders(settings: Settings, tokenizers: Sequence[str]) -> list[PromptBuilder]:
    """One for each tokenizer that a server has used on this folder. Raises Unavailable where none is there
    any more.
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
        log.warning(
            "KV made with a tokenizer that is gone stays on disk until it is evicted or cleared: %s", reason
        )
    return found


def _token_ids(prompts: PromptBuilder, rows: Sequence[Eviction]) -> list[list[int]]:
    return [prompts.document_ids(row.title, row.text or "") for row in rows]


def _folder(settings: Settings) -> Path:
    return settings.data_dir / "kv"


def _noted(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (
        FileNotFoundError,
        ValueError,
    ):  # never written, or by something else: as in a folder of an earlier version
        return {}
