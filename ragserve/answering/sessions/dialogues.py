"""Sessions: dialogues that the server keeps, so that a turn sends its question only.

A dialogue is kept as the token ids of its turns. The next prompt is these ids, the documents that are new,
and the question; so the engine finds the KV of all that came before under the session's own key. With a
budget, turns before the last are compressed for the question when they exceed it (`turn_compression`).
They are in memory, and with a `session_store` on disk, so that a restart goes on with them; the KV of their
turns is then computed again."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from ragserve.answering.query import Query
from ragserve.answering.sessions.kept_dialogue import Dialogue
from ragserve.answering.sessions.lost_documents import lost_document
from ragserve.answering.sessions.next_turn import NextTurn, check_current
from ragserve.answering.sessions.turn_compression import TurnCompressor
from ragserve.engine.base import Engine
from ragserve.engine.document_cache import CachingEngine
from ragserve.errors import NotFound, RagserveError, TooManyRequests
from ragserve_index.viewers import EVERYTHING, Viewer
from sglang_ext.wire.joint_names import names_of

if TYPE_CHECKING:
    from ragserve.answering.sessions.session_store import SessionStore
    from ragserve_index import IndexStore

log = logging.getLogger(__name__)

NEW = "new"
"""What a request says instead of a session's id to begin one."""
OF_KEY, OF_SERVER = 8, 64
"""Times as many sessions as an API key may have in a namespace, it may have in all, and the server."""
_SWEEP_S = 30.0  # between two looks for sessions that have expired or lost a document


