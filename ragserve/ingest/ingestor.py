"""Ingestion as jobs: ``submit_*`` creates one; ``run`` runs it, in any process and again after a crash."""

from __future__ import annotations

import io
import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ragserve.config import Settings
from ragserve.errors import Conflict, InvalidRequest, NotFound, StorageFull
from ragserve.ingest.chunk_editor import ChunkEditor
from ragserve.ingest.chunk_embedding import DocumentEmbedder
from ragserve.ingest.chunk_lines import MOST_AT_ONCE, PARSER, one_import, read_lines
from ragserve.ingest.connectors.folders_of_a_job import folders_of
from ragserve.ingest.file_planner import FilePlanner
from ragserve.ingest.job_writes import JobWriter
from ragserve.ingest.jobs.job_report import JobReport, OnProgress, failures_of
from ragserve.ingest.jobs.lease import LEASE_S, JobRun, run_leased, worker_name
from ragserve.ingest.jobs.submitter import Submitter
from ragserve.ingest.parsers.base import one_line
from ragserve.ingest.parsing.parse_process import ParseProcess, parsing_options
from ragserve.ingest.pipeline import Pipeline
from ragserve.ingest.preview import Previewer
from ragserve.ingest.prune import prune
from ragserve.ingest.sources import clean_name, printable, scan
from ragserve.ingest.spool import Spool, SpooledFile, unusable_disk_explained
from ragserve.ingest.submissions import PathOptions, SubmittedText, Upload, given_labels, stored
from ragserve.ingest.url_sources import KIND as URL_JOBS
from ragserve.ingest.url_sources import checked_urls, fetcher_of, follow_sitemaps
from ragserve.metrics import metrics
from ragserve.retrieval.embedder import embedder_name, embedder_options, flag_of, is_remote
from ragserve_index import IndexStore, JobStore
from ragserve_index.batch import metadata_json
from ragserve_index.types import Job, JobItem
from sglang_ext.wire.protocol import NAMESPACE

log = logging.getLogger(__name__)
_ALL = 1_000_000  # jobs are listed without paging
_COMMAND = Submitter()
_RESUMABLE_S = 86_400.0  # for which the input of a command that was killed is kept


