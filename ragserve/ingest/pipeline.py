"""Files to indexed chunks: one thread drives the parsing process while the calling thread embeds and writes.

    planning thread                     calling thread
    fetch / stat -> parsing process     gather ~512 chunks -> embed -> one transaction -> record the items
                └── bounded queue ──────┘

A document is written with all of its chunks in one transaction or not at all. Its item is recorded after
that, so a process that dies in between leaves an item to repeat, whose file is then found unchanged. Nothing
is lost and nothing is duplicated.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import Empty, Queue
from typing import Any, NamedTuple

from ragserve.config import Settings
from ragserve.errors import Conflict, Forbidden, InvalidRequest, NotFound
from ragserve.ingest.attachments import Result, results_of
from ragserve.ingest.chunk_embedding import DocumentEmbedder, Vectors, embed_chunks
from ragserve.ingest.chunking import CHUNKING_VERSION
from ragserve.ingest.jobs.job_report import Interrupted
from ragserve.ingest.jobs.lease import JobRun
from ragserve.ingest.parsers import PARSER_VERSION
from ragserve.ingest.parsers.base import NOT_TEXT, joined_notes, one_line
from ragserve.ingest.parsing.parse_process import (
    INTERRUPTED,
    Failed,
    ParsedFile,
    ParseProcess,
    Unchanged,
)
from ragserve.ingest.planned import PlannedFile
from ragserve_index.attached_documents import ATTACHMENTS
from ragserve_index.errors import InvalidDocument
from ragserve_index.types import JobItem, NewChunk, NewDocument

log = logging.getLogger(__name__)

# chunks per transaction: enough that an fsync and sorting by length cost little beside embedding, and so few
# that documents appear, and progress shows, about every two seconds
_BATCH_CHUNKS, _BATCH_S, _MIN_BATCH_CHUNKS = 512, 2.0, 16
_START_CHUNKS = 64  # enough to start embedding while the parser has nothing more ready
_QUEUE_CHUNKS = 4096  # parsed ahead; bounds memory
# outcomes without a document are recorded this many, or this many seconds, at a time
_RECORD_ITEMS, _RECORD_S = 500, 1.0
# what a document may do to an embedder, or to the index; all others are errors of the run
OF_A_DOCUMENT = (InvalidDocument, Forbidden, ValueError, TypeError, ArithmeticError, LookupError)
_OF_LABELS = (Conflict, Forbidden, InvalidRequest, NotFound)  # what new labels may do to a document
_TITLE_CHARS = 500
_JOIN_S = 10.0  # a download in progress is left to its own time limit


Ready = tuple[PlannedFile, ParsedFile]
EmbeddedChunks = tuple[Sequence[NewChunk], Vectors]


class Written(NamedTuple):
    """A document that was written; ``note`` says what became of its corrections."""

    doc_id: str
    note: str = ""


Commit = Callable[[list[tuple[NewDocument, Sequence[Any], Vectors]]], Sequence[Written]]


def content_salt(
    settings: Settings,
    tokenizer: str,
    title: str,
    metadata: Mapping[str, Any],
    read_as: Mapping[str, str | None] = {},
) -> str:
    """Hash everything but the bytes that shapes a document, as 64 hex digits.

    It goes into the content hash, so that a changed setting counts as a changed file. ``read_as``: how the
    bytes are read, where a request or a web server said so.
    """
    taken = [settings.chunk_tokens, settings.ingest_hidden, settings.ingest_comments]
    shape = [PARSER_VERSION, CHUNKING_VERSION, tokenizer, *taken, title, sorted(metadata.items())]
    if said := sorted(item for item in read_as.items() if item[1] is not None):
        shape.append(said)
    return hashlib.blake2b(json.dumps(shape).encode(), digest_size=32).hexdigest()


class WritingPipeline(ABC):
    """A run over many files, wherever they are parsed and embedded. The thread that calls ``run`` writes.

    Args:
        run: The job's run, which counts progress and says when to stop.
        commit: Writes documents in one transaction.
        record: Records outcomes of files, several at a time.
        relabel: Gives the document of an unchanged file the file's labels; an error is the file's own.
    """

    def __init__(
        self,
        run: JobRun,
        *,
        commit: Commit,
        record: Callable[[Sequence[JobItem]], None],
        relabel: Callable[[PlannedFile], None],
    ) -> None:
        self._run = run
        self._progress = run.progress
        self._commit = commit
        self._record = record
        self._relabel = relabel
        self._outcomes: list[JobItem] = []
        self._recorded_at = time.monotonic()
        self._batch_chunks = _START_CHUNKS

    def run(self, files: Iterable[PlannedFile]) -> None:
        """Take each file to its outcome. Raises ``Interrupted``, and errors of ``commit`` and ``files``."""
        queue = ResultQueue(_QUEUE_CHUNKS)
        thread = threading.Thread(
            target=self._produce_all, args=(files, queue), name="ragserve-parse", daemon=True
        )
        thread.start()
        try:
            self._drain(queue)
        except Interrupted:
            self._flush()
            raise
        else:
            self._flush()
        finally:
            queue.close()
            self._interrupt()
            thread.join(_JOIN_S)

    @abstractmethod
    def _produce(self, files: Iterable[PlannedFile], queue: ResultQueue) -> None:
        """Put each file with its result into the queue, until all are done or the queue is closed."""

    @abstractmethod
    def _interrupt(self) -> None:
        """Make ``_produce``, on another thread, end soon."""

    @abstractmethod
    def _embedded(self, documents: Sequence[NewDocument], ready: Sequence[Ready]) -> Sequence[EmbeddedChunks]:
        """The chunks and vectors of parsed files. Raises ``Interrupted``."""

    def _produce_all(self, files: Iterable[PlannedFile], queue: ResultQueue) -> None:
        end: BaseException = _End()
        try:
            self._produce(files, queue)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for this one
            end = error
        queue.put(end)

    def _drain(self, queue: ResultQueue) -> None:
        ready: list[Ready] = []
        n_chunks = 0
        while True:
            if self._run.should_stop():
                raise Interrupted
            start = min(_START_CHUNKS, self._batch_chunks)
            try:
                item = queue.get(timeout=0.2 if n_chunks < start else 0.0)
            except Empty:
                item = None
            if isinstance(item, _End):
                break
            if isinstance(item, BaseException):
                raise item
            family = item or []
            self._progress.total += max(0, len(family) - 1)  # attachments
            for file, result in family:
                if isinstance(result, ParsedFile):
                    ready.append((file, result))
                    n_chunks += len(result.chunks)
                else:
                    self._finish_without_document(file, result)
            if len(self._outcomes) >= _RECORD_ITEMS or time.monotonic() - self._recorded_at > _RECORD_S:
                self._flush()
            if n_chunks >= self._batch_chunks or (n_chunks >= start and item is None):
                self._write(ready)
                ready, n_chunks = [], 0
        if ready:
            self._write(ready)

    def _finish_without_document(self, file: PlannedFile, result: Unchanged | Failed) -> None:
        source = file.source
        if isinstance(result, Failed) and result.code == INTERRUPTED:
            return  # the run was stopped, and the file is for the next one
        if isinstance(result, Unchanged):
            try:
                self._relabel(file)  # not before: a text gets only the labels that came with it
            except _OF_LABELS as error:
                result = Failed(str(error), error.code)
        if isinstance(result, Unchanged):
            self._progress.unchanged += 1
            self._outcomes.append(JobItem(source, "unchanged", None, 0, 0, result.size, None))
        elif file.found and result.code == NOT_TEXT:
            self._progress.skipped += 1
            self._outcomes.append(JobItem(source, "skipped", result.reason, 0, 0, 0, None))
        else:
            self._progress.failed += 1
            self._outcomes.append(JobItem(source, "failed", result.reason, 0, 0, 0, None))
        self._progress.current = source
        self._run.notify()

    def _flush(self) -> None:
        if self._outcomes:
            self._record(self._outcomes)
            self._outcomes = []
        self._recorded_at = time.monotonic()

    def _write(self, ready: list[Ready]) -> None:
        """Write documents in one transaction; if one of them prevents that, each in its own."""
        documents = [new_document(file, parsed) for file, parsed in ready]
        try:
            embedded = self._embedded(documents, ready)
            started = time.perf_counter()
            written = self._commit([(d, *own) for d, own in zip(documents, embedded, strict=True)])
        except OF_A_DOCUMENT as error:
            if len(ready) > 1:
                for each in ready:
                    self._write([each])
                return
            ((file, _),) = ready
            log.warning("Document %r cannot be indexed", file.source, exc_info=True)
            reason = f"could not be indexed: {error}"
            self._finish_without_document(file, Failed(reason, "not_indexed"))
            return
        progress = self._progress
        progress.index_s += time.perf_counter() - started
        for (file, parsed), (doc_id, said) in zip(ready, written, strict=True):
            note = joined_notes(parsed.note, said) or None
            n, tokens = len(parsed.chunks), sum(chunk.n_tokens for chunk in parsed.chunks)
            item = JobItem(file.source, "indexed", note, n, tokens, parsed.size, doc_id)
            self._outcomes.append(item)
            progress.indexed += 1
            progress.size_bytes += parsed.size
            progress.tokens += tokens
        self._flush()
        progress.chunks += sum(len(own) for own, _ in embedded)
        progress.current = ready[-1][0].source
        self._run.notify()


class Pipeline(WritingPipeline):
    """A run on this machine.

    Args:
        parser: The parsing process; the pipeline interrupts it at the end.
        embedder: Returns the embedder; called when the first chunks need it.
        sentence_bytes: Bytes a token to store for embedded sentences; 0: embed none.
    """

    def __init__(
        self,
        run: JobRun,
        *,
        parser: ParseProcess,
        embedder: Callable[[], DocumentEmbedder],
        commit: Commit,
        record: Callable[[Sequence[JobItem]], None],
        relabel: Callable[[PlannedFile], None],
        sentence_bytes: int = 0,
    ) -> None:
        super().__init__(run, commit=commit, record=record, relabel=relabel)
        self._parser = parser
        self._embedder = embedder
        self._sentence_bytes = sentence_bytes

    def _produce(self, files: Iterable[PlannedFile], queue: ResultQueue) -> None:
        for file in files:
            queue.put(results_of(self._parser, file))
            if queue.closed:
                return

    def _interrupt(self) -> None:
        self._parser.interrupt()

    def _embedded(self, documents: Sequence[NewDocument], ready: Sequence[Ready]) -> Sequence[EmbeddedChunks]:
        """Embed chunks and their sentences, and note the speed."""
        titled = [(d.title, parsed.chunks) for d, (_, parsed) in zip(documents, ready, strict=True)]
        embedder = self._embedder()
        started = time.perf_counter()
        embedded = embed_chunks(embedder, titled, self._sentence_bytes, self._run.should_stop)
        seconds = time.perf_counter() - started
        self._progress.embed_s += seconds
        per_batch = int(sum(len(own) for own, _ in embedded) / max(seconds, 1e-6) * _BATCH_S)
        self._batch_chunks = max(_MIN_BATCH_CHUNKS, min(_BATCH_CHUNKS, per_batch))
        return embedded


def new_document(file: PlannedFile, parsed: ParsedFile) -> NewDocument:
    """The document of a parsed file."""
    title = shown_title(parsed, file.source, file.title)
    own = {"filename": parsed.filename, "ext": parsed.ext, "title": title}
    metadata = {**parsed.metadata, **own, **file.metadata}
    if ATTACHMENTS in parsed.metadata:  # by which they are removed with it
        metadata[ATTACHMENTS] = parsed.metadata[ATTACHMENTS]
    known = parsed.hash, parsed.mime, parsed.size
    return NewDocument(file.source, title, *known, metadata, file.labels, file.root, file.labels_before)


def shown_title(parsed: ParsedFile, source: str, given: str = "") -> str:
    """The title of a document, ``given`` or of the file."""
    title = given or parsed.title or parsed.filename.rsplit(".", 1)[0]
    return one_line(title)[:_TITLE_CHARS] or source


class _End(Exception):
    """Internal: all results have been delivered."""


class ResultQueue(Queue[list[Result] | BaseException]):
    """A queue bounded by the chunks it holds; what is larger than the bound passes alone. A file comes with
    its attachments.

    The last item is ``_End`` or the error that stopped the producer. ``close`` releases a waiting producer.
    """

    closed = False
    _chunks = 0

    def close(self) -> None:
        with self.mutex:
            self.closed = True
            self.maxsize = sys.maxsize
            self.not_full.notify_all()

    def _qsize(self) -> int:
        return self._chunks

    def _put(self, item: Any) -> None:
        self._chunks += _weight(item)
        super()._put(item)

    def _get(self) -> Any:
        item = super()._get()
        self._chunks -= _weight(item)
        return item


def _weight(item: Any) -> int:
    results = item if isinstance(item, list) else []
    return max(1, sum(len(result.chunks) for _, result in results if isinstance(result, ParsedFile)))
