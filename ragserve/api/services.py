"""The parts of a running server: opened at its start, closed in reverse order at its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

from fastapi import Depends, Request

from ragserve.answering.answer_forms import AnswerForms, tool_parser
from ragserve.answering.answerer import Answerer
from ragserve.answering.auto import Chooser
from ragserve.answering.follow_ups import DialogueSearch
from ragserve.answering.in_flight import Idleness, QueryLimiter
from ragserve.answering.key_reranker import make_rerankers
from ragserve.answering.prompt import PromptBuilder
from ragserve.answering.query_log import QueryLog
from ragserve.answering.rating_log import FeedbackLog, UnansweredLog
from ragserve.answering.sessions.dialogues import Dialogues
from ragserve.answering.sessions.session_store import SessionStore, forget_all
from ragserve.answering.sessions.turn_attention import TurnAttention
from ragserve.answering.sessions.turn_compression import TurnCompressor
from ragserve.api.access import Access
from ragserve.api.seen_jobs import SeenJobs
from ragserve.cache.evictions import Evictor, clean_files, note_engine
from ragserve.config import Settings
from ragserve.engine.base import Engine, EngineInfo, TokenizingEngine
from ragserve.engine.document_cache import CachingEngine, ManyEngines
from ragserve.errors import InvalidRequest, ModelUnavailable, RagserveError, Unavailable
from ragserve.profiles.costs import FILE_NAME as COSTS_FILE
from ragserve.profiles.gate import Gate
from ragserve.profiles.in_use import InUseRecord
from ragserve.retrieval.passage_search import PassageSearch
from ragserve.retrieval.remote_reranker import public_name
from ragserve.retrieval.retriever import Retriever
from ragserve.retrieval.served_models import ServedModels
from ragserve.retrieval.spelling import SpellingCorrector
from ragserve.setting_groups.per_namespace import NamespaceSettings
from ragserve.verification.answer_watch import AnswerWatch
from ragserve.verification.background import BackgroundVerification
from ragserve.verification.dropped import forget_outdated
from ragserve.verification.idle_tuner import IdleTuner
from sglang_ext.wire.joint_names import is_joint, names_of

if TYPE_CHECKING:
    from ragserve.ingest.ingestor import Ingestor
    from ragserve.ingest.jobs.runner import JobRunner
    from ragserve.retrieval.embedder import AnyEmbedder
    from ragserve.verification.costs import CostEngine
    from ragserve_index import IndexStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything that routes use. One per server."""

    settings: Settings
    engine: Engine
    store: IndexStore
    embedder: AnyEmbedder
    retriever: Retriever
    search: DialogueSearch
    served: ServedModels
    ingestor: Ingestor
    runner: JobRunner
    url_runner: JobRunner
    limiter: QueryLimiter
    answerer: Answerer
    dialogues: Dialogues
    feedback: FeedbackLog
    verification: BackgroundVerification
    warm_runner: JobRunner | None  # None if the engine has no document cache
    foreign: list[str]  # namespaces that were cut for another model, when the server started
    evict: Callable[[], Coroutine[Any, Any, None]]  # evict the KV of removed documents from every tier

    def seen_jobs(self, caller: Access) -> SeenJobs:
        """The jobs as a caller sees them."""
        return SeenJobs(self.ingestor.jobs, self.store, caller.who)

    async def own_settings(self, namespace: str, asked: Collection[str] = ()) -> NamespaceSettings:
        """A namespace's own settings, without any for one that does not exist; of several, by their joint
        name, as `NamespaceSettings.shared`: ``asked`` are fields that the request gives."""

        def each() -> dict[str, NamespaceSettings]:
            return {name: NamespaceSettings.of(self.store.settings(name)) for name in names_of(namespace)}

        found = await asyncio.to_thread(each)
        return NamespaceSettings.shared(found, asked) if is_joint(namespace) else found[namespace]

    def document_cache(self) -> CachingEngine:
        """The engine, as a document cache. Raises InvalidRequest if it has none."""
        if not isinstance(self.engine, CachingEngine):
            raise _no_document_cache()
        return self.engine

    def warm_ups(self) -> JobRunner:
        """The runner of warm-up jobs. Raises InvalidRequest without a document cache."""
        if self.warm_runner is None:
            raise _no_document_cache()
        return self.warm_runner

    def check_question(self, question: str, history_length: int = 0, *, param: str = "query") -> None:
        """Raises InvalidRequest if question or history exceed a limit of the settings."""
        limit = self.settings.max_query_chars
        if len(question) > limit:
            raise InvalidRequest(
                f"The question has {len(question):,} characters; the limit is {limit:,}.",
                hint="Shorten it, or raise max_query_chars.",
                code="query_too_long",
                param=param,
            )
        if history_length > self.settings.max_history_messages:
            raise InvalidRequest(
                f"The history has {history_length} messages; "
                f"the limit is {self.settings.max_history_messages}.",
                hint="Send only the latest, or raise max_history_messages.",
                param="history" if param == "query" else param,
            )


