"""The clients: one for threads and one for asyncio, over the same calls."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

import httpx

from ragserve import errors
from ragserve.api.views import JobDetail, JobView
from ragserve.client import calls
from ragserve.client.arguments import QueryArguments
from ragserve.client.calls import Call, Page
from ragserve.client.failures import Outcome, may_pass, pause_before_retry, successful, translated
from ragserve.client.sse_reader import EventReader, QueryEvent

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_CONNECT_S = 10.0
_FIRST_POLL_S, _LONGEST_POLL_S = 0.2, 5.0
_AWAY_S = 3600.0  # that a server may not answer while a job is waited for
_POLL_GROWTH = 1.1  # a job is seen to end after a tenth more time, and its polls leave a key's rate to others


def _blocking(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """Make the method of `Client` that sends a call."""

    def method(self: Client, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(build(*args, **kwargs))

    return _named_as(build, method)


def _awaitable(
    build: Callable[P, Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Make the method of `AsyncClient` that sends a call."""

    async def method(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(build(*args, **kwargs))

    return _named_as(build, method)


def _blocking_list(build: Callable[P, Call[Page[T]]]) -> Callable[Concatenate[Client, P], Iterator[T]]:
    """Make the method of `Client` that goes through all pages of a list."""

    def method(self: Client, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        following: Call[Page[T]] | None = build(*args, **kwargs)
        while following is not None:
            page = self.send(following)
            yield from page.items
            following = page.following

    return _named_as(build, method)


def _async_list(
    build: Callable[P, Call[Page[T]]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    """Make the method of `AsyncClient` that goes through all pages of a list."""

    async def method(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        following: Call[Page[T]] | None = build(*args, **kwargs)
        while following is not None:
            page = await self.send(following)
            for item in page.items:
                yield item
            following = page.following

    return _named_as(build, method)


def _named_as(build: Callable[..., Any], method: F) -> F:
    """Give a method the name, text and signature of the function that it calls, for `help`."""
    method.__name__, method.__doc__ = build.__name__, build.__doc__
    own = inspect.signature(build)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = own.replace(parameters=[itself, *own.parameters.values()])  # type: ignore[attr-defined]
    return method


class Client:
    """Connection to one server. Thread-safe; close it, or use it in a ``with`` block.

    ``timeout_s``: longest silence of the server during a request. ``retries``: how often a request is sent
    again at most, where that is safe (`ragserve.client.failures.pause_before_retry`). ``no_store``: ask a
    server with a query log not to keep the questions."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 2,
        no_store: bool = False,
    ) -> None:
        self.url, self._retries = url.rstrip("/"), retries
        with translated(self.url):
            self._http = httpx.Client(**_options(self.url, api_key, timeout_s, no_store))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    call = _blocking(calls.call)
    info = _blocking(calls.info)
    query = _blocking(calls.query)
    retrieve = _blocking(calls.retrieve)
    ingest_texts = _blocking(calls.ingest_texts)
    ingest_files = _blocking(calls.ingest_files)
    preview = _blocking(calls.preview)
    ingest_urls = _blocking(calls.ingest_urls)
    job = _blocking(calls.job)
    jobs = _blocking(calls.jobs)
    job_items = _blocking_list(calls.job_items)
    cancel_job = _blocking(calls.cancel_job)
    warm = _blocking(calls.warm)
    documents = _blocking_list(calls.documents)
    document = _blocking(calls.document)
    chunks = _blocking_list(calls.chunks)
    chunk = _blocking(calls.chunk)
    change_chunk = _blocking(calls.change_chunk)
    lost_corrections = _blocking(calls.lost_corrections)
    forget_lost_corrections = _blocking(calls.forget_lost_corrections)
    remove_document = _blocking(calls.remove_document)
    label_document = _blocking(calls.label_document)
    namespaces = _blocking(calls.namespaces)
    namespace = _blocking(calls.namespace)
    drop_namespace = _blocking(calls.drop_namespace)
    namespace_settings = _blocking(calls.namespace_settings)
    set_namespace_settings = _blocking(calls.set_namespace_settings)
    rate = _blocking(calls.rate)
    ratings = _blocking(calls.ratings)
    unanswered = _blocking(calls.unanswered)
    sessions = _blocking(calls.sessions)
    end_session = _blocking(calls.end_session)

    def stream(self, question: str, **fields: Unpack[QueryArguments]) -> Generator[QueryEvent, None, None]:
        """``POST /rag/query``, event by event. Closing the generator aborts the answer.

        Raises the server's error, whenever it comes, and ``Unavailable`` if the stream is cut."""
        reader = EventReader()
        with self._answered(calls.streamed_query(question, **fields)) as response:
            for piece in response.iter_bytes():
                yield from reader.feed(piece)
        reader.end(self.url)

    def wait(
        self,
        job: str | JobView,
        *,
        timeout_s: float = 3600.0,
        on_progress: Callable[[JobDetail], object] = lambda job: None,
    ) -> JobDetail:
        """Wait for a job and return it, also while its server is restarted. Sources that failed are in its
        ``counts`` and in `job_items`.

        Raises ``Unavailable`` if the job fails, is cancelled or exceeds ``timeout_s``, or the server has not
        answered for an hour."""
        answered = time.monotonic()
        deadline = answered + timeout_s
        poll_s = _FIRST_POLL_S
        while True:
            wanted_s = 0.0
            try:
                now = self.job(_id_of(job))
            except errors.RagserveError as error:
                wanted_s = _wanted_pause(error, min(deadline, answered + _AWAY_S))
            else:
                answered = time.monotonic()
                on_progress(now)
                if _is_done(now, deadline):
                    return now
            time.sleep(max(poll_s, wanted_s))
            poll_s = min(_POLL_GROWTH * poll_s, _LONGEST_POLL_S)

    def send(self, call: Call[T]) -> T:
        """Send a call and return what it reads from the reply."""
        with self._answered(call) as response:
            response.read()
            return call.read(response)

    @contextmanager
    def _answered(self, call: Call[Any]) -> Iterator[httpx.Response]:
        """Send a request, again where that is safe, and yield the response. Raises the server's error."""
        with translated(self.url), call.sendable() as options, ExitStack() as stack:
            for attempt in itertools.count():
                outcome: Outcome
                try:
                    outcome = stack.enter_context(self._http.stream(call.method, call.path, **options))
                    if outcome.is_error:
                        outcome.read()
                except httpx.TransportError as error:
                    outcome = error
                pause_s = pause_before_retry(call, outcome, attempt, self._retries)
                if pause_s is None:
                    break
                time.sleep(pause_s)
            yield successful(outcome)


class AsyncClient:
    """The same as `Client`, for asyncio: ``async with AsyncClient(url) as client``."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 2,
        no_store: bool = False,
    ) -> None:
        self.url, self._retries = url.rstrip("/"), retries
        with translated(self.url):
            self._http = httpx.AsyncClient(**_options(self.url, api_key, timeout_s, no_store))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    call = _awaitable(calls.call)
    info = _awaitable(calls.info)
    query = _awaitable(calls.query)
    retrieve = _awaitable(calls.retrieve)
    ingest_texts = _awaitable(calls.ingest_texts)
    ingest_files = _awaitable(calls.ingest_files)
    preview = _awaitable(calls.preview)
    ingest_urls = _awaitable(calls.ingest_urls)
    job = _awaitable(calls.job)
    jobs = _awaitable(calls.jobs)
    job_items = _async_list(calls.job_items)
    cancel_job = _awaitable(calls.cancel_job)
    warm = _awaitable(calls.warm)
    documents = _async_list(calls.documents)
    document = _awaitable(calls.document)
    chunks = _async_list(calls.chunks)
    chunk = _awaitable(calls.chunk)
    change_chunk = _awaitable(calls.change_chunk)
    lost_corrections = _awaitable(calls.lost_corrections)
    forget_lost_corrections = _awaitable(calls.forget_lost_corrections)
    remove_document = _awaitable(calls.remove_document)
    label_document = _awaitable(calls.label_document)
    namespaces = _awaitable(calls.namespaces)
    namespace = _awaitable(calls.namespace)
    drop_namespace = _awaitable(calls.drop_namespace)
    namespace_settings = _awaitable(calls.namespace_settings)
    set_namespace_settings = _awaitable(calls.set_namespace_settings)
    rate = _awaitable(calls.rate)
    ratings = _awaitable(calls.ratings)
    unanswered = _awaitable(calls.unanswered)
    sessions = _awaitable(calls.sessions)
    end_session = _awaitable(calls.end_session)

    async def stream(
        self, question: str, **fields: Unpack[QueryArguments]
    ) -> AsyncGenerator[QueryEvent, None]:
        """As `Client.stream`. Read it to its end, or in a block of `contextlib.aclosing`."""
        reader = EventReader()
        async with self._answered(calls.streamed_query(question, **fields)) as response:
            async for piece in response.aiter_bytes():
                for event in reader.feed(piece):
                    yield event
        reader.end(self.url)

    async def wait(
        self,
        job: str | JobView,
        *,
        timeout_s: float = 3600.0,
        on_progress: Callable[[JobDetail], object] = lambda job: None,
    ) -> JobDetail:
        """As `Client.wait`."""
        answered = time.monotonic()
        deadline = answered + timeout_s
        poll_s = _FIRST_POLL_S
        while True:
            wanted_s = 0.0
            try:
                now = await self.job(_id_of(job))
            except errors.RagserveError as error:
                wanted_s = _wanted_pause(error, min(deadline, answered + _AWAY_S))
            else:
                answered = time.monotonic()
                on_progress(now)
                if _is_done(now, deadline):
                    return now
            await asyncio.sleep(max(poll_s, wanted_s))
            poll_s = min(_POLL_GROWTH * poll_s, _LONGEST_POLL_S)

    async def send(self, call: Call[T]) -> T:
        """Send a call and return what it reads from the reply."""
        async with self._answered(call) as response:
            await response.aread()
            return call.read(response)

    @asynccontextmanager
    async def _answered(self, call: Call[Any]) -> AsyncIterator[httpx.Response]:
        with translated(self.url), ExitStack() as files:
            # Opening files would hold up the event loop.
            options = await asyncio.to_thread(files.enter_context, call.sendable())
            async with AsyncExitStack() as stack:
                for attempt in itertools.count():
                    outcome: Outcome
                    try:
                        sent = self._http.stream(call.method, call.path, **options)
                        outcome = await stack.enter_async_context(sent)
                        if outcome.is_error:
                            await outcome.aread()
                    except httpx.TransportError as error:
                        outcome = error
                    pause_s = pause_before_retry(call, outcome, attempt, self._retries)
                    if pause_s is None:
                        break
                    await asyncio.sleep(pause_s)
                yield successful(outcome)


def _options(url: str, api_key: str | None, timeout_s: float, no_store: bool) -> dict[str, Any]:
    """httpx's arguments for a client."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    if no_store:
        headers["Cache-Control"] = "no-store"
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))
    return {"base_url": url, "headers": headers, "timeout": timeout}


def _id_of(job: str | JobView) -> str:
    return job if isinstance(job, str) else job.job_id


def _wanted_pause(error: errors.RagserveError, deadline: float) -> float:
    """Seconds for which a server that failed so is to be left alone at least. Raises the error where it will
    not pass, or not in time."""
    wanted_s = error.retry_after_s if isinstance(error, errors.TooManyRequests) else 0.0
    if time.monotonic() + wanted_s > deadline or not may_pass(error):
        raise error
    return wanted_s


def _is_done(job: JobDetail, deadline: float) -> bool:
    """Whether a job has ended well. Raises Unavailable if it cannot, or not before the deadline."""
    if job.state in {"failed", "cancelled"}:
        raise errors.Unavailable(f"Job {job.job_id} {job.state}: {job.error or 'no reason given'}")
    if job.state != "done" and time.monotonic() > deadline:
        raise errors.Unavailable(
            f"Job {job.job_id} is still {job.state} after the time to wait for it.",
            hint="It goes on: wait again, with a longer timeout_s.",
            code="timeout",
        )
    return job.state == "done"
