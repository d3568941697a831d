"""What the routes work with: opened when the server starts, closed in the opposite order when it stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request

from ragserve.answering.answerer import Answerer, QueryLimiter
from ragserve.answering.auto import Chooser
from ragserve.answering.prompt import PromptBuilder
from ragserve.cache.evictions import Evictor, clean_files, note_engine
from ragserve.config import Settings
from ragserve.engine.base import Engine, EngineInfo
from ragserve.engine.document_cache import CachingEngine
from ragserve.errors import InvalidRequest, Unavailable
from ragserve.profiles.costs import FILE_NAME as COSTS_FILE
from ragserve.profiles.gate import Gate
from ragserve.retrieval.retriever import Retriever

if TYPE_CHECKING:
    from ragserve.ingest.ingestor import Ingestor
    from ragserve.ingest.jobs.runner import JobRunner
    from ragserve.retrieval.embedder import Embedder
    from ragserve_index import IndexStore, JobStore

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Services:
    """One per running server."""

    settings: Settings
    engine: Engine
    store: IndexStore
    jobs: JobStore
    embedder: Embedder
    prompts: PromptBuilder
    retriever: Retriever
    ingestor: Ingestor
    runner: JobRunner
    limiter: QueryLimiter
    answerer: Answerer
    warm_runner: JobRunner | None  # None where the engine has no document cache
    evict: Callable[
        [], Coroutine[Any, Any, None]
    ]  # the KV of all that has been removed so far, from every tier

    def warm_ups(self) -> JobRunner:
        """Who runs warm-up jobs. Raises InvalidRequest where there is no cache to warm."""
        if self.warm_runner is None:
            raise InvalidRequest(
                "This server has no document cache: its engine runs elsewhere.",
                hint="Ask the server that runs the engine.",
                code="no_document_cache",
            )
        return self.warm_runner

    def check_question(self, question: str, history_length: int = 0, *, param: str = "query") -> None:
        """Raises InvalidRequest where a limit of the settings is exceeded."""
        limit = self.settings.max_query_chars
        if len(question) > limit:
            raise InvalidRequest(
                f"The question has {len(question):,} characters; at most {limit:,} are taken.",
                hint="Shorten it, or raise max_query_chars.",
                code="query_too_long",
                param=param,
            )
        if history_length > self.settings.max_history_messages:
            raise InvalidRequest(
                f"The history has {history_length} messages; at most {self.settings.max_history_messages} are taken.",
                hint="Send the latest ones only, or raise max_history_messages.",
                param="history" if param == "query" else param,
            )


@asynccontextmanager
async def open_services(
    settings: Settings, engine: Engine, load_embedder: Callable[[Settings], Any]
) -> AsyncIterator[Services]:
    """The embedder, which takes longest, loads in a thread while the engine starts. Raises what keeps a part
    from starting.
    """
    from ragserve.cache.warm import KIND as WARM
    from ragserve.cache.warm import Warmer
    from ragserve.ingest.ingestor import Ingestor
    from ragserve.ingest.jobs.runner import JobRunner
    from ragserve_index import IndexStore

    async with AsyncExitStack() as stack:
        embedder_loading = asyncio.create_task(asyncio.to_thread(load_embedder, settings))
        stack.push_async_callback(_settled, embedder_loading)
        store = await asyncio.to_thread(
            IndexStore, settings.data_dir, index_type=settings.index_type, device=settings.index_device
        )
        stack.push_async_callback(asyncio.to_thread, store.close)
        info = await engine.start()
        stack.push_async_callback(engine.close)
        embedder = await embedder_loading
        # Only now: both import transformers, whose lazy modules two threads at once can find half made.
        prompts = await asyncio.to_thread(PromptBuilder.load, info.tokenizer, settings.system_prompt)
        retriever = Retriever(store, embedder)
        stack.push_async_callback(retriever.close)
        evict = await stack.enter_async_context(_evictions(settings, store, engine, prompts, info))
        loop = asyncio.get_running_loop()
        ingestor = Ingestor(
            settings,
            store,
            embedder,
            tokenizer=info.tokenizer,
            evict=lambda: asyncio.run_coroutine_threadsafe(evict(), loop).result(),
        )
        runner = JobRunner(ingestor)
        await asyncio.to_thread(runner.start)
        stack.push_async_callback(asyncio.to_thread, runner.stop)
        warm_runner = None
        if isinstance(engine, CachingEngine):
            warm_runner = JobRunner(Warmer(store, engine, prompts, loop), WARM)
            await asyncio.to_thread(warm_runner.start)
            stack.push_async_callback(asyncio.to_thread, warm_runner.stop)
        limiter = QueryLimiter(settings.max_concurrent_queries)
        gate = Gate.of(
            settings, model=info.model, fingerprint=info.fingerprint, dtype=info.dtype, samkv=info.samkv
        )
        chooser = Chooser(engine, gate, settings.data_dir / COSTS_FILE)
        answerer = Answerer(
            engine, retriever, prompts, limiter, None if settings.force_strategies else gate, chooser
        )
        yield Services(
            settings,
            engine,
            store,
            ingestor.jobs,
            embedder,
            prompts,
            retriever,
            ingestor,
            runner,
            limiter,
            answerer,
            warm_runner,
            evict,
        )
        log.info("shutting down")


@asynccontextmanager
async def _evictions(
    settings: Settings, store: IndexStore, engine: Engine, prompts: PromptBuilder, info: EngineInfo
) -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
    """An engine of ours evicts at once and follows the log; with one elsewhere only files of earlier runs may
    be left to remove.
    """
    if info.kind == "local":
        await asyncio.to_thread(note_engine, settings, info.tokenizer)
        evictor = Evictor(store, engine, prompts)
        async with evictor.running():
            yield evictor.drain
    else:

        async def clean() -> None:
            await asyncio.to_thread(clean_files, settings, store)

        await clean()
        yield clean


def load_embedder(settings: Settings) -> Embedder:
    """The embedder that the settings name; imports torch."""
    from ragserve.retrieval.embedder import Embedder

    return Embedder(settings.embedder, device=settings.embed_device, batch_size=settings.embed_batch)


async def _settled(task: asyncio.Task[Any]) -> None:
    """A start that failed elsewhere still waits for the thread, so that nothing is left running."""
    await asyncio.gather(task, return_exceptions=True)


async def services(request: Request) -> Services:
    """Dependency of the routes. Raises Unavailable before and after the server's life."""
    found: Services | None = getattr(request.app.state, "services", None)
    if found is None:
        raise Unavailable("The server is starting or stopping.", hint="Retry when /ready answers 200.")
    return found


async def request_id(request: Request) -> str:
    """Dependency: the id that the outermost middleware gave the request."""
    return str(request.state.request_id)


Svc = Annotated[Services, Depends(services)]
RequestId = Annotated[str, Depends(request_id)]
