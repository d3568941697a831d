"""Embed the documents of a namespace again, from their stored chunks: passages, and the sentences in them.

For documents that were ingested by a version which embedded less: no sentences, or only the beginning of long
chunks. A document is written with all its vectors in one transaction, unless it has been replaced or removed
since it was read. Its item of the job is recorded after that, so a killed run repeats one batch at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from ragserve.errors import Conflict, NotFound
from ragserve.ingest.chunk_editor import embed_corrections
from ragserve.ingest.chunk_embedding import DocumentEmbedder, embed_chunks
from ragserve.ingest.jobs.job_report import Interrupted, JobReport, OnProgress
from ragserve.ingest.jobs.lease import JobRun, run_leased
from ragserve.ingest.prune import every_document
from ragserve.retrieval.embedder import flag_of
from ragserve.retrieval.remote_embedder import RefusedText
from ragserve_index import IndexStore, JobStore
from ragserve_index.types import Document, Job, JobItem, NewChunk

KIND = "reembed"
_BATCH_CHUNKS = 64  # in one transaction, or a single document
_REPLACED = "replaced or removed meanwhile: it has the vectors of its new version"


def submit_reembed(
    store: IndexStore, namespace: str, sentence_bytes: int, sources: Sequence[str] | None = None
) -> Job:
    """Return the unfinished job of the same documents and budget, or a new one. Raises NotFound.

    ``sources``: the documents; None for all of the namespace.
    """
    store.namespace(namespace)
    jobs = JobStore(store)
    chosen = None if sources is None else sorted(sources)
    spec = {"kind": KIND, "sentence_bytes": sentence_bytes, "sources": chosen}
    for state in ("running", "queued"):
        for job in jobs.list(namespace, state, limit=1_000_000):
            if dict(job.spec) == spec:
                return job
    wanted = [document.source for document in every_document(store, namespace)] if chosen is None else chosen
    return jobs.create(namespace, spec, wanted)


def reembed(
    store: IndexStore,
    embedder: DocumentEmbedder,
    job_id: str,
    *,
    on_progress: OnProgress | None = None,
    stop: threading.Event | None = None,
) -> JobReport:
    """Run a job to its end. Raises ``Conflict`` for another embedder than the namespace's, and what
    `run_leased` raises.
    """
    jobs = JobStore(store)
    info = store.namespace(jobs.get(job_id).namespace)
    if (info.embedder, info.dim) != (embedder.name, embedder.dim):
        raise Conflict(
            f"Namespace {info.name!r} holds vectors of {info.embedder}, not of {embedder.name}.",
            hint=f"Use {flag_of(info.embedder)}. For another one, ingest into a new namespace.",
            code="embedder_mismatch",
        )
    return run_leased(
        jobs,
        job_id,
        lambda run: _Reembedding(store, embedder, run).run(),
        failures=("failed", "skipped"),
        on_progress=on_progress,
        stop=stop,
        wait=True,
    )


class _Reembedding:
    """A run of a job."""

    def __init__(self, store: IndexStore, embedder: DocumentEmbedder, run: JobRun) -> None:
        self._store = store
        self._jobs = JobStore(store)
        self._embedder = embedder
        self._run = run

    def run(self) -> None:
        """Embed what is pending. Raises ``Interrupted`` between batches."""
        self._run.notify()
        for batch in self._batches():
            if self._run.should_stop():
                raise Interrupted
            self._write(batch)

    def _batches(self) -> Iterator[list[tuple[Document, list[NewChunk]]]]:
        batch: list[tuple[Document, list[NewChunk]]] = []
        for item in self._jobs.items(self._run.job.job_id, "pending"):
            read = self._read(item.source)
            if read is None:
                continue
            if batch and sum(len(chunks) for _, chunks in [*batch, read]) > _BATCH_CHUNKS:
                yield batch
                batch = []
            batch.append(read)
        if batch:
            yield batch

    def _read(self, source: str) -> tuple[Document, list[NewChunk]] | None:
        """A document and, read after it, its chunks as its file gave them; None, with the item settled, if
        there is nothing to embed."""
        namespace = self._run.job.namespace
        document = self._store.find_source(namespace, source)
        try:
            chunks = [] if document is None else self._store.chunk_changes.as_cut(namespace, document.doc_id)
        except NotFound:
            document = None
        if document is None:
            self._settle([JobItem(source, "skipped", _REPLACED, 0, 0, 0, None)])
            return None
        if not chunks:
            self._settle([JobItem(source, "unchanged", None, 0, 0, 0, document.doc_id)])
            return None
        return document, chunks

    def _write(self, batch: list[tuple[Document, list[NewChunk]]]) -> None:
        run, progress = self._run, self._run.progress
        titled = [(document.title, chunks) for document, chunks in batch]
        sentence_bytes = int(run.job.spec["sentence_bytes"])
        started = time.perf_counter()
        titles = {document.source: document.title for document, _ in batch}
        try:
            embedded = embed_chunks(self._embedder, titled, sentence_bytes, run.should_stop)
            embed_corrections(self._store, self._embedder, run.job.namespace, titles, sentence_bytes)
        except RefusedText as error:
            if len(batch) > 1:
                for each in batch:
                    self._write([each])
                return
            ((document, _),) = batch
            reason = f"could not be embedded: {error}"
            self._settle([JobItem(document.source, "failed", reason, 0, 0, 0, document.doc_id)])
            return
        progress.embed_s += (wrote := time.perf_counter()) - started
        written = self._store.replace_documents(
            run.job.namespace,
            [(d.unchanged, *own) for (d, _), own in zip(batch, embedded, strict=True)],
            as_read=[document for document, _ in batch],
        )
        progress.index_s += time.perf_counter() - wrote
        done = {document.source: document for document in written}
        items = []
        for document, chunks in batch:
            new = done.get(document.source)
            if new is None:
                items.append(JobItem(document.source, "skipped", _REPLACED, 0, 0, 0, document.doc_id))
                continue
            n, tokens = len(chunks), sum(chunk.n_tokens for chunk in chunks)
            items.append(JobItem(new.source, "indexed", None, n, tokens, new.size_bytes, new.doc_id))
            progress.chunks += n
            progress.tokens += tokens
            progress.current = new.source
        self._settle(items)

    def _settle(self, items: list[JobItem]) -> None:
        self._jobs.update_items(self._run.job.job_id, items)
        progress = self._run.progress
        for item in items:
            setattr(progress, item.state, getattr(progress, item.state) + 1)
        self._run.notify()
