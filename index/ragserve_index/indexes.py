"""The indexes this process has, and when each is brought up, built anew and saved without anyone asking."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from ragserve_index import registry
from ragserve_index.database import Database
from ragserve_index.errors import NotFound, RagserveError
from ragserve_index.gpu import ON_GPU, GpuMirror
from ragserve_index.live import LiveIndex

log = logging.getLogger(__name__)

# vectors changed before a write brings a loaded index up itself instead of leaving that to the next search
REFRESH_AFTER = 1_024
SAVE_AFTER = 5_000  # vectors changed, and a fifth of all, before the index is saved
CLOSE_SAVES_UP_TO = (
    20_000  # at close an index not loaded is saved all the same if it is this small, or if 1/50 of it changed
)
CLOSE_SAVES_SHARE = 50


class Indexes:
    """LiveIndex objects by namespace id, opened at first use."""

    def __init__(self, database: Database, directory: Path, gpu: GpuMirror | None) -> None:
        self._database = database
        self._directory = directory
        self._gpu = gpu
        self._lock = Lock()
        self._live: dict[int, LiveIndex] = {}
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ragserve-index")
        self._scheduled: set[int] = set()
        self.get = self._live.get  # the dict's own method: one call on the way of every search

    def of(self, ns: registry.Namespace) -> LiveIndex:
        """The namespace's index, not necessarily loaded."""
        with self._lock:
            live = self._live.get(ns.id)
            if live is None:
                if self._gpu is not None and ns.index_type not in ON_GPU:
                    log.warning(
                        "namespace %s: an index of type %s has no GPU form, it is searched on the CPU",
                        ns.name,
                        ns.index_type,
                    )
                live = self._live[ns.id] = LiveIndex(self._database, self._directory, ns, self._gpu)
            return live

    def forget(self, namespace_id: int) -> None:
        with self._lock:
            self._live.pop(namespace_id, None)

    def after_write(self, namespace_id: int) -> None:
        """What a commit may make due. Never fails: the documents are safe in the registry, and the next write
        or search tries again.
        """
        try:
            with self._database.read() as connection:
                ns = registry.namespace_by_id(connection, namespace_id)
            if ns is None:
                return
            live = self.of(ns)
            if _worth_saving(live, ns) or (
                live.structure is not None and ns.changed - live.changed >= REFRESH_AFTER
            ):
                live.catch_up()
            self._upkeep(live, ns)
        except NotFound:
            return  # dropped meanwhile
        except RagserveError as error:
            log.warning(
                "namespace %d: upkeep of its index failed, it will be tried again: %s", namespace_id, error
            )

    def after_search(self, live: LiveIndex) -> None:
        """What catching up may have made due is done in the background: a search does not wait for training."""
        if not live.needs_upkeep() or live.namespace_id in self._scheduled:
            return
        with self._lock:
            if live.namespace_id in self._scheduled:
                return
            self._scheduled.add(live.namespace_id)
        try:
            self._background.submit(self._upkeep_in_background, live)
        except RuntimeError:
            self._scheduled.discard(live.namespace_id)  # closing

    def _upkeep_in_background(self, live: LiveIndex) -> None:
        try:
            with self._database.read() as connection:
                ns = registry.namespace_by_id(connection, live.namespace_id)
            if ns is not None:
                self._upkeep(live, ns)
        except RagserveError as error:
            log.warning("namespace %s: upkeep of its index failed: %s", live.name, error)
        finally:
            self._scheduled.discard(live.namespace_id)

    def _upkeep(self, live: LiveIndex, ns: registry.Namespace) -> None:
        if live.structure is None:
            return
        live.maintain()
        if live.file_unfit or _worth_saving(live, ns):
            live.save()

    def close(self) -> None:
        """Save what changed. Loaded indexes always; others when it costs little or spares the next start
        much.
        """
        self._background.shutdown(wait=True)
        with self._lock:
            everything = list(self._live.values())
        for live in everything:
            try:
                with self._database.read() as connection:
                    ns = registry.namespace_by_id(connection, live.namespace_id)
                if ns is None:
                    continue
                unsaved = live.unsaved(ns)
                cheap = ns.n_chunks <= CLOSE_SAVES_UP_TO or unsaved * CLOSE_SAVES_SHARE >= ns.n_chunks
                if live.file_unfit or (unsaved and (live.structure is not None or cheap)):
                    live.catch_up()
                    live.maintain()
                    live.save()
            except NotFound:
                continue  # dropped meanwhile
            except RagserveError as error:
                log.warning(
                    "namespace %s: its index was not saved, the next start brings it up from the registry: %s",
                    live.name,
                    error,
                )


def _worth_saving(live: LiveIndex, ns: registry.Namespace) -> bool:
    return live.unsaved(ns) >= max(SAVE_AFTER, ns.n_chunks // 5)