def _no_document_cache() -> InvalidRequest:
    return InvalidRequest(
        "This server has no document cache: its engine runs elsewhere.",
        hint="Ask the server that runs the engine.",
        code="no_document_cache",
    )


@asynccontextmanager
async def open_services(
    settings: Settings, engine: Engine, load_embedder: Callable[[Settings], Any], idleness: Idleness
) -> AsyncIterator[Services]:
    """Start all parts; the embedder, the slowest, loads in a thread while the engine starts.

    Raises the error of a part that cannot start."""
    from ragserve.cache.cold_documents import submit_cold
    from ragserve.cache.warm import KIND as WARM
    from ragserve.cache.warm import Warmer
    from ragserve.ingest.ingestor import Ingestor
    from ragserve.ingest.jobs.runner import JobRunner
    from ragserve.ingest.url_sources import KIND as URL_JOBS
    from ragserve.retrieval.document_store import open_store

    async with AsyncExitStack() as stack:
        embedder_loading = asyncio.create_task(asyncio.to_thread(load_embedder, settings))
        # Waits for the thread even if another part fails to start, so that nothing is left running.
        stack.push_async_callback(asyncio.gather, embedder_loading, return_exceptions=True)
        store = await asyncio.to_thread(open_store, settings)
        stack.push_async_callback(asyncio.to_thread, store.close)
        stack.push_async_callback(engine.close)  # a start that fails leaves connections open, too
        info = await engine.start()
        embedder = await embedder_loading
        # Only now: both import transformers, whose lazy modules are not thread-safe.
        prompts = await asyncio.to_thread(PromptBuilder.load, info.tokenizer, settings.system_prompt)
        if isinstance(engine, TokenizingEngine):
            await engine.check_tokenizer(prompts.plain_ids)
        foreign = await asyncio.to_thread(_cut_for_others, store, info)
        retriever = Retriever(store, embedder)
        stack.push_async_callback(retriever.close)
        limiter = QueryLimiter(settings.max_concurrent_queries)
        drain = await stack.enter_async_context(_evictions(settings, store, engine, prompts, info, limiter))
        dialogues = Dialogues(
            engine,
            store,
            ttl_s=settings.session_ttl_s,
            most=settings.max_sessions,
            compressor=TurnCompressor(prompts, TurnAttention(engine, prompts)),
            budget=settings.session_budget,
            refresh_turns=settings.session_refresh_turns,
            disk=await _sessions_on_disk(settings, info, prompts),
        )
        await stack.enter_async_context(dialogues.running())

        query_log = QueryLog(settings.data_dir, settings.query_log_bytes, store)
        not_found = UnansweredLog(settings.data_dir, settings.query_log_bytes, store)
        feedback = FeedbackLog(settings.data_dir, settings.feedback_bytes, store)
        logs = (query_log, not_found, feedback)
        for each in logs:
            await stack.enter_async_context(each.running())

        async def evict() -> None:
            await drain()
            await dialogues.drop_outdated()
            for each in logs:
                await each.sweep()

        loop = asyncio.get_running_loop()
        ingestor = Ingestor(
            settings,
            store,
            embedder,
            tokenizer=info.tokenizer,
            evict=lambda: asyncio.run_coroutine_threadsafe(evict(), loop).result(),
            warms=lambda: isinstance(engine, CachingEngine) and not info.only_exact,
        )
        runner = JobRunner(ingestor)
        url_runner = JobRunner(ingestor, URL_JOBS)  # a slow site must not keep uploads waiting
        for job_runner in (runner, url_runner):
            await asyncio.to_thread(job_runner.start)
            stack.push_async_callback(asyncio.to_thread, job_runner.stop)
        timing = asyncio.Lock()  # of costs, while which nothing is warmed
        warm_runner = None
        if isinstance(engine, CachingEngine):
            warm_runner = JobRunner(
                Warmer(store, engine, prompts, loop, busy=lambda: limiter.in_flight > 0, timing=timing), WARM
            )
            await asyncio.to_thread(warm_runner.start)
            if settings.warm_ingested and not info.only_exact:
                room = await _room(engine)
                submitting = asyncio.create_task(asyncio.to_thread(submit_cold, store, room))
                stack.push_async_callback(asyncio.wait, [submitting])
            stack.push_async_callback(asyncio.to_thread, warm_runner.stop)
        usual = partial(NamespaceSettings.usual, settings, store)
        gate = Gate.of(settings, usual, **info.gate_identity)
        rerankers = make_rerankers(settings, engine, prompts)
        for reranker in rerankers.values():
            stack.push_async_callback(reranker.close)
        if (default := rerankers.get(public_name(settings.rerank))) is not None:
            await default.load()  # now, so that the first question does not wait, nor fail for a broken model
        served = ServedModels(embedder, rerankers, public_name(settings.rerank))
        stack.push_async_callback(served.close)
        passages = PassageSearch(retriever, rerankers)
        verification = _verification(settings, store, engine, passages, prompts, gate, limiter, timing)
        await stack.enter_async_context(verification.running(idleness))
        chooser = Chooser(
            engine, gate, settings.data_dir / COSTS_FILE, verification.in_use, verification.progress
        )
        spelling = SpellingCorrector(store, embedder.words)
        stack.push_async_callback(spelling.close)
        search = DialogueSearch(engine, passages, prompts, spelling)
        answerer = Answerer(
            engine,
            search,
            prompts,
            limiter,
            None if settings.force_strategies else gate,
            chooser,
            settings.nothing_found,
            verification.watch.answered,
            dialogues,
            query_log.answered,
            not_found.not_found,
            AnswerForms(
                prompts,
                every_grammar=settings.grammars == "all",
                parser=tool_parser(settings.engine_args),
            ),
        )
        yield Services(
            settings=settings,
            engine=engine,
            store=store,
            embedder=embedder,
            retriever=retriever,
            search=search,
            served=served,
            ingestor=ingestor,
            runner=runner,
            url_runner=url_runner,
            limiter=limiter,
            answerer=answerer,
            dialogues=dialogues,
            verification=verification,
            warm_runner=warm_runner,
            evict=evict,
            foreign=foreign,
            feedback=feedback,
        )
        log.info("shutting down")


