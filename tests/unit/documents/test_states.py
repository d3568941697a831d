"""Random histories against a dict: what is found is right, what was removed is not found, nothing is lost or
counted twice.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_ext.documents.pages.page_format import ALIGN
from sglang_ext.documents.pages.types import DiskConfig, LoadTicket
from sglang_ext.documents.tier_store import TierStore
from tests.conftest import EXHAUSTIVE
from tests.unit.documents.document_samples import (
    FINGERPRINT,
    SHAPE,
    Sample,
    bytes_under,
    files_of,
    look_up,
    pages_of,
)

PAGE = SHAPE.page_bytes
HOST_PAGES = 24
numbers = st.integers(0, 7)
DOCUMENTS = [Sample(i, (1, 4, 7, 16, 18, 33, 40, 64)[i], namespace=f"space-{i % 2}") for i in range(8)]
FILES = [ALIGN + document.blocks * PAGE for document in DOCUMENTS]


class TierMachine(RuleBasedStateMachine):
    """``live`` is the model: documents put and not removed, which may be found. ``sure`` are those that must
    be: written whole, and neither evicted (``evicted`` until put again) nor damaged behind the store's back
    (``damaged`` until removed)."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tiers-"))
        self.live: set[int] = set()
        self.sure: set[int] = set()
        self.evicted: set[int] = set()
        self.damaged: set[int] = set()
        self.pins: dict[int, int] = {}
        self.tickets: list[tuple[int, LoadTicket]] = []
        self.host_pages = HOST_PAGES
        self.disk_bytes = sum(FILES)
        self.queue_bytes = 1 << 30
        self.store = self._open()

    def _open(self) -> TierStore:
        self.host_pages = HOST_PAGES
        disk = DiskConfig(self.folder, self.disk_bytes, queue_bytes=self.queue_bytes)
        return TierStore(SHAPE, fingerprint=FINGERPRINT, host_bytes=HOST_PAGES * PAGE, disk=disk, pin=False)

    @initialize(queue_pages=st.sampled_from([2, 8, 10_000]))
    def queue(self, queue_pages: int) -> None:
        self.store.close()
        self.queue_bytes = queue_pages * PAGE
        self.store = self._open()

    @rule(number=numbers)
    def put(self, number: int) -> None:
        DOCUMENTS[number].put(self.store)
        self.live.add(number)
        self.evicted.discard(number)

    @rule()
    def settle(self) -> None:
        """Write everything: from now on the disk has what fits and nobody dropped."""
        assert self.store.flush(60)
        assert (
            bytes_under(self.folder) <= self.disk_bytes
        )  # removed namespaces have given their space back, too
        figures = self.store.stat()
        if (
            figures["dropped_writes"] == 0
            and self.disk_bytes >= sum(FILES)
            and figures["faults"].keys() <= {"tokens"}
        ):
            self.sure = self.live - self.evicted - self.damaged

    @rule(number=numbers)
    def lookup(self, number: int) -> None:
        document = DOCUMENTS[number]
        resident = document.found(self.store)
        if number not in self.live:
            assert resident is None
        if number in self.sure:
            assert resident is not None
        if resident is not None:
            assert resident.on_disk or bool(resident.blocks_on_host.all())
            blocks = resident.blocks_on_host.nonzero().flatten().tolist()
            if blocks:
                document.assert_pages(self.store, blocks)

    @rule(number=numbers, other=numbers)
    def lookup_as_someone_else(self, number: int, other: int) -> None:
        document, stranger = DOCUMENTS[number], DOCUMENTS[other]
        if number != other:
            assert look_up(self.store, document.key, stranger.ids, document.namespace) is None
        assert look_up(self.store, document.key, document.ids, "nobody") is None

    @rule(number=numbers, some=st.none() | st.lists(st.integers(0, 15), max_size=4), wait=st.booleans())
    def load(self, number: int, some: list[int] | None, wait: bool) -> None:
        document = DOCUMENTS[number]
        blocks = None if some is None else [block % document.blocks for block in some]
        ticket = self.store.load(document.key, blocks)
        if number not in self.live:
            assert not ticket.ok
        self.tickets.append((number, ticket))
        if wait:
            self.finish_loads()

    @rule()
    def finish_loads(self) -> None:
        for number, ticket in self.tickets:
            assert ticket.wait(240)
            assert ticket.ok == (not ticket.reason)
            if number in self.sure:
                # unknown, removed: asked for before it was put, or put again since
                assert ticket.ok or ticket.reason in ("no_room", "unknown", "removed", "not_on_disk")
        self.tickets.clear()

    @rule(number=numbers)
    def pin(self, number: int) -> None:
        try:
            self.store.pin(DOCUMENTS[number].key)
        except KeyError:
            assert number not in self.sure
        else:
            assert number in self.live
            self.pins[number] = self.pins.get(number, 0) + 1

    @rule(choice=numbers)
    def unpin(self, choice: int) -> None:
        if not self.pins:
            return
        number = sorted(self.pins)[choice % len(self.pins)]
        self.store.unpin(DOCUMENTS[number].key)
        self.pins[number] -= 1
        if not self.pins[number]:
            del self.pins[number]

    @rule()
    def read_pinned(self) -> None:
        """Pages that a pin holds stay what they are, removed or not."""
        for number in self.pins:
            self._read_pinned(DOCUMENTS[number])

    def _read_pinned(self, document: Sample) -> None:
        for block in range(document.blocks):
            try:
                pages_of(self.store, document.key, [block])
            except KeyError:
                continue
            document.assert_pages(self.store, [block])

    @rule(number=numbers)
    def remove(self, number: int) -> None:
        removed = self.store.remove(DOCUMENTS[number].key)
        if number in self.sure:
            assert removed
        if number not in self.live:
            assert not removed
        self._forget({number})

    @rule(space=st.integers(0, 1))
    def remove_namespace(self, space: int) -> None:
        gone = {number for number in self.live if number % 2 == space}
        assert len(gone & self.sure) <= self.store.remove_namespace(f"space-{space}") <= len(gone)
        self._forget(gone)

    @rule(pages=st.integers(0, HOST_PAGES))
    def shrink_or_grow_host(self, pages: int) -> None:
        self.store.set_budget(host_bytes=pages * PAGE)
        self.host_pages = pages
        # A document that waits for the queue, and is evicted before its turn, is lost.

    @rule(share=st.sampled_from([0.0, 0.3, 1.0]))
    def shrink_or_grow_disk(self, share: float) -> None:
        self.disk_bytes = int(sum(FILES) * share)
        self.store.set_budget(disk_bytes=self.disk_bytes)
        if share < 1:
            self.sure.clear()
            self.evicted |= self.live

    @rule()
    def drop_host(self) -> None:
        self.store.drop_host()

    @rule(flush=st.booleans())
    def restart(self, flush: bool) -> None:
        if flush:
            assert self.store.flush(60)
        self.store.close()
        self.pins.clear()
        self.tickets.clear()
        present = self._on_disk()
        assert not flush or self.sure <= present
        for documents in (self.live, self.sure, self.evicted, self.damaged):
            documents &= present
        self.evicted.clear()
        self.store = self._open()

    @rule(
        what=st.sampled_from(["cut", "flip", "delete", "folder"]),
        choice=numbers,
        at=st.floats(0, 1),
        flip=st.integers(1, 255),
    )
    def damage(self, what: str, choice: int, at: float, flip: int) -> None:
        """A file is cut, flipped or deleted, or the whole folder goes."""
        assert self.store.flush(60)
        files = files_of(self.folder)
        self.sure.clear()
        self.damaged |= self.live
        if what == "folder":
            shutil.rmtree(self.folder, ignore_errors=True)
        elif files:
            path = files[choice % len(files)]
            content = bytearray(path.read_bytes())
            offset = int(at * (len(content) - 1))
            if what == "delete":
                path.unlink()
            elif what == "cut":
                path.write_bytes(content[:offset])
            elif content:
                content[offset] ^= flip
                path.write_bytes(content)

    @invariant()
    def accounts_are_right(self) -> None:
        self.store.check_integrity()
        figures = self.store.stat()
        if not self.pins and not self.tickets and not figures["disk"]["queued_bytes"]:
            assert figures["host"]["bytes"] <= self.host_pages * PAGE
        if self.folder.exists() and figures["disk"]["scanned"] and not figures["disk"]["queued_bytes"]:
            assert sum(map(_size, files_of(self.folder))) <= self.disk_bytes

    def teardown(self) -> None:
        for number, count in self.pins.items():
            for _ in range(count):
                self.store.unpin(DOCUMENTS[number].key)
        assert self.store.flush(60)
        self.store.check_integrity()
        self.store.clear()
        assert self.store.flush(60)
        figures = self.store.stat()
        assert (figures["host"]["pages"], figures["disk"]["bytes"]) == (0, 0)
        self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _forget(self, gone: set[int]) -> None:
        for documents in (self.live, self.sure, self.evicted, self.damaged):
            documents -= gone

    def _on_disk(self) -> set[int]:
        present = {path.stem for path in files_of(self.folder)}
        return {number for number, document in enumerate(DOCUMENTS) if document.key in present}


def _size(path: Path) -> int:
    """0 for a file that a removed namespace took with it while it was looked at."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


TierMachine.TestCase.settings = settings(
    max_examples=300 if EXHAUSTIVE else 40,
    stateful_step_count=50,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestTierMachine = TierMachine.TestCase
