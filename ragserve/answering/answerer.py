"""Answer a query as a stream of events, which the JSON, SSE and OpenAI routes only encode differently."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ragserve import tracing
from ragserve.answering.accounting import Clock, context_use, no_context, observe
from ragserve.answering.answer_forms import AnswerForm, AnswerForms
from ragserve.answering.answer_reader import MessageDelta
from ragserve.answering.attribution import attributed
from ragserve.answering.auto import AUTO, Candidates, Chooser
from ragserve.answering.chosen_passages import ChosenPassages, choose
from ragserve.answering.citations import Marker
from ragserve.answering.doubts import doubts, refuses
from ragserve.answering.follow_ups import DialogueSearch, Found
from ragserve.answering.in_flight import InFlight, QueryLimiter
from ragserve.answering.laid_out import LaidOutTurn, apart, check_room, laid_out_request, own_options
from ragserve.answering.offered import check_offered, check_verified
from ragserve.answering.prompt import Prompt, PromptBuilder, PromptDocument
from ragserve.answering.query import Query
from ragserve.answering.results import (
    Answer,
    Citation,
    DecodeUse,
    PrefillUse,
    RetrievalTimings,
    RetrievedPassage,
    SearchedFor,
    SearchResults,
    Usage,
)
from ragserve.answering.scores import SCORED, retrieval_scores
from ragserve.answering.sessions.dialogues import NEW, Dialogues
from ragserve.answering.sessions.next_turn import NextTurn
from ragserve.answering.small_contexts import better_exact
from ragserve.best_passages import PASSAGES, choice_of
from ragserve.engine.base import Engine, EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.engine.tool_calls import ToolCall
from ragserve.errors import EngineError, InvalidRequest
from ragserve.metrics import metrics
from ragserve.profiles.gate import Gate
from ragserve.strategy_spec import FULL, StrategySpec
from sglang_ext.wire.protocol import EXACT_STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterator

# Longer prompts are laid out in a thread, so that other streams do not stutter.
_INLINE_PROMPT_CHARS = 100_000


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The whole answer, the places of its citation markers, and the calls of tools that the model asks for.
    ``by_model``: false if it was not asked."""

    answer: Answer
    markers: tuple[Marker, ...]
    calls: tuple[ToolCall, ...] = ()
    by_model: bool = True


Event = SearchResults | MessageDelta | ToolCall | Citation | FinalAnswer
OnChosen = Callable[[StrategySpec, GenerateRequest, GenerateRequest, int | None, str | None], None]
"""Called with each strategy that answered in place of full prefill, its request, the same of all passages by
full prefill, the version of the namespace that was searched (None: the documents were given), and what brings
the passages of the namespace's queries (None: not known)."""
OnAnswered = Callable[[Query, SearchedFor | None, float, Iterable[str]], None]
"""Called with each query that was searched for and answered: with what, when it came (``time.time``), and
the namespaces whose passages were read."""
OnDoubt = Callable[[Query, SearchedFor | None, float, str], None]
"""Called with each query whose answer the documents do not seem to have: as `OnAnswered`, and with why."""


