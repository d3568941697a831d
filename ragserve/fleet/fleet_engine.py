"""Engine over several workers: each request goes to the one that holds most of its documents."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

from ragserve.config import Settings
from ragserve.engine.base import EngineInfo, GenerateChunk, GenerateRequest
from ragserve.engine.document_cache import CachingEngine, Whereabouts
from ragserve.errors import Conflict, RagserveError, Unavailable
from ragserve.fleet.affinity import Holders, document_hash, owners, ranked, tokens_held
from ragserve.fleet.merged_answers import in_order, merged, whereabouts
from ragserve.fleet.request_parts import PREFIX_TOKENS, documents_of, part
from ragserve.fleet.router import Router
from ragserve.fleet.unconfirmed import Unconfirmed
from ragserve.fleet.worker_about import WorkerAbout, differences
from ragserve.fleet.worker_link import PROBE_S, WorkerLink, checked, is_loss
from ragserve.metrics import metrics
from sglang_ext.wire.protocol import document_key

T = TypeVar("T")
Hashed = Sequence[tuple[int, int]]
"""64-bit hash and number of tokens of each document."""

log = logging.getLogger(__name__)
DELETIONS = frozenset({"clear", "remove", "remove_namespace", "remove_session"})
_EVERYWHERE = frozenset({"check", "evict", "flush", "stat", "verify"})
_RETRY_S = 0.25
_SAID_S = 10.0
_SESSIONS = 100_000  # whose worker is remembered
_LEAST_TOKENS = 512  # that take as long as a request without any to compute


class FleetEngine:
    """A `CachingEngine` and one of `ManyEngines`.

    Belongs to one event loop. ``start_s``: how long to wait for the first worker; ``others_s``: for the
    others after it."""

    def __init__(
        self,
        settings: Settings,
        urls: Sequence[str],
        *,
        start_s: float = 60.0,
        others_s: float = 10.0,
        failed: Callable[[], str] = lambda: "",
        look: Callable[[float], None] = lambda now: None,
    ) -> None:
        """``failed`` says why a worker will never start. ``look`` is called every second after the start,
        with the time, to look after the workers' processes.

        Raises InvalidRequest for addresses that are none, or twice there."""
        self._settings = settings
        self._start_s, self._others_s, self._failed, self._look = start_s, others_s, failed, look
        self._unconfirmed = Unconfirmed(settings.data_dir)
        addresses = checked(urls)
        router = settings.router_url
        self._router = None if router is None else Router(settings, router, len(addresses))
        self._holders = Holders()
        self._links = [
            WorkerLink(settings, url, self._unconfirmed, self._holders, self._router) for url in addresses
        ]
        self._info: EngineInfo | None = None
        self._reference: WorkerAbout | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._sessions: OrderedDict[str, str] = OrderedDict()  # worker of each session's last turn

    # --- start and state

    async def start(self) -> EngineInfo:
        """Wait for the workers, and check that they fit together. Raises Unavailable if none answers,
        Conflict if they serve different things, and what keeps one from being used."""
        await self._reached()
        about = [link.about for link in self._links if link.about is not None and not link.refusal]
        reference = self._known()
        self._info = replace(
            reference.engine,
            kind="fleet",
            tokenizer=self._settings.tokenizer or reference.engine.tokenizer,
            context_length=min(one.engine.context_length for one in about),
            max_total_tokens=min(one.engine.max_total_tokens for one in about),
            offloaded_tokens=min(one.engine.offloaded_tokens for one in about),
            by_layers=all(one.engine.by_layers for one in about),
            context_tokens=min(one.engine.context_tokens for one in about),
            context_pages=min(one.engine.context_pages for one in about),
        )
        if self._router is not None:
            reached = [link.engine for link in self._links if link.about is not None]
            await self._router.start(reached, self._start_s)
        self._watchers = [asyncio.create_task(link.watch(self._refusal_of)) for link in self._links]
        self._watchers.append(asyncio.create_task(self._look_after()))
        return self._info

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                self._look(time.monotonic())
                if self._router is not None:
                    await self._router.look([link.engine for link in self._serving()])
            except Exception:  # whatever it is, later ends must be seen
                log.warning("Workers and router could not be looked after, will retry", exc_info=True)

    async def _reached(self) -> None:
        loop = asyncio.get_running_loop()
        said = loop.time()
        until = said + self._start_s
        while True:
            await asyncio.gather(*(link.probe(self._refusal_of) for link in self._links))
            for link in self._links:
                if link.error is not None and link.refusal:
                    raise link.error
                if link.refusal:
                    raise Conflict(
                        f"The workers do not fit together: {link.refusal}.",
                        hint="Start all of them with one version, model and settings.",
                        code="workers_differ",
                    )
            away = [link for link in self._links if link.error is not None]
            if not away:
                return
            if len(away) < len(self._links):
                until = min(until, loop.time() + self._others_s)
            if reason := self._failed():
                raise Unavailable(reason, hint="See its log above.")
            if loop.time() >= until:
                break
            if loop.time() >= said + _SAID_S:
                said = loop.time()
                log.info("Waiting for workers: %s", ", ".join(link.url for link in away))
            await asyncio.sleep(_RETRY_S)
        if len(away) == len(self._links):
            raise Unavailable(
                "No worker answers: " + "; ".join(str(link.error) for link in away),
                hint="Start them with `ragserve serve --worker`, and check --workers.",
                code="engine_unreachable",
            )
        log.warning("Starting without workers %s", ", ".join(link.url for link in away))

    def _refusal_of(self, about: WorkerAbout) -> str:
        """Say why a worker may not serve beside the others; the first that answers sets what they serve."""
        if self._reference is None:
            self._reference = about
        urls = [link.url for link in self._links if link.answers_as(about.id)]
        if len(urls) > 1:
            return f"{' and '.join(urls)} are one worker, or use one data folder"
        if different := differences(self._reference, about):
            mine = next((link.url for link in self._links if link.id == self._reference.id), "the first")
            theirs = urls[0] if urls else "another"
            return f"{mine} and {theirs} have {different}"
        return ""

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise Unavailable("The workers have not been reached yet.", hint="Wait until /ready answers 200.")
        return self._info

    async def check_tokenizer(self, encode: Callable[[str], Sequence[int]]) -> None:
        """See `TokenizingEngine`."""
        await self.least_loaded().engine.check_tokenizer(encode)

    async def ready(self) -> bool:
        """See `Engine`: one worker that takes requests is enough."""
        return self._info is not None and any(link.serving for link in self._links)

    def workers(self) -> list[dict[str, Any]]:
        """Address, state and load of each worker."""
        return [link.describe() for link in self._links]

    # --- requests

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """See `Engine`. A request whose worker is lost before a token came is sent to the next one."""
        documents = self._hashed(request.namespace, documents_of(request), request.owners)
        tried: list[WorkerLink] = []
        while True:
            link, tokens = self._next_for(request, documents, tried)
            began = False
            # before it is computed: requests that come meanwhile and share documents go there, too
            self._holders.note(link.id, documents)
            try:
                with link.busy(tokens) as computed:
                    async with aclosing(link.engine.generate(request)) as chunks:  # type: ignore[type-var]
                        async for chunk in chunks:
                            if not began:
                                computed()
                                self._note(request, link.id)
                            began = True
                            yield chunk
                return
            except RagserveError as error:
                if not is_loss(error):
                    raise
                if error.status != 429:
                    link.suspect()
                if began:
                    raise Unavailable(
                        "The worker that was answering is gone, in the middle of the answer.",
                        hint="Send the request again: another worker answers it.",
                        code="worker_lost",
                    ) from error
                tried.append(link)
                log.info("request %s was not answered by worker %s: %s", request.rid, link.url, error)
                if all(each in tried for each in self._serving()):
                    raise (error if error.status == 429 else self._nobody()) from None
                metrics().worker_resent.labels(link.url).inc()

    def _next_for(
        self, request: GenerateRequest, documents: Hashed, tried: Collection[WorkerLink]
    ) -> tuple[WorkerLink, int]:
        """The worker for a request of these documents, and how many tokens it has to compute."""
        held = {}
        if request.session is not None and (last := self._sessions.get(request.session.key)):
            held[last] = max(1, request.session.held)
        link, found = self._choose(documents, len(request.input_ids), held, tried)
        return link, max(_LEAST_TOKENS, len(request.input_ids) - int(found))

    def _choose(
        self,
        documents: Hashed,
        size: int,
        held: dict[str, int] | None = None,
        tried: Collection[WorkerLink] = (),
    ) -> tuple[WorkerLink, float]:
        """The worker for a request of these documents and ``size`` tokens, and how many of them it holds.
        Raises Unavailable without one."""
        links = [link for link in self._serving() if link not in tried]
        if not links:
            raise self._nobody()
        tokens = tokens_held(documents, [link.id for link in links], holders=self._holders, held=held)
        loads, waiting = [link.in_flight for link in links], [link.waiting for link in links]
        order = ranked(tokens, loads, waiting, max(_LEAST_TOKENS, size))
        return links[order[0]], tokens[order[0]]

    def _hashed(
        self, namespace: str, documents: Sequence[Sequence[int]], owners: Sequence[str] = ()
    ) -> Hashed:
        """Hash and tokens of each document. The first one is the system text if there are more, and does not
        count, because every worker has it. ``owners``: as in `GenerateRequest`."""
        own = list(zip(owners or [namespace] * len(documents), documents, strict=True))
        return [(document_hash(self._key(name, ids)), len(ids)) for name, ids in own[1:] or own]

    def _key(self, namespace: str, ids: Sequence[int]) -> str:
        return document_key(namespace, self._known().cache_fingerprint, ids)

    def _known(self) -> WorkerAbout:
        """Return what the workers serve. Raises Unavailable before one has answered."""
        if self._reference is None:
            raise Unavailable("No worker has answered yet.")
        return self._reference

    def _serving(self) -> list[WorkerLink]:
        return [link for link in self._links if link.serving]

    def _nobody(self) -> Unavailable:
        states = ", ".join(sorted(link.state for link in self._links))
        return Unavailable(
            f"No worker takes requests now ({states}).", hint="Retry in a moment.", code="no_worker"
        )

    def _note(self, request: GenerateRequest, worker: str) -> None:
        """Remember which worker has a session now."""
        if request.session is None:
            return
        session = request.session.key
        self._sessions[session] = worker
        self._sessions.move_to_end(session)
        while len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)

    def answering(
        self, namespace: str, documents: Sequence[Sequence[int]], owners: Sequence[str] = ()
    ) -> CachingEngine:
        """See `ManyEngines`. Raises Unavailable without a worker."""
        hashed = self._hashed(namespace, documents, owners)
        return self._choose(hashed, sum(map(len, documents)))[0].engine

    def measured(self) -> CachingEngine:
        """See `ManyEngines`: one worker at a time, another one when it is gone."""
        return cast("CachingEngine", OneWorker(self))

    def least_loaded(self) -> WorkerLink:
        """The worker for a request that has no documents. Raises Unavailable without one."""
        if not (links := self._serving()):
            raise self._nobody()
        return min(links, key=lambda link: link.in_flight)

    # --- the document cache

    def _by_owner(self, namespace: str, documents: Sequence[Sequence[int]]) -> dict[WorkerLink, list[int]]:
        """The places of documents, by the worker that owns each. Raises Unavailable without a worker."""
        if not (links := self._serving()):
            raise self._nobody()
        if not documents:
            return {link: [] for link in links}
        hashed = [document_hash(self._key(namespace, ids)) for ids in documents]
        found: dict[WorkerLink, list[int]] = {}
        for place, owner in enumerate(owners(hashed, [link.id for link in links]).tolist()):
            found.setdefault(links[owner], []).append(place)
        return found

    async def _at_owners(
        self,
        namespace: str,
        documents: Sequence[Sequence[int]],
        ask: Callable[[WorkerLink, list[int]], Awaitable[T]],
    ) -> list[tuple[list[int], T]]:
        """Call ``ask(worker, places)`` for the documents of each owner. When one is lost, its documents have
        other owners, which are asked. Raises Unavailable without a worker, and what ``ask`` raises."""
        found: list[tuple[list[int], T]] = []
        left = list(range(len(documents)))
        while True:
            parts = [
                (link, [left[i] for i in places])
                for link, places in self._by_owner(namespace, [documents[i] for i in left]).items()
            ]
            got = await self._each([link for link, _ in parts], [ask(link, at) for link, at in parts])
            found += [(at, got[link]) for link, at in parts if link in got]
            left = [place for link, at in parts if link not in got for place in at]
            if not left and found:
                return found

    async def _each(self, links: Sequence[WorkerLink], calls: Sequence[Awaitable[T]]) -> dict[WorkerLink, T]:
        """Await a call to each worker, and leave out the workers that are lost. Raises what others raise,
        TooManyRequests of one whose queue is full among them: it is not lost."""
        found: dict[WorkerLink, T] = {}
        for link, one in zip(links, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if not isinstance(one, BaseException):
                found[link] = one
            elif isinstance(one, RagserveError) and is_loss(one) and one.status != 429:
                link.suspect()
            else:
                raise one
        return found

    async def warm(self, request: GenerateRequest) -> None:
        """See `CachingEngine`: each document by its owner."""
        documents = [request.input_ids[span.start : span.end] for span in request.spans]
        if not documents:
            return
        hashed = [(document_hash(self._key(request.namespace, ids)), len(ids)) for ids in documents]

        async def warm(link: WorkerLink, places: list[int]) -> None:
            await link.engine.warm(part(request, places))
            self._holders.note(link.id, [hashed[place] for place in places])

        await self._at_owners(request.namespace, documents, warm)

    async def where(self, namespace: str, documents: Sequence[Sequence[int]]) -> Whereabouts:
        """See `CachingEngine`: each document at its owner."""
        found = await self._at_owners(
            namespace,
            documents,
            lambda link, places: link.engine.where(namespace, [documents[i] for i in places]),
        )
        return whereabouts(found, len(documents))

    async def prefix(self, namespace: str, input_ids: Sequence[int]) -> int:
        """See `CachingEngine`."""
        return await self.answering(namespace, [input_ids[:PREFIX_TOKENS]]).prefix(namespace, input_ids)

    async def forget(self, namespace: str, documents: Sequence[Sequence[int]] | None) -> None:
        """See `Engine`. Returns when every worker has confirmed it, or is fenced off until it has."""
        if documents is None:
            await self._delete({"op": "remove_namespace", "namespace": namespace})
        elif documents:
            keys = [self._key(namespace, ids) for ids in documents]
            await self._delete({"op": "remove", "keys": keys, "namespace": namespace})

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """See `CachingEngine`. Deletions as in `forget`; figures are those of all workers that serve."""
        if operation in DELETIONS:
            await self._delete({"op": operation} | arguments)
            return {}
        if operation == "score":
            return await self._score(**arguments)
        if operation == "attend" and (link := self._link_of(str(arguments["key"]))) is not None:
            return await link.engine.control(operation, **arguments)
        if operation not in _EVERYWHERE:
            return await self.least_loaded().engine.control(operation, **arguments)
        links = self._serving()
        found = await self._each(links, [link.engine.control(operation, **arguments) for link in links])
        if not found:
            raise self._nobody()
        return merged(list(found.values()), [link.url for link in found])

    def _link_of(self, session: str) -> WorkerLink | None:
        """The worker that answered the session's last turn, while it serves."""
        last = self._sessions.get(session)
        return next((link for link in self._serving() if link.id == last), None)

    async def _score(
        self, namespace: str, documents: Sequence[Sequence[int]], **question: Any
    ) -> dict[str, Any]:
        """Score documents by their owners: a score rests on the question and one document."""

        async def scores(link: WorkerLink, places: list[int]) -> list[float | None]:
            own = [documents[i] for i in places]
            answer = await link.engine.control("score", namespace=namespace, documents=own, **question)
            return list(answer["scores"])

        return {"scores": in_order(await self._at_owners(namespace, documents, scores), len(documents))}

    async def _delete(self, deletion: dict[str, Any]) -> None:
        """Have every worker that was ever seen carry out a deletion, or note that it has not."""
        asked = [link for link in self._links if link.state in ("serving", "draining")]
        reached = {link.id for link in asked}
        self._unconfirmed.add([one for one in self._unconfirmed.workers if one not in reached], deletion)
        if deletion["op"] == "remove_session":
            self._sessions.pop(str(deletion["key"]), None)
        await asyncio.gather(*(link.confirm(deletion) for link in asked))
        if deletion["op"] in ("clear", "remove_namespace"):
            for link in self._links:
                link.list_again()
        await self._unconfirmed.save()

    async def close(self) -> None:
        """Leave the workers running."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        with suppress(Unavailable):
            await self._unconfirmed.save()
        await asyncio.gather(*(link.engine.close() for link in self._links))
        if self._router is not None:
            await self._router.close()


class OneWorker:
    """A worker that stands for all, to measure on: all calls go to one, while it serves."""

    def __init__(self, fleet: FleetEngine) -> None:
        self._fleet = fleet
        self._link: WorkerLink | None = None

    def __getattr__(self, name: str) -> Any:
        if self._link is None or not self._link.serving:
            self._link = self._fleet.least_loaded()
        return getattr(self._link.engine, name)
