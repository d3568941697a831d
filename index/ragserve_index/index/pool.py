"""The indexes of this process, and when each is brought up to date, rebuilt and saved."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock

from ragserve.errors import NotFound, RagserveError
from ragserve_index import registry
from ragserve_index.background_work import BackgroundWork
from ragserve_index.database import Database
from ragserve_index.gpu import ON_GPU, GpuMirror
from ragserve_index.index import file_format
from ragserve_index.index.namespace_index import NamespaceIndex

log = logging.getLogger(__name__)

# Vectors changed before a write updates a loaded index itself instead of leaving that to the next search.
REFRESH_AFTER = 1_024
SAVE_AFTER = 5_000  # vectors changed, and a fifth of all, before the index is saved
# At close an index that is not loaded is saved only if it is this small, or if 1/50 of it changed.
CLOSE_SAVES_UP_TO = 20_000
CLOSE_SAVES_SHARE = 50


class IndexPool:
    """Each namespace's index, opened at first use. Thread-safe."""

    def __init__(self, database: Database, directory: Path, gpu: GpuMirror | None) -> None:
        self._database = database
        self._directory = directory
        self._gpu = gpu
        self._lock = Lock()
        self._indexes: dict[int, NamespaceIndex] = {}
        self._background = BackgroundWork("ragserve-index")

    def of(self, ns: registry.Namespace) -> NamespaceIndex:
        """The namespace's index, not necessarily loaded."""
        with self._lock:
            index = self._indexes.get(ns.id)
            if index is None:
                if self._gpu is not None and ns.index_type not in ON_GPU:
                    log.warning(
                        "namespace %s: an index of type %s has no GPU form, it is searched on the CPU",
                        ns.name,
                        ns.index_type,
                    )
                index = NamespaceIndex(self._database, self._directory, ns, self._gpu)
                self._indexes[ns.id] = index
            return index

    def held(self) -> set[int]:
        """Ids of the namespaces whose indexes are in memory."""
        with self._lock:
            return set(self._indexes)

    def forget(self, namespace_id: int) -> None:
        """Drop the index of a namespace that is gone, and its file."""
        with self._lock:
            self._indexes.pop(namespace_id, None)
        path = file_format.index_path(self._directory, namespace_id)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # the next start tries again
            log.warning("%s, of a dropped namespace, cannot be removed: %s", path, error)

    def after_write(self, ns: registry.Namespace) -> None:
        """Do the upkeep that a commit made due. Never fails: the documents are safe in the registry, and the
        next write or search tries again.
        """
        with _tolerant(ns.name, "upkeep of its index failed, it will be tried again"):
            ns = self._row(ns.id, ns.name)
            index = self.of(ns)
            outdated = index.structure is not None and ns.changed - index.changed >= REFRESH_AFTER
            if outdated or _worth_saving(index, ns):
                index.catch_up()
            self._upkeep(index, ns)

    def after_search(self, index: NamespaceIndex) -> None:
        """Do the upkeep that catching up made due, in the background: a search does not wait for training."""
        if index.needs_upkeep():
            self._background.start(index.namespace_id, partial(self._upkeep_in_background, index))

    def _upkeep_in_background(self, index: NamespaceIndex) -> None:
        with _tolerant(index.name, "upkeep of its index failed"):
            self._upkeep(index, self._row(index.namespace_id, index.name))

    def _upkeep(self, index: NamespaceIndex, ns: registry.Namespace) -> None:
        if index.structure is None:
            return
        index.maintain()
        if index.file_unfit or _worth_saving(index, ns):
            index.save()

    def close(self) -> None:
        """Save what changed: loaded indexes always, others if that is cheap or saves the next start much."""
        self._background.close()
        with self._lock:
            everything = list(self._indexes.values())
        for index in everything:
            with _tolerant(
                index.name, "its index was not saved, the next start rebuilds it from the registry"
            ):
                ns = self._row(index.namespace_id, index.name)
                unsaved = index.unsaved(ns)
                cheap = ns.n_chunks <= CLOSE_SAVES_UP_TO or unsaved * CLOSE_SAVES_SHARE >= ns.n_chunks
                if index.file_unfit or (unsaved and (index.structure is not None or cheap)):
                    index.bring_up_and_save()

    def _row(self, namespace_id: int, name: str) -> registry.Namespace:
        with self._database.read() as connection:
            return registry.namespace_by_id(connection, namespace_id, name)


@contextmanager
def _tolerant(name: str, problem: str) -> Iterator[None]:
    """Log failures of upkeep instead of raising them; ignore a namespace that was dropped meanwhile."""
    try:
        yield
    except NotFound:
        pass
    except RagserveError as error:
        log.warning("namespace %s: %s: %s", name, problem, error)


def _worth_saving(index: NamespaceIndex, ns: registry.Namespace) -> bool:
    return index.unsaved(ns) >= max(SAVE_AFTER, ns.n_chunks // 5)
