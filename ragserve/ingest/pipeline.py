"""Files to indexed chunks: one thread drives the parsing process while the calling thread embeds and writes.

    source thread                       calling thread
    fetch / stat -> parsing process     gather ~512 chunks -> embed -> one transaction -> record the items
                └── bounded queue ──────┘

A document is written with all of its chunks in one transaction or not at all, and its item is marked after
that: a process that dies in between leaves an item to do again, whose file is then found unchanged. Nothing
is lost, nothing is doubled."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ragserve.ingest.chunking import CHUNKING_VERSION
from ragserve.ingest.jobs.job_report import Interrupted, Progress
from ragserve.ingest.parsers import PARSER_VERSION
from ragserve.ingest.parsing.parse_process import Failed, ParsedFile, ParseProcess, ParseRequest, Unchanged
from ragserve_index.types import JobItem, NewDocument

__all__ = ["Embeds", "Interrupted", "Pipeline", "Work", "content_salt", "embedding_text"]

_BATCH_CHUNKS = (
    512  # a transaction's worth: enough that an fsync and sorting by length cost little beside embedding
)
_START_CHUNKS = 64  # enough to start embedding when the parser has no more ready
_QUEUE_CHUNKS = 4096  # parsed ahead; bounds memory
_RECORD_ITEMS, _RECORD_S = (
    500,
    1.0,
)  # outcomes without a document are recorded this many, or this many seconds, at a time
_JOIN_S = 10.0  # a download in progress is left to its own time limit


class Embeds(Protocol):
    """What the pipeline wants of `retrieval.embedder.Embedder`."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class Work:
    """One file to do. ``source`` is the document's identity; ``request`` what the parsing process gets."""

    source: str
    request: ParseRequest
    title: str
    metadata: Mapping[str, Any]


def content_salt(tokenizer: str, chunk_tokens: int, title: str, metadata: Mapping[str, Any]) -> str:
    """What shapes a document beside its bytes, as 64 hex digits: with it in the hash, a changed setting
    counts as a changed file.
    """
    shape = [PARSER_VERSION, CHUNKING_VERSION, tokenizer, chunk_tokens, title, sorted(metadata.items())]
    return hashlib.blake2b(json.dumps(shape).encode(), digest_size=32).hexdigest()


def embedding_text(title: str, text: str) -> str:
    """What is embedded for a chunk: its document's title, then its text.

    Measured with all-MiniLM-L6-v2 without and with title, nDCG@10 / recall@10: squad/retrieval (600
    questions) 0.813 / 0.942 and 0.814 / 0.945; cranfield 0.396 / 0.414 and 0.400 / 0.416. Little where every
    passage names its subject; where a chunk from the middle of a document does not, the title is all that
    says what it is about."""
    return f"{title}\n{text}" if title else text


