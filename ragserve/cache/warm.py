"""Warm-up: compute the KV of indexed documents ahead of queries, into every tier of the document cache.

A warm-up is a job like an ingestion: resumable, cancellable, one item per document. Documents that are cached
are skipped. A document counts as warmed when all of it has reached the lowest tier, which survives a restart
if that is the disk; the next group is computed meanwhile, at the pace of the disk.

A server warms what is ingested in the background: such a job waits while queries are being answered, or
costs measured, computes a quarter of a second at a time, and never makes room by evicting other documents."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.base import GenerateRequest
from ragserve.engine.document_cache import CachingEngine, Whereabouts
from ragserve.errors import InvalidRequest, NotFound, RagserveError, StorageFull, Unavailable
from ragserve.ingest.jobs.job_report import Interrupted, JobReport, OnProgress
from ragserve.ingest.jobs.lease import JobRun, run_leased
from ragserve.ingest.jobs.submitter import Submitter
from ragserve.ingest.prune import every_document
from ragserve.metrics import metrics
from ragserve_index import IndexStore, JobStore
from ragserve_index.types import Document, Job, JobItem
from sglang_ext.wire.protocol import EXACT_STRATEGIES, Span, SystemText

__all__ = ["KIND", "Warmer", "submit_warm", "warming"]

log = logging.getLogger(__name__)
KIND = "warm"
# Tokens computed at a time: enough to fill a prefill batch, few enough that queries do not wait long.
_GROUP_TOKENS = 4096
_BACKGROUND_S = 0.25  # of computing at a time in the background: how long a query may wait for it
_BACKGROUND_FIRST_TOKENS = 256  # at a time, before the pace is known
_LOG_S = 30.0
_STALLED_S = 120.0  # without a byte written
_POLL_S = 0.05
_RETRY_S = 1.0  # an engine that has died takes its server along within seconds
_COMMAND = Submitter()
T = TypeVar("T")


def submit_warm(
    store: IndexStore,
    namespace: str,
    documents: Sequence[str] | None = None,
    by: Submitter = _COMMAND,
) -> Job:
    """Queue a job for these documents (doc_id or source), or all of the namespace that the store's viewer
    sees. Raises NotFound."""
    store.namespace(namespace)
    if documents is None:
        sources = [document.source for document in every_document(store, namespace)]
    else:
        sources = [_find(store, namespace, name).source for name in documents]
    return JobStore(store).create(namespace, {"kind": KIND, **by.as_spec()}, sources)


def warming(jobs: Iterable[Job]) -> dict[str, int]:
    """Numbers of warm-ups among the jobs that are queued or running, of their documents, and of those not
    done yet."""
    own = [job for job in jobs if job.kind == KIND and not job.finished]
    left = sum(job.counts.get("pending", 0) for job in own)
    return {"jobs": len(own), "documents": sum(job.n_items for job in own), "documents_left": left}


def _find(store: IndexStore, namespace: str, name: str) -> Document:
    return store.find_source(namespace, name) or store.document(namespace, name)


@dataclass(eq=False)
class _Item:
    """A document of the job in progress; the system text is one without a source."""

    source: str
    doc_id: str | None = None
    left: int = 0  # chunks that have not reached the lowest tier yet
    computed: int = 0  # chunks
    tokens: int = 0  # of computed chunks
    size: int = 0  # bytes of KV
    reason: str | None = None


@dataclass(eq=False)
class _Group:
    """Chunks that are computed together."""

    pieces: list[tuple[_Item, list[int]]] = field(default_factory=list)  # each chunk's token ids
    new: list[bool] = field(default_factory=list)  # per piece: not cached before
    tokens: int = 0


class Warmer:
    """Runs warm-up jobs: ``run`` on the caller's thread, the engine on ``loop``."""

    def __init__(
        self,
        store: IndexStore,
        engine: CachingEngine,
        prompts: PromptBuilder,
        loop: asyncio.AbstractEventLoop,
        busy: Callable[[], bool] = lambda: False,
        timing: asyncio.Lock | None = None,
    ) -> None:
        """``busy``: queries are being answered, for which jobs in the background wait, as they do while
        another holds ``timing``. Nothing is computed then."""
        self._timing = timing or asyncio.Lock()
        self._answering = busy
        self.store = store
        self.prompts = prompts
        self.engine = engine
        self._loop = loop
        self.jobs = JobStore(store)

    def run(
        self,
        job_id: str,
        *,
        on_progress: OnProgress | None = None,
        stop: threading.Event | None = None,
        wait: bool = False,
    ) -> JobReport:
        """Run a job to its end, as `Ingestor.run` does. Raises ``StorageFull`` when the disk is full, and
        what keeps the engine from it.
        """
        return run_leased(
            self.jobs,
            job_id,
            lambda run: _WarmRun(self, run).run(),
            failures=("failed", "skipped"),
            on_progress=on_progress,
            stop=stop,
            wait=wait,
        )

    def tidy(self) -> int:
        """Warm-ups leave nothing behind; returns 0."""
        return 0

    def check(self) -> None:
        """Raise InvalidRequest if the engine never reads the document cache."""
        info = self.engine.info
        if set(info.strategies) <= set(EXACT_STRATEGIES):
            raise InvalidRequest(
                "This engine cannot compose contexts from cached documents, so warming them has no effect.",
                hint=f"Reason: {info.only_exact}." if info.only_exact else "",
                code="no_document_cache",
            )

    def busy(self) -> bool:
        """Whether jobs in the background are to wait."""
        return self._answering() or self._timing.locked()

    async def compute(self, request: GenerateRequest) -> None:
        """Compute documents when nothing is timed."""
        async with self._timing:
            await self.engine.warm(request)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a call of the engine. Raises ``Interrupted`` if the engine has died: the next server
        resumes the job."""
        try:
            return self._wait_for(work)
        except RagserveError as error:
            if self._wait_for(self.engine.ready()):
                raise
            time.sleep(_RETRY_S)
            raise Interrupted from error

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _WarmRun:
    """A run of a job."""

    def __init__(self, warmer: Warmer, run: JobRun) -> None:
        self._warmer = warmer
        self._job = run.job
        self._progress = run.progress
        self._should_stop = run.should_stop
        self._notify = run.notify
        self._start = self._where([])
        self._size = 0  # of all documents of the job that are, or are to be, in the lasting tier
        self._background = bool(run.job.spec.get("background"))
        self._limit = _BACKGROUND_FIRST_TOKENS if self._background else _GROUP_TOKENS  # tokens of a group
        self._logged = time.monotonic()

    def run(self) -> None:
        """Run the job. Raises ``Interrupted``, ``StorageFull`` and engine errors that concern
        every document.
        """
        if self._background:
            if not self._worthwhile():
                return
            cached = self._warmer.call(self._warmer.engine.control("stat"))
            self._size = int(cached[self._start.lasting]["bytes"])
        else:
            self._warmer.check()
        log.info("Warming %d documents of namespace %s", self._progress.total, self._job.namespace)
        self._notify()
        before = _Group()
        for group in self._groups():
            if self._should_stop():
                raise Interrupted
            if self._background:
                self._pause_for_requests()
            self._compute(group)
            self._settle(before)
            before = group
        self._settle(before)

    def _worthwhile(self) -> bool:
        """Return False, with the job's items skipped, if the engine never reads the document cache."""
        try:
            self._warmer.check()
        except InvalidRequest as error:
            for item in self._warmer.jobs.items(self._job.job_id, "pending"):
                self._record(_Item(item.source), "skipped", str(error))
            return False
        return True

    def _pause_for_requests(self) -> None:
        """Wait until no query is being answered. Raises ``Interrupted``."""
        while self._warmer.busy():
            if self._should_stop():
                raise Interrupted
            time.sleep(_POLL_S)

    def _groups(self) -> Iterator[_Group]:
        group = _Group()
        for item, pieces in self._documents():
            item.left = len(pieces)
            for ids in pieces:
                if group.tokens and group.tokens + len(ids) > self._limit:
                    yield group
                    group = _Group()
                group.pieces.append((item, ids))
                group.tokens += len(ids)
        if group.pieces:
            yield group

    def _documents(self) -> Iterator[tuple[_Item, list[list[int]]]]:
        """Yield the system text, then each document, with the token ids of its chunks as queries contain
        them.
        """
        warmer, namespace = self._warmer, self._job.namespace
        yield _Item(""), [SystemText(warmer.prompts.system_ids())]
        for pending in warmer.jobs.items(self._job.job_id, "pending"):
            item = _Item(pending.source)
            try:
                document = _find(warmer.store, namespace, pending.source)
                chunks = warmer.store.document_chunks(namespace, document.doc_id)
            except NotFound:
                self._record(item, "skipped", "it is no longer indexed")
                continue
            item.doc_id = document.doc_id
            pieces = [warmer.prompts.document_ids(chunk.title, chunk.text) for chunk in chunks]
            cached = self._cached(pieces) if self._background else [False] * len(pieces)
            if pieces and all(cached):
                if self._should_stop():
                    raise Interrupted
                self._record(item, "unchanged", None)
                continue
            new = (ids for ids, has in zip(pieces, cached, strict=True) if not has)
            item.size = sum(self._start.bytes_of(len(ids)) for ids in new)
            if reason := self._unfit(pieces, item.size):
                item.size = 0
                self._record(item, *reason)
                continue
            self._size += item.size
            yield item, pieces

    def _unfit(self, pieces: Sequence[Sequence[int]], size: int) -> tuple[str, str] | None:
        """(state, reason) if a document of ``size`` bytes of KV cannot be warmed."""
        longest, limit = max(map(len, pieces), default=0), self._warmer.engine.info.max_prompt_tokens
        if not longest:
            return "skipped", "it has no text"
        if longest > limit:
            return "failed", f"a chunk has {longest} tokens, the engine takes {limit}"
        budget, tier = self._start.budget_bytes, self._start.lasting
        if budget is not None and self._size + size > budget:
            reason = f"no room: documents of this job fill the {tier} tier's {budget:,} bytes"
            return "skipped", f"{reason} (kv_{tier}_bytes)"
        return None

    def _where(self, documents: Sequence[Sequence[int]]) -> Whereabouts:
        """The tiers that have these documents (token ids)."""
        return self._warmer.call(self._warmer.engine.where(self._job.namespace, documents))

    def _cached(self, documents: Sequence[Sequence[int]]) -> list[bool]:
        """Whether each is in the lasting tier or in the shared store."""
        found = self._where(documents)
        return [below in (found.lasting, "remote") for below in found.below]

    def _compute(self, group: _Group) -> None:
        """Compute the chunks that are neither in the lowest tier nor in the shared store, at the pace of the
        disk."""
        ids = [ids for _, ids in group.pieces]
        found = self._where(ids)
        group.new = [below not in (found.lasting, "writing", "remote") for below in found.below]
        spans: dict[_Item, list[Span]] = {}
        prompt: list[int] = []
        system = False
        for (item, piece), new in zip(group.pieces, group.new, strict=True):
            if new:
                system |= isinstance(piece, SystemText)  # it is the first piece of the job
                spans.setdefault(item, []).append(Span(len(prompt), len(prompt) + len(piece)))
                prompt += piece
        if not prompt:
            return
        wanted = sum(found.bytes_of(len(piece)) for piece, new in zip(ids, group.new, strict=True) if new)
        self._wait(found, lambda now: now.write_room_bytes >= wanted or not now.queued_bytes, [])
        started = time.perf_counter()
        if self._failure(prompt, [span for own in spans.values() for span in own], system) is None:
            if self._background:
                seconds = max(time.perf_counter() - started, 1e-3)
                self._limit = min(_GROUP_TOKENS, round(len(prompt) / seconds * _BACKGROUND_S))
            return
        for item, own in spans.items():  # each document by itself, to find the one that fails
            item.reason = self._failure(prompt, own, system) or item.reason

    def _failure(self, prompt: list[int], spans: Sequence[Span], system: bool) -> str | None:
        """Compute documents of ``prompt``; why that failed, if it did. Raises ``Unavailable``."""
        request = GenerateRequest(
            self._job.job_id, prompt, self._job.namespace, spans=tuple(spans), system=system
        )
        try:
            self._warmer.call(self._warmer.compute(request))
        except Unavailable:
            raise
        except RagserveError as error:
            return str(error)
        return None

    def _settle(self, group: _Group) -> None:
        """Wait until the group has reached the lowest tier, and record the documents that end with it."""
        ids = [ids for _, ids in group.pieces]
        found = self._wait(self._where(ids), lambda now: "writing" not in now.below, ids)
        for (item, piece), new, below in zip(group.pieces, group.new, found.below, strict=True):
            item.left -= 1
            item.computed += new
            item.tokens += len(piece) if new else 0
            if below not in (found.lasting, "remote") and item.reason is None:
                item.reason = self._why(found)
            if not item.left and item.source:
                done = "warmed" if item.computed else "unchanged"
                self._record(item, done if item.reason is None else "failed", item.reason)

    def _wait(
        self, found: Whereabouts, done: Callable[[Whereabouts], bool], ids: Sequence[Sequence[int]]
    ) -> Whereabouts:
        """Poll until ``done``. Raises ``Interrupted``, and ``Unavailable`` if nothing is written
        for 120 s.
        """
        queued, since = found.queued_bytes, time.monotonic()
        while not done(found):
            if self._should_stop():
                raise Interrupted
            if found.queued_bytes != queued:
                queued, since = found.queued_bytes, time.monotonic()
            if time.monotonic() - since > _STALLED_S:
                message = f"Nothing was written to disk for {_STALLED_S:g} s."
                raise Unavailable(message, hint="See the server's log.", code="disk_stalled")
            time.sleep(_POLL_S)
            found = self._where(ids)
        return found

    def _why(self, found: Whereabouts) -> str:
        """Give the reason why a computed document did not reach its tier. Raises ``StorageFull`` if no
        document can."""
        new = {name: n - self._start.faults.get(name, 0) for name, n in found.faults.items()}
        if new.get("disk_full"):
            hint = "Free some space, or give the cache less: kv_disk_bytes."
            raise StorageFull("The disk of the document cache is full.", hint=hint)
        faults = ", ".join(name for name, n in new.items() if n > 0)
        return f"not kept on {found.lasting}" + (f" ({faults})" if faults else ": evicted, or no room")

    def _record(self, item: _Item, state: str, reason: str | None) -> None:
        progress = self._progress
        setattr(progress, state, getattr(progress, state) + 1)
        if state == "warmed":
            progress.chunks += item.computed
            progress.tokens += item.tokens
            progress.size_bytes += item.size
        progress.current = item.source
        left = progress.total - progress.done
        metrics().warm_left.set(left)
        if time.monotonic() - self._logged > _LOG_S:
            self._logged = time.monotonic()
            log.info(
                "Warming namespace %s: %d of %d documents left", self._job.namespace, left, progress.total
            )
        outcome = JobItem(item.source, state, reason, item.computed, item.tokens, item.size, item.doc_id)
        self._warmer.jobs.update_items(self._job.job_id, [outcome])
        self._notify()
