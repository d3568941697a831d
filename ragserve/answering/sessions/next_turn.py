"""A turn of a session while it is answered: what its prompt, its engine request and its figures are."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from ragserve.answering.prompt import Message, Prompt, PromptBuilder, PromptDocument
from ragserve.answering.query import Query
from ragserve.answering.results import EarlierTurn, RetrievedPassage, SessionUse
from ragserve.answering.sessions.kept_dialogue import Dialogue
from ragserve.answering.sessions.past_turns import PastTurn, SessionKv, ids_of
from ragserve.answering.sessions.turn_candidates import TurnCandidates
from ragserve.answering.sessions.turn_compression import TurnCompressor
from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.errors import Conflict, InvalidRequest, PromptTooLong
from ragserve.strategy_spec import StrategySpec, keeps_whole
from sglang_ext.wire.protocol import EXACT_STRATEGIES


class NextTurn:
    """A turn that is being answered. It changes its dialogue when it is done, not before."""

    def __init__(
        self,
        dialogue: Dialogue,
        compressor: TurnCompressor,
        expires_s: float,
        is_kept: Callable[[], bool],
        refresh_turns: int = 0,
        write: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``refresh_turns``: turns after which the dialogue's KV is computed anew; 0: never. ``write``: put
        the dialogue on disk as it is now."""
        self._dialogue = dialogue
        self._exact = dialogue.exact
        if refresh_turns and dialogue.turns % refresh_turns == 0:
            self._exact = dialogue.turns
        self._compressor = compressor
        self._candidates: TurnCandidates | None = None
        self._expires_s = expires_s
        self._is_kept = is_kept
        self._write = write
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
        request = replace(request, namespace=dialogue.namespace)  # a pattern may match others by now
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
        check_current(self._dialogue)  # it may have ended while passages were searched for
        if self._budget:
            self._shorten(query.question, found)
        documents = [
            PromptDocument(passage.namespace or "", passage.title, passage.text)
            for passage in self.new(found)
        ]
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
        if self.is_first:
            return new  # equal ones are different passages there, each with a place in the prompt
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
        check_current(self._dialogue)
        is_shortened = any(turn.is_text for turn in self._past)
        if is_shortened or request.strategy in EXACT_STRATEGIES:
            self._exact = self._dialogue.exact
        key = self._dialogue.key_with(self._exact)
        self._dialogue.keys.add(key)
        return SessionKv(self._past, key, exact=0 if is_shortened else self._exact).request(request)

    async def done(
        self,
        query: Query,
        asked: GenerateRequest,
        spec: StrategySpec,
        prompt: Prompt,
        answer: tuple[Sequence[int], str],
        last: GenerateChunk,
    ) -> SessionUse:
        """Let the dialogue go on from here, and wait until that is on disk. ``asked`` was answered by
        ``spec``; ``answer``: its token ids, and its text as the user sees it."""
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
        turn = PastTurn.of(prompt, ids, behind=behind, unregistered=asked.unregistered, owners=asked.owners)
        history = query.history if self.is_first else ()
        turn = replace(turn, passages=tuple(self._added), question=query.question, history=history)
        dialogue.past.append(turn)
        dialogue.prompts.append((*self._past, turn))
        dialogue.budget, dialogue.exact = self._budget, self._exact
        dialogue.messages += [Message("user", query.question), Message("assistant", text)]
        dialogue.turns += 1
        if self._write is not None:
            await self._write()
        return use


def check_current(dialogue: Dialogue) -> None:
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
            hint="Use prefix, full, or a strategy that keeps whole documents, such as concat, without a "
            "choice of passages.",
            param="strategy",
        )
