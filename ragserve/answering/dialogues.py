"""Sessions: dialogues that the server keeps, so that a turn sends its question only.

A dialogue is kept as the token ids of its turns. The next prompt is these ids, the documents that are new,
and the question; so the engine finds the KV of all that came before under the session's own key. With a
budget, turns before the last are compressed for the question when they exceed it (`turn_compression`).
Everything is in memory: a restart forgets it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ragserve.answering.kept_dialogue import Dialogue
from ragserve.answering.past_turns import PastTurn, SessionKv, ids_of
from ragserve.answering.prompt import Message, Prompt, PromptBuilder, PromptDocument
from ragserve.answering.query import Query
from ragserve.answering.results import EarlierTurn, RetrievedPassage, SessionUse
from ragserve.answering.turn_candidates import TurnCandidates
from ragserve.answering.turn_compression import TurnCompressor
from ragserve.engine.base import Engine, GenerateChunk, GenerateRequest
from ragserve.engine.document_cache import CachingEngine
from ragserve.errors import Conflict, InvalidRequest, NotFound, PromptTooLong, RagserveError, TooManyRequests
from ragserve.strategy_spec import StrategySpec, keeps_whole
from sglang_ext.protocol import EXACT_STRATEGIES

if TYPE_CHECKING:
    from ragserve_index import IndexStore

log = logging.getLogger(__name__)

NEW = "new"
"""What a request says instead of a session's id to begin one."""
_SWEEP_S = 30.0  # between two looks for sessions that have expired or lost a document


