"""Namespaces, documents and chunks in SQL. The functions take a connection; the caller owns the
transaction. What reads documents takes the viewer whose they are, without a default: nobody may forget it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ragserve.errors import InvalidRequest, NotFound
from ragserve_index import corrections
from ragserve_index.batch import Prepared
from ragserve_index.database import Connection
from ragserve_index.evictions import log_document, unlog_present
from ragserve_index.filters import filtering
from ragserve_index.structures.base import Ids
from ragserve_index.text_forms import normal
from ragserve_index.types import Chunk, Document, NamespaceInfo, Position
from ragserve_index.viewers import Viewer
from ragserve_index.visible import Condition, both, labels_of_new, replaced_labels, sees, visible
from sglang_ext.wire.protocol import NAMESPACE

_DOCUMENT = (
    "d.doc_id, d.source, d.title, d.content_hash, d.mime, d.size_bytes, d.n_chunks, d.n_tokens, "
    "d.created_at, d.updated_at, d.metadata, d.labels"
)
_CHUNK = (
    'c.chunk_id, d.doc_id, c.ordinal, c.text, c.start, c."end", c.page, c.n_tokens, '
    "d.source, d.title, d.metadata, c.edited, d.labels"
)

VECTORS_PER_ROW = 1024


@dataclass(frozen=True, slots=True)
class Namespace(NamespaceInfo):
    """A row of ``namespaces``, as of one transaction."""

    id: int
    changed: int
    uid: str
    log_floor: int

    def info(self) -> NamespaceInfo:
        """The public part."""
        return NamespaceInfo(*(getattr(self, field.name) for field in fields(NamespaceInfo)))


_NAMESPACE = ", ".join(field.name for field in fields(Namespace))


def namespaces(connection: Connection, where: str = "TRUE", *parameters: object) -> list[Namespace]:
    """List all namespaces (that meet an SQL condition), by name."""
    rows = connection.execute(f"SELECT {_NAMESPACE} FROM namespaces WHERE {where} ORDER BY name", parameters)
    return [Namespace(*row) for row in rows]


def find_namespace(connection: Connection, name: str) -> Namespace | None:
    """The namespace of a name, or None."""
    return next(iter(namespaces(connection, "name = ?", name)), None)


def namespace(connection: Connection, name: str) -> Namespace:
    """Raises NotFound."""
    found = find_namespace(connection, name)
    if found is None:
        raise namespace_not_found(name)
    return found


def namespace_by_id(connection: Connection, namespace_id: int, name: str) -> Namespace:
    """The namespace of an id. Raises NotFound, which calls it ``name``, once it was dropped."""
    found = namespaces(connection, "id = ?", namespace_id)
    if not found:
        raise namespace_not_found(name)
    return found[0]


def namespace_not_found(name: str) -> NotFound:
    """The error for a namespace that is not there."""
    return NotFound(
        f"There is no namespace {name!r}.",
        hint="Ingest something into it first, or list those there are.",
        code="namespace_not_found",
    )


def create_namespace(
    connection: Connection, name: str, embedder: str, dim: int, index_type: str
) -> Namespace:
    """Raises InvalidRequest for a bad name or dimension."""
    if not NAMESPACE.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} is not a namespace name.",
            hint="Letters, digits, '_', '.' and '-', at most 64, starting with a letter or digit.",
            code="invalid_namespace",
            param="namespace",
        )
    if not 1 <= dim <= 65_536:
        raise InvalidRequest(
            f"Vectors of {dim} components cannot be indexed.", code="invalid_dim", param="dim"
        )
    connection.execute(
        "INSERT INTO namespaces (name, embedder, dim, index_type, created_at, uid) VALUES (?, ?, ?, ?, ?, ?)",
        (name, embedder, dim, index_type, time.time(), secrets.token_hex(16)),
    )
    created = namespace(connection, name)
    connection.execute("INSERT INTO versions VALUES (?, 0, ?)", (created.id, _stamp()))
    connection.dialect.lexical.create(connection, created.id)
    return created


def set_index_type(connection: Connection, ns: Namespace, index_type: str) -> None:
    """Change the type in a version of its own, so that other processes notice."""
    connection.execute("UPDATE namespaces SET index_type = ? WHERE id = ?", (index_type, ns.id))
    commit_version(connection, ns)


def stamp_of(connection: Connection, namespace_id: int, version: int) -> int | None:
    """The random stamp of a version; None for one that the registry never had, or has pruned."""
    row = connection.execute(
        "SELECT stamp FROM versions WHERE namespace_id = ? AND version = ?", (namespace_id, version)
    ).fetchone()
    return row[0] if row else None


def _stamp() -> int:
    return secrets.randbits(62)


def to_document(namespace_name: str, row: tuple[Any, ...], viewer: Viewer) -> Document:
    """A document from a row of ``_DOCUMENT``, as a viewer sees it."""
    *columns, metadata, labels = row
    shown = tuple(viewer.shown(json.loads(labels)))
    values: tuple[Any, ...] = (columns[0], namespace_name, *columns[1:], json.loads(metadata), shown)
    return Document(*values)


def write_documents(
    connection: Connection, ns: Namespace, batch: Sequence[Prepared], viewer: Viewer
) -> list[Document]:
    """Write a viewer's batch as version ``ns.version + 1``, replacing documents of the same sources. Raises
    Forbidden for one that the viewer does not see."""
    now = time.time()
    version = ns.version + 1
    documents = chunks = tokens = changed = 0  # differences to the version before
    written, rows = [], []
    lexical = connection.dialect.lexical
    ids = [doc_id for item in batch for doc_id in (item.doc_id, *item.older_ids)]
    lexical.remove(connection, ns.id, _rows_of(connection, ns, ids))
    corrected = corrections.read(connection, ns.id, [item.doc_id for item in batch])
    inherited = labels_of_new(connection, ns.id, ns.name, batch)
    for item in batch:
        corrections.remove_of(connection, ns.id, item.older_ids)
        # last its own, whose created_at stays
        for doc_id in (*item.older_ids, item.doc_id):
            old = _delete(connection, ns, version, doc_id)
            if old is not None:
                documents, changed = documents - 1, changed + old[0]
                chunks, tokens = chunks - old[0], tokens - old[1]
        own = corrected.get(item.doc_id, [])
        cut = corrections.applied(connection, ns.id, ns.dim, item, own, now)
        n, n_tokens = len(cut.chunks), sum(chunk.n_tokens for chunk in cut.chunks)
        row = (
            item.doc_id,
            item.document.source,
            item.document.title,
            item.document.content_hash,
            item.document.mime,
            item.document.size_bytes,
            n,
            n_tokens,
            old[2] if old else now,
            now,
            item.metadata,
            replaced_labels(viewer, item.document, old[3] if old else inherited.get(item.doc_id, "[]")),
        )
        first_id = connection.dialect.reserve_chunks(connection, n)
        (document,) = connection.execute(
            "INSERT INTO documents"
            " (doc_id, source, title, content_hash, mime, size_bytes, n_chunks, n_tokens, created_at,"
            " updated_at, metadata, labels, namespace_id, first_id)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id",
            (*row, ns.id, first_id),
        ).fetchone()
        rows.append(document)
        _insert_chunks(connection, ns, version, document, first_id, cut)
        unlog_present(connection, ns.name, document, item.doc_id, item.document.title)
        documents, chunks, tokens, changed = documents + 1, chunks + n, tokens + n_tokens, changed + n
        written.append(to_document(ns.name, row, viewer))
    lexical.add(connection, ns.id, rows)
    commit_version(connection, ns, changed, documents, chunks, tokens)
    return written


def unchanged(
    connection: Connection, ns: Namespace, batch: Sequence[Prepared], as_read: Iterable[Document]
) -> list[Prepared]:
    """Select the documents of a batch that nobody has written or removed since they were read."""
    versions = {(document.doc_id, document.updated_at) for document in as_read}
    rows = connection.execute(
        "SELECT doc_id, updated_at FROM documents"
        f" WHERE namespace_id = ? AND doc_id IN (SELECT value FROM {connection.dialect.texts} listed)",
        (ns.id, json.dumps([item.doc_id for item in batch])),
    )
    same = {row[0] for row in rows if row in versions}
    return [item for item in batch if item.doc_id in same]


def under_known_ids(connection: Connection, ns: Namespace, batch: Sequence[Prepared]) -> list[Prepared]:
    """The batch with the ids under which its documents are stored; those of new ones stay."""
    stored = set()
    if ids := [doc_id for item in batch if item.older_ids for doc_id in (item.doc_id, *item.older_ids)]:
        rows = connection.execute(
            "SELECT doc_id FROM documents"
            f" WHERE namespace_id = ? AND doc_id IN (SELECT value FROM {connection.dialect.texts} listed)",
            (ns.id, json.dumps(ids)),
        )
        stored = {row[0] for row in rows}
    found = []
    for item in batch:
        known = [doc_id for doc_id in (item.doc_id, *item.older_ids) if doc_id in stored]
        found.append(replace(item, doc_id=known[0], older_ids=known[1:]) if known else item)
    return found


def delete_document(connection: Connection, ns: Namespace, doc_id: str, viewer: Viewer) -> Document:
    """Remove a viewer's document as version ``ns.version + 1`` and return it. Raises NotFound."""
    removed = get_document(connection, ns, doc_id, viewer)
    connection.dialect.lexical.remove(connection, ns.id, _rows_of(connection, ns, [doc_id]))
    _delete(connection, ns, ns.version + 1, doc_id)
    corrections.remove_of(connection, ns.id, [doc_id])
    commit_version(connection, ns, removed.n_chunks, -1, -removed.n_chunks, -removed.n_tokens)
    return removed