class Ingestor:
    """Thread-safe; a job runs in the thread that calls ``run``."""

    def __init__(
        self,
        settings: Settings,
        store: IndexStore,
        embedder: DocumentEmbedder | Callable[[], DocumentEmbedder],
        *,
        tokenizer: str | None = None,
        evict: Callable[[], object] | None = None,
        warms: Callable[[], bool] = lambda: False,
        ray: str | None = None,
    ) -> None:
        """
        Args:
            settings: The settings; chunk sizes, limits and the data folder are used.
            store: Where documents go.
            embedder: The embedder, or a function that returns it, called when the first chunk needs it.
            tokenizer: Name of the tokenizer; default: the settings' tokenizer or model.
            evict: Removes the KV of replaced and removed documents. Called before the end of a job is
                recorded; it must not raise.
            warms: Returns True if a server on the data folder warms in the background what is ingested.
            ray: Address of a Ray cluster that parses and embeds files (`RayPipeline`).
        """
        if ray is not None and is_remote(settings.embedder):
            message = "A Ray cluster embeds with a local model, not with a remote one: omit --ray."
            raise InvalidRequest(message, param="embedder")
        self._settings = settings
        self._store = store
        self._lock = threading.Lock()
        self._embedder: DocumentEmbedder | None = None if callable(embedder) else embedder
        self._make_embedder = embedder if callable(embedder) else lambda: embedder
        name = tokenizer or settings.tokenizer or settings.model
        self.editor = ChunkEditor(settings, store, self._load_embedder, name)
        self.previewer = Previewer(settings, self.editor.tokenizer)
        self._imports = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._evict = evict or (lambda: None)
        self._warms = warms
        self._ray = ray
        self.jobs = JobStore(store)
        self.spool = Spool(settings.data_dir)

    # submitting

    def submit_paths(
        self,
        namespace: str,
        inputs: Sequence[str],
        options: PathOptions = PathOptions(),
        *,
        roots: Sequence[str] | None = None,
        within: Sequence[str] = (),
        sync: bool = False,
    ) -> Job:
        """Create a job over paths and URLs of this machine: for its own users, never for a server's clients.

        Unreadable paths become failed items. Vanished files are looked for in ``roots``, by default the
        directories among ``inputs``. ``within`` is that of `sources.scan`. An interrupted earlier job with
        the same arguments is cancelled; one that runs is a ``Conflict`` (``job_busy``) with ``sync``. Raises
        ``InvalidRequest``, ``Conflict``, ``StorageFull``.
        """
        self._check_namespace(namespace)
        metadata_json(options.metadata, "metadata of the job")
        found = scan(
            inputs,
            recursive=options.recursive,
            globs=options.globs,
            exclude=self._settings.data_dir,
            follow_symlinks=options.follow_symlinks,
            within=within,
        )
        spec = {
            "kind": "paths",
            "inputs": [printable(given) for given in inputs],
            "roots": stored(found.roots if roots is None else roots),
            "named": stored([] if within else found.named),
            **asdict(options),
            "globs": list(options.globs),
            "labels": given_labels(options.labels, Submitter()),
            **({"sync": True} if sync else {}),
        }
        self._supersede(namespace, spec, alone=sync)
        notes = [JobItem(source, "failed", reason, 0, 0, 0, None) for source, reason in found.failed]
        notes += [JobItem(source, "skipped", reason, 0, 0, 0, None) for source, reason in found.skipped]
        sources = list(dict.fromkeys([*found.sources, *(item.source for item in notes)]))
        job = self.jobs.create(namespace, spec, sources)
        self.jobs.update_items(job.job_id, notes)
        return self.jobs.get(job.job_id)

    def submit_urls(
        self,
        namespace: str,
        urls: Sequence[str],
        options: PathOptions,
        *,
        max_bytes: int | None = None,
        by: Submitter = _COMMAND,
    ) -> Job:
        """Create a job over URLs, for a server's clients; ``options``: about sitemaps, ``metadata``,
        ``labels``, ``prune`` and ``warm``. ``max_bytes``: of a file, if less than the settings'.

        Raises ``InvalidRequest``, ``Forbidden`` (the settings ``url_ingestion`` and ``client_sources``),
        ``Conflict``, ``StorageFull``.
        """
        self._check_namespace(namespace)
        inputs = checked_urls(self._settings, namespace, urls)
        metadata_json(options.metadata, "metadata of the job")
        limit = min(max_bytes or self._settings.max_upload_bytes, self._settings.max_upload_bytes)
        own = {"labels": given_labels(options.labels, by), **by.as_spec()}
        spec = {"kind": URL_JOBS, "inputs": inputs, "max_bytes": limit, **asdict(options), **own}
        return self.jobs.create(namespace, spec, list(dict.fromkeys(inputs)))

    def submit_texts(
        self,
        namespace: str,
        texts: Sequence[SubmittedText],
        *,
        warm: bool = False,
        by: Submitter = _COMMAND,
    ) -> Job:
        """Create a job over texts, which are durable when this returns.

        Raises ``InvalidRequest`` (empty, duplicate or unusable names, invalid Unicode) and ``TooLarge``.
        """
        uploads = []
        for text in texts:
            try:
                data = text.text.encode()
            except UnicodeEncodeError as error:
                message = f"The text of {text.name!r} is not valid Unicode: {error.reason}."
                raise InvalidRequest(message, param="texts") from error
            upload = Upload(text.name, io.BytesIO(data), text.title, text.labels)
            uploads.append((upload, "text", text.metadata))
        return self._submit_spooled(namespace, uploads, "upload", warm, by)

    def submit_files(
        self,
        namespace: str,
        files: Sequence[Upload],
        metadata: Mapping[str, Any] | None = None,
        *,
        kind: str = "upload",
        warm: bool = False,
        by: Submitter = _COMMAND,
    ) -> Job:
        """Create a job over files, which are durable when this returns.

        A server runs jobs of ``kind`` "upload"; "stdin" leaves the job to the process that created it. Raises
        ``InvalidRequest``, ``TooLarge``, ``Conflict``, ``StorageFull``, and leaves nothing behind then.
        """
        uploads = [(file, None, metadata or {}) for file in files]
        return self._submit_spooled(namespace, uploads, kind, warm, by)

    def submit_chunks(
        self,
        namespace: str,
        files: Sequence[Upload],
        metadata: Mapping[str, Any] | None = None,
        *,
        kind: str = "upload",
        warm: bool = False,
        by: Submitter = _COMMAND,
    ) -> Job:
        """As `submit_files`, of documents that came in chunks: JSON lines, see `read_lines`. A line that
        cannot be used is a failed source. Also raises ``TooManyRequests``."""
        lines = ((file.filename, file.opened()) for file in files)
        labels = files[0].labels if files else None  # of all alike
        with one_import(self._imports):
            found, bad = read_lines(lines, max_bytes=self._settings.max_upload_bytes)
            own = [
                (Upload(d.name, d.stream, d.title, labels), PARSER, d.metadata | dict(metadata or {}))
                for d in found
            ]
            return self._submit_spooled(namespace, own, kind, warm, by, bad)

    def _submit_spooled(
        self,
        namespace: str,
        uploads: Sequence[tuple[Upload, str | None, Mapping[str, Any]]],
        kind: str,
        warm: bool,
        by: Submitter,
        failed: Sequence[tuple[str, str]] = (),
    ) -> Job:
        self._check_namespace(namespace)
        if not uploads:
            raise InvalidRequest("Nothing to ingest: no file and no text.")
        names = [clean_name(upload.filename) for upload, _, _ in uploads]
        for name, (_, _, metadata) in zip(names, uploads, strict=True):
            metadata_json(metadata, f"document {name!r}")
        if len(names) != len(set(names)):
            twice = min(name for name in names if names.count(name) > 1)
            message = f"The name {twice!r} is given twice; names identify documents."
            raise InvalidRequest(message, param="name")
        labels = {
            name: given_labels(upload.labels, by) for name, (upload, _, _) in zip(names, uploads, strict=True)
        }
        spec = {
            "kind": kind,
            "warm": warm,
            "labels": sorted({one for own in labels.values() for one in own or ()}),
        }
        with self.spool.writing() as writer:
            for name, (upload, parser, metadata) in zip(names, uploads, strict=True):
                file = SpooledFile(
                    name,
                    "",
                    name.rsplit("/", 1)[-1],
                    one_line(upload.title),
                    parser,
                    dict(metadata),
                    labels[name],
                )
                writer.add(file, upload.opened(), max_bytes=self._settings.max_upload_bytes)
            for source, reason in failed:
                writer.add_failed(source, reason)
            writer.seal()
            sources = [*names, *(source for source, _ in failed)]
            return self.jobs.create(namespace, {**spec, "spool": writer.id, **by.as_spec()}, sources)

    def _check_namespace(self, namespace: str) -> None:
        if not NAMESPACE.fullmatch(namespace):
            rule = "must be 1 to 64 letters, digits, _, . or -, starting with a letter or digit"
            raise InvalidRequest(f"The namespace {namespace!r} {rule}.", param="namespace")
        try:
            info = self._store.namespace(namespace)
        except NotFound:
            return
        embedder = self._embedder
        wanted = embedder.name if embedder is not None else embedder_name(self._settings)
        if info.embedder != wanted:
            raise Conflict(
                f"The namespace {namespace!r} is embedded with {info.embedder!r}, not with {wanted!r}.",
                hint=f"Use {flag_of(info.embedder)}, or another namespace.",
                param="embedder",
            )

    def _supersede(self, namespace: str, spec: Mapping[str, Any], *, alone: bool) -> None:
        for state in ("queued", "running"):
            for old in self.jobs.list(namespace, state, limit=_ALL):
                if dict(old.spec) != json.loads(json.dumps(spec)):
                    continue
                # a job that cannot be claimed has a live process
                if self.jobs.claim(worker_name(), LEASE_S, old.job_id) is not None:
                    self.jobs.finish(old.job_id, "cancelled", "superseded by a new job")
                elif alone:
                    raise Conflict(f"Job {old.job_id} of {old.worker} does this already.", code="job_busy")

    # running

    def run(
        self,
        job_id: str,
        *,
        on_progress: OnProgress | None = None,
        stop: threading.Event | None = None,
        wait: bool = False,
    ) -> JobReport:
        """Run a job to its end, as `run_leased` does: ``stop`` interrupts it between batches.

        Failures of single files become items of the job. An error that ends the whole run is recorded, then
        raised. Raises ``NotFound``, ``Conflict`` (it runs elsewhere or is over), ``StorageFull``.
        """
        self._check_uploads_are_here(job_id)
        vanished: tuple[str, ...] = ()
        warm_job: str | None = None

        def work(run: JobRun) -> None:
            nonlocal vanished, warm_job
            try:
                with unusable_disk_explained(self._settings.data_dir):
                    vanished = self._process(run)
                    warm_job = self._create_warm_job(run.job)
            finally:
                self._evict()

        report = run_leased(
            self.jobs, job_id, work, finish=self._finish, on_progress=on_progress, stop=stop, wait=wait
        )
        metrics().job_seconds.observe(report.seconds)
        skipped = failures_of(self.jobs, job_id, "skipped")
        notes = tuple(item for item in failures_of(self.jobs, job_id, "indexed") if item[1])
        return replace(report, skipped=skipped, notes=notes, vanished=vanished, warm_job=warm_job)

    def _check_uploads_are_here(self, job_id: str) -> None:
        """Raise Conflict for a job of another server on the registry, whose folder has the uploads."""
        if not self._store.database.shared:
            return
        spool = self.jobs.get(job_id).spec.get("spool")
        if spool is not None and not self.spool.folder(spool).is_dir():
            raise Conflict(f"The uploads of job {job_id} are on another server.", code="job_elsewhere")

    def _create_warm_job(self, job: Job) -> str | None:
        """Create a job that computes KV, and return the id of one that the caller asked for: with ``warm`` of
        all documents found, else of new ones, in the background, where a server does that."""
        asked = bool(job.spec.get("warm"))
        if not asked and not (self._settings.warm_ingested and self._warms()):
            return None
        states = ("indexed", "unchanged") if asked else ("indexed",)
        sources = [item.source for item in self.jobs.items(job.job_id) if item.state in states]
        if not sources:
            return None
        spec = {"kind": "warm", "after": job.job_id, **Submitter.of(job).as_spec()}
        spec |= {} if asked else {"background": True}
        warm_job = self.jobs.create(job.namespace, spec, sources).job_id
        return warm_job if asked else None

    def tidy(self) -> int:
        """Remove uploads that no job needs and return their number. Those of commands that were killed, which
        no server runs, are kept for a day."""
        for job in self._open_jobs():
            if job.kind == "stdin" and job.updated_at < time.time() - _RESUMABLE_S:
                self.jobs.request_cancel(job.job_id)
        return self.spool.clean(self.spools_in_use)

    def _process(self, run: JobRun) -> tuple[str, ...]:
        """Take the job's files to their outcomes; returns the sources whose file vanished."""
        record, settings = partial(self._record, run.job), self._settings
        with (
            fetcher_of(settings, run) as fetcher,
            tempfile.TemporaryDirectory(prefix="ragserve-") as downloads,
            folders_of(settings, self._store, run, Path(downloads)) as folders,
        ):
            follow_sitemaps(self.jobs, run, fetcher, settings.sitemap_urls, record)
            tokenizer = self.editor.tokenizer()
            places = self.spool, run.job, tokenizer.fingerprint, Path(downloads)
            planner = FilePlanner(settings, self._store, *places, fetcher, folders)
            folders.read_listings(self.jobs, planner.is_current, record)
            pending = [item.source for item in self.jobs.items(run.job.job_id, "pending")]
            run.notify()
            folders.expect(pending)
            if pending:
                self._take(run, planner, pending, parsing_options(settings, tokenizer))
            return prune(self._store, self.jobs, run, folders.vanished(), record)

    def _take(
        self, run: JobRun, planner: FilePlanner, pending: Sequence[str], parsing: Mapping[str, Any]
    ) -> None:
        """Take files to their outcomes, here or on the Ray cluster."""
        record, files = partial(self._record, run.job), map(planner.plan, pending)
        writer = JobWriter(self._store, self.jobs, self.editor, run.job)
        if self._ray is None:
            with ParseProcess(**parsing) as parser:
                Pipeline(
                    run,
                    parser=parser,
                    embedder=self._load_embedder,
                    commit=lambda batch: writer.write(batch, self._load_embedder().name),
                    record=record,
                    relabel=planner.relabel,
                    sentence_bytes=self._settings.sentence_bytes,
                ).run(files)
            return
        from ragserve.ingest.ray_pipeline import RayPipeline

        RayPipeline(
            run,
            address=self._ray,
            parser=parsing,
            embedder=embedder_options(self._settings),
            commit=lambda batch: writer.write(batch, embedder_name(self._settings)),
            record=record,
            relabel=planner.relabel,
            sentence_bytes=self._settings.sentence_bytes,
        ).run(files)

    def _record(self, job: Job, outcomes: Sequence[JobItem]) -> None:
        self.jobs.update_items(job.job_id, outcomes, add=True)  # attachments are found meanwhile
        for outcome in outcomes:
            metrics().ingested.labels(outcome.state).inc()
            metrics().ingested_chunks.inc(outcome.chunks)

    def _finish(self, job: Job, state: str, error: str | None) -> None:
        """Record the end, and remove the uploads. Raises ``Conflict`` for a job that another worker has,
        which needs them."""
        try:
            self.jobs.finish(job.job_id, state, error, worker=job.worker)
        except StorageFull as full:  # the caller gets the reason anyway; the lease expires by itself
            log.warning("The end of job %s could not be recorded: %s", job.job_id, full)
            return
        if "spool" in job.spec:
            self.spool.remove(job.spec["spool"])

    def spools_in_use(self) -> set[str]:
        """Ids of the spools of jobs that are not over."""
        return {job.spec["spool"] for job in self._open_jobs() if "spool" in job.spec}

    def _open_jobs(self) -> list[Job]:
        return [job for state in ("queued", "running") for job in self.jobs.list(state=state, limit=_ALL)]

    def _load_embedder(self) -> DocumentEmbedder:
        with self._lock:
            if self._embedder is None:
                self._embedder = self._make_embedder()
            return self._embedder