class Pipeline:
    """One run over many files. ``commit`` writes documents and gives their doc_ids; ``record`` gets every
    file's outcome, some at a time; ``stop`` says whether to end between batches."""

    def __init__(
        self,
        *,
        parser: ParseProcess,
        embedder: Callable[[], Embeds],
        commit: Callable[[list[tuple[NewDocument, Sequence[Any], npt.NDArray[np.float32]]]], Sequence[str]],
        record: Callable[[Sequence[JobItem]], None],
        progress: Progress,
        stop: Callable[[], bool],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._parser = parser
        self._embedder = embedder
        self._commit = commit
        self._record = record
        self._outcomes: list[JobItem] = []
        self._recorded_at = time.monotonic()
        self._progress = progress
        self._stop = stop
        self._notify = on_progress

    def run(self, work: Iterable[Work | tuple[str, Failed]]) -> None:
        """Take each piece of work to its outcome; (source, Failed) came to it before. Raises ``Interrupted``
        and what ``commit`` raises.
        """
        queue = _Parsed(_QUEUE_CHUNKS)
        thread = threading.Thread(
            target=self._parse_all, args=(work, queue), name="ragserve-parse", daemon=True
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
            self._parser.interrupt()
            thread.join(_JOIN_S)

    def _parse_all(self, work: Iterable[Work | tuple[str, Failed]], queue: _Parsed) -> None:
        try:
            for one in work:
                if isinstance(one, tuple):
                    queue.put(*one)
                else:
                    queue.put(one, self._parser.parse(one.request))
                if queue.closed:
                    return
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for this one
            queue.fail(error)
        else:
            queue.finish()

    def _drain(self, queue: _Parsed) -> None:
        ready: list[tuple[Work, ParsedFile]] = []
        n_chunks = 0
        while True:
            if self._stop():
                raise Interrupted
            item = queue.get(wait_s=0.2 if n_chunks < _START_CHUNKS else 0.0)
            if isinstance(item, _End):
                break
            if item is not None:
                one, result = item
                if isinstance(one, Work) and isinstance(result, ParsedFile):
                    ready.append((one, result))
                    n_chunks += len(result.chunks)
                else:
                    self._without_embedding(one, result)
            if len(self._outcomes) >= _RECORD_ITEMS or time.monotonic() - self._recorded_at > _RECORD_S:
                self._flush()
            if n_chunks >= _BATCH_CHUNKS or (n_chunks >= _START_CHUNKS and item is None):
                self._write(ready)
                ready, n_chunks = [], 0
        if ready:
            self._write(ready)

    def _without_embedding(self, one: Work | str, result: ParsedFile | Unchanged | Failed) -> None:
        source = one.source if isinstance(one, Work) else one
        if isinstance(result, Unchanged):
            self._progress.unchanged += 1
            self._outcomes.append(JobItem(source, "unchanged", None, 0, 0, result.size, None))
        elif isinstance(result, Failed):
            self._progress.failed += 1
            self._outcomes.append(JobItem(source, "failed", result.reason, 0, 0, 0, None))
        self._progress.current = source
        self._notify(self._progress)

    def _flush(self) -> None:
        if self._outcomes:
            self._record(self._outcomes)
            self._outcomes = []
        self._recorded_at = time.monotonic()

    def _write(self, ready: list[tuple[Work, ParsedFile]]) -> None:
        texts = [
            embedding_text(_title(one, file), chunk.text) for one, file in ready for chunk in file.chunks
        ]
        vectors = self._embed(texts)
        batch, at = [], 0
        for one, file in ready:
            batch.append((_document(one, file), file.chunks, vectors[at : at + len(file.chunks)]))
            at += len(file.chunks)
        started = time.perf_counter()
        doc_ids = self._commit(batch)
        self._progress.index_s += time.perf_counter() - started
        for (one, file), doc_id in zip(ready, doc_ids, strict=True):
            tokens = sum(chunk.n_tokens for chunk in file.chunks)
            self._progress.indexed += 1
            self._progress.size_bytes += file.size
            self._outcomes.append(
                JobItem(one.source, "indexed", None, len(file.chunks), tokens, file.size, doc_id)
            )
        self._flush()
        self._progress.tokens += sum(chunk.n_tokens for _, file in ready for chunk in file.chunks)
        self._progress.chunks += len(texts)
        self._progress.current = ready[-1][0].source
        self._notify(self._progress)

    def _embed(self, texts: list[str]) -> npt.NDArray[np.float32]:
        """In slices, so that a stop need not wait for the end of a document of thousands of chunks. Raises
        ``Interrupted``.
        """
        embedder = self._embedder()
        started = time.perf_counter()
        # by length over the whole batch, so that slices as well as the embedder's own batches waste little on
        # padding
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors = np.empty((len(texts), embedder.dim), dtype=np.float32)
        for start in range(0, len(order), _BATCH_CHUNKS // 4):
            if self._stop():
                raise Interrupted
            part = order[start : start + _BATCH_CHUNKS // 4]
            vectors[part] = embedder.encode([texts[i] for i in part])
        self._progress.embed_s += time.perf_counter() - started
        return vectors


def _title(one: Work, file: ParsedFile) -> str:
    return one.title or file.title or one.request.filename.rsplit(".", 1)[0]


def _document(one: Work, file: ParsedFile) -> NewDocument:
    title = _title(one, file)
    metadata = {
        **file.metadata,
        "filename": one.request.filename,
        "ext": one.request.ext,
        "title": title,
        **one.metadata,
    }
    return NewDocument(one.source, title, file.hash, file.mime, file.size, metadata)


class _End:
    """The queue has delivered everything."""


class _Parsed:
    """A queue bounded by the chunks it holds. One producer, one consumer; ``close`` from the consumer frees
    the producer.
    """

    def __init__(self, max_chunks: int) -> None:
        self._items: deque[tuple[Work | str, ParsedFile | Unchanged | Failed]] = deque()
        self._max = max_chunks
        self._chunks = 0
        self._changed = threading.Condition()
        self._finished = False
        self._error: BaseException | None = None
        self.closed = False

    def put(self, one: Work | str, result: ParsedFile | Unchanged | Failed) -> None:
        """Waits while the queue is full; a document larger than the bound passes alone."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed or (self._chunks < self._max and len(self._items) < self._max)
            )
            self._items.append((one, result))
            self._chunks += _weight(result)
            self._changed.notify_all()

    def get(self, wait_s: float) -> tuple[Work | str, ParsedFile | Unchanged | Failed] | _End | None:
        """The next result, None if there is none within ``wait_s`` seconds. Raises what stopped the producer."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finished or self._error, timeout=wait_s)
            if self._items:
                item = self._items.popleft()
                self._chunks -= _weight(item[1])
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            return _End() if self._finished else None

    def finish(self) -> None:
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()


def _weight(result: ParsedFile | Unchanged | Failed) -> int:
    return len(result.chunks) if isinstance(result, ParsedFile) else 0