def _rows_of(connection: Connection, ns: Namespace, doc_ids: Sequence[str]) -> list[int]:
    """Row ids of the documents that exist."""
    rows = connection.execute(
        "SELECT id FROM documents"
        f" WHERE namespace_id = ? AND doc_id IN (SELECT value FROM {connection.dialect.texts} listed)",
        (ns.id, json.dumps(doc_ids)),
    )
    return [row[0] for row in rows]


def _delete(
    connection: Connection, ns: Namespace, version: int, doc_id: str
) -> tuple[int, int, float, str] | None:
    """Remove a document if it exists, except from the lexical index. Returns its (chunks, tokens,
    created_at, labels)."""
    log_document(connection, ns.name, ns.id, doc_id)
    row = connection.execute(
        "DELETE FROM documents WHERE namespace_id = ? AND doc_id = ?"
        " RETURNING first_id, n_chunks, n_tokens, created_at, labels",
        (ns.id, doc_id),
    ).fetchone()
    if row is None:
        return None
    first_id, n_chunks, n_tokens, created_at, labels = row
    if n_chunks:
        connection.execute("INSERT INTO removals VALUES (?, ?, ?, ?)", (ns.id, version, first_id, n_chunks))
    return n_chunks, n_tokens, created_at, labels


def _insert_chunks(
    connection: Connection,
    ns: Namespace,
    version: int,
    document: int,
    first_id: int,
    cut: corrections.CorrectedCut,
) -> None:
    connection.executemany(
        'INSERT INTO chunks (chunk_id, document, ordinal, start, "end", page, n_tokens, text, edited)'
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (first_id + i, document, at, c.start, c.end, c.page, c.n_tokens, c.text, int(c.edited))
            for i, (at, c) in enumerate(zip(cut.ordinals, cut.chunks, strict=True))
        ),
    )
    connection.executemany(
        "INSERT INTO sentences (chunk_id, data) VALUES (?, ?)",
        (
            (first_id + i, c.sentences.encode())
            for i, c in enumerate(cut.chunks)
            if c.sentences is not None and len(c.sentences)
        ),
    )
    for start in range(0, len(cut.vectors), VECTORS_PER_ROW):
        block = cut.vectors[start : start + VECTORS_PER_ROW]
        connection.execute(
            "INSERT INTO vectors (first_id, namespace_id, version, n, document, data)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (first_id + start, ns.id, version, len(block), document, block.tobytes()),
        )