class Answerer:
    """Retrieves, lays out the prompt, generates and cites."""

    def __init__(
        self,
        engine: Engine,
        search: DialogueSearch,
        prompts: PromptBuilder,
        limiter: QueryLimiter,
        gate: Gate | None,
        chooser: Chooser,
        nothing_found: str = "",
        on_chosen: OnChosen | None = None,
        dialogues: Dialogues | None = None,
        on_answered: OnAnswered | None = None,
        on_doubt: OnDoubt | None = None,
        forms: AnswerForms | None = None,
    ) -> None:
        """Without ``gate``, unverified strategies may answer. ``nothing_found``: the answer where nothing
        was found. ``dialogues``: None for an answerer without sessions. ``forms``: by default those that
        need no choice of the operator."""
        self._forms = forms or AnswerForms(prompts)
        self._dialogues = dialogues
        self._on_doubt = on_doubt
        self._on_chosen = on_chosen
        self._on_answered = on_answered
        self._engine = engine
        self._gate = gate
        self._chooser = chooser
        self._search = search
        self._prompts = prompts
        self._limiter = limiter
        self._nothing_found = nothing_found

    async def events(self, query: Query) -> AsyncGenerator[Event, None]:
        """Yield SearchResults, MessageDelta* and ToolCall*, Citation*, FinalAnswer.

        The joined deltas are the answer. One task must read the events to the end or close them; closing or
        cancelling aborts the generation. Raises any RagserveError; those caused by the request come before
        the first event."""
        try:
            with self._limiter.slot(query.request.namespace) as slot:
                clock = Clock()
                async with (
                    self._turn(query) as turn,
                    aclosing(self._events(query, slot, turn, clock)) as events,
                ):
                    async for event in events:
                        yield event
        except (asyncio.CancelledError, GeneratorExit):
            metrics().aborted.inc()
            raise

    @asynccontextmanager
    async def _turn(self, query: Query) -> AsyncIterator[NextTurn | None]:
        """The turn of the query's session; None without one."""
        if query.session is None:
            if query.session_budget is not None:
                raise InvalidRequest(
                    "session_budget is about the turns of a session.",
                    hint='Begin one with "session": "new", or omit it.',
                    param="session_budget",
                )
            yield None
            return
        if self._dialogues is None:
            raise InvalidRequest("There are no sessions here.", param="session")
        async with self._dialogues.turn(query) as turn:
            yield turn

    async def _events(
        self, query: Query, slot: InFlight, turn: NextTurn | None, clock: Clock
    ) -> AsyncGenerator[Event, None]:
        if turn is not None:
            query = turn.query(query)
        request = query.request
        named = request.strategy
        best, options = choice_of(named, own_options(request))
        if named == PASSAGES:
            request = replace(request, strategy="prefix", options={})
        check_offered(request, self._engine.info)
        check_verified(query, request, self._gate)
        form = await self._forms.of(query)
        if best is not None:
            request = replace(request, options=options)
        private = query.documents is not None and await self._search.hides(
            request.namespace, query.search.viewer
        )
        if private and (turn is not None or request.strategy == AUTO):
            # a session's exact KV is its own; what `auto` asks and says is about the namespace's cache
            request = replace(request, strategy="prefix", options={})
        candidates = self._chooser.candidates(request.namespace, query) if request.strategy == AUTO else None
        search = await self._found(query, candidates)
        if search is not None:
            query = replace(query, question=search.reads.question, history=search.reads.history)
        found = (query.documents or []) if search is None else search.passages
        retrieval = RetrievalTimings() if search is None else search.timings
        searched: dict[str, Any] = {
            "retrieval": None if search is None else search.searched_by(query.search),
            "searched_for": None if search is None else search.searched_for,
            "reranking": None if search is None else search.reranking,
            "index_version": None if search is None else search.version,
            "index_versions": None if search is None else search.versions,
        }
        doubt = None
        if search is not None and (turn is None or turn.is_first):
            searched["evidence"] = search.evidence
            doubt = doubts(search, query.search)
            if doubt is not None and self._on_doubt is not None:
                self._on_doubt(query, search.searched_for, slot.began, doubt)
            elsewhere = query.tools or query.turns  # they may have the answer
            if doubt is not None and refuses(search, query.search) and not elsewhere:
                for event in self._nothing(query, clock, search, searched, doubt):
                    yield event
                return
        prompt_start = time.perf_counter()
        with tracing.span("prompt"):
            sentences = [] if search is None else search.sentences
            about = searched["searched_for"]
            asked_for = query.question if about is None else about.question
            room = None if query.documents is None else self._engine.info.max_prompt_tokens
            whole, chosen = None, None
            if best is None:
                laid_out = whole = await self._lay_out(query, found, turn, form)
            else:
                chosen = await choose(self._prompts, asked_for, found, best, room)
        choice = None
        if request.strategy == AUTO and whole is not None:
            with tracing.span("choose"):
                choice = await self._chooser.choose(
                    whole.prompt,
                    request.namespace,
                    candidates,
                    whole=turn is not None or query.documents is not None,  # no verdict is about these
                    shared=turn is None,
                    choose=partial(choose, self._prompts, asked_for, found),
                )
            named, chosen = choice.spec.name, choice.passages
            _, options = choice_of(named, choice.spec.options)
            request = replace(request, strategy="prefix" if named == PASSAGES else named, options=options)
        if chosen is not None:
            found = [found[number] for number in chosen.order]
            sentences = [sentences[number] for number in chosen.order] if sentences else []
            laid_out = await self._lay_out_best(query, found, chosen, form)
        prompt = slot.prompt = laid_out.prompt
        prompt_ms = (time.perf_counter() - prompt_start) * 1e3
        yield SearchResults(
            namespace=request.namespace,
            **searched,
            results=laid_out.found,
            documents_kept=laid_out.shown,
            session=None if turn is None else turn.id,
            timings=retrieval,
            request_id=request.rid,
        )
        kept = laid_out.passages
        reader = form.reader(len(kept))
        said: list[str] = []  # with invalid markers, for the next turn
        last = GenerateChunk("", EngineUsage(), EngineTimings())
        clock.engine_starts()
        if request.strategy == SCORED and search is not None:
            scores = retrieval_scores(self._prompts, prompt, found, sentences)
            request = replace(request, scores=scores)
        asked = laid_out_request(query, request, prompt)
        asked = replace(asked, sampling=form.sampling(asked.sampling))
        if turn is not None:
            asked = turn.request(asked)
        elif private:
            asked = replace(asked, namespace=apart(request.namespace, query.owner))
        exact = better_exact(asked, self._engine.info.samkv_defaults)
        if exact is not None:
            asked = replace(asked, strategy="prefix", options={})
        with tracing.span("generate", **{"ragserve.strategy": request.strategy}):
            # The protocol's iterators are generators: closing them aborts the request.
            generated = cast("AsyncGenerator[GenerateChunk, None]", self._engine.generate(asked))
            query.spend(len(asked.input_ids))
            async with aclosing(generated) as chunks:
                async for chunk in chunks:
                    query.spend(max(0, chunk.usage.completion - last.usage.completion))
                    last = chunk if exact is None else replace(chunk, fallback=exact)
                    if chunk.text:
                        clock.token()
                    if turn is not None:
                        said.append(chunk.text)
                    for delta in reader.feed(chunk.text):
                        yield delta
            clock.engine_ends()
            clock.trace(last)
        if last.finish_reason is None or last.finish_reason == "abort":
            raise EngineError(
                "The engine aborted the generation.", hint="It may be shutting down; retry.", code="aborted"
            )
        watched = turn is None and query.is_usual and not last.fallback
        if self._on_chosen is not None and watched and whole is not None:
            spec = StrategySpec(request.strategy, own_options(request)) if choice is None else choice.spec
            if spec.name not in EXACT_STRATEGIES:
                full = laid_out_request(query, replace(request, strategy=FULL.name, options={}), whole.prompt)
                usual = None if query.usual is None else query.usual.retriever
                self._on_chosen(spec, asked, full, searched["index_version"], usual)
        if self._on_answered is not None and search is not None:
            self._on_answered(query, search.searched_for, slot.began, laid_out.namespaces(query))
        for delta in reader.end():
            yield delta
        answer, markers = reader.answer, reader.markers
        session = None
        if turn is not None:
            spec = StrategySpec(request.strategy, request.options)
            ids = self._prompts.answer_ids(last.output_ids, "".join(said))
            session = await turn.done(query, asked, spec, prompt, (ids, answer.strip()), last)
        with tracing.span("attribute"):
            spoken, citations = await asyncio.to_thread(  # long contexts take tens of milliseconds
                attributed, reader.spoken, markers, query.question, kept
            )
        for citation in citations:
            yield citation
        timings = clock.timings(retrieval, prompt_ms, last)
        result = Answer(
            answer=answer,
            citations=citations,
            sentences=spoken,
            usage=Usage.model_validate(last.usage, from_attributes=True),
            context=context_use(
                named if chosen else request.strategy,
                prompt,
                last,
                len(found),
                choice,
                session,
                sparse=request.asks_sparse,
                doubt=doubt,
                search_notes=[] if search is None else search.notes,
            ),
            session=session,
            timings=timings,
            decode=None
            if last.decode is None
            else DecodeUse.model_validate(last.decode, from_attributes=True),
            prefill=None
            if last.prefill is None
            else PrefillUse.model_validate(last.prefill, from_attributes=True),
            **searched,
            namespace=request.namespace,
            finish_reason=last.finish_reason,
            request_id=request.rid,
        )
        observe(result)
        yield FinalAnswer(result, tuple(markers), reader.calls)

    def _nothing(
        self, query: Query, clock: Clock, search: Found, searched: dict[str, Any], doubt: str
    ) -> Iterator[Event]:
        """The events of an answer that the model is not asked for."""
        named: dict[str, Any] = {"namespace": query.request.namespace, "request_id": query.request.rid}
        yield SearchResults(results=[], documents_kept=0, timings=search.timings, **searched, **named)
        yield MessageDelta(self._nothing_found, by_model=False)
        result = Answer(
            answer=self._nothing_found,
            citations=[],
            sentences=[],
            usage=Usage(prompt=0, cached=0, completion=0),
            context=no_context(query, doubt, search.notes),
            timings=clock.timings(search.timings, None, None),
            **searched,
            **named,
            finish_reason="stop",
        )
        observe(result)
        yield FinalAnswer(result, (), by_model=False)

    async def _found(self, query: Query, candidates: Candidates | None) -> Found | None:
        """Search for the query's passages; None if it brings its own. ``candidates``: those of ``auto``."""
        if query.documents is not None:
            return None
        return await self._search.search(
            query.question,
            query.search,
            namespace=query.request.namespace,
            request_id=query.request.rid,
            history=query.history,
            spend=query.spend,
            was_read=query.session not in (None, NEW),
            # read by one strategy only
            sentences=candidates.include(SCORED)
            if candidates is not None
            else query.request.strategy == SCORED,
        )

    async def _lay_out(
        self, query: Query, found: list[RetrievedPassage], turn: NextTurn | None, form: AnswerForm
    ) -> LaidOutTurn:
        """Lay out the prompt, and number the passages. Raises DocumentsTooLong and PromptTooLong."""
        later = turn if turn is not None and not turn.is_first else None
        if later is not None:
            await later.attend(query.question, found)
        info = self._engine.info  # a session's KV stays on the device
        room = info.prompt_room(query.request, len(found)) if turn is None else info.max_prompt_tokens
        prompt = await self._prompt(query, found, later, room, form)
        new = found if later is None else later.new(found)
        check_room(query, prompt, len(new), alone=later is None)
        if prompt.cut_to is not None:
            whole = new[prompt.documents_kept - 1]
            beginning = {"text": whole.text[: prompt.cut_to], "end": (whole.start or 0) + prompt.cut_to}
            found[found.index(whole)] = whole.model_copy(update=beginning)
        if turn is None:
            return LaidOutTurn(prompt, found, prompt.documents_kept, found[: prompt.documents_kept])
        found = turn.number(found, prompt.documents_kept)
        return LaidOutTurn(prompt, found, len(found) - len(new) + prompt.documents_kept, turn.passages)

    async def _lay_out_best(
        self, query: Query, found: list[RetrievedPassage], chosen: ChosenPassages, form: AnswerForm
    ) -> LaidOutTurn:
        """Lay out the chosen passages alone, which come first among those found."""
        laid_out = await self._lay_out(query, found[: chosen.kept], None, form)
        rest = found[chosen.kept :]
        prompt = replace(laid_out.prompt, tokens_retrieved=chosen.tokens, left_out=len(rest))
        both = [
            passage.model_copy(update={"index": index})
            for index, passage in enumerate([*laid_out.found, *rest], 1)
        ]
        return LaidOutTurn(prompt, both, laid_out.shown, both[: laid_out.shown])

    async def _prompt(
        self,
        query: Query,
        found: list[RetrievedPassage],
        later: NextTurn | None,
        limit: int,
        form: AnswerForm,
    ) -> Prompt:
        """``limit``: tokens for prompt and answer."""
        new_tokens = query.request.sampling.max_new_tokens
        if new_tokens >= limit:
            raise InvalidRequest(
                f"max_new_tokens {new_tokens} leaves no room for a prompt: the engine takes {limit} tokens "
                "of prompt and answer together.",
                hint="Lower max_new_tokens.",
                param="max_new_tokens",
            )

        cut = query.documents is not None and query.overflow == "cut"  # which tokenises a beginning anew

        def build() -> Prompt:
            if later is not None:
                return later.prompt(self._prompts, query, found, limit - new_tokens)
            return self._prompts.build(
                query.question,
                [PromptDocument(passage.namespace or "", passage.title, passage.text) for passage in found],
                max_prompt_tokens=limit - new_tokens,
                history=query.history,
                system=query.system,
                cut=cut,
                turns=query.turns,
                tools=() if query.tools is None else query.tools.tools,
                default=form.system,
            )

        chars = len(query.question) + self._prompts.unread_chars((each.title, each.text) for each in found)
        chars += sum(each.chars for each in (*query.history, *query.turns))
        is_short = query.tools is None and not cut and chars < _INLINE_PROMPT_CHARS
        is_short = is_short and not (later is not None and later.may_shorten)
        return build() if is_short else await asyncio.to_thread(build)
