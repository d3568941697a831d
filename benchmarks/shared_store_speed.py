"""Measure how fast documents come out of, and go into, the stores that engines share.

    .venv/bin/python -m benchmarks.shared_store_speed --out benchmarks/results

Documents have the KV of 512 tokens of Llama-3.1-8B, 64 MiB in pages of 2 MiB. A document is read as an engine
reads it: its record, its pages into memory of its own, their CRCs. Everything is on this machine: Mooncake's
master and client speak TCP over loopback, and the folder is in memory where /dev/shm is. So neither a network
nor a disk is in the figures. They are CPU time, of this process and those that it has started, which other
programs on the machine disturb least; the rival, a copy of the same bytes in memory with their CRCs, shows
what is left of it without a store.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from ragserve.engine.ports import LOOPBACK, hold_port, port_of
from ragserve.verification.report import write
from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.page_format import Record
from sglang_ext.documents.pages.types import KvShape
from sglang_ext.documents.remote.folder_backend import FolderBackend
from sglang_ext.documents.remote.mooncake_backend import MooncakeBackend
from sglang_ext.documents.remote.remote_backend import RemoteBackend, StoreAway
from sglang_ext.documents.remote.remote_options import mooncake_options

SHAPE = KvShape(layers=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, block=16)
LAYOUT = SHAPE.layout("shared-store-speed", 0, 1)
TOKENS, DOCUMENTS, ROUNDS = 512, 4, 8
PAGES = TOKENS // SHAPE.block
MEMORY = Path("/dev/shm")
NAMESPACE = "speed"
START_S = 60.0


def document(number: int) -> tuple[Record, bytes, list[torch.Tensor]]:
    """A document of random bytes: its record, the record encoded, and its pages, uint8 [page bytes] each."""
    draw = torch.Generator().manual_seed(number)
    pages = list(torch.randint(256, (PAGES, LAYOUT.page_bytes), dtype=torch.uint8, generator=draw))
    key = f"document-{number}"
    crcs = array("I", (page_format.page_crc(key, block, page.numpy()) for block, page in enumerate(pages)))
    ids = array("i", range(TOKENS))
    data = page_format.encode(key, NAMESPACE, ids, crcs, LAYOUT, b"")
    return Record(key, NAMESPACE, ids, crcs, len(data), LAYOUT.page_bytes), data, pages


def check(record: Record, pages: list[torch.Tensor]) -> None:
    """Raise ValueError for pages that are not the document's."""
    for block, page in enumerate(pages):
        if page_format.page_crc(record.key, block, page.numpy()) != record.crcs[block]:
            raise ValueError(f"page {block} of {record.key} is damaged")


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of CPU time that a call takes, in all processes."""
    before = cpu_seconds()
    work()
    return 1e3 * (cpu_seconds() - before)


def cpu_seconds() -> float:
    """CPU time so far of this process and those that it has started, user and system."""
    this = psutil.Process()
    times = [each.cpu_times() for each in (this, *this.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def measured(name: str, backend: RemoteBackend | None) -> dict[str, Any]:
    """Write and read each of `DOCUMENTS` in turn, `ROUNDS` times; without a backend, copy them in memory."""
    writes, reads = [], []
    targets = list(torch.empty((PAGES, LAYOUT.page_bytes), dtype=torch.uint8).fill_(1))
    kept = list(torch.empty((PAGES, LAYOUT.page_bytes), dtype=torch.uint8).fill_(1))
    for number in range(DOCUMENTS):
        record, data, pages = document(number)

        def put(data: bytes = data, record: Record = record, pages: list[torch.Tensor] = pages) -> None:
            if backend is None:
                for page, place in zip(pages, kept, strict=True):
                    place.copy_(page)
            elif not backend.write(record, data, pages, b""):
                raise ValueError(f"{name} refused {record.key}")

        def get(record: Record = record) -> None:
            if backend is None:
                for page, place in zip(kept, targets, strict=True):
                    place.copy_(page)
            else:
                found = backend.find(record.key, NAMESPACE)
                if found is None or not backend.read(found, range(PAGES), targets):
                    raise ValueError(f"{name} has lost {record.key}")
            check(record, targets)

        for _ in range(ROUNDS):
            writes.append(timed(put))
            reads.append(timed(get))
            if backend is not None:
                backend.remove([record.key], NAMESPACE)
    size = PAGES * LAYOUT.page_bytes
    return {
        "store": name,
        **{
            f"{way} CPU ms": round(sum(each) / len(each), 1)
            for way, each in (("write", writes), ("read", reads))
        },
        **{
            f"{way} GB a CPU second": round(size * len(each) / sum(each) / 1e6, 2)
            for way, each in (("write", writes), ("read", reads))
        },
    }


@contextmanager
def mooncake(folder: Path) -> Iterator[RemoteBackend]:
    """A Mooncake Store with a master and a client of its own. Raises StoreAway if it does not come up."""
    if (spec := find_spec("mooncake")) is None:
        raise StoreAway("Mooncake is not installed: pip install 'ragserve[mooncake]'")
    with ExitStack() as stack:
        port, metrics = (port_of(stack.enter_context(hold_port())) for _ in range(2))
    with (folder / "master.log").open("wb") as log:
        master = subprocess.Popen(
            [
                str(Path(str(spec.origin)).with_name("mooncake_master")),
                f"-rpc_port={port}",
                f"-rpc_address={LOOPBACK}",
                f"-metrics_port={metrics}",
                f"-metrics_host={LOOPBACK}",
            ],
            stdout=log,
            stderr=log,
            # where scripts/install unpacks libibverbs1
            env=os.environ | {"LD_LIBRARY_PATH": str(Path(sys.prefix) / "lib" / "ibverbs")},
        )
    options = {"master_server_address": f"{LOOPBACK}:{port}", "global_segment_size": 2**30}
    backend = MooncakeBackend(LAYOUT, mooncake_options(options))
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                backend.check()
                break
            except StoreAway:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield backend
    finally:
        backend.close()
        master.kill()
        master.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for shared-store.json")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    parent = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="ragserve-store-", dir=parent) as folder:
        rows = [measured("none: a copy in memory", None)]
        shared = FolderBackend(Path(folder), LAYOUT, 2**34)
        rows.append(measured("shared", shared))
        with mooncake(Path(folder)) as backend:
            rows.append(measured("mooncake", backend))
    workload = {
        "a document": f"{TOKENS} tokens of Llama-3.1-8B, {PAGES * LAYOUT.page_bytes // 2**20} MiB",
        "documents": f"{DOCUMENTS}, {ROUNDS} times each, one at a time",
        "shared": "a folder in /dev/shm" if parent else "a folder on a local disk",
        "mooncake": "TCP over loopback",
    }
    note = "Means of CPU time. Reading includes the record and the CRC of every page. No network and no disk."
    write("shared-store", workload, rows, out=None if out is None else out / "shared-store.json", note=note)


if __name__ == "__main__":
    main()