def commit_version(
    connection: Connection,
    ns: Namespace,
    changed: int = 0,
    documents: int = 0,
    chunks: int = 0,
    tokens: int = 0,
) -> None:
    """Make version ``ns.version + 1``; the other numbers are added to the namespace's."""
    connection.execute(
        "UPDATE namespaces SET version = version + 1, changed = changed + ?, n_documents = n_documents + ?,"
        " n_chunks = n_chunks + ?, n_tokens = n_tokens + ? WHERE id = ?",
        (changed, documents, chunks, tokens, ns.id),
    )
    connection.execute("INSERT INTO versions VALUES (?, ?, ?)", (ns.id, ns.version + 1, _stamp()))


def get_document(connection: Connection, ns: Namespace, doc_id: str, viewer: Viewer) -> Document:
    """Raises NotFound, alike for one that the viewer does not see and for one that never was."""
    row = connection.execute(
        f"SELECT {_DOCUMENT} FROM documents d WHERE d.namespace_id = ? AND d.doc_id = ?", (ns.id, doc_id)
    ).fetchone()
    if row is None or not viewer.sees(json.loads(row[-1])):
        raise NotFound(
            f"There is no document {doc_id!r} in namespace {ns.name!r}.",
            hint="List its documents.",
            code="document_not_found",
        )
    return to_document(ns.name, row, viewer)


