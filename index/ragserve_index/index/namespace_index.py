"""A namespace's index in this process: opened from its file, kept up with the registry, rebuilt, saved.

The registry is the truth and the index follows it. A version is applied as a whole under the write lock, so
that a search, which holds the read lock, always sees one committed version. Three locks, always taken in this
order:

* ``_building``: one rebuild at a time; held during training, while searches and updates go on;
* ``updating``: one thread at a time changes or saves the structure;
* ``lock``: readers search, the writer changes or replaces the structure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from threading import Lock, RLock

import numpy as np

from ragserve.errors import InvalidRequest
from ragserve_index import registry, structures
from ragserve_index.database import Connection, Database
from ragserve_index.gpu import GpuMirror
from ragserve_index.index import file_format, vectors
from ragserve_index.index.file_format import Damaged
from ragserve_index.index.index_file import IndexFile
from ragserve_index.locks import ReadWriteLock
from ragserve_index.structures.base import Floats, Ids, IdSelection, Results, Structure, load_faiss

log = logging.getLogger(__name__)

_LOWEST = np.finfo(np.float32).min  # FAISS's own score of "no result"


class Behind(Exception):
    """The index is not at the requested version. Internal: the caller catches up and searches again."""


class NamespaceIndex:
    """Thread-safe. ``version`` is the committed version that searches see; -1 while nothing is loaded."""

    def __init__(
        self, database: Database, directory: Path, ns: registry.Namespace, gpu: GpuMirror | None
    ) -> None:
        self.namespace_id = ns.id
        self.name = ns.name
        self.dim = ns.dim
        self.index_type = ns.index_type
        self.file = IndexFile(database, directory, ns)
        self.version = -1
        self.changed = 0
        self.file_unfit = False  # no usable file, or one that a rebuilt structure should replace
        self.structure: Structure | None = None
        self.lock = ReadWriteLock()
        self.updating = RLock()
        # (`changed`, `version`) of the file, zeros without one; None: not read yet
        self._saved: tuple[int, int] | None = None
        self._wanted_type = ns.index_type
        self._building = Lock()
        self._stamp: int | None = None
        self._database = database
        self._gpu = gpu

    # searching

    def search(
        self, queries: Floats, k: int, version: int, selection: IdSelection | None
    ) -> tuple[Floats, Ids, int]:
        """Search. Returns scores [n, k], ids [n, k] (padded with -1) and their version.

        Without a selection the version is at least ``version``, with one exactly that. Raises Behind when the
        index is not there, InvalidRequest for queries that are not finite."""
        with self.lock.reading():
            structure, at = self.structure, self.version
            if structure is None or at < version or (selection is not None and at != version):
                raise Behind
            candidates = structure.count if selection is None else len(selection)
            if not candidates:
                sound = bool(np.isfinite(queries).all())
                scores, ids = (
                    np.empty((len(queries), 0), dtype=np.float32),
                    np.empty((len(queries), 0), dtype=np.int64),
                )
            elif self._gpu is not None and selection is None:
                scores, ids = self._gpu.search(structure, queries, min(k, candidates))
            else:
                scores, ids = _search(structure, queries, min(k, candidates), selection)
        # A query that is not finite has scores that are not, or no results: cheaper to check than the query.
        if candidates:
            one = len(scores) == 1
            sound = (
                ids[0, 0] >= 0 and isfinite(scores[0, 0])
                if one
                else bool((ids[:, :1] >= 0).all() and np.isfinite(scores[:, :1]).all())
            )
        if not sound:
            raise InvalidRequest("Query vectors must be finite.", code="invalid_vectors", param="queries")
        if candidates < k:
            missing = ((0, 0), (0, k - ids.shape[1]))
            scores = np.pad(scores, missing, constant_values=_LOWEST)
            ids = np.pad(ids, missing, constant_values=-1)
        return scores, ids, at

    def cosines(self, query: Floats, ids: Ids, version: int) -> Floats:
        """Inner products [n] of a query [dim] with the vectors of chunks that exist at ``version``. Raises
        Behind when the index is not at that version.
        """
        with self.lock.reading():
            if self.structure is None or self.version != version:
                raise Behind
            vectors = self.structure.vectors(ids)
        products: Floats = vectors @ query.astype(np.float32)
        return products

    # following the registry

    def catch_up(self) -> None:
        """Bring the index to the registry's newest version, opening it if need be. Raises NotFound when the
        namespace is gone.
        """
        with self.updating, self._database.read() as connection:
            self.follow(connection)

    def follow(self, connection: Connection) -> registry.Namespace:
        """Bring the index to the version of this read transaction and return the namespace's row.

        If the caller has held ``updating`` since before the transaction began, the index is exactly at that
        version, and stays there."""
        with self.updating:
            ns = registry.namespace_by_id(connection, self.namespace_id, self.name)
            self._wanted_type = ns.index_type
            if self.structure is None:
                loaded = self._load(connection, ns)
                self._install(loaded if loaded is not None else self._build(connection, ns), connection, ns)
            elif self.version < ns.version:
                self._apply(connection, ns)
            return ns

    def _install(self, structure: Structure, connection: Connection, ns: registry.Namespace) -> None:
        stamp = registry.stamp_of(connection, ns.id, ns.version)
        with self.lock.writing():
            self.structure, self.index_type, self._wanted_type = structure, ns.index_type, ns.index_type
            self.version, self.changed, self._stamp = ns.version, ns.changed, stamp

    def _apply(self, connection: Connection, ns: registry.Namespace) -> None:
        """Apply all commits since the index's version: from the change log, or by comparing ids where the log
        does not reach back that far.
        """
        structure, changes = self.structure, ns.changed - self.changed
        if structure is None:
            return
        stamp = registry.stamp_of(connection, ns.id, ns.version)
        log_reaches = self.version >= ns.log_floor
        gone = connection.execute(
            "SELECT first_id, n FROM removals WHERE namespace_id = ? AND version > ?", (ns.id, self.version)
        )
        removed = registry.expand(gone.fetchall()) if log_reaches else None
        added: Iterable[tuple[Ids, Floats]] = vectors.slabs(connection, ns, self.version)
        if changes <= vectors.SLAB:
            added = list(added)  # read before searches are blocked
        try:
            with self.lock.writing():
                whole = True
                if removed is not None:
                    _change(structure, removed, added)
                else:
                    whole = self._reconcile(structure, connection, ns, self.version)
                if not whole or structure.count != ns.n_chunks:
                    raise Damaged(
                        f"it holds {structure.count} vectors at version {ns.version} instead of {ns.n_chunks}"
                    )
                self.version, self.changed, self._stamp = ns.version, ns.changed, stamp
        except BaseException as error:
            self.structure = None  # half changed: the next search reopens it
            self.version = -1
            if not isinstance(error, Damaged):
                raise
            log.error(
                "namespace %s: the index in memory cannot be right (%s); rebuilding it from the registry",
                ns.name,
                error,
            )
            self._install(self._build(connection, ns), connection, ns)
            self.file_unfit = True

    def _reconcile(
        self, structure: Structure, connection: Connection, ns: registry.Namespace, version: int
    ) -> bool:
        """Bring a structure of ``version`` to ``ns`` by comparing id sets. False when the structure is not an
        earlier state of the namespace.
        """
        ranges = connection.execute(
            "SELECT first_id, n_chunks FROM documents WHERE namespace_id = ? AND n_chunks > 0", (ns.id,)
        ).fetchall()
        wanted, have = registry.expand(ranges), structure.ids()
        gone, missing = (
            np.setdiff1d(have, wanted, assume_unique=True),
            np.setdiff1d(wanted, have, assume_unique=True),
        )
        if len(missing) and len(have) and missing[0] < have[-1]:
            return False  # ids only grow: no later version adds one among old ones
        _change(structure, gone, vectors.slabs(connection, ns, version))
        return structure.count == len(wanted)

    def _build(self, connection: Connection, ns: registry.Namespace) -> Structure:
        structure = structures.create(
            ns.index_type, ns.dim, ns.n_chunks, lambda m: vectors.sample(connection, ns, m)
        )
        for ids, rows in vectors.slabs(connection, ns):
            structure.add(ids, rows)
        return structure

    # maintenance

    def maintain(self) -> None:
        """Rebuild the index if it has outgrown its training or has too many tombstones. Searches go on
        meanwhile.
        """
        if self._why_rebuild() is None:
            return
        with self._building:
            reason = self._why_rebuild()  # another thread may have done it during the wait
            if reason is not None and not self._adopt():
                self._rebuild(reason)

    def rebuild(self, reason: str) -> None:
        """Rebuild the index from the registry, whatever state it is in. Searches go on meanwhile."""
        with self._building:
            self._rebuild(reason)

    def _why_rebuild(self) -> str | None:
        structure = self.structure
        if structure is None:
            return None
        if self._wanted_type != self.index_type:
            return f"the namespace is now of type {self._wanted_type}"
        return structures.why_rebuild(self.index_type, structure)

    def _rebuild(self, reason: str) -> None:
        log.info("namespace %s: rebuilding its %s index: %s", self.name, self.index_type, reason)
        while True:
            with self._database.read() as connection:
                ns = registry.namespace_by_id(connection, self.namespace_id, self.name)
                structure = self._build(connection, ns)
            if self._bring_in(structure, ns):
                self.file_unfit = True
                return

    def _adopt(self) -> bool:
        """Load the saved index if another process has saved a fit one since this one read it."""
        try:
            footer = file_format.read_footer(self.file.path)
        except Damaged:
            return False
        if footer is None or footer.changed <= (self._saved or (0, 0))[0]:
            return False
        with self._database.read() as connection:
            ns = registry.namespace_by_id(connection, self.namespace_id, self.name)
            structure = self._load(connection, ns)
        if structure is None or structures.why_rebuild(ns.index_type, structure) is not None:
            return False
        return self._bring_in(structure, ns)

    def _bring_in(self, structure: Structure, ns: registry.Namespace) -> bool:
        """Replace the structure by one of ``ns``, caught up with commits since. False if that is
        impossible.
        """
        with self.updating, self._database.read() as connection:
            now = registry.namespace_by_id(connection, self.namespace_id, self.name)
            if now.index_type != ns.index_type or not self._reconcile(structure, connection, now, ns.version):
                return False
            self._install(structure, connection, now)
            return True

    # its file

    def _load(self, connection: Connection, ns: registry.Namespace) -> Structure | None:
        """Read the saved structure and catch up to ``ns``; None, with the reason logged, if it is
        unusable.
        """
        self.file_unfit, self._saved = True, (0, 0)
        try:
            found = self.file.load(connection, ns)
            if found is None:
                self.file_unfit = ns.n_chunks > 0
                if ns.n_chunks:
                    log.info(
                        "namespace %s: no saved index, building it from %d vectors", ns.name, ns.n_chunks
                    )
                return None
            structure, footer = found
            if not self._reconcile(structure, connection, ns, footer.version):
                raise Damaged("its vectors are not those of the registry")
        except Damaged as error:
            log.warning(
                "namespace %s: %s cannot be used (%s); rebuilding the index from the registry",
                ns.name,
                self.file.path,
                error,
            )
            return None
        self.file_unfit, self._saved = False, (footer.changed, footer.version)
        return structure

    def unsaved(self, ns: registry.Namespace) -> int:
        """Number of vectors added or removed since the file was written."""
        if self._saved is None:
            there = self.file.ours_on_disk()
            self._saved = (0, 0) if there is None else (there.changed, there.version)
        return ns.changed - self._saved[0]

    def needs_upkeep(self) -> bool:
        """True if the index should be rebuilt or saved."""
        return self.file_unfit or self._why_rebuild() is not None

    def save(self) -> bool:
        """Write the index to its file unless the file is as new; True if it wrote. Searches go on meanwhile.

        Raises StorageFull or Unavailable, leaving the old file as it was, and NotFound.
        """
        with self.updating:
            structure = self.structure
            saved = (self._saved or (0, 0))[1] == self.version and not self.file_unfit
            if structure is None or self.index_type != self._wanted_type or saved:
                return False
            there = self.file.save(
                structure, self.version, self._stamp, self.changed, self.index_type, force=self.file_unfit
            )
            self.file_unfit = False
            newest = self if there is None else there
            self._saved = (newest.changed, newest.version)
        return there is None

    def bring_up_and_save(self) -> None:
        """Catch up, rebuild if due, and save. Raises NotFound, StorageFull or Unavailable."""
        self.catch_up()
        self.maintain()
        self.save()


def _change(structure: Structure, removed: Ids, added: Iterable[tuple[Ids, Floats]]) -> None:
    if len(removed):
        structure.remove(removed)
    for ids, rows in added:
        structure.add(ids, rows)


def _search(structure: Structure, queries: Floats, k: int, selection: IdSelection | None) -> Results:
    """Search a single query on the calling thread alone: FAISS spreads queries over threads, never one query,
    and waking its threads costs milliseconds when cores are busy.
    """
    if len(queries) > 1:
        return structure.search(queries, k, selection)
    faiss = load_faiss()
    threads = faiss.omp_get_max_threads()
    if threads == 1:
        return structure.search(queries, k, selection)
    faiss.omp_set_num_threads(1)  # of this thread alone
    try:
        return structure.search(queries, k, selection)
    finally:
        faiss.omp_set_num_threads(threads)
