"""Plain data of the index's interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # it needs numpy, and the process that parses files does without
    from ragserve_index.sentence_vectors import SentenceVectors

IndexType = Literal["flat", "sq8", "ivf", "hnsw"]
MetadataValue = str | int | float | bool | None | list[str]


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A passage of a document's text: ``document_text[start:end]``. The text of one that continues a table
    begins with a copy of the table's header, and one that continues a sentence of the page before with a copy
    of its beginning, in front of that: `header_chars`. ``page`` counts from 1, if the
    format has pages. ``sentences``: embeddings of its sentences, if they were made. ``edited``: a person gave
    it another text, which stands for that of the file from ``start`` to ``end``.
    """

    text: str
    start: int
    end: int
    n_tokens: int
    page: int | None = None
    sentences: SentenceVectors | None = None
    edited: bool = False

    @property
    def header_chars(self) -> int:
        """Length of the copied header at the beginning of ``text``; mostly 0."""
        return 0 if self.edited else max(0, len(self.text) - (self.end - self.start))


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A document to index. ``source`` (absolute path, URL or given name) identifies it in the namespace: the
    same source replaces it.
    """

    source: str
    title: str
    content_hash: str  # hex digest of the bytes it was parsed from and of the settings that shape its chunks
    mime: str
    size_bytes: int
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None  # None: those that it had; a new one those of ``root``, or none
    root: str = ""  # source of the message that it came with, at the beginning of a chain of messages
    labels_before: tuple[str, ...] = ()  # with ``labels`` None: of a document that was removed meanwhile


@dataclass(frozen=True, slots=True)
class Document:
    """An indexed document. Times are Unix seconds. ``doc_id`` depends on namespace and source alone, and
    stays the same when the document is replaced. ``labels``: those that its reader may know of.
    """

    doc_id: str
    namespace: str
    source: str
    title: str
    content_hash: str
    mime: str
    size_bytes: int
    n_chunks: int
    n_tokens: int
    created_at: float
    updated_at: float
    metadata: Mapping[str, Any]
    labels: tuple[str, ...] = ()

    @property
    def unchanged(self) -> NewDocument:
        """The document to be written again as it is, with the labels that it then has."""
        return NewDocument(
            self.source, self.title, self.content_hash, self.mime, self.size_bytes, self.metadata
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """An indexed chunk, with its document's fields for citations. ``chunk_id`` is a positive int64, never
    reused. ``edited``: see `NewChunk`.
    """

    chunk_id: int
    doc_id: str
    ordinal: int
    text: str
    start: int
    end: int
    page: int | None
    n_tokens: int
    source: str
    title: str
    metadata: Mapping[str, Any]
    edited: bool = False
    namespace: str = ""

    @property
    def header_chars(self) -> int:
        """Length of the copy at the beginning of ``text``, see `NewChunk`; mostly 0."""
        return 0 if self.edited else max(0, len(self.text) - (self.end - self.start))

    @property
    def first_page(self) -> int | None:
        """``page``, or the one before it if ``text`` begins with a copy of the sentence that goes on there; a
        copied table header has lines of its own."""
        copied = self.text[: self.header_chars]
        goes_on = copied and "\n" not in copied and self.page_kind == "page"
        return self.page - 1 if goes_on and self.page else self.page

    @property
    def own_text(self) -> str:
        """The document's text from ``start`` to ``end``, or what stands for it in an edited chunk."""
        return self.text[self.header_chars :]

    @property
    def page_kind(self) -> str | None:
        """Kind of place that ``page`` counts: page, slide, sheet, chapter, message or section; None without
        one."""
        return None if self.page is None else str(self.metadata.get("page_kind", "page"))

    @property
    def page_name(self) -> str | None:
        """Name of the sheet, chapter or section; None if it has none."""
        names = self.metadata.get("page_names")
        if self.page is None or not isinstance(names, list) or not 0 < self.page <= len(names):
            return None
        return str(names[self.page - 1]) or None


class Hit(NamedTuple):
    """A retrieved chunk. Higher scores are better.

    ``score`` is what the hits are ordered by: ``cosine``, the inner product of L2-normalised vectors, in a
    dense search; ``bm25`` in a lexical one; in a hybrid one the sum of both in standard deviations from the
    mean of the candidates, where all have a ``cosine`` and those that the lexical search found ``bm25``."""

    chunk: Chunk
    score: float
    cosine: float | None = None
    bm25: float | None = None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Hits per query, best first, all read at one version of the namespace."""

    hits: list[list[Hit]]
    version: int


@dataclass(frozen=True, slots=True)
class JointResult:
    """Hits of one query over several namespaces, best first, and the version at which each was read."""

    hits: list[Hit]
    versions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """A namespace. ``version`` grows by one with each committed change to its documents."""

    name: str
    embedder: str
    dim: int
    index_type: str
    version: int
    n_documents: int
    n_chunks: int
    n_tokens: int


Position = tuple[int, int]
"""A place in a namespace's change log: version and first chunk id. (0, 0) is its beginning."""


@dataclass(frozen=True, slots=True)
class AddedChunks:
    """Chunks that were added to a namespace, as far as they are still there; ``n_added`` counts the others,
    too.

    ``namespace_id`` and ``n_chunks`` are those of the namespace; ``position`` is behind the last chunk. No
    namespace ever has the id of a dropped one."""

    namespace_id: int
    n_chunks: int
    chunks: list[Chunk]
    n_added: int
    position: Position


@dataclass(frozen=True, slots=True)
class IndexReport:
    """Result of :meth:`IndexStore.check` for one namespace; ``problems`` is empty when all is well."""

    namespace: str
    index_type: str
    structure: str  # in memory: sq8 and ivf are flat until there are enough vectors to train on
    version: int
    n_documents: int
    n_chunks: int
    n_indexed: int  # vectors that a search can find
    n_tombstones: int  # removed vectors still in an hnsw graph, filtered out of every search
    index_bytes: int  # size of the saved index file, 0 without one
    file: str  # current, behind, missing (both normal: the next open catches up), or "damaged: reason"
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


FINISHED = ("done", "failed", "cancelled")
JOB_STATES = ("queued", "running", *FINISHED)
ITEM_STATES = ("pending", "indexed", "warmed", "unchanged", "removed", "failed", "skipped")


@dataclass(frozen=True, slots=True)
class Job:
    """A job: an ingestion, or a warm-up of the document cache.

    ``counts`` has the number of items per state, zeros included; times are Unix seconds.
    """

    job_id: str
    namespace: str
    state: str  # one of JOB_STATES
    spec: Mapping[str, Any]
    counts: Mapping[str, int]
    n_items: int
    chunks: int
    tokens: int
    size_bytes: int
    error: str | None
    cancel_requested: bool
    worker: str | None
    lease_until: float | None
    created_at: float
    updated_at: float

    @property
    def kind(self) -> str:
        """paths, upload or stdin for an ingestion, by the origin of its sources; warm for a warm-up."""
        return str(self.spec.get("kind", ""))

    @property
    def finished(self) -> bool:
        """True once the job has ended."""
        return self.state in FINISHED


@dataclass(frozen=True, slots=True)
class JobItem:
    """A source of a job and its outcome. ``reason`` says why it failed or was skipped; of an indexed one it
    is a note."""

    source: str
    state: str  # one of ITEM_STATES
    reason: str | None
    chunks: int
    tokens: int
    size_bytes: int
    doc_id: str | None