def list_documents(
    connection: Connection,
    ns: Namespace,
    condition: Condition | None,
    limit: int,
    after: str | None,
    prefix: str | None,
    viewer: Viewer,
) -> list[Document]:
    """List up to ``limit`` documents of the viewer that meet the condition, by doc_id, behind ``after``, with
    this source prefix. Raises InvalidRequest as `selected_ids` does."""
    sql, parameters = both(condition, visible(connection, ns.id, viewer)) or ("TRUE", [])
    begun, begin = "TRUE", list[Any]()
    if prefix:
        begun, begin = (
            f"substr({connection.dialect.nfc}(d.source), 1, ?) = ?",
            [len(normal(prefix)), normal(prefix)],
        )
    with filtering(connection):
        rows = connection.execute(
            f"SELECT {_DOCUMENT} FROM documents d WHERE d.namespace_id = ? AND {sql}"
            f" AND d.doc_id > ? AND {begun} ORDER BY d.doc_id LIMIT ?",
            [ns.id, *parameters, after or "", *begin, limit],
        ).fetchall()
    return [to_document(ns.name, row, viewer) for row in rows]


def to_chunk(row: Any, namespace_name: str) -> Chunk:
    """A chunk from a row of ``_CHUNK``."""
    return Chunk(*[*row[:10], json.loads(row[10]), bool(row[11]), namespace_name])


def chunks_by_id(
    connection: Connection, ns: Namespace, chunk_ids: Iterable[int], viewer: Viewer
) -> dict[int, Chunk]:
    """The chunks that exist, belong to the namespace and are seen by the viewer, by id."""
    rows = connection.execute(
        # CROSS JOIN keeps this order: left to itself, SQLite reads all chunks of the namespace
        f"SELECT {_CHUNK} FROM {connection.dialect.integers} wanted"
        " CROSS JOIN chunks c CROSS JOIN documents d"
        " WHERE c.chunk_id = wanted.value AND d.id = c.document AND d.namespace_id = ?",
        (json.dumps(list(chunk_ids)), ns.id),
    )
    return {row[0]: to_chunk(row, ns.name) for row in rows if sees(viewer, row[-1])}


def added_since(
    connection: Connection, ns: Namespace, after: Position, most: int
) -> list[tuple[int, int, int]]:
    """The next runs of chunks in the change log, (version, first id, length) each: of at most ``most`` chunks
    together, or the first run alone."""
    rows = connection.execute(
        "SELECT version, first_id, n FROM vectors WHERE namespace_id = ? AND (version, first_id) > (?, ?)"
        " ORDER BY version, first_id LIMIT ?",
        (ns.id, *after, most),
    ).fetchall()
    total = np.cumsum([row[2] for row in rows])
    return [tuple(row) for row in rows[: max(1, int((total <= most).sum()))]]


_ALL = 2**31 - 1


def document_chunks(
    connection: Connection,
    ns: Namespace,
    doc_id: str,
    viewer: Viewer,
    after: int = 0,
    limit: int | None = None,
) -> list[Chunk]:
    """The chunks of a viewer's document that are searched, in text order: all, or those of ``limit`` ordinals
    from ``after`` on. Raises NotFound."""
    get_document(connection, ns, doc_id, viewer)
    until = _ALL if limit is None else min(_ALL, after + limit)
    rows = connection.execute(
        f"SELECT {_CHUNK} FROM documents d JOIN chunks c ON c.document = d.id"
        " WHERE d.namespace_id = ? AND d.doc_id = ? AND c.ordinal >= ? AND c.ordinal < ? ORDER BY c.ordinal",
        (ns.id, doc_id, min(after, _ALL), until),
    )
    return [to_chunk(row, ns.name) for row in rows]


def expand(ranges: Sequence[tuple[int, int]]) -> Ids:
    """Return all ids of (first, n) ranges, ascending."""
    if not ranges:
        return np.empty(0, dtype=np.int64)
    first, n = np.array(sorted(ranges), dtype=np.int64).T
    starts = np.cumsum(n) - n
    return np.repeat(first - starts, n) + np.arange(int(n.sum()), dtype=np.int64)


def selected_ids(connection: Connection, ns_id: int, condition: Condition) -> Ids:
    """Ids of all chunks whose document meets the condition, ascending. Raises InvalidRequest for one that
    takes longer than `filters.MAX_S`."""
    sql, parameters = condition
    with filtering(connection):
        rows = connection.execute(
            "SELECT d.first_id, d.n_chunks FROM documents d"
            f" WHERE d.namespace_id = ? AND d.n_chunks > 0 AND {sql}",
            [ns_id, *parameters],
        ).fetchall()
    return expand(rows)
