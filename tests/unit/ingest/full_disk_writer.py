"""Makes every write of ingestion on a disk without room, then on a read-only one: a script for a mount
namespace of its own (``unshare -rm``). Prints how many writes failed."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ragserve.errors import RagserveError, StorageFull, Unavailable
from ragserve.ingest.spool import Spool, SpooledFile
from ragserve_index import IndexStore, JobStore, NewChunk, NewDocument
from ragserve_index.types import JobItem

DIM = 32
ROOMS = (0, 12_000, 40_000)  # bytes left on the disk
BALLAST = "ballast"
WRITES = ("documents", "replacement", "index", "namespace", "job", "job items", "upload", "removal")


class Writes:
    """Every kind of write, each about 200 KB, and what can be seen of them."""

    def __init__(self, data_dir: Path) -> None:
        self.store = IndexStore(data_dir)
        self.store.ensure_namespace("n", embedder="e", dim=DIM)
        self.jobs = JobStore(self.store)
        self.spool = Spool(data_dir)
        self.job = self.jobs.create("n", {"kind": "upload"}, [f"{i}-{'s' * 400}" for i in range(400)]).job_id
        self.by_name: dict[str, Callable[[], Any]] = {
            "documents": lambda: self.documents("new"),
            "replacement": lambda: self.documents("first"),
            "index": lambda: self.store.save("n"),
            "namespace": self.namespaces,
            "job": lambda: self.jobs.create("n", {"kind": "paths"}, ["x" * 500 + str(i) for i in range(400)]),
            "job items": self.items,
            "upload": self.upload,
            "removal": lambda: self.store.drop_namespace("n"),
        }
        self.documents("first")

    def documents(self, source: str) -> None:
        chunks = [NewChunk("x" * 1000, 1000 * i, 1000 * i + 1000, 1) for i in range(200)]
        vectors = np.eye(DIM, dtype=np.float32)[np.arange(200) % DIM]
        document = NewDocument(source, source, os.urandom(8).hex(), "text/plain", 1, {})
        self.store.replace_documents("n", [(document, chunks, vectors)])

    def namespaces(self) -> None:
        for i in range(40):
            self.store.ensure_namespace(f"other-{i}", embedder="e" * 400, dim=DIM)

    def items(self) -> None:
        sources = [item.source for item in self.jobs.items(self.job)]
        self.jobs.update_items(
            self.job, [JobItem(each, "failed", "r" * 500, 0, 0, 0, None) for each in sources]
        )

    def upload(self) -> None:
        with self.spool.writing() as writer:
            writer.add(SpooledFile("a.txt", "", "a.txt"), io.BytesIO(bytes(200_000)), max_bytes=1 << 20)
            writer.seal()

    def seen(self) -> dict[str, Any]:
        namespaces = [info for info in self.store.namespaces() if not info.name.startswith("other-")]
        return {
            "namespaces": namespaces,
            "documents": self.store.documents("n"),
            "jobs": self.jobs.list(),
            "items": self.jobs.items(self.job),
            "uploads": sorted(self.spool.root.iterdir()) if self.spool.root.exists() else [],
            "indexes": sorted(path.name for path in (self.store.data_dir / "indexes").iterdir()),
        }

    def sound(self) -> None:
        assert all(report.ok for report in self.store.check(None))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def fill(disk: Path, room: int) -> None:
    """Write until ``room`` bytes are left."""
    with open(disk / BALLAST, "wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(4096))
        except OSError:
            ballast.truncate(max(0, ballast.tell() - room))


def said_by(write: Callable[[], Any], kind: type[RagserveError]) -> str | None:
    """The message of a write's error, None if it succeeds."""
    try:
        write()
    except kind as error:
        return str(error)
    return None


def on_a_full_disk(disk: Path) -> int:
    failed = 0
    for name in WRITES:
        for room in ROOMS:
            writes = Writes(disk / f"{name}-{room}")
            writes.seen()
            open_before = descriptors()
            fill(disk, room)
            before = writes.seen()
            said = said_by(writes.by_name[name], StorageFull)
            if said is not None:
                failed += 1
                assert str(disk) in said
                assert writes.seen() == before, name
                writes.sound()
            (disk / BALLAST).unlink()
            writes.by_name[name]()
            if name != "removal":
                writes.sound()
            assert descriptors() == open_before, (name, room, descriptors(), open_before)
            writes.store.close()
            shutil.rmtree(writes.store.data_dir)
    return failed


def on_a_read_only_disk(disk: Path) -> int:
    """Index files and uploads; a registry that cannot be written cannot be opened."""
    failed = 0
    writes = Writes(disk / "read-only")
    writes.upload()
    writes.seen()
    open_before = descriptors()
    for name, folder in (("index", "indexes"), ("upload", "uploads")):
        before = writes.seen()
        path = str(disk / "read-only" / folder)
        subprocess.run(["mount", "--bind", path, path], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True)
        said = said_by(writes.by_name[name], Unavailable)
        failed += path in (said or "")
        assert writes.seen() == before
        subprocess.run(["umount", path], check=True)
        writes.by_name[name]()
    assert descriptors() == open_before
    writes.store.close()
    return failed


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(on_a_full_disk(place), on_a_read_only_disk(place))
