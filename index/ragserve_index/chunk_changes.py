"""Chunks of a document as people see and change them: listed with those that are disabled, edited, disabled
and enabled again.

A change is a new version of its document, whose chunks are written again with the vectors that they have: so
every index, every server on the registry and every cache follows it as it follows an ingestion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ragserve.errors import Conflict, InvalidRequest, NotFound
from ragserve_index import corrections, registry, stored_vectors
from ragserve_index.batch import Prepared, document_ids, metadata_json
from ragserve_index.corrections import ChunkCorrection
from ragserve_index.database import Connection, Database
from ragserve_index.index.pool import IndexPool
from ragserve_index.labelling import hidden_ids
from ragserve_index.sentence_vectors import SentenceVectors
from ragserve_index.types import Chunk, Document, NewChunk
from ragserve_index.viewers import EVERYTHING, Viewer


@dataclass(frozen=True, slots=True)
class ChunkState:
    """A chunk of a document, searched or not. A disabled one has ``chunk.chunk_id`` 0. ``original``: the text
    of the file, if the chunk was edited. ``version``: what a change must name."""

    chunk: Chunk
    disabled: bool
    original: str | None
    version: str


@dataclass(frozen=True, slots=True)
class LostCorrection:
    """A correction whose original text is not in the document any more. ``lost_at`` is in Unix seconds."""

    original: str
    text: str
    disabled: bool
    page: int | None
    ordinal: int
    lost_at: float


@dataclass(frozen=True, slots=True)
class NewText:
    """Another text for a chunk, its number of tokens, its vector [dim] float32 of length 1, and those of its
    sentences, if they are embedded."""

    text: str
    n_tokens: int
    vector: np.ndarray
    sentences: SentenceVectors | None = None


class ChunkChanges:
    """Thread-safe, and safe among processes: each method is one transaction."""

    def __init__(self, database: Database, pool: IndexPool, viewer: Viewer = EVERYTHING) -> None:
        """``viewer``: whose documents they are."""
        self._database = database
        self._pool = pool
        self._viewer = viewer

    def seen_by(self, viewer: Viewer) -> ChunkChanges:
        """The same for another viewer."""
        return ChunkChanges(self._database, self._pool, viewer)

    def states(
        self, namespace: str, doc_id: str, *, after: int = 0, limit: int | None = None
    ) -> list[ChunkState]:
        """The document's chunks of the ordinals from ``after`` on, ``limit`` of them. Raises NotFound."""
        with self._database.read() as connection:
            ns = registry.namespace(connection, namespace)
            return _states(
                connection, ns, registry.get_document(connection, ns, doc_id, self._viewer), after, limit
            )

    def state(self, namespace: str, doc_id: str, ordinal: int) -> ChunkState:
        """One chunk. Raises NotFound."""
        for found in self.states(namespace, doc_id, after=ordinal, limit=1):
            if found.chunk.ordinal == ordinal:
                return found
        raise _no_chunk(doc_id, ordinal)

    def lost(
        self, namespace: str, doc_ids: Sequence[str], *, since: float = 0.0
    ) -> dict[str, list[LostCorrection]]:
        """The lost corrections of documents by doc_id, if any; those that were lost at ``since`` or later."""
        with self._database.read() as connection:
            ns = registry.namespace(connection, namespace)
            found = corrections.read(connection, ns.id, doc_ids)
            hidden = hidden_ids(connection, namespace, doc_ids, self._viewer)
        listed = {
            doc_id: [
                LostCorrection(row.original, row.text, row.disabled, row.page, row.ordinal, row.lost_at)
                for row in rows
                if row.lost_at is not None and row.lost_at >= since
            ]
            for doc_id, rows in found.items()
            if doc_id not in hidden
        }
        return {doc_id: rows for doc_id, rows in listed.items() if rows}

    def forget_lost(self, namespace: str, doc_id: str) -> int:
        """Remove a document's lost corrections and return their number. Raises NotFound."""
        with self._database.write() as connection:
            ns = registry.namespace(connection, namespace)
            registry.get_document(connection, ns, doc_id, self._viewer)
            rows = corrections.read(connection, ns.id, [doc_id]).get(doc_id, [])
            gone = [row.id for row in rows if row.lost_at is not None]
            corrections.remove(connection, gone)
        return len(gone)

    def rows_of(self, namespace: str, sources: Sequence[str]) -> dict[str, list[ChunkCorrection]]:
        """All corrections of documents, by source; of those that have some. Empty without the namespace."""
        ids = {doc_id: source for source in sources for doc_id in document_ids(namespace, source)}
        with self._database.read() as connection:
            ns = registry.find_namespace(connection, namespace)
            found = {} if ns is None else corrections.read(connection, ns.id, list(ids))
        return {ids[doc_id]: rows for doc_id, rows in found.items()}

    def embed_again(self, texts: Sequence[tuple[ChunkCorrection, NewText]]) -> None:
        """Replace tokens and vectors of corrections, unless their text has been changed meanwhile. Searches
        have them when the document is next written."""
        with self._database.write() as connection:
            for row, new in texts:
                connection.execute(
                    "UPDATE corrections SET n_tokens = ?, vector = ?, sentences = ?"
                    " WHERE id = ? AND text = ?",
                    (new.n_tokens, _vector(new), _encoded(new.sentences), row.id, row.text),
                )

    def as_cut(self, namespace: str, doc_id: str) -> list[NewChunk]:
        """The document's chunks as its file gave them, without corrections. Raises NotFound."""
        with self._database.read() as connection:
            ns = registry.namespace(connection, namespace)
            registry.get_document(connection, ns, doc_id, self._viewer)
            return [chunk for chunk, _ in _cut(connection, ns, doc_id)[0]]

    def change(
        self,
        namespace: str,
        doc_id: str,
        ordinal: int,
        version: str,
        *,
        text: NewText | None = None,
        disabled: bool | None = None,
    ) -> ChunkState:
        """Give a chunk another text, disable it or enable it, and return it as it is now; None: as it is.

        The text of the file given again ends the edit. Raises NotFound, and Conflict if the chunk is not of
        ``version`` any more."""
        with self._database.write() as connection:
            ns = registry.namespace(connection, namespace)
            document = registry.get_document(connection, ns, doc_id, self._viewer)
            before = _states(connection, ns, document, ordinal, 1)
            if not before:
                raise _no_chunk(doc_id, ordinal)
            if before[0].version != version:
                raise Conflict(
                    f"Chunk {ordinal} of document {doc_id!r} was changed meanwhile.",
                    hint="Read it again, and give the version that it has now.",
                    code="chunk_changed",
                    param="version",
                )
            same_text = text is None or text.text == before[0].chunk.text
            if same_text and disabled in (None, before[0].disabled):
                return before[0]
            item = _changed(connection, ns, document, ordinal, None if same_text else text, disabled)
            registry.write_documents(connection, ns, [item], self._viewer)
            now = registry.namespace(connection, namespace)
            written = registry.get_document(connection, now, doc_id, self._viewer)
            after = _states(connection, now, written, ordinal, 1)[0]
        self._pool.after_write(ns)
        return after


