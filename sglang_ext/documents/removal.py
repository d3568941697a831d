"""Removal of documents from host, the write queue and the disk."""

from __future__ import annotations

from sglang_ext.documents.disk import FileTier
from sglang_ext.documents.tiers import Tiers
from sglang_ext.documents.writeback import WriteBack


class Remover:
    """Every method requires the store's lock."""

    def __init__(self, tiers: Tiers, writes: WriteBack) -> None:
        self._tiers = tiers
        self._writes = writes

    def remove(self, key: str) -> bool:
        """Remove one document from every tier; True if there was one."""
        tiers = self._tiers
        entry = tiers.host.entries.get(key)
        tiers.find_on_disk(key, entry.namespace if entry is not None else None)
        if tiers.disk is not None and not tiers.disk.has_folder and key in tiers.index:
            tiers.record(key)  # other backends delete page by page
        was_writing = self._writes.cancel(key)
        on_disk = tiers.forget(key)
        if entry is not None:
            tiers.host.remove(entry)
        return entry is not None or was_writing or on_disk

    def remove_namespace(self, namespace: str) -> int:
        """Remove all documents of a namespace and return their number."""
        tiers = self._tiers
        keys = self._keys(namespace)
        if tiers.disk is not None:
            try:
                keys.update(tiers.disk.remove_namespace(namespace))
            except OSError as error:
                tiers.faults("io", f"removing namespace {namespace}: {error}")
        for key in keys:
            self.remove(key)
        tiers.note_trash()
        return len(keys)

    def clear(self) -> None:
        """Remove everything, including what the scan has not reached."""
        tiers = self._tiers
        for key in self._keys(None):
            self.remove(key)
        if tiers.disk is not None:
            try:
                tiers.disk.clear()
            except OSError as error:
                tiers.faults("io", f"clearing the document folder: {error}")
            tiers.note_trash()

    def _keys(self, namespace: str | None) -> set[str]:
        """Documents (of a namespace) on host, in the queue or on disk. Other disk backends list only what
        this process has met.
        """
        tiers = self._tiers
        keys = {key for key, entry in tiers.host.entries.items() if namespace in (None, entry.namespace)}
        keys.update(self._writes.keys(namespace))
        keys.update(key for key, entry in tiers.index.items() if namespace in (None, entry.namespace))
        if isinstance(tiers.disk, FileTier) and not tiers.index.complete:
            keys.update(found.key for found in tiers.disk.files.scan(namespace))
        return keys