class Dialogues:
    """The sessions of a server. Belongs to one event loop."""

    def __init__(
        self,
        engine: Engine,
        store: IndexStore,
        *,
        ttl_s: float,
        most: int,
        compressor: TurnCompressor,
        budget: int = 0,
        refresh_turns: int = 0,
        disk: SessionStore | None = None,
    ) -> None:
        """``ttl_s``: seconds without a turn after which a session ends. ``most``: of an API key in a
        namespace; `OF_KEY` and `OF_SERVER` bound those of all namespaces, for a key may name any number.
        ``budget``: of sessions that do not give one, 0 for none. ``refresh_turns``: as in `NextTurn`.
        ``disk``: None keeps them in memory only."""
        self._engine = engine
        self._store = store
        self._ttl_s = ttl_s
        self._most = most
        self._compressor = compressor
        self._budget = budget
        self._refresh_turns = refresh_turns
        self._disk = disk
        self._dialogues: dict[str, Dialogue] = {}
        self._of: dict[str, dict[str, Dialogue]] = {}  # the same by owner

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Go on with the sessions on disk. End those whose time is up, or which have lost a document, while
        the block lasts."""
        await self._restore()
        task = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self._disk is not None:
                await self._disk.close()

    @asynccontextmanager
    async def turn(self, query: Query) -> AsyncIterator[NextTurn]:
        """Begin a session, or wait until the turn before is done and go on. A session whose first turn fails
        is none.

        Raises NotFound, Conflict for a session that has lost a document, and TooManyRequests."""
        namespace = query.request.namespace
        if query.session == NEW:
            dialogue = self._new(query.owner, namespace)
        else:
            dialogue, _ = self.get(query.owner, str(query.session))
            if dialogue.namespace != namespace and not (
                query.by_pattern and await self._covers(query, dialogue)
            ):
                raise _not_found(dialogue.id)
        try:
            async with dialogue.lock:
                if query.session == NEW:
                    made_at = await asyncio.to_thread(self._store.made_at)
                    names = names_of(namespace)
                    dialogue.namespaces_made_at = {name: made_at[name] for name in names if name in made_at}
                else:
                    self.get(query.owner, dialogue.id)  # it may have ended while this request waited
                    await self._end_if_lost([dialogue], query.search.viewer)
                    check_current(dialogue)
                dialogue.used_at = time.time()
                yield NextTurn(
                    dialogue,
                    self._compressor,
                    self._ttl_s,
                    lambda: dialogue.id in self._dialogues,
                    self._refresh_turns,
                    None if self._disk is None else partial(self._disk.keep, dialogue),
                )
                await self._forget_kv(dialogue, dialogue.keys - {dialogue.key})
        finally:
            if not dialogue.turns and dialogue.outdated is None:
                self._drop(dialogue)

    async def _covers(self, query: Query, dialogue: Dialogue) -> bool:
        """Whether the patterns of a query match all that is left of a session's namespaces."""
        there = await asyncio.to_thread(self._store.made_at)
        own = {name for name in names_of(dialogue.namespace) if name in there}
        return own <= set(names_of(query.request.namespace))

    def get(self, owner: str, name: str) -> tuple[Dialogue, float]:
        """An owner's session and the time at which it ends. Raises NotFound, alike for one of others and for
        one that never was."""
        dialogue = self._dialogues.get(name)
        if dialogue is None or dialogue.owner != owner or self._is_expired(dialogue):
            raise _not_found(name)
        return dialogue, dialogue.used_at + self._ttl_s

    def of(self, owner: str) -> list[tuple[Dialogue, float]]:
        """An owner's sessions and the times at which they end, oldest first."""
        return [
            (dialogue, dialogue.used_at + self._ttl_s)
            for dialogue in self._of.get(owner, {}).values()
            if dialogue.turns and not self._is_expired(dialogue)
        ]

    async def end(self, dialogue: Dialogue) -> None:
        """Forget a session and its KV."""
        self._drop(dialogue)
        await self._remove([dialogue])
        await self._forget_kv(dialogue, dialogue.keys)

    async def end_namespace(self, namespace: str) -> None:
        """Take their texts from all sessions of a namespace that was removed, alone or among others."""
        ended = [each for each in self._dialogues.values() if namespace in names_of(each.namespace)]
        for dialogue in ended:
            await self._outdate(dialogue, "its namespace was removed.")

    async def drop_outdated(self) -> None:
        """Take their texts from all sessions with a document that has been removed or replaced."""
        await self._end_if_lost(list(self._dialogues.values()))

    def _new(self, owner: str, namespace: str) -> Dialogue:
        own = self._of.get(owner, {}).values()
        limits = (
            (self._dialogues.values(), OF_SERVER * self._most, "on this server"),
            (own, OF_KEY * self._most, "of this API key"),
            (
                [each for each in own if each.namespace == namespace],
                self._most,
                f"in namespace {namespace!r}",
            ),
        )
        for there, most, where in limits:
            # most requests find few, and need not look at each
            if len(there) >= most and sum(not self._is_expired(each) for each in there) >= most:
                raise TooManyRequests(
                    f"There are {most} sessions {where} already.",
                    hint="End one with DELETE /rag/sessions/{id}, wait until one expires, or raise "
                    "max_sessions.",
                    code="too_many_sessions",
                    param="session",
                )
        dialogue = Dialogue(secrets.token_hex(16), owner, namespace, self._budget)
        self._add(dialogue)
        return dialogue

    def _add(self, dialogue: Dialogue) -> None:
        self._dialogues[dialogue.id] = dialogue
        self._of.setdefault(dialogue.owner, {})[dialogue.id] = dialogue

    def _drop(self, dialogue: Dialogue) -> None:
        self._dialogues.pop(dialogue.id, None)
        own = self._of.get(dialogue.owner, {})
        own.pop(dialogue.id, None)
        if not own:
            self._of.pop(dialogue.owner, None)

    async def _end_if_lost(self, dialogues: Collection[Dialogue], viewer: Viewer = EVERYTHING) -> None:
        """``viewer``: who goes on with them, and must see their documents still."""
        current = [each for each in dialogues if each.outdated is None]
        if not current:
            return
        made_at = await asyncio.to_thread(self._store.made_at)
        for dialogue in current:
            lost = await asyncio.to_thread(lost_document, dialogue, self._store.seen_by(viewer), made_at)
            if lost is not None:
                await self._outdate(dialogue, lost)

    async def _outdate(self, dialogue: Dialogue, reason: str) -> None:
        if dialogue.outdated is not None:
            return
        dialogue.end(reason)
        if self._disk is not None and dialogue.turns and dialogue.id in self._dialogues:
            await self._disk.keep(dialogue)
        await self._forget_kv(dialogue, dialogue.keys)

    def _is_expired(self, dialogue: Dialogue) -> bool:
        return not dialogue.lock.locked() and time.time() > dialogue.used_at + self._ttl_s

    async def _sweep(self) -> None:
        while True:
            try:
                await self._restore()
                expired = [each for each in self._dialogues.values() if self._is_expired(each)]
                for dialogue in expired:
                    self._drop(dialogue)
                await self._remove(expired)
                # An engine with exact strategies only cannot drop one prefix without the others.
                for dialogue in () if self._engine.info.only_exact else expired:
                    await self._forget_kv(dialogue, dialogue.keys)
                await self.drop_outdated()
            except Exception:  # whatever it is, later ones must be seen
                log.warning("sessions could not be looked through, will retry", exc_info=True)
            await asyncio.sleep(min(_SWEEP_S, self._ttl_s))

    async def _restore(self) -> None:
        """Open the sessions' file, unless it is open: take what is in it, and write what is not."""
        if self._disk is None or self._disk.is_open:
            return
        for dialogue in await self._disk.open():
            if dialogue.id not in self._dialogues:
                self._add(dialogue)
        if self._disk.is_open:
            kept = [self._disk.keep(each) for each in self._dialogues.values() if each.turns]
            await asyncio.gather(*kept)

    async def _remove(self, dialogues: Iterable[Dialogue]) -> None:
        if self._disk is not None and (names := [each.id for each in dialogues if each.turns]):
            await self._disk.remove(names)

    async def _forget_kv(self, dialogue: Dialogue, keys: Collection[str]) -> None:
        if not isinstance(self._engine, CachingEngine):
            return
        for key in sorted(keys):
            dialogue.keys.discard(key)
            try:
                await self._engine.control("remove_session", key=key)
            except RagserveError as error:  # nothing finds it any more, and it is evicted in its turn
                log.warning("KV of a session stays until it is evicted: %s", error)


def _not_found(name: str) -> NotFound:
    return NotFound(
        f"There is no session {name[:64]!r}.",
        hint="It may have expired or ended, or been forgotten by a server that keeps sessions in memory only "
        'and was started again: begin another one with "session": "new", and send what was said as history.',
        code="session_not_found",
        param="session",
    )
