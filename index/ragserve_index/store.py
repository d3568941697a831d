"""The documents, chunks and vectors of a data directory, and searches. README.md has the promises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragserve.errors import Conflict, InvalidRequest, NotFound
from ragserve_index import batch as batches
from ragserve_index import job_cancellation, labelling, own_settings, registry, stored_vectors, structures
from ragserve_index.attached_documents import attached_to, remove_attached
from ragserve_index.chunk_changes import ChunkChanges
from ragserve_index.chunk_windows import chunks_around
from ragserve_index.evictions import log_namespace
from ragserve_index.filters import AnyFilter, compile_filter
from ragserve_index.gpu import GpuMirror
from ragserve_index.index import file_format
from ragserve_index.index.pool import IndexPool
from ragserve_index.integrity import check_database, check_namespace
from ragserve_index.joint_search import JointSearcher
from ragserve_index.labelled_store import LabelledStore
from ragserve_index.lexical_indexes import LexicalIndexes
from ragserve_index.opening import check_device, folder_error, open_database
from ragserve_index.sentence_vectors import SentenceVectors
from ragserve_index.structures.base import Floats, Ids
from ragserve_index.types import (
    AddedChunks,
    Chunk,
    Document,
    IndexReport,
    JointResult,
    NamespaceInfo,
    NewChunk,
    NewDocument,
    Position,
    SearchResult,
)
from ragserve_index.viewers import EVERYTHING


class IndexStore(LabelledStore):
    """The store of a data directory. Thread-safe, and safe with other processes that use the same directory.

    Raises the errors of ``ragserve.errors``: NotFound (``namespace_not_found``, ``document_not_found``,
    ``chunk_not_found``), InvalidRequest, Conflict, StorageFull (nothing was changed), Unavailable, and
    RegistryDamaged when the registry cannot be read.

    A store is one viewer's: what that does not see looks as if it were not there, in every method that reads
    documents or searches, and in numbers. A new store sees everything; `seen_by` makes another's of it."""

    def __init__(
        self,
        data_dir: Path,
        *,
        index_type: str = "flat",
        device: str = "cpu",
        registry_url: str | None = None,
    ) -> None:
        """Open ``data_dir``, creating it if absent. ``index_type`` is for new namespaces; ``device`` is cpu
        or gpu. ``registry_url``: keep the registry in that Postgres database instead of the folder's SQLite
        file; the folder then holds this process's indexes, made from it.
        """
        structures.check_type(index_type)
        check_device(index_type, device)
        gpu = GpuMirror() if device == "gpu" else None
        self.data_dir = Path(data_dir)
        self.index_type = index_type
        self._directory = self.data_dir / "indexes"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self.database = open_database(self.data_dir, registry_url)
            try:
                file_format.remove_leftovers(self._directory, self._known_files)
            except BaseException:
                self.database.close()
                raise
        except OSError as error:
            raise folder_error(self.data_dir, error) from error
        self._pool = IndexPool(self.database, self._directory, gpu)
        self._lexical = LexicalIndexes(self.database, self._directory)
        self._searcher = JointSearcher(self.database, self._pool, self._lexical)
        self.chunk_changes = ChunkChanges(self.database, self._pool)
        self._closed = False
        self._viewer = EVERYTHING

    def _known_files(self) -> set[Path]:
        with self.database.read() as connection:
            return {file_format.index_path(self._directory, ns.id) for ns in registry.namespaces(connection)}

    def __enter__(self) -> IndexStore:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # namespaces

    def ensure_namespace(
        self, name: str, *, embedder: str, dim: int, index_type: str | None = None, job_id: str | None = None
    ) -> NamespaceInfo:
        """Return the namespace, creating it if absent; ``index_type`` applies only then (see
        :meth:`rebuild`). Raises Conflict for another embedder, and where a cancelled job would create it."""
        kind = structures.check_type(index_type or self.index_type)
        with self.database.read() as connection:
            ns = registry.find_namespace(connection, name)
        if ns is None:
            with self.database.write() as connection:
                job_cancellation.check_goes_on(connection, job_id)
                ns = registry.find_namespace(connection, name) or registry.create_namespace(
                    connection, name, embedder, dim, kind
                )
        if (ns.embedder, ns.dim) != (embedder, dim):
            raise Conflict(
                f"Namespace {name!r} holds vectors of {ns.embedder} with {ns.dim} components, "
                f"not of {embedder} with {dim}.",
                hint="Use that embedder, or another namespace, or drop this one and ingest again.",
                code="embedder_mismatch",
            )
        return ns.info()

    def namespaces(self) -> list[NamespaceInfo]:
        """List all namespaces, by name."""
        with self.database.read() as connection:
            every = registry.namespaces(connection)
            return [self._searcher.info(connection, ns, self._viewer) for ns in every]

    def namespace(self, name: str) -> NamespaceInfo:
        """Raises NotFound."""
        with self.database.read() as connection:
            ns = registry.namespace(connection, name)
            return self._searcher.info(connection, ns, self._viewer)

    def made_at(self) -> dict[str, float]:
        """When each namespace was made, in Unix seconds, by name: later for one that was dropped and made
        again."""
        with self.database.read() as connection:
            return dict(connection.execute("SELECT name, created_at FROM namespaces").fetchall())

    def settings(self, name: str) -> dict[str, Any]:
        """A namespace's own settings; empty for one without, or that does not exist."""
        with self.database.read() as connection:
            return own_settings.read(connection, name)

    def set_settings(self, name: str, settings: Mapping[str, Any]) -> None:
        """Replace a namespace's own settings, JSON values. Raises NotFound."""
        with self.database.write() as connection:
            own_settings.write(connection, registry.namespace(connection, name).id, settings)

    def drop_namespace(self, name: str) -> NamespaceInfo:
        """Remove a namespace with all its documents, cancel its jobs, and return what it was. Raises
        NotFound, and Forbidden if the viewer does not see all of them."""
        with self.database.write() as connection:
            ns = registry.namespace(connection, name)
            labelling.check_sees_all(connection, ns, self._viewer)
            log_namespace(connection, name)
            job_cancellation.cancel(connection, namespace=name)
            connection.execute("DELETE FROM namespaces WHERE id = ?", (ns.id,))
            connection.dialect.lexical.drop(connection, ns.id)
        self._searcher.forget(ns.id)
        return ns.info()

    def forget_dropped(self) -> None:
        """Let go of the indexes, in memory and on disk, of namespaces that other processes have dropped."""
        self._searcher.forget_dropped(file_format.namespace_ids(self._directory))

    # documents

    def replace_documents(
        self,
        namespace: str,
        batch: Iterable[tuple[NewDocument, Sequence[NewChunk], Any]],
        *,
        as_read: Iterable[Document] | None = None,
        job_id: str | None = None,
    ) -> list[Document]:
        """Write documents with their chunks and vectors, [n_chunks, dim] float32 of length 1, replacing those
        of the same sources, and return what was written.

        ``as_read``: the versions to replace. A document that was written or removed since is left alone. One
        transaction: when this returns, all of it is on disk; when it raises or the process dies, none of it
        is. What was attached to a replaced version and is not to the new one is removed if the viewer sees
        it. Raises Conflict where a cancelled job, as all are with their namespace, would write."""
        ns = self._namespace(namespace)
        prepared = batches.prepare(ns.name, ns.dim, batch)
        if not prepared:
            return []
        with self.database.write() as connection:
            job_cancellation.check_goes_on(connection, job_id)
            now = registry.namespace(connection, namespace)
            if (now.embedder, now.dim) != (ns.embedder, ns.dim):
                raise Conflict(
                    f"Namespace {namespace!r} was dropped and created again with another embedder.",
                    code="embedder_mismatch",
                )
            prepared = registry.under_known_ids(connection, now, prepared)
            if as_read is not None:
                prepared = registry.unchanged(connection, now, prepared, as_read)
            ids = [item.doc_id for item in prepared]
            attached = attached_to(connection, now, ids)
            written = []
            if prepared:
                written = registry.write_documents(connection, now, prepared, self._viewer)
            if attached:
                kept = {*ids, *attached_to(connection, now, ids)}
                kept |= labelling.hidden_ids(connection, namespace, attached, self._viewer)
                remove_attached(connection, ns, [one for one in attached if one not in kept])
        self._pool.after_write(ns)
        return written

    def remove_document(self, namespace: str, doc_id: str) -> Document:
        """Remove a document, and those that came attached to it, and return it. Raises NotFound, and
        Forbidden if the viewer does not see all of them."""
        with self.database.write() as connection:
            ns = registry.namespace(connection, namespace)
            registry.get_document(connection, ns, doc_id, self._viewer)
            attached = attached_to(connection, ns, [doc_id])
            labelling.check_sees_attached(connection, ns, attached, self._viewer)
            removed = registry.delete_document(connection, ns, doc_id, self._viewer)
            remove_attached(connection, ns, attached)
        self._pool.after_write(ns)
        return removed

    def document(self, namespace: str, doc_id: str) -> Document:
        """Raises NotFound."""
        with self.database.read() as connection:
            ns = registry.namespace(connection, namespace)
            return registry.get_document(connection, ns, doc_id, self._viewer)

    def find_source(self, namespace: str, source: str) -> Document | None:
        """The document of a source, in whatever form of Unicode it is typed, or None. Raises NotFound for the
        namespace."""
        for doc_id in batches.document_ids(namespace, source):
            try:
                return self.document(namespace, doc_id)
            except NotFound as error:
                if error.code != "document_not_found":
                    raise
        return None

    def documents(
        self,
        namespace: str,
        *,
        filter: AnyFilter | None = None,
        limit: int = 100,
        after: str | None = None,
        source_prefix: str | None = None,
    ) -> list[Document]:
        """List up to ``limit`` documents in the order of doc_id, starting behind ``after``. Sources and
        ``source_prefix`` are compared in one normal form."""
        if limit < 1:
            raise InvalidRequest("limit must be at least 1.", param="limit")
        condition = None if filter is None else compile_filter(filter, self.database.dialect)
        with self.database.read() as connection:
            ns = registry.namespace(connection, namespace)
            return registry.list_documents(
                connection, ns, condition, limit, after, source_prefix, self._viewer
            )

    def chunks(self, namespace: str, chunk_ids: Sequence[int]) -> list[Chunk]:
        """The chunks in the order of ``chunk_ids``. Raises NotFound if one is not in the namespace (any
        more).
        """
        with self.database.read() as connection:
            found = registry.chunks_by_id(
                connection,
                registry.namespace(connection, namespace),
                (int(i) for i in chunk_ids),
                self._viewer,
            )
        try:
            return [found[int(i)] for i in chunk_ids]
        except KeyError as error:
            raise NotFound(
                f"There is no chunk {error} in namespace {namespace!r}.",
                hint="Search again.",
                code="chunk_not_found",
            ) from None

    def chunks_around(self, namespace: str, chunk_ids: Iterable[int], n: int) -> dict[int, Chunk]:
        """Return these chunks and up to ``n`` before and after each in its document, by id; those that are
        gone are left out."""
        with self.database.read() as connection:
            ns = registry.namespace(connection, namespace)
            return chunks_around(connection, ns, [int(i) for i in chunk_ids], n, self._viewer)

    def added_chunks(self, namespace: str, after: Position, most: int) -> AddedChunks:
        """The next chunks of the change log behind ``after``, at most ``most`` or one run of at most 1,024.
        Raises NotFound."""
        with self.database.read() as connection:
            ns = registry.namespace(connection, namespace)
            runs = registry.added_since(connection, ns, after, most)
            ids = [first + i for _, first, n in runs for i in range(n)]
            found = registry.chunks_by_id(connection, ns, ids, self._viewer)
        position = (runs[-1][0], runs[-1][1]) if runs else after
        return AddedChunks(ns.id, ns.n_chunks, list(found.values()), len(ids), position)

    def document_chunks(
        self, namespace: str, doc_id: str, *, after: int = 0, limit: int | None = None
    ) -> list[Chunk]:
        """Return the chunks of a document that are searched, in text order: all, or those of ``limit``
        ordinals from ``after`` on. ``chunk_changes`` has the disabled ones, too. Raises NotFound."""
        with self.database.read() as connection:
            ns = registry.namespace(connection, namespace)
            return registry.document_chunks(connection, ns, doc_id, self._viewer, after, limit)

    def sentence_vectors(self, namespace: str, chunk_ids: Sequence[int]) -> dict[int, SentenceVectors]:
        """Embedded sentences of chunks, by id; a chunk that is gone, or was embedded without, is left out."""
        with self.database.read() as connection:
            ns = registry.namespace(connection, namespace)
            return stored_vectors.sentence_vectors(connection, ns, (int(i) for i in chunk_ids), self._viewer)

    # searches

    def search(
        self, namespace: str, queries: np.ndarray, k: int, *, filter: AnyFilter | None = None
    ) -> SearchResult:
        """The k best chunks for each query [n, dim] float32, all of one committed version; fewer than k only
        if fewer exist.

        flat is exact, sq8 compares all vectors rounded to 8 bits, ivf and hnsw are approximate (exact when
        few are selected). Raises InvalidRequest for k outside 1..10,000, queries of another shape or not
        finite, and a filter over its limits."""
        return self._searcher.search(namespace, queries, k, filter, self._viewer)

    def search_text(
        self,
        namespace: str,
        text: str,
        k: int,
        *,
        variants: Sequence[str] = (),
        vector: np.ndarray | None = None,
        filter: AnyFilter | None = None,
    ) -> SearchResult:
        """The k best chunks for one text by BM25, all of one committed version; fewer if fewer share a word
        with it. With its ``vector`` [dim] float32, a dense search's chunks are fused in (`fusion`).

        Each of ``variants``, other wordings of the text, is searched too: BM25 is then the mean of all, in
        which ``text`` counts as much as the variants together. Any text is a valid query. Raises
        InvalidRequest as :meth:`search`."""
        return self._searcher.search_text(namespace, (text, *variants), k, filter, vector, self._viewer)

    def search_several(
        self,
        namespaces: Sequence[str],
        k: int,
        *,
        text: str | None = None,
        variants: Sequence[str] = (),
        vector: np.ndarray | None = None,
        filter: AnyFilter | None = None,
    ) -> JointResult:
        """The k best chunks of several namespaces as of one: by ``vector`` [dim] float32 alone as in
        :meth:`search`, by ``text`` alone or by both as in :meth:`search_text`. BM25 has the statistics of all
        of them together, for the `fusion.DEPTH` best of each. Raises NotFound for one that is not there."""
        texts = () if text is None else (text, *variants)
        return self._searcher.search_several(namespaces, texts, k, filter, vector, self._viewer)

    def word_counts(self, namespace: str, words: Sequence[str]) -> dict[str, int]:
        """The number of the namespace's chunks that have each word, as the lexical index compares words; of
        frequent words about that. Raises NotFound."""
        return self._searcher.word_counts(namespace, words, self._viewer)

    def search_ids(
        self, namespace: str, queries: np.ndarray, k: int, *, filter: AnyFilter | None = None
    ) -> tuple[Floats, Ids, int]:
        """Search as :meth:`search`, without rows: scores [n, k] float32, chunk ids [n, k] int64 (-1 for
        none), the version.
        """
        return self._searcher.search_ids(namespace, queries, k, filter, self._viewer)

    def faiss_index(self, namespace: str) -> Any:
        """The FAISS index as it is now, for measurements. Search it from one thread and change nothing."""
        index = self._pool.of(self._namespace(namespace))
        index.catch_up()
        return index.structure.index if index.structure is not None else None

    # maintenance

    def check(self, namespace: str | None = None) -> list[IndexReport]:
        """Check all namespaces (or one) for inconsistencies. Raises RegistryDamaged if the database's own
        check fails.
        """
        check_database(self.database)
        return [
            check_namespace(self.database, self._pool.of(ns), self._lexical_damage(ns))
            for ns in self._chosen(namespace)
        ]

    def _lexical_damage(self, ns: registry.Namespace) -> str | None:
        with self.database.write() as connection:
            damage = connection.dialect.lexical.damage(connection, ns.id)
        return damage or self._lexical.problem(ns)

    def rebuild_lexical(self, namespace: str) -> None:
        """Build the lexical index again from the chunks, in one transaction, and that of tantivy, if there is
        one, in the background. Raises NotFound."""
        with self.database.write() as connection:
            ns = registry.namespace(connection, namespace)
            connection.dialect.lexical.build(connection, ns.id)
        self._lexical.remove(ns.id)

    def rebuild(self, namespace: str, *, index_type: str | None = None) -> NamespaceInfo:
        """Rebuild the index from the registry and save it, optionally as another type. Searches go on
        meanwhile.
        """
        ns = self._namespace(namespace)
        if index_type is not None and structures.check_type(index_type) != ns.index_type:
            with self.database.write() as connection:
                registry.set_index_type(connection, registry.namespace(connection, namespace), index_type)
        index = self._pool.of(ns)
        index.rebuild("requested")
        index.save()
        return self.namespace(namespace)

    def save(self, namespace: str | None = None) -> None:
        """Bring the indexes of all namespaces (or one) up to date and write those whose files are older.
        Raises StorageFull.
        """
        for ns in self._chosen(namespace):
            if self._lexical.serves(ns):
                self._lexical.bring_up(ns)
            self._pool.of(ns).bring_up_and_save()

    def close(self) -> None:
        """Save indexes where worth it, and close. Idempotent. A failing save is only logged: the registry
        holds everything.
        """
        if not self._closed:
            self._closed = True
            self._lexical.close()
            self._pool.close()
            self.database.close()

    def _namespace(self, name: str) -> registry.Namespace:
        with self.database.read() as connection:
            return registry.namespace(connection, name)

    def _chosen(self, name: str | None) -> list[registry.Namespace]:
        """The named namespace, or all."""
        if name is not None:
            return [self._namespace(name)]
        with self.database.read() as connection:
            return registry.namespaces(connection)
