"""Documents with made-up KV, and how to read them back out of a store's pool."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_ext.documents.pages.types import DiskConfig, DocumentMeta, KvShape
from sglang_ext.documents.tier_store import TierStore

FINGERPRINT = "model-a/tokenizer-a"
SHAPE = KvShape(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32, block=4)  # pages of 512 bytes
LARGE = 1 << 30


@dataclass(frozen=True)
class Resident:
    """The tiers that have a document."""

    blocks_on_host: torch.Tensor  # bool [blocks]
    on_disk: bool


def look_up(store: TierStore, key: str, ids: Sequence[int], namespace: str = "default") -> Resident | None:
    """Find a document as the scheduler does; None for a miss."""
    pages = store.host_pages(key, ids, namespace)
    if pages is None:
        return None
    return Resident(torch.from_numpy(pages) >= 0, store.where(key, namespace)[1] == "disk")


def pages_of(store: TierStore, key: str, blocks: Sequence[int]) -> list[int]:
    """Page numbers of these blocks, also of a removed document that is pinned; KeyError for one
    not on host.
    """
    entry = store._tiers.host.find(key)
    if entry is None or any(entry.pages[block] < 0 for block in blocks):
        raise KeyError(key)
    entry.wait_copied()
    return [entry.pages[block] for block in blocks]


class Sample:
    """A document whose KV follows from its namespace and number."""

    def __init__(
        self,
        number: int,
        n_tokens: int,
        *,
        namespace: str = "default",
        shape: KvShape = SHAPE,
        fingerprint: str = FINGERPRINT,
    ):
        self.shape = shape
        ids = [number * 1000 + i for i in range(n_tokens)]
        text = f"{namespace}|{fingerprint}|{ids}"
        self.key = hashlib.sha256(text.encode()).hexdigest()
        self.meta = DocumentMeta(self.key, namespace, ids, n_tokens, fingerprint)
        generator = torch.Generator().manual_seed(int(self.key[:12], 16))
        size = (shape.layers, n_tokens, shape.kv_heads, shape.head_dim)
        self.k = torch.randn(size, generator=generator).to(shape.dtype)
        self.v = torch.randn(size, generator=generator).to(shape.dtype)

    @property
    def ids(self) -> Sequence[int]:
        return self.meta.token_ids

    @property
    def namespace(self) -> str:
        return self.meta.namespace

    @property
    def blocks(self) -> int:
        return self.shape.blocks(self.meta.n_tokens)

    def put(self, store: TierStore) -> None:
        store.put(self.meta, self.k, self.v)

    def found(self, store: TierStore) -> Resident | None:
        return look_up(store, self.key, self.ids, self.namespace)

    def resident(self, store: TierStore) -> Resident:
        """As ``found``, for a document that must be there."""
        resident = self.found(store)
        assert resident is not None
        return resident

    def assert_pages(self, store: TierStore, blocks: Sequence[int] | None = None) -> None:
        """These blocks are on host, bit for bit what was put, and zero behind the document's end. Of 8 bits,
        within half a step, and float16's rounding of the row's scale and middle.
        """
        blocks = range(self.blocks) if blocks is None else blocks
        block = self.shape.block
        for index, page in zip(blocks, pages_of(store, self.key, blocks), strict=True):
            n = min(block, self.meta.n_tokens - index * block)
            where = torch.full((block,), page), torch.arange(block)
            read = [store.pages.read(layer, *where) for layer in range(self.shape.layers)]
            for half, source in enumerate((self.k, self.v)):
                stored = torch.stack([layer[half] for layer in read])  # [layers, block, kv_heads, head_dim]
                expected = source[:, index * block : index * block + n].contiguous()
                if self.shape.bits == 8:
                    steps = (expected.float().amax(-1) - expected.float().amin(-1)) / 255
                    rounding = expected.float().abs().amax(-1) * 2**-11
                    assert ((stored[:, :n] - expected).abs().amax(-1) <= 0.52 * steps + rounding).all()
                else:
                    assert torch.equal(stored[:, :n].view(torch.uint8), expected.view(torch.uint8))
                assert not stored[:, n:].any()

    def load_and_check(self, store: TierStore, blocks: Sequence[int] | None = None) -> bool:
        """Load, and compare what came up; False for a load that failed. The store must say a document is
        there only if its bytes are.
        """
        store.pin(self.key)
        try:
            ticket = store.load(self.key, blocks)
            assert ticket.wait(240)
            if ticket.ok:
                self.assert_pages(store, blocks)
            return ticket.ok
        finally:
            store.unpin(self.key)


@contextmanager
def opened(
    folder: Path | None,
    *,
    shape: KvShape = SHAPE,
    host_pages: int = 1000,
    disk_bytes: int = LARGE,
    fingerprint: str = FINGERPRINT,
    queue_bytes: int = LARGE,
    **disk: Any,
) -> Iterator[TierStore]:
    """A store, closed at the end; without a folder there is no disk tier."""
    config = None if folder is None else DiskConfig(folder, disk_bytes, queue_bytes=queue_bytes, **disk)
    store = TierStore(
        shape, fingerprint=fingerprint, host_bytes=host_pages * shape.page_bytes, disk=config, pin=False
    )
    try:
        yield store
    finally:
        store.close()


def files_of(folder: Path) -> list[Path]:
    """Document files in their places."""
    return sorted(folder.glob("rank-*/[!.]*/*.pages"))


def bytes_under(folder: Path) -> int:
    """Bytes of all files, finished, being written or being deleted; what disappears while it is counted
    counts as nothing.
    """
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(place, name))
    return total


def flushed(store: TierStore) -> None:
    assert store.flush(60)
    store.check_integrity()


def in_child(work: Callable[[int], None]) -> tuple[int, int]:
    """(pid, reading end of its pipe) of a forked child that runs ``work(writing end)`` and exits."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            torch.set_num_threads(1)
            work(writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    return pid, reading


_WRITTEN = [(i, 5 + 7 * i, f"space-{i % 3}") for i in range(12)]  # number, tokens, namespace


def kill_writer(folder: Path, after_s: float) -> None:
    """Kill a process that puts and removes documents, so long after it has begun."""

    def work(writing: int) -> None:
        order = random.Random(os.getpid())
        documents = [Sample(number, n, namespace=space) for number, n, space in _WRITTEN]
        with opened(folder) as store:
            os.write(writing, b"r")
            while True:
                document = order.choice(documents)
                if order.random() < 0.3:
                    store.remove(document.key)
                elif order.random() < 0.05:
                    store.remove_namespace(document.namespace)
                else:
                    document.put(store)

    pid, reading = in_child(work)
    assert os.read(reading, 1) == b"r"
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    os.close(reading)


def whole_documents(folder: Path) -> int:
    """Documents that a killed writer has left. Asserts that each is whole, and that nothing else is there."""
    whole = 0
    with opened(folder) as store:
        for number, n, space in _WRITTEN:
            document = Sample(number, n, namespace=space)
            if document.found(store) is not None:
                assert document.load_and_check(store)
                whole += 1
        flushed(store)
        assert store.verify().ok
        assert store.stat()["faults"] == {}
        assert store.stat()["disk"]["bytes"] == bytes_under(folder)
    return whole
