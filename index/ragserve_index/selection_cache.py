"""Bounded caches of what filters select, and of what viewers see."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from ragserve_index import registry
from ragserve_index.database import Connection
from ragserve_index.structures.base import IdSelection
from ragserve_index.types import NamespaceInfo
from ragserve_index.viewers import Viewer
from ragserve_index.visible import Condition, as_seen, visible

_MAX_SIGHTS = 4_096
_ENTRY_IDS = 512  # cost of an entry besides its ids, in ids


class SelectionCache:
    """Selections by (namespace id, version, filter), least recently used out first, bounded by the number of
    ids. A version never changes, so an entry cannot become wrong. Thread-safe.
    """

    def __init__(self, max_ids: int = 4 << 20) -> None:
        self._max_ids = max_ids
        self._ids = 0
        self._lock = Lock()
        self._selections: OrderedDict[tuple[int, int, str], IdSelection] = OrderedDict()

    def get(self, key: tuple[int, int, str]) -> IdSelection | None:
        with self._lock:
            found = self._selections.get(key)
            if found is not None:
                self._selections.move_to_end(key)
            return found

    def add(self, key: tuple[int, int, str], selection: IdSelection) -> None:
        with self._lock:
            if key in self._selections:
                return
            self._selections[key] = selection
            self._ids += len(selection) + _ENTRY_IDS
            while self._ids > self._max_ids and self._selections:
                _, oldest = self._selections.popitem(last=False)
                self._ids -= len(oldest) + _ENTRY_IDS


class SightCache:
    """What viewers see of a version of a namespace, which never changes. Thread-safe."""

    def __init__(self) -> None:
        self._conditions: dict[tuple[int, int, frozenset[str] | None], Condition | None] = {}
        self._infos: dict[tuple[int, int, frozenset[str] | None], NamespaceInfo] = {}

    def known(self, namespace_id: int, version: int, viewer: Viewer) -> tuple[Condition | None] | None:
        """The condition of what a viewer sees, in which None is all; None if it is not known yet."""
        if viewer.labels is None:
            return (None,)
        key = namespace_id, version, viewer.labels
        try:
            return (self._conditions[key],)
        except KeyError:
            return None

    def of(self, connection: Connection, ns: registry.Namespace, viewer: Viewer) -> Condition | None:
        """The condition of what a viewer sees in this transaction; None: all."""
        known = self.known(ns.id, ns.version, viewer)
        if known is not None:
            return known[0]
        found = visible(connection, ns.id, viewer)
        if len(self._conditions) >= _MAX_SIGHTS:
            self._conditions.clear()
        self._conditions[ns.id, ns.version, viewer.labels] = found
        return found

    def info(self, connection: Connection, ns: registry.Namespace, viewer: Viewer) -> NamespaceInfo:
        """The namespace with the numbers of the documents that a viewer sees."""
        condition = self.of(connection, ns, viewer)
        if condition is None:
            return ns.info()
        key = ns.id, ns.version, viewer.labels
        found = self._infos.get(key)
        if found is None:
            if len(self._infos) >= _MAX_SIGHTS:
                self._infos.clear()
            found = self._infos[key] = as_seen(connection, ns.id, ns.info(), condition)
        return found