def _no_chunk(doc_id: str, ordinal: int) -> NotFound:
    return NotFound(
        f"Document {doc_id!r} has no chunk {ordinal}.", hint="List its chunks.", code="chunk_not_found"
    )


def _states(
    connection: Connection, ns: registry.Namespace, document: Document, after: int, limit: int | None
) -> list[ChunkState]:
    rows = corrections.read(connection, ns.id, [document.doc_id]).get(document.doc_id, [])
    live = {row.ordinal: row for row in rows if row.lost_at is None}
    found = []
    for chunk in registry.document_chunks(connection, ns, document.doc_id, EVERYTHING, after, limit):
        row = live.get(chunk.ordinal)
        original = chunk.text if row is None else row.original
        version = corrections.version_of(original, chunk.text, False)
        found.append(ChunkState(chunk, False, None if original == chunk.text else original, version))
    for row in live.values():
        if row.disabled and after <= row.ordinal and (limit is None or row.ordinal < after + limit):
            version = corrections.version_of(row.original, row.text, True)
            chunk = _hidden_chunk(document, row)
            found.append(ChunkState(chunk, True, row.original if row.edited else None, version))
    return sorted(found, key=lambda state: state.chunk.ordinal)


def _hidden_chunk(document: Document, row: ChunkCorrection) -> Chunk:
    return Chunk(
        chunk_id=0,
        doc_id=document.doc_id,
        ordinal=row.ordinal,
        text=row.text,
        start=row.start,
        end=row.end,
        page=row.page,
        n_tokens=row.n_tokens,
        source=document.source,
        title=document.title,
        metadata=document.metadata,
        edited=row.edited,
    )