class NextTurn:
    """A turn that is being answered. It changes its dialogue when it is done, not before."""

    def __init__(
        self,
        dialogue: Dialogue,
        compressor: TurnCompressor,
        expires_s: float,
        is_kept: Callable[[], bool],
        refresh_turns: int = 0,
    ) -> None:
        """``refresh_turns``: turns after which the dialogue's KV is computed anew; 0: never."""
        self._dialogue = dialogue
        self._exact = dialogue.exact
        if refresh_turns and dialogue.turns % refresh_turns == 0:
            self._exact = dialogue.turns
        self._compressor = compressor
        self._candidates: TurnCandidates | None = None
        self._expires_s = expires_s
        self._is_kept = is_kept
        self._budget = dialogue.budget
        self._past: Sequence[PastTurn] = tuple(dialogue.past)  # as this turn's prompt has them
        self._left: list[EarlierTurn] = []
        self._set_before(dialogue.passages)
        self._added: list[RetrievedPassage] = []
        self._found = 0  # passages of this turn that the dialogue has already

    def _set_before(self, passages: Sequence[RetrievedPassage], whole: int | None = None) -> None:
        """Number the passages before this turn by their place in the prompt. The last ``whole`` of them, or
        all, are known and not added again."""
        self._before = [
            passage.model_copy(update={"index": number}) for number, passage in enumerate(passages, 1)
        ]
        known = self._before if whole is None else self._before[len(self._before) - whole :]
        self._known = {(passage.title, passage.text): passage.index for passage in known}

    @property
    def id(self) -> str:
        return self._dialogue.id

    @property
    def is_first(self) -> bool:
        return not self._dialogue.turns

    def query(self, query: Query) -> Query:
        """The query with the dialogue's history, system text and strategy. Raises InvalidRequest for
        others."""
        spec = StrategySpec(query.request.strategy, query.request.options)
        if query.session_budget is not None:
            self._budget = query.session_budget
        if self.is_first:
            _check_whole(spec)
            return query
        dialogue = self._dialogue
        given = {
            "history": bool(query.history),
            "system": query.system is not None and query.system != dialogue.system,
            "strategy": query.names_strategy and spec not in (dialogue.named, dialogue.spec),
        }
        for name, differs in given.items():
            if differs:
                raise InvalidRequest(
                    f"{name} cannot change within a session: it keeps that of its first turn.",
                    hint='Leave it out, or begin another session with "session": "new".',
                    param=name,
                )
        request = query.request
        if dialogue.spec is not None:
            request = replace(request, strategy=dialogue.spec.name, options=dialogue.spec.options)
        return replace(query, request=request, history=tuple(dialogue.messages), system=dialogue.system)

    async def attend(self, question: str, found: Sequence[RetrievedPassage]) -> None:
        """Find out what the question attends to in turns that have to be compressed, before `prompt`."""
        if not self.may_shorten:
            return
        texts = {(passage.title, passage.text) for passage in found}
        key, prompts = self._dialogue.key, self._dialogue.prompts
        self._candidates = await self._compressor.attended(self._past, question, texts, key, prompts)

    def prompt(
        self, prompts: PromptBuilder, query: Query, found: Sequence[RetrievedPassage], room: int
    ) -> Prompt:
        """Lay out the turn, with the passages of ``found`` that are new, behind what the budget leaves of
        the dialogue. Raises PromptTooLong."""
        _check_current(self._dialogue)  # it may have ended while passages were searched for
        if self._budget:
            self._shorten(query.question, found)
        documents = [PromptDocument("", passage.title, passage.text) for passage in self.new(found)]
        self._found = len(found) - len(documents)
        cut = query.documents is not None and query.overflow == "cut"
        try:
            return prompts.follow_up(
                ids_of(self._past), query.question, documents, max_prompt_tokens=room, cut=cut
            )
        except PromptTooLong as error:
            raise PromptTooLong(
                f"The session is full: {error.message}",
                hint="Begin another session, or lower max_new_tokens.",
                code="session_full",
                param="session",
            ) from error

    def _shorten(self, question: str, found: Sequence[RetrievedPassage]) -> None:
        texts = {(passage.title, passage.text) for passage in found}
        shortened = self._compressor.shorten(
            self._past,
            question,
            self._budget,
            system=self._dialogue.system,
            found=texts,
            candidates=self._candidates,
        )
        self._past, self._left = shortened.turns, shortened.report
        self._set_before(shortened.passages, shortened.whole)

    @property
    def may_shorten(self) -> bool:
        """Laying out the prompt may have to choose among sentences, which takes longer."""
        return 0 < self._budget < sum(len(turn.ids) for turn in self._past[:-1])

    def new(self, found: Sequence[RetrievedPassage]) -> list[RetrievedPassage]:
        """Those of ``found`` that the dialogue does not have, each once."""
        if self.is_first:
            return list(found)
        unknown: dict[tuple[str, str], RetrievedPassage] = {}
        for passage in found:
            if (key := (passage.title, passage.text)) not in self._known:
                unknown.setdefault(key, passage)
        return list(unknown.values())

    def number(self, found: Sequence[RetrievedPassage], kept: int) -> list[RetrievedPassage]:
        """Number passages as the dialogue counts them: those in it, best first, then new ones without room.
        ``kept``: new ones in the prompt."""
        before = len(self._before)
        new = [
            passage.model_copy(update={"index": before + index})
            for index, passage in enumerate(self.new(found), 1)
        ]
        self._added = new[:kept]
        numbers = {**self._known, **{(passage.title, passage.text): passage.index for passage in new}}
        numbered = [
            passage.model_copy(update={"index": numbers[passage.title, passage.text]}) for passage in found
        ]
        return sorted(numbered, key=lambda passage: passage.index > before + kept)

    @property
    def passages(self) -> list[RetrievedPassage]:
        """All of the dialogue, by number; with those of this turn once they are numbered."""
        return [*self._before, *self._added]

    def request(self, request: GenerateRequest) -> GenerateRequest:
        """The request as part of the session. Raises Conflict if that has lost a document meanwhile."""
        _check_current(self._dialogue)
        is_shortened = any(turn.is_text for turn in self._past)
        if is_shortened or request.strategy in EXACT_STRATEGIES:
            self._exact = self._dialogue.exact
        key = self._dialogue.key_with(self._exact)
        self._dialogue.keys.add(key)
        return SessionKv(self._past, key, exact=0 if is_shortened else self._exact).request(request)

    def done(
        self,
        query: Query,
        asked: GenerateRequest,
        spec: StrategySpec,
        prompt: Prompt,
        answer: tuple[Sequence[int], str],
        last: GenerateChunk,
    ) -> SessionUse:
        """Let the dialogue go on from here. ``asked`` was answered by ``spec``; ``answer``: its token ids,
        and its text as the user sees it."""
        dialogue, (ids, text) = self._dialogue, answer
        earlier = 0 if self.is_first else prompt.segments[0].end
        held = min(last.usage.cached, earlier) if last.context is None else last.context.session_held
        use = SessionUse(
            id=dialogue.id,
            turn=dialogue.turns + 1,
            expires_in_s=self._expires_s,
            documents=len(self.passages),
            documents_added=len(self._added),
            documents_known=self._found,
            tokens=len(prompt.input_ids) + len(ids),
            tokens_held=held,
            tokens_computed=earlier - held,
            earlier=self._left if self._budget else None,
            refreshed=self._exact > dialogue.exact,
        )
        dialogue.used_at = time.time()
        if dialogue.outdated is not None or not self._is_kept():
            return use
        if self.is_first:
            dialogue.system, dialogue.spec = query.system, spec
            dialogue.named = StrategySpec(query.request.strategy, query.request.options)
            dialogue.messages.extend(query.history)
        behind = sum(len(turn.ids) for turn in self._past)
        turn = PastTurn.of(prompt, ids, behind=behind, unregistered=asked.unregistered)
        history = query.history if self.is_first else ()
        turn = replace(turn, passages=tuple(self._added), question=query.question, history=history)
        dialogue.past.append(turn)
        dialogue.prompts.append((*self._past, turn))
        dialogue.budget, dialogue.exact = self._budget, self._exact
        dialogue.messages += [Message("user", query.question), Message("assistant", text)]
        dialogue.turns += 1
        return use


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
    ) -> None:
        """``ttl_s``: seconds without a turn after which a session ends. ``most``: of an API key in a
        namespace. ``budget``: of sessions that do not give one, 0 for none. ``refresh_turns``: as in
        `NextTurn`."""
        self._engine = engine
        self._store = store
        self._ttl_s = ttl_s
        self._most = most
        self._compressor = compressor
        self._budget = budget
        self._refresh_turns = refresh_turns
        self._dialogues: dict[str, Dialogue] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """End sessions whose time is up, or which have lost a document, while the block lasts."""
        task = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

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
            if dialogue.namespace != namespace:
                raise _not_found(dialogue.id)
        try:
            async with dialogue.lock:
                if query.session != NEW:
                    self.get(query.owner, dialogue.id)  # it may have ended while this request waited
                    await self._end_if_lost(dialogue)
                    _check_current(dialogue)
                dialogue.used_at = time.time()
                yield NextTurn(
                    dialogue,
                    self._compressor,
                    self._ttl_s,
                    lambda: dialogue.id in self._dialogues,
                    self._refresh_turns,
                )
                await self._forget_kv(dialogue, dialogue.keys - {dialogue.key})
        finally:
            if not dialogue.turns and dialogue.outdated is None:
                self._dialogues.pop(dialogue.id, None)

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
            for dialogue in self._dialogues.values()
            if dialogue.owner == owner and dialogue.turns and not self._is_expired(dialogue)
        ]

    async def end(self, dialogue: Dialogue) -> None:
        """Forget a session and its KV."""
        self._dialogues.pop(dialogue.id, None)
        await self._forget_kv(dialogue, dialogue.keys)

    async def drop_outdated(self) -> None:
        """Take their texts from all sessions with a document that has been removed or replaced."""
        for dialogue in list(self._dialogues.values()):
            await self._end_if_lost(dialogue)

    def _new(self, owner: str, namespace: str) -> Dialogue:
        own = [
            each for each in self._dialogues.values() if (each.owner, each.namespace) == (owner, namespace)
        ]
        if sum(not self._is_expired(each) for each in own) >= self._most:
            raise TooManyRequests(
                f"There are {self._most} sessions in namespace {namespace!r} already.",
                hint="End one with DELETE /rag/sessions/{id}, wait until one expires, or raise max_sessions.",
                code="too_many_sessions",
                param="session",
            )
        dialogue = Dialogue(secrets.token_hex(16), owner, namespace, self._budget)
        self._dialogues[dialogue.id] = dialogue
        return dialogue

    async def _end_if_lost(self, dialogue: Dialogue) -> None:
        if dialogue.outdated is None and (lost := await self._lost(dialogue)) is not None:
            dialogue.end(lost)
            await self._forget_kv(dialogue, dialogue.keys)

    async def _lost(self, dialogue: Dialogue) -> str | None:
        """Say which document of a session is not in the index any more; None if all are."""
        texts = {p.chunk_id: (p.title, p.text) for p in dialogue.passages if p.chunk_id is not None}
        if not texts:
            return None
        try:
            found = await asyncio.to_thread(self._store.chunks, dialogue.namespace, list(texts))
        except NotFound:
            return "a document that it rests on was removed or replaced."
        changed = [chunk.title for chunk in found if (chunk.title, chunk.text) != texts[chunk.chunk_id]]
        return f"document {changed[0]!r}, on which it rests, was replaced." if changed else None

    def _is_expired(self, dialogue: Dialogue) -> bool:
        return not dialogue.lock.locked() and time.time() > dialogue.used_at + self._ttl_s

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._ttl_s))
            try:
                for dialogue in [each for each in self._dialogues.values() if self._is_expired(each)]:
                    del self._dialogues[dialogue.id]
                    # An engine with exact strategies only cannot drop one prefix without the others.
                    if not self._engine.info.only_exact:
                        await self._forget_kv(dialogue, dialogue.keys)
                await self.drop_outdated()
            except Exception:  # whatever it is, later ones must be seen
                log.warning("sessions could not be looked through, will retry", exc_info=True)

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
        hint="It may have expired, or the server was started again: begin another one with "
        '"session": "new", and send what was said as history.',
        code="session_not_found",
        param="session",
    )


def _check_current(dialogue: Dialogue) -> None:
    if dialogue.outdated is not None:
        raise Conflict(
            f"The session has ended: {dialogue.outdated}",
            hint='Begin another one with "session": "new".',
            code="session_outdated",
            param="session",
        )


def _check_whole(spec: StrategySpec) -> None:
    if not keeps_whole(spec):
        raise InvalidRequest(
            f"Strategy {spec.label} keeps part of the documents, and a session's later questions may be "
            "about other parts.",
            hint="Use prefix, full, or a strategy that keeps whole documents, such as concat.",
            param="strategy",
        )
