"""Ingestion as jobs: submitted (`submit_*`), then run (`run`), here or by another process, to the end or
again after a crash.
"""

from __future__ import annotations

import io
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter, ValidationError

from ragserve.config import Namespace, Settings
from ragserve.errors import Conflict, InvalidRequest, NotFound, RagserveError, StorageFull
from ragserve.ingest.file_planner import FilePlanner
from ragserve.ingest.jobs.job_report import JobReport, Progress
from ragserve.ingest.jobs.lease import LEASE_S, run_leased, worker_name
from ragserve.ingest.parsing.parse_process import Failed, ParseProcess
from ragserve.ingest.pipeline import Embeds, Pipeline, Work
from ragserve.ingest.sources import clean_name, scan
from ragserve.ingest.spool import Spool, SpooledFile, is_disk_full, storage_full
from ragserve.ingest.tokenizer import TokenizerSource
from ragserve.metrics import metrics
from ragserve.retrieval.embedder import canonical_name
from ragserve_index import IndexStore, JobStore
from ragserve_index.types import Job, JobItem

__all__ = ["Ingestor", "PathOptions", "SubmittedText", "Upload"]

log = logging.getLogger(__name__)
_ALL = 1_000_000  # items and jobs are listed whole
_namespace = TypeAdapter(Namespace)


@dataclass(frozen=True, slots=True)
class SubmittedText:
    """A text to index under ``name``, which identifies it in its namespace."""

    name: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Upload:
    """A client's file. Its name is a label and a hint at the format, never a path. Exactly one of ``stream``
    and ``path``.
    """

    filename: str
    stream: BinaryIO | None = None
    path: Path | None = None
    title: str = ""


@dataclass(frozen=True, slots=True)
class PathOptions:
    """How paths are read: see `sources.scan`. ``prune`` removes documents whose file vanished from a
    directory given.

    ``warm`` makes a second job, when this one is done, that computes their KV into the document cache (see
    `warm.py`)."""

    recursive: bool = False
    globs: tuple[str, ...] = ()
    prune: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    warm: bool = False


