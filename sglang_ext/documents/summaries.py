"""Summaries of documents (bytes; `sglang_ext.analysis` knows what they say): kept beside the pages on host,
stored with them on disk.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from sglang_ext.documents import page_format
from sglang_ext.documents.page_format import PageError, Record
from sglang_ext.documents.tiers import Tiers


@dataclass
class SummaryTicket:
    """The progress of reading a summary; ``data`` is final once ``done()``, None where there is none that can
    be used.
    """

    data: bytes | None = None
    finished: threading.Event = field(default_factory=threading.Event)

    def done(self) -> bool:
        return self.finished.is_set()

    @classmethod
    def known(cls, data: bytes | None) -> SummaryTicket:
        """One that is done."""
        ticket = cls(data)
        ticket.finished.set()
        return ticket


class Summaries:
    """Every method wants the store's lock held; reads and writes themselves run in the IO threads without it."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._replacing: dict[str, bytes] = {}  # what is to be stored with a document that is on disk already

    def get(self, key: str) -> SummaryTicket:
        """From host or from disk."""
        tiers = self._tiers
        entry = tiers.host.entries.get(key)
        if entry is not None and entry.summary:
            return SummaryTicket.known(entry.summary)
        if key in self._replacing:
            return SummaryTicket.known(self._replacing[key])
        record = tiers.record(key) if tiers.find_on_disk(key, None) is not None else None
        ticket = SummaryTicket()
        if (
            record is None
            or not record.summary_bytes
            or tiers.io is None
            or not tiers.io.read(lambda: self._read(record, ticket))
        ):
            return SummaryTicket.known(None)
        return ticket

    def put(self, key: str, data: bytes) -> bool:
        """Keep a summary with a document that is in a tier; whether there is one. What is on disk without it
        is written anew.
        """
        tiers = self._tiers
        entry = tiers.host.entries.get(key)
        if entry is not None:
            entry.summary = data
        if tiers.find_on_disk(key, None) is None:
            return entry is not None
        record = tiers.record(key)
        if record is None or record.summary_bytes or key in self._replacing or tiers.io is None:
            return True
        self._replacing[key] = data
        if not tiers.io.write(lambda: self._replace(key, data)):
            del self._replacing[key]
        return True

    def _read(self, record: Record, ticket: SummaryTicket) -> None:
        """An IO job."""
        try:
            if self._tiers.disk is not None:
                ticket.data = self._tiers.disk.load_summary(record)
        finally:
            ticket.finished.set()

    def _replace(self, key: str, data: bytes) -> None:
        """An IO job: store the document with its summary, unless it was removed meanwhile or does not fit any
        more.
        """
        tiers, disk, reserved = self._tiers, self._tiers.disk, 0
        try:
            with tiers.lock:
                old = tiers.record(key) if key in tiers.index else None
                if (
                    disk is None
                    or old is None
                    or old.summary_bytes
                    or not tiers.make_disk_room(old.file_bytes + len(data))
                ):
                    return
                if key not in tiers.index:
                    return  # it had to make room itself
                layout = tiers.layout
                encoded = page_format.encode(key, old.namespace, old.token_ids, old.crcs, layout, data)
                new = replace(old, summary_bytes=len(data), summary_crc=page_format.summary_crc(key, data))
                reserved = new.file_bytes
                tiers.index.reserved += reserved
                disk.begin(key, old.namespace)
            done = disk.replace_summary(old, new, encoded, data)
            with tiers.lock:
                tiers.index.reserved -= reserved
                reserved = 0
                if done and key in tiers.index:
                    tiers.index.add(key, old.namespace, new.file_bytes, new)
                    tiers.make_disk_room(0)
                elif done:
                    disk.remove(key, old.namespace, new)
        except (PageError, OSError) as error:
            tiers.faults(
                error.reason if isinstance(error, PageError) else "io",
                f"storing the summary of document {key}: {error}",
            )
        finally:
            with tiers.lock:
                tiers.index.reserved -= reserved
                self._replacing.pop(key, None)
                tiers.refresh()
