"""The lexical indexes of this process: which namespaces have one, and when it is brought up to date."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Lock

from ragserve.errors import NotFound, RagserveError
from ragserve_index import registry
from ragserve_index.background_work import BackgroundWork
from ragserve_index.bm25 import WordScores
from ragserve_index.database import Connection, Database
from ragserve_index.lexical_index import LexicalIndex, Unusable, folder_of
from ragserve_index.lexical_search import Scored
from ragserve_index.structures.base import IdSelection

log = logging.getLogger(__name__)

FROM = 2_048  # chunks of a namespace from which on it has an index; the registry is quick enough below
AT_ONCE = 2_000  # changed chunks that a search takes in itself; more are left to the background
COMPARED = 100_000  # chunks whose ids a search compares where the change log is gone
_WAIT_S = 0.5  # for another search that brings the index up to date
_BUSY = "LockBusy"  # in the message of tantivy's error when another process writes the index


class LexicalIndexes:
    """Each large namespace's index, opened at its first search. Thread-safe.

    Nothing here fails a search, unless the registry does: where an index is of no use, the registry's own
    lexical index answers. Servers that share a registry have indexes of their own, each in its folder."""

    def __init__(self, database: Database, directory: Path) -> None:
        self._database = database
        self._directory = directory
        self._lock = Lock()
        self._indexes: dict[int, LexicalIndex] = {}
        self._background = BackgroundWork("ragserve-lexical")
        self._unfit: set[int] = set()  # namespaces whose index cannot even be built
        self._stopped = Event()

    def serves(self, ns: registry.Namespace) -> bool:
        """True if the namespace is large enough for an index, and one can be made."""
        return ns.n_chunks >= FROM and ns.id not in self._unfit

    def search(
        self,
        connection: Connection,
        ns: registry.Namespace,
        text: str,
        k: int,
        selection: IdSelection | None,
    ) -> Scored | None:
        """Search at the version of this transaction; None if the namespace's index cannot."""
        if not self.serves(ns):
            return None
        index = self._of(ns)
        with self._tolerant(index, ns):
            if index.version < ns.version:
                self._follow(index, connection, ns)
            return index.search(text, k, selection, ns.version)
        return None

    def word_scores(
        self, ns: registry.Namespace, wanted: Sequence[str], ids: Sequence[int]
    ) -> list[WordScores] | None:
        """See `LexicalIndex.word_scores`; None if the namespace's index cannot."""
        if not self.serves(ns):
            return None
        index = self._of(ns)
        with self._tolerant(index, ns):
            return index.word_scores(wanted, ids, ns.version)
        return None

    def _follow(self, index: LexicalIndex, connection: Connection, ns: registry.Namespace) -> None:
        """Bring the index to ``ns``, or leave that to the background."""
        # The background may take minutes, or be at its end, or busy with another namespace.
        wait = 0 if self._background.works_on(ns.id) else _WAIT_S
        if not index.updating.acquire(timeout=wait):
            return
        try:
            index.open(connection, ns)
            logged = index.version >= ns.log_floor or ns.n_chunks <= COMPARED
            if index.version >= 0 and logged and _changed(connection, ns, index.version) <= AT_ONCE:
                index.follow(connection, ns, self._stopped.is_set)
                return
        finally:
            index.updating.release()
        self._background.start(ns.id, partial(self._bring_up_later, ns))

    def bring_up(self, ns: registry.Namespace) -> LexicalIndex:
        """Open the index of a large namespace and bring it to the newest version, building it if need be.
        Raises NotFound once the namespace is dropped, leaving none."""
        try:
            index = self._brought_up(ns)
            with self._database.read() as connection:  # building takes minutes
                registry.namespace_by_id(connection, ns.id, ns.name)
        except NotFound:
            self.remove(ns.id)
            raise
        return index

    def _brought_up(self, ns: registry.Namespace) -> LexicalIndex:
        with self._database.read() as connection:
            now = registry.namespace_by_id(connection, ns.id, ns.name)
            index = self._of(now)
            with self._tolerant(index, now):
                index.open(connection, now)
            index = self._of(now)
            with self._tolerant(index, now):
                index.follow(connection, now, self._stopped.is_set)
        return index

    def problem(self, ns: registry.Namespace) -> str | None:
        """Compare the index, if there is one, with the namespace; return what differs."""
        if not self.serves(ns) or not self._path(ns.id).exists():
            return None
        index = self.bring_up(ns)
        with self._database.read() as connection:
            now = registry.namespace_by_id(connection, ns.id, ns.name)
        if index.version == now.version and index.n_chunks() != now.n_chunks:
            return f"{index.n_chunks()} chunks are in {self._path(ns.id)} instead of {now.n_chunks}"
        return None

    def held(self) -> set[int]:
        """Ids of the namespaces whose indexes are open."""
        with self._lock:
            return set(self._indexes)

    def remove(self, namespace_id: int) -> None:
        """Remove a namespace's index; where the namespace goes on, it is built again."""
        with self._lock:
            index = self._indexes.get(namespace_id)
        if index is not None:
            index.remove()  # before another may be made over the same folder
        else:
            shutil.rmtree(self._path(namespace_id), ignore_errors=True)
        with self._lock:
            self._indexes.pop(namespace_id, None)
            self._unfit.discard(namespace_id)

    def close(self) -> None:
        """Stop what goes on in the background, and take in small changes: once the vector index is saved, the
        change log that says what they are is gone."""
        self._stopped.set()
        self._background.close()
        with self._lock:
            indexes = dict(self._indexes)
        for namespace_id, index in indexes.items():
            try:
                self._take_in(index, namespace_id)
            except RagserveError as error:
                log.warning("%s is left as it is: %s", self._path(namespace_id), error)
            finally:
                index.close()

    def _take_in(self, index: LexicalIndex, namespace_id: int) -> None:
        with self._database.read() as connection:
            for ns in registry.namespaces(connection, "id = ?", namespace_id):
                with self._tolerant(index, ns):
                    if index.version >= 0 and _changed(connection, ns, index.version) <= AT_ONCE:
                        index.follow(connection, ns, lambda: False)

    def _of(self, ns: registry.Namespace) -> LexicalIndex:
        with self._lock:
            return self._indexes.setdefault(ns.id, LexicalIndex(self._path(ns.id), ns.uid))

    def _path(self, namespace_id: int) -> Path:
        return folder_of(self._directory, namespace_id)

    def _bring_up_later(self, ns: registry.Namespace) -> None:
        try:
            self.bring_up(ns)
        except NotFound:
            pass  # dropped meanwhile
        except RagserveError as error:
            log.warning("%s was not brought up to date: %s", self._path(ns.id), error)

    @contextmanager
    def _tolerant(self, index: LexicalIndex, ns: registry.Namespace) -> Iterator[None]:
        """Log an error and start the index anew; give it up where it was made from nothing. Files that were
        there may be those of a killed commit."""
        fresh = index.version < 0 and not self._path(ns.id).exists()
        try:
            yield
        except NotFound:
            raise
        except Exception as error:  # tantivy's are of many kinds, and the registry can answer
            if isinstance(error, self._database.fatal):
                raise
            if _BUSY in str(error):
                return
            again = not fresh or isinstance(error, Unusable)
            what = "is built again" if again else "is not used until the next start"
            log.warning("namespace %s: %s %s: %s", ns.name, self._path(ns.id), what, error)
            self.remove(ns.id)
            if not again:
                self._unfit.add(ns.id)


def _changed(connection: Connection, ns: registry.Namespace, version: int) -> int:
    """Number of chunks that were added or removed after a version, and are known of."""
    return sum(
        connection.execute(
            f"SELECT coalesce(sum(n), 0) FROM {table} WHERE namespace_id = ? AND version > ?",
            (ns.id, version),
        ).fetchone()[0]
        for table in ("vectors", "removals")
    )