class Ingestor:
    """Thread-safe; a job runs in the thread that calls ``run``. ``embedder`` may be a function, called when
    the first chunk needs it.
    """

    def __init__(
        self,
        settings: Settings,
        store: IndexStore,
        embedder: Embeds | Callable[[], Embeds],
        *,
        tokenizer: str | None = None,
        evict: Callable[[], object] | None = None,
    ) -> None:
        """``evict``, called before the end of a job is recorded, removes the KV of what it replaced or
        removed; it does not raise.
        """
        self._settings = settings
        self._store = store
        self._lock = threading.Lock()
        self._embedder: Embeds | None = None if callable(embedder) else embedder
        self._make_embedder = embedder if callable(embedder) else None
        self._tokenizer_name = tokenizer or settings.tokenizer or settings.model
        self._tokenizer: TokenizerSource | None = None
        self._evict = evict or (lambda: None)
        self.jobs = JobStore(store)
        self.spool = Spool(settings.data_dir)

    # submitting

    def submit_paths(
        self,
        namespace: str,
        inputs: Sequence[str],
        options: PathOptions | None = None,
        *,
        roots: Sequence[str] | None = None,
    ) -> Job:
        """Paths and URLs of this machine: for its own users, never for a server's clients. What cannot be
        read is a failed item.

        Documents whose file is gone are looked for in ``roots``, by default the directories among ``inputs``.
        An earlier job with the same arguments that was cut short is superseded. Raises ``InvalidRequest``,
        ``Conflict``, ``StorageFull``."""
        options = options or PathOptions()
        self._check_namespace(namespace)
        found = scan(
            inputs, recursive=options.recursive, globs=options.globs, exclude=self._settings.data_dir
        )
        spec = {
            "kind": "paths",
            "inputs": list(inputs),
            "roots": found.roots if roots is None else list(roots),
            "recursive": options.recursive,
            "globs": list(options.globs),
            "prune": options.prune,
            "metadata": dict(options.metadata),
            "warm": options.warm,
        }
        notes = [(source, "failed", reason) for source, reason in found.failed]
        notes += [(source, "skipped", reason) for source, reason in found.skipped]
        sources = list(dict.fromkeys([*found.sources, *(source for source, _, _ in notes)]))
        job = self.jobs.create(namespace, spec, sources)
        self.jobs.update_items(
            job.job_id, [JobItem(source, state, reason, 0, 0, 0, None) for source, state, reason in notes]
        )
        self._supersede(job)
        return self.jobs.get(job.job_id)

    def submit_texts(self, namespace: str, texts: Sequence[SubmittedText], *, warm: bool = False) -> Job:
        """Durable before it returns. Raises ``InvalidRequest`` (empty, duplicate or unusable names, invalid
        Unicode), ``TooLarge``.
        """
        uploads = []
        for text in texts:
            try:
                data = text.text.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequest(
                    f"The text of {text.name!r} is not valid Unicode: {error.reason}.", param="texts"
                ) from error
            uploads.append((Upload(text.name, io.BytesIO(data), title=text.title), "text", text.metadata))
        return self._submit_spooled(namespace, uploads, "upload", warm)

    def submit_files(
        self,
        namespace: str,
        files: Sequence[Upload],
        metadata: Mapping[str, Any] | None = None,
        *,
        kind: str = "upload",
        warm: bool = False,
    ) -> Job:
        """Durable before it returns. ``kind`` "stdin" keeps the job to the process that made it; a server
        runs "upload" ones.

        Raises ``InvalidRequest``, ``TooLarge``, ``Conflict``, ``StorageFull``; nothing is left behind then.
        """
        return self._submit_spooled(namespace, [(file, None, metadata or {}) for file in files], kind, warm)

    def _submit_spooled(
        self,
        namespace: str,
        uploads: Sequence[tuple[Upload, str | None, Mapping[str, Any]]],
        kind: str,
        warm: bool,
    ) -> Job:
        self._check_namespace(namespace)
        if not uploads:
            raise InvalidRequest("Nothing to ingest: no file and no text.")
        names = [clean_name(upload.filename) for upload, _, _ in uploads]
        twice = {name for name in names if names.count(name) > 1} if len(names) != len(set(names)) else set()
        if twice:
            raise InvalidRequest(
                f"The name {min(twice)!r} is given twice; names identify documents.", param="name"
            )
        with self.spool.writing() as writer:
            for name, (upload, parser, metadata) in zip(names, uploads, strict=True):
                with _opened(upload) as stream:
                    writer.add(
                        SpooledFile(name, "", name.rsplit("/", 1)[-1], upload.title, parser, dict(metadata)),
                        stream,
                        max_bytes=self._settings.max_upload_bytes,
                    )
            writer.seal()
            return self.jobs.create(namespace, {"kind": kind, "spool": writer.id, "warm": warm}, names)

    def _check_namespace(self, namespace: str) -> None:
        try:
            _namespace.validate_python(namespace)
        except ValidationError as error:
            raise InvalidRequest(
                f"The namespace {namespace!r} must be 1 to 64 letters, digits, _, . or -, starting with a letter or digit.",
                param="namespace",
            ) from error
        try:
            info = self._store.namespace(namespace)
        except NotFound:
            return
        wanted = (
            self._embedder.name if self._embedder is not None else canonical_name(self._settings.embedder)
        )
        if info.embedder != wanted:
            raise Conflict(
                f"The namespace {namespace!r} is embedded with {info.embedder!r}, not with {wanted!r}.",
                hint=f"Use --embedder {info.embedder}, or another namespace.",
                param="embedder",
            )

    def _supersede(self, job: Job) -> None:
        for state in ("queued", "running"):
            for old in self.jobs.list(job.namespace, state, limit=_ALL):
                if old.job_id == job.job_id or dict(old.spec) != dict(job.spec):
                    continue
                if (
                    self.jobs.claim(worker_name(), LEASE_S, old.job_id) is not None
                ):  # None: its process is alive
                    self.jobs.finish(old.job_id, "cancelled", f"superseded by job {job.job_id}")

    # running

    def run(
        self,
        job_id: str,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        stop: threading.Event | None = None,
        wait: bool = False,
    ) -> JobReport:
        """Run a job to its end. Failures of single files are items of the job; what stops the whole run is
        raised after it is recorded.

        ``stop`` ends it between batches with state "interrupted", to be resumed. A job of a dead process is
        taken over when its lease has expired; ``wait`` waits for that. Raises ``NotFound``, ``Conflict`` (it
        runs elsewhere or is over), ``StorageFull``."""
        started = time.monotonic()
        progress = Progress()
        vanished: tuple[str, ...] = ()
        warm_job: str | None = None

        def work(job: Job, should_stop: Callable[[], bool]) -> None:
            nonlocal vanished, warm_job
            try:
                self._process(job, progress, should_stop, on_progress or (lambda _: None))
                vanished = self._vanished(job, progress)
                warm_job = self._follow_up(job)
            except OSError as failure:
                if is_disk_full(failure):
                    raise storage_full(self._settings.data_dir) from failure
                raise
            finally:
                self._evict()

        job, state = run_leased(
            self.jobs, job_id, work, self._finish, stop=stop or threading.Event(), wait=wait
        )
        seconds = time.monotonic() - started
        metrics().job_seconds.observe(seconds)
        failures = tuple((item.source, item.reason or "") for item in self.jobs.items(job_id, "failed"))
        return JobReport(
            job_id, job.namespace, state, seconds, progress, failures, vanished, warm_job=warm_job
        )

    def _follow_up(self, job: Job) -> str | None:
        """With ``warm`` asked for: a job that computes the KV of what this one indexed or found unchanged;
        its id.
        """
        if not job.spec.get("warm"):
            return None
        there = [
            item.source for item in self.jobs.items(job.job_id) if item.state in ("indexed", "unchanged")
        ]
        return (
            self.jobs.create(job.namespace, {"kind": "warm", "after": job.job_id}, there).job_id
            if there
            else None
        )

    def tidy(self) -> int:
        """Remove uploads that no job needs; how many."""
        return self.spool.clean(self.spools_in_use)

    def _process(
        self, job: Job, progress: Progress, stop: Callable[[], bool], notify: Callable[[Progress], None]
    ) -> None:
        pending = [item.source for item in self.jobs.items(job.job_id, "pending")]
        progress.total = job.n_items
        for outcome in (
            "failed",
            "skipped",
            "indexed",
            "unchanged",
        ):  # found at the scan, or done before an interruption
            setattr(progress, outcome, job.counts.get(outcome, 0))
        notify(progress)
        if not pending:
            return
        tokenizer = self._tokenizer_source()
        settings = self._settings
        parser = ParseProcess(
            tokenizer_json=tokenizer.json,
            chunk_tokens=settings.chunk_tokens,
            max_bytes=settings.max_upload_bytes,
            timeout_s=settings.parse_timeout_s,
        )
        with parser, tempfile.TemporaryDirectory(prefix="ragserve-") as downloads:
            planner = FilePlanner(
                self._store,
                self.spool,
                job,
                tokenizer.fingerprint,
                settings.chunk_tokens,
                settings.max_upload_bytes,
                Path(downloads),
            )
            Pipeline(
                parser=parser,
                embedder=self._the_embedder,
                commit=lambda batch: self._commit(job, batch),
                record=lambda outcomes: self._record(job, outcomes),
                progress=progress,
                stop=stop,
                on_progress=notify,
            ).run(self._planned(planner, pending))

    def _planned(self, planner: FilePlanner, pending: Sequence[str]) -> Iterator[Work | tuple[str, Failed]]:
        for source in pending:
            yield planner.plan(source)

    def _commit(self, job: Job, batch: list[Any]) -> list[str]:
        embedder = self._the_embedder()
        self._store.ensure_namespace(job.namespace, embedder=embedder.name, dim=embedder.dim, index_type=None)
        return [document.doc_id for document in self._store.replace_documents(job.namespace, batch)]

    def _record(self, job: Job, outcomes: Sequence[JobItem]) -> None:
        self.jobs.update_items(job.job_id, outcomes)
        for outcome in outcomes:
            metrics().ingested.labels(outcome.state).inc()
            metrics().ingested_chunks.inc(outcome.chunks)

    def _vanished(self, job: Job, progress: Progress) -> tuple[str, ...]:
        from ragserve.ingest.prune import vanished

        if job.spec.get("kind") != "paths" or not job.spec["roots"]:
            return ()
        gone = vanished(
            self._store,
            job.namespace,
            job.spec["roots"],
            recursive=job.spec["recursive"],
            globs=job.spec["globs"],
        )
        if job.spec["prune"] and gone:
            self.jobs.add_items(job.job_id, [document.source for document in gone])
            for document in gone:
                self._store.remove_document(job.namespace, document.doc_id)
                progress.removed += 1
            self._record(job, [JobItem(d.source, "removed", None, 0, 0, 0, d.doc_id) for d in gone])
        return tuple(document.source for document in gone)

    def _finish(self, job: Job, state: str, error: str | None) -> None:
        try:
            self.jobs.finish(job.job_id, state, error)
        except (
            StorageFull
        ) as full:  # the reason is on its way to the caller already; the lease runs out by itself
            log.warning("The end of job %s could not be recorded: %s", job.job_id, full)
            return
        if "spool" in job.spec:
            self.spool.remove(job.spec["spool"])

    def spools_in_use(self) -> set[str]:
        """Spools of jobs that are not over."""
        jobs = [job for state in ("queued", "running") for job in self.jobs.list(state=state, limit=_ALL)]
        return {job.spec["spool"] for job in jobs if "spool" in job.spec}

    def _the_embedder(self) -> Embeds:
        with self._lock:
            if self._embedder is None:
                if self._make_embedder is None:
                    raise RagserveError("The ingestor has no embedder.")
                self._embedder = self._make_embedder()
            return self._embedder

    def _tokenizer_source(self) -> TokenizerSource:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = TokenizerSource.load(self._tokenizer_name)
            return self._tokenizer


@contextmanager
def _opened(upload: Upload) -> Iterator[BinaryIO]:
    if upload.stream is not None:
        yield upload.stream
    elif upload.path is not None:
        with open(upload.path, "rb") as stream:
            yield stream
    else:
        raise InvalidRequest(f"The upload {upload.filename!r} has neither a stream nor a path.")
