"""Removal of documents from every tier below the device."""

from __future__ import annotations

from collections.abc import Collection

from sglang_ext.documents.disk.disk import FileTier
from sglang_ext.documents.pages.host import HostEntry
from sglang_ext.documents.pages.page_format import valid_key, valid_namespace
from sglang_ext.documents.tiers import Tiers
from sglang_ext.documents.writeback import WriteBack


class Removal:
    """Removes documents. Every method requires the store's lock, and returns when no lookup finds them any
    more and their files are moved aside; the shared store's keeper deletes there."""

    def __init__(self, tiers: Tiers, writes: WriteBack) -> None:
        self._tiers = tiers
        self._writes = writes

    def remove(self, key: str, namespace: str | None) -> bool:
        """Remove a document; True if it was on host or disk."""
        tiers = self._tiers
        known = tiers.host.entries.get(key) or tiers.index.entries.get(key)
        space = namespace if known is None else known.namespace
        if tiers.remote is not None and space is not None:
            tiers.remote.delete(space, key)
        return self._here(key, namespace)

    def remove_namespace(self, namespace: str, also: Collection[str] = ()) -> int:
        """Remove all documents of a namespace and return their number. ``also``: documents of it that may be
        on disk without being listed.
        """
        tiers = self._tiers
        keys, moved = self._keys(namespace), isinstance(tiers.disk, FileTier)
        try:
            keys.update(tiers.disk.remove_namespace(namespace))
        except OSError as error:
            tiers.faults("io", f"removing namespace {namespace}: {error}")
            moved = False
        for key in keys:
            self._here(key, namespace, moved=moved)
        if not moved:
            keys.update([key for key in also if key not in keys and self._here(key, namespace)])
        if tiers.remote is not None:
            tiers.remote.delete(namespace)
        tiers.note_removal(namespace)
        tiers.note_trash()
        return len(keys)

    def clear(self) -> None:
        """Remove everything."""
        tiers, keys = self._tiers, self._keys(None)
        moved = self._move_all()
        for key in keys:
            self._here(key, moved=moved)
        if not moved:
            try:
                tiers.disk.clear()
            except OSError as error:
                tiers.faults("io", f"clearing the document folder: {error}")
        if tiers.remote is not None:
            tiers.remote.delete()
        tiers.note_trash()

    def _move_all(self) -> bool:
        """Move the folders of all namespaces aside; False if some are left."""
        tiers = self._tiers
        if not isinstance(tiers.disk, FileTier):
            return False
        try:
            for namespace in tiers.disk.files.namespaces():
                tiers.note_removal(namespace)
                tiers.disk.remove_namespace(namespace)
        except OSError:
            return False
        return True

    def _here(self, key: str, namespace: str | None = None, *, moved: bool = False) -> bool:
        """Remove a document from host and disk; True if it was there. Without a namespace it is looked for in
        all of them, as far as the index is incomplete. ``moved``: the folder (all folders) has been moved,
        so that no file of it is touched."""
        tiers = self._tiers
        entry = tiers.host.entries.get(key)
        space = namespace if entry is None else entry.namespace
        if moved and all(
            each is None or namespace in (None, each.namespace)
            for each in (entry, tiers.index.entries.get(key))
        ):
            return self._forget(key, entry)
        tiers.find_on_disk(key, space)
        if not tiers.disk.has_folder and key in tiers.index.entries:
            tiers.record(key)  # other backends delete page by page
        was_writing = self._writes.cancel(key)
        known = entry or tiers.index.entries.get(key)
        on_disk = tiers.forget(key)
        if not on_disk and space is not None and valid_key(key) and valid_namespace(space):
            tiers.delete(key, space, None)  # a look-up that failed has not found it
        if known is not None:
            tiers.note_removal(known.namespace)
        if entry is not None:
            tiers.host.remove(entry)
        return entry is not None or was_writing or on_disk

    def _forget(self, key: str, entry: HostEntry | None) -> bool:
        """Remove a document whose file has gone with its folder from the host, the queue and the index."""
        was_writing = self._writes.cancel(key)
        on_disk = self._tiers.index.drop(key) is not None
        if entry is not None:
            self._tiers.note_removal(entry.namespace)
            self._tiers.host.remove(entry)
        return entry is not None or was_writing or on_disk

    def _keys(self, namespace: str | None) -> set[str]:
        """Documents (of a namespace) on host, in the queue or on disk. Other disk backends list only what
        this process has met.
        """
        tiers = self._tiers
        keys = {key for key, entry in tiers.host.entries.items() if namespace in (None, entry.namespace)}
        keys.update(self._writes.keys(namespace))
        keys.update(key for key, entry in tiers.index.entries.items() if namespace in (None, entry.namespace))
        if isinstance(tiers.disk, FileTier) and not tiers.index.complete:

            def failed(error: OSError) -> None:
                tiers.faults("io", f"listing removed documents: {error}")

            keys.update(found.key for found in tiers.disk.files.scan(namespace, failed))
        return keys