def _cut(
    connection: Connection, ns: registry.Namespace, doc_id: str
) -> tuple[list[tuple[NewChunk, np.ndarray]], dict[int, ChunkCorrection]]:
    """The chunks as the file gave them, in order, each with the vector of what is searched for it; and the
    corrections by ordinal, lost ones left out."""
    rows = corrections.read(connection, ns.id, [doc_id]).get(doc_id, [])
    live = {row.ordinal: row for row in rows if row.lost_at is None}
    chunks = registry.document_chunks(connection, ns, doc_id, EVERYTHING)
    sentences = stored_vectors.sentence_vectors(
        connection, ns, [chunk.chunk_id for chunk in chunks], EVERYTHING
    )
    vectors = stored_vectors.document_vectors(connection, ns, doc_id)
    found: dict[int, tuple[NewChunk, np.ndarray]] = {
        ordinal: (row.as_cut, np.frombuffer(row.vector, dtype="<f4")) for ordinal, row in live.items()
    }
    for chunk, vector in zip(chunks, vectors, strict=True):
        if chunk.ordinal not in live:
            own = sentences.get(chunk.chunk_id)
            new = NewChunk(chunk.text, chunk.start, chunk.end, chunk.n_tokens, chunk.page, own)
            found[chunk.ordinal] = new, vector
    return [found[ordinal] for ordinal in sorted(found)], live


def _changed(
    connection: Connection,
    ns: registry.Namespace,
    document: Document,
    ordinal: int,
    text: NewText | None,
    disabled: bool | None,
) -> Prepared:
    """Note the change in the document's corrections, and return the document as its file was cut, to be
    written again with them."""
    cut, live = _cut(connection, ns, document.doc_id)
    chunk, vector = cut[ordinal]
    row = live.get(ordinal) or ChunkCorrection(
        id=0,
        doc_id=document.doc_id,
        ordinal=ordinal,
        start=chunk.start,
        end=chunk.end,
        page=chunk.page,
        original=chunk.text,
        original_tokens=chunk.n_tokens,
        text=chunk.text,
        n_tokens=chunk.n_tokens,
        disabled=False,
        vector=np.ascontiguousarray(vector, dtype="<f4").tobytes(),
        sentences=_encoded(chunk.sentences),
        lost_at=None,
    )
    if text is not None:
        row = replace(
            row,
            text=text.text,
            n_tokens=text.n_tokens,
            vector=_vector(text),
            sentences=_encoded(text.sentences),
        )
    if disabled is not None:
        row = replace(row, disabled=disabled)
    if len(row.vector) != 4 * ns.dim:
        raise InvalidRequest(f"The vector of the text must have {ns.dim} components.", code="invalid_vectors")
    if row.edited or row.disabled:
        corrections.write(connection, ns.id, row)
    else:  # as its file gave it
        corrections.remove(connection, [row.id])
        own = None if row.sentences is None else SentenceVectors.decode(row.sentences, ns.dim)
        cut[ordinal] = replace(chunk, sentences=own), np.frombuffer(row.vector, dtype="<f4")
    vectors = np.stack([each for _, each in cut]).astype("<f4")
    metadata: Any = metadata_json(document.metadata, f"document {document.source!r}")
    return Prepared(document.unchanged, document.doc_id, (), metadata, [each for each, _ in cut], vectors)


def _vector(text: NewText) -> bytes:
    return np.ascontiguousarray(text.vector, dtype="<f4").tobytes()


def _encoded(sentences: SentenceVectors | None) -> bytes | None:
    return None if sentences is None or not len(sentences) else sentences.encode()