async def _room(engine: CachingEngine) -> int | None:
    """Tokens of documents that the lasting tier of an engine holds; None without a limit."""
    one = engine.measured() if isinstance(engine, ManyEngines) else engine
    where = await one.where("default", [])
    return (
        None
        if where.budget_bytes is None
        else where.budget_bytes * where.block // where.bytes_of(where.block)
    )


def _cut_for_others(store: IndexStore, info: EngineInfo) -> list[str]:
    """Namespaces that were cut for another model, which is logged."""
    from ragserve.ingest.foreign_cuts import advice_of, foreign_cuts

    try:
        found = foreign_cuts(store, info.tokenizer)
    except RagserveError as error:  # a tokenizer that only the engine can load
        log.debug("it is not known for which model documents were cut: %s", error)
        return []
    if found:
        log.warning("%s: %s", *advice_of(found, info.model))
    return found


def _verification(
    settings: Settings,
    store: IndexStore,
    engine: Engine,
    search: PassageSearch,
    prompts: PromptBuilder,
    gate: Gate,
    limiter: QueryLimiter,
    timing: asyncio.Lock,
) -> BackgroundVerification:
    from ragserve.cache.warm import KIND as WARM
    from ragserve.ingest.jobs.runner import UPLOADS
    from ragserve.ingest.url_sources import KIND as URL_JOBS
    from ragserve_index import JobStore

    info = engine.info
    usual = partial(NamespaceSettings.usual, settings, store)
    in_use = InUseRecord.of(settings, usual, **info.gate_identity)
    watch = AnswerWatch(engine, store, gate, in_use, limiter, prompts, settings.verify_share)
    tuner = None
    if settings.idle_tuning and isinstance(engine, CachingEngine) and not info.only_exact:
        every, kinds = JobStore(store), (UPLOADS, URL_JOBS, WARM)
        tuner = IdleTuner(
            settings,
            cast("CostEngine", engine.measured() if isinstance(engine, ManyEngines) else engine),
            store,
            search,
            prompts,
            gate,
            in_use,
            limiter,
            jobs=lambda background: every.any_active(kinds, background=background),
            timing=timing,
        )
    return BackgroundVerification(gate, in_use, watch, tuner)


