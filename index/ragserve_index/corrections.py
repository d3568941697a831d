"""What people changed of a document's chunks: the rows that keep it, and how a new cut of the document takes
it over.

A row has the chunk's text as the file gave it, by which it is found again in a later cut, and the text that
is searched instead, with its vectors. A disabled chunk is in this table alone, so that no search needs to
know of it. Ordinals count all chunks of the cut, disabled ones too."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from ragserve_index.batch import Prepared
from ragserve_index.database import Connection
from ragserve_index.sentence_vectors import SentenceVectors
from ragserve_index.types import NewChunk

MOST_LOST = 1_000
"""Lost corrections of a document that are kept, the latest."""

_COLUMNS = (
    'k.id, k.doc_id, k.ordinal, k.start, k."end", k.page, k.original, k.original_tokens, k.text, k.n_tokens,'
    " k.disabled, k.vector, k.sentences, k.lost_at"
)


@dataclass(frozen=True, slots=True)
class ChunkCorrection:
    """A row. ``original``: the text of the file; ``text``: the one that stands for it, the same for a chunk
    that is only disabled; ``vector`` [dim] float32 and ``sentences`` are of ``text``. ``lost_at``: when its
    original was last in the document, Unix seconds; None while it is."""

    id: int
    doc_id: str
    ordinal: int
    start: int
    end: int
    page: int | None
    original: str
    original_tokens: int
    text: str
    n_tokens: int
    disabled: bool
    vector: bytes
    sentences: bytes | None
    lost_at: float | None

    @property
    def edited(self) -> bool:
        """Whether the text was changed."""
        return self.text != self.original

    @property
    def as_cut(self) -> NewChunk:
        """The chunk as the file gave it."""
        return NewChunk(self.original, self.start, self.end, self.original_tokens, self.page)


@dataclass(frozen=True, slots=True)
class CorrectedCut:
    """A document's chunks as they are searched, their vectors [n, dim], and the ordinal of each."""

    chunks: Sequence[NewChunk]
    vectors: np.ndarray
    ordinals: Sequence[int]


def version_of(original: str, text: str, disabled: bool) -> str:
    """What a change of a chunk must name, so that it does not undo one that its author has not seen."""
    parts = json.dumps([original, text, disabled]).encode()
    return blake2b(parts, digest_size=8).hexdigest()


