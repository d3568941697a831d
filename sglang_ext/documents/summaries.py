"""Summaries of documents: bytes that `sglang_ext.analysis` encodes, kept with the pages on host and disk."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from sglang_ext.documents.disk.disk import DiskTier
from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.page_format import PageError, Record
from sglang_ext.documents.tiers import Tiers


@dataclass
class SummaryTicket:
    """Progress of reading a summary. ``data`` is final once ``done()``; None where no summary is usable."""

    data: bytes | None = None
    finished: threading.Event = field(default_factory=threading.Event)

    def done(self) -> bool:
        return self.finished.is_set()

    @classmethod
    def known(cls, data: bytes | None) -> SummaryTicket:
        """A finished ticket."""
        ticket = cls(data)
        ticket.finished.set()
        return ticket


class Summaries:
    """Reads and stores summaries. Every method requires the store's lock; the IO itself runs without it."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._replacing: dict[str, bytes] = {}  # to be stored with documents that are on disk already

    def get(self, key: str) -> SummaryTicket:
        """Start reading a document's summary, from host or from disk."""
        tiers = self._tiers
        entry = tiers.host.entries.get(key)
        if entry is not None and entry.summary:
            return SummaryTicket.known(entry.summary)
        if key in self._replacing:
            return SummaryTicket.known(self._replacing[key])
        record = tiers.record(key) if tiers.find_on_disk(key, None) is not None else None
        tier, io, ticket = tiers.disk, tiers.io, SummaryTicket()
        if record is None and tiers.remote is not None:
            record, tier, io = tiers.remote.record(key, None), tiers.remote, tiers.remote.io
        if record is None or not record.summary_bytes:
            return SummaryTicket.known(None)
        known = record
        return ticket if io.read(lambda: self._read(tier, known, ticket)) else SummaryTicket.known(None)

    def put(self, key: str, data: bytes, *, unusable: bool = False) -> bool:
        """Keep a summary with a document; False if the document is in no tier. A file on disk is written anew
        if it has other bytes, or with ``unusable`` whatever it seems to have.
        """
        tiers = self._tiers
        entry = tiers.host.entries.get(key)
        if entry is not None:
            entry.summary = data
        if tiers.remote is not None:
            tiers.remote.offer_summary(key, data)
        if tiers.find_on_disk(key, None) is None:
            return entry is not None
        record = tiers.record(key)
        stored = record is not None and _holds(record, data) and not unusable
        if record is None or (stored and key not in self._replacing):
            return True
        running = key in self._replacing
        self._replacing[key] = data  # what runs takes the newest bytes, or runs again
        if not running and not tiers.io.write(lambda: self._replace(key)):
            del self._replacing[key]
        return True

    def _read(self, tier: DiskTier, record: Record, ticket: SummaryTicket) -> None:
        """An IO job."""
        try:
            ticket.data = tier.load_summary(record)
        finally:
            ticket.finished.set()

    def _replace(self, key: str) -> None:
        """An IO job: rewrite the document with its summary, unless it was removed or no longer fits."""
        tiers, disk, reserved = self._tiers, self._tiers.disk, 0
        data = self._replacing[key]
        try:
            with tiers.lock:
                old = tiers.record(key) if key in tiers.index.entries else None
                if (
                    old is None
                    or not tiers.make_disk_room(old.file_bytes + len(data))
                    or key not in tiers.index.entries  # evicted itself to make room
                ):
                    return
                layout = tiers.layout
                encoded = page_format.encode(key, old.namespace, old.token_ids, old.crcs, layout, data)
                new = replace(old, summary_bytes=len(data), summary_crc=page_format.summary_crc(key, data))
                reserved = new.file_bytes
                tiers.index.reserved += reserved
                disk.begin(key, old.namespace)
            if tiers.trash:
                tiers.sweep()
            done = disk.replace_summary(old, new, encoded, data)
            with tiers.lock:
                tiers.index.reserved -= reserved
                reserved = 0
                if done and key in tiers.index.entries:
                    tiers.index.add(key, old.namespace, new.file_bytes, new)
                    tiers.make_disk_room(0)
                elif done:
                    tiers.delete(key, old.namespace, new)
        except (PageError, OSError) as error:
            tiers.faults.note(error, f"storing the summary of document {key}")
        finally:
            with tiers.lock:
                tiers.index.reserved -= reserved
                newer = self._replacing[key] is not data
                if not newer or not tiers.io.write(lambda: self._replace(key)):
                    del self._replacing[key]
                tiers.refresh()


def _holds(record: Record, data: bytes) -> bool:
    crc = page_format.summary_crc(record.key, data)
    return (record.summary_bytes, record.summary_crc) == (len(data), crc)