@asynccontextmanager
async def _evictions(
    settings: Settings,
    store: IndexStore,
    engine: Engine,
    prompts: PromptBuilder,
    info: EngineInfo,
    limiter: QueryLimiter,
) -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
    """Follow the eviction log with an engine of ours; with a remote one, only remove files of earlier
    runs."""
    if info.kind != "remote":
        await asyncio.to_thread(note_engine, settings, info.tokenizer, elsewhere=info.kind == "fleet")
        forget = partial(forget_outdated, settings.data_dir, store)
        await asyncio.to_thread(forget)  # the log keeps no row for long
        evictor = Evictor(store, engine, prompts, limiter.queries, forget)
        async with evictor.running():
            yield evictor.drain
    else:

        async def clean() -> None:
            await asyncio.to_thread(clean_files, settings, store)

        await clean()
        yield clean


async def _sessions_on_disk(
    settings: Settings, info: EngineInfo, prompts: PromptBuilder
) -> SessionStore | None:
    if settings.sessions_on_disk:
        model = info.fingerprint or info.model
        return SessionStore(settings.data_dir, lambda: f"{model} {prompts.fingerprint()}")
    try:
        await asyncio.to_thread(forget_all, settings.data_dir)
    except OSError as error:
        log.warning("sessions of an earlier run are still on disk: %s", error)
    return None


def load_embedder(settings: Settings) -> AnyEmbedder:
    """Load the embedder of the settings; imports torch. A remote one is asked what it is; if it is down, the
    server starts all the same, without dense search."""
    from ragserve.retrieval.embedder import Embedder
    from ragserve.retrieval.remote_embedder import RemoteEmbedder

    embedder = Embedder.of(settings)
    if isinstance(embedder, RemoteEmbedder):
        with contextlib.suppress(ModelUnavailable):  # which it has logged
            embedder.measure()
    return embedder


async def services(request: Request) -> Services:
    """Dependency: the server's services, with the store as the caller sees it: a route reads no others'
    documents. Raises Unavailable during start and stop."""
    found: Services | None = getattr(request.app.state, "services", None)
    if found is None:
        raise Unavailable("The server is starting or stopping.", hint="Retry when /ready answers 200.")
    caller: Access = request.state.access
    return replace(found, store=found.store.seen_by(caller.who.viewer))


async def request_id(request: Request) -> str:
    """Dependency: the request id set by the outermost middleware."""
    return str(request.state.request_id)


Svc = Annotated[Services, Depends(services)]
RequestId = Annotated[str, Depends(request_id)]
