"""Integrity of one namespace: the registry agrees with itself, and both indexes hold exactly what it does."""

from __future__ import annotations

import numpy as np

from ragserve_index import corrections, registry
from ragserve_index.database import Connection, Database
from ragserve_index.errors import RegistryDamaged
from ragserve_index.index.namespace_index import NamespaceIndex
from ragserve_index.sentence_vectors import SentenceVectors
from ragserve_index.types import IndexReport


def check_database(database: Database) -> None:
    """Raises RegistryDamaged if the database's own check fails."""
    if lines := database.quick_check():
        raise RegistryDamaged(
            f"The registry {database.name} is damaged: {'; '.join(lines)}.",
            hint="Restore it from a backup, or move the data directory away and ingest again.",
        )


def check_namespace(database: Database, index: NamespaceIndex, lexical_damage: str | None) -> IndexReport:
    """Check a namespace at one version; ``lexical_damage`` is what the lexical index's own check found. The
    file is checked before the index is opened, because opening replaces a damaged file in memory.
    """
    with index.updating, database.read() as connection:
        ns = registry.namespace_by_id(connection, index.namespace_id, index.name)
        file = index.file.status(connection, ns)
        index_bytes = index.file.path.stat().st_size if file != "missing" else 0
        problems, expected = _registry_problems(connection, ns)
        if lexical_damage is not None:
            problems.append(lexical_damage)
        problems += connection.dialect.lexical.missing_and_extra(connection, ns.id, expected)
        index.follow(connection)
        structure = index.structure
        n_indexed, tombstones, name = 0, 0, "none"
        if structure is not None:
            have = structure.ids()
            n_indexed, tombstones, name = len(have), structure.tombstones, structure.name
            for found, text in (
                (np.setdiff1d(expected, have), "chunks are missing from the index"),
                (np.setdiff1d(have, expected), "indexed ids have no chunk"),
            ):
                if len(found):
                    problems.append(f"{len(found)} {text}: {found[:5].tolist()}")
            if len(np.unique(have)) != len(have) or structure.count != len(have):
                problems.append(f"{structure.count} vectors in the index under {len(np.unique(have))} ids")
    if file.startswith("damaged"):
        problems.append(f"{index.file.path} is {file}; it is not used and will be replaced at the next save")
    return IndexReport(
        namespace=ns.name,
        index_type=ns.index_type,
        structure=name,
        version=ns.version,
        n_documents=ns.n_documents,
        n_chunks=ns.n_chunks,
        n_indexed=n_indexed,
        n_tombstones=tombstones,
        index_bytes=index_bytes,
        file=file,
        problems=tuple(problems),
    )


def _registry_problems(connection: Connection, ns: registry.Namespace) -> tuple[list[str], registry.Ids]:
    """Return what disagrees, and the chunk ids that documents claim."""
    problems = []
    counted = connection.execute(
        "SELECT count(*), CAST(coalesce(sum(n_chunks), 0) AS BIGINT),"
        " CAST(coalesce(sum(n_tokens), 0) AS BIGINT) FROM documents"
        " WHERE namespace_id = ?",
        (ns.id,),
    ).fetchone()
    kept = (ns.n_documents, ns.n_chunks, ns.n_tokens)
    if counted != kept:
        problems.append(f"documents, chunks and tokens are {counted}, the namespace says {kept}")
    ranges = "SELECT first_id, n_chunks FROM documents WHERE namespace_id = ? AND n_chunks > 0"
    claimed = registry.expand(connection.execute(ranges, (ns.id,)).fetchall())
    rows = connection.execute(
        "SELECT c.chunk_id FROM documents d JOIN chunks c ON c.document = d.id WHERE d.namespace_id = ?"
        " ORDER BY c.chunk_id",
        (ns.id,),
    )
    chunk_ids = np.fromiter((row[0] for row in rows), dtype=np.int64)
    if not np.array_equal(claimed, chunk_ids):
        problems.append(f"documents claim {len(claimed)} chunks, {len(chunk_ids)} rows are there")
    blocks = connection.execute(
        "SELECT first_id, n, length(data) FROM vectors WHERE namespace_id = ?", (ns.id,)
    ).fetchall()
    if not np.array_equal(claimed, registry.expand([(first_id, n) for first_id, n, _ in blocks])):
        problems.append("the vectors are not those of the chunks")
    wrong = [first_id for first_id, n, size in blocks if size != n * ns.dim * 4]
    if wrong:
        problems.append(f"{len(wrong)} rows of vectors have a wrong length: {wrong[:5]}")
    sentences = connection.execute(
        "SELECT s.chunk_id, length(s.data) FROM documents d JOIN chunks c ON c.document = d.id"
        " JOIN sentences s ON s.chunk_id = c.chunk_id WHERE d.namespace_id = ?",
        (ns.id,),
    )
    wrong = [chunk_id for chunk_id, size in sentences if size % SentenceVectors.bytes_each(ns.dim)]
    if wrong:
        problems.append(f"{len(wrong)} rows of sentences have a wrong length: {wrong[:5]}")
    problems += corrections.problems(connection, ns.id, ns.dim)
    return problems, claimed