def read(
    connection: Connection, namespace_id: int, doc_ids: Sequence[str]
) -> dict[str, list[ChunkCorrection]]:
    """The corrections of documents by doc_id, in the order of their chunks, lost ones last."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM corrections k WHERE k.namespace_id = ?"
        f" AND k.doc_id IN (SELECT value FROM {connection.dialect.texts} listed)"
        " ORDER BY (CASE WHEN k.lost_at IS NULL THEN 0 ELSE 1 END), k.ordinal, k.id",
        (namespace_id, json.dumps(list(doc_ids))),
    )
    found: dict[str, list[ChunkCorrection]] = defaultdict(list)
    for row in rows:
        each = ChunkCorrection(*[*row[:10], bool(row[10]), *row[11:]])
        found[each.doc_id].append(each)
    return dict(found)


def write(connection: Connection, namespace_id: int, row: ChunkCorrection) -> None:
    """Replace a row; one of id 0 is new."""
    remove(connection, [row.id])
    connection.execute(
        'INSERT INTO corrections (namespace_id, doc_id, ordinal, start, "end", page, original,'
        " original_tokens, text, n_tokens, disabled, vector, sentences, lost_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(namespace_id, row.doc_id, row.ordinal, row.start, row.end, row.page, row.original),
            *(row.original_tokens, row.text, row.n_tokens, int(row.disabled), row.vector, row.sentences),
            row.lost_at,
        ),
    )


def remove(connection: Connection, ids: Sequence[int]) -> None:
    """Remove rows."""
    for each in ids:
        connection.execute("DELETE FROM corrections WHERE id = ?", (each,))


def remove_of(connection: Connection, namespace_id: int, doc_ids: Sequence[str]) -> None:
    """Remove all rows of documents."""
    for doc_id in doc_ids:
        connection.execute(
            "DELETE FROM corrections WHERE namespace_id = ? AND doc_id = ?", (namespace_id, doc_id)
        )


def applied(
    connection: Connection, ns_id: int, dim: int, item: Prepared, rows: Sequence[ChunkCorrection], now: float
) -> CorrectedCut:
    """Take a document's corrections over into a new cut: each to the chunk of its original text, of several
    the nearest. The others are lost, and stay until the text comes back. One whose new text the file now has
    itself is done with."""
    chunks, vectors = list(item.chunks), item.vectors
    places: dict[str, list[int]] = defaultdict(list)
    for place, chunk in enumerate(chunks):
        places[chunk.text].append(place)
    if rows:
        vectors = vectors.copy()
    hidden: set[int] = set()
    lost: list[ChunkCorrection] = []
    for row in rows:
        candidates = places[row.original]
        if not candidates:
            if row.edited and not row.disabled and places[row.text]:
                remove(connection, [row.id])
            else:
                lost.append(row)
            continue
        place = min(candidates, key=lambda at: abs(at - row.ordinal))
        candidates.remove(place)
        cut = chunks[place]
        here = replace(
            row,
            ordinal=place,
            start=cut.start,
            end=cut.end,
            page=cut.page,
            original_tokens=cut.n_tokens,
            lost_at=None,
        )
        if here != row:
            write(connection, ns_id, here)
        if row.disabled:
            hidden.add(place)
            continue
        sentences = None if row.sentences is None else SentenceVectors.decode(row.sentences, dim)
        chunks[place] = replace(
            cut, text=row.text, n_tokens=row.n_tokens, sentences=sentences, edited=row.edited
        )
        vectors[place] = np.frombuffer(row.vector, dtype="<f4")
    _keep_lost(connection, lost, now)
    shown = [place for place in range(len(chunks)) if place not in hidden]
    return CorrectedCut([chunks[place] for place in shown], vectors[shown] if hidden else vectors, shown)


def _keep_lost(connection: Connection, lost: Sequence[ChunkCorrection], now: float) -> None:
    for row in lost:
        if row.lost_at is None:
            connection.execute("UPDATE corrections SET lost_at = ? WHERE id = ?", (now, row.id))
    oldest = sorted(lost, key=lambda row: row.lost_at or now)
    remove(connection, [row.id for row in oldest[: max(0, len(lost) - MOST_LOST)]])


def problems(connection: Connection, namespace_id: int, dim: int) -> list[str]:
    """What disagrees between corrections and chunks."""
    found = []
    (wrong,) = connection.execute(
        "SELECT count(*) FROM corrections k"
        " LEFT JOIN documents d ON d.namespace_id = k.namespace_id AND d.doc_id = k.doc_id"
        " LEFT JOIN chunks c ON c.document = d.id AND c.ordinal = k.ordinal AND k.lost_at IS NULL"
        " WHERE k.namespace_id = ? AND (d.id IS NULL OR length(k.vector) <> ? OR (k.lost_at IS NULL AND"
        " (CASE WHEN k.disabled = 1 THEN c.chunk_id IS NOT NULL"
        " ELSE c.chunk_id IS NULL OR c.edited = 0 OR c.text <> k.text END)))",
        (namespace_id, 4 * dim),
    ).fetchone()
    if wrong:
        found.append(f"{wrong} corrections do not agree with the chunks")
    (alone,) = connection.execute(
        "SELECT count(*) FROM documents d JOIN chunks c ON c.document = d.id"
        " WHERE d.namespace_id = ? AND c.edited = 1 AND NOT EXISTS (SELECT 1 FROM corrections k WHERE"
        " k.namespace_id = d.namespace_id AND k.doc_id = d.doc_id AND k.ordinal = c.ordinal"
        " AND k.lost_at IS NULL)",
        (namespace_id,),
    ).fetchone()
    if alone:
        found.append(f"{alone} edited chunks have no correction")
    return found
