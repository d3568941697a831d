"""A full disk, a read-only disk and a clock that is set back, during every kind of write: of the index, of
documents' KV, and of ingestion and removal over REST.

The error is one that says what to do. Reading goes on, nothing is half written, what was there before is
there after, the same write works once the trouble is over, and no file descriptor is left.

The disk is a small tmpfs in a mount namespace of the process. It is made read-only by a read-only mount on
top of it: files that are open go on, as with a disk whose files are open when it fails, and no file can be
made, renamed or removed."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import httpx

from ragserve.errors import RagserveError
from ragserve_index import IndexStore
from tests.campaigns.progress import Progress
from tests.campaigns.site import ENDED
from tests.conftest import MODEL
from tests.unit.api.scripted_server import Live, serving
from tests.unit.documents.document_samples import Sample, bytes_under, flushed, opened
from tests.unit.index.index_samples import assert_clean, item, make, texts, vectors_of

TARGET = 1_000
SIZE = 16 * 2**20
_NAMES = ("a", "b", "c", "d", "e", "f")
_WAIT_S = 60.0
Trouble = Callable[[], AbstractContextManager[None]]


class Volume:
    """A mounted tmpfs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        _mount("-t", "tmpfs", "-o", f"size={SIZE}", "none", str(path))

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    @contextlib.contextmanager
    def full(self, left: int) -> Iterator[None]:
        """Only ``left`` bytes are free, rounded down to pages."""
        filler = self.path / "filler"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, self.free_bytes() - left))
        try:
            yield
        finally:
            filler.unlink()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        _mount("--bind", str(self.path), str(self.path))
        _mount("-o", "remount,bind,ro", str(self.path))
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@contextlib.contextmanager
def clock(shift_s: float) -> Iterator[None]:
    real = time.time
    with mock.patch("time.time", side_effect=lambda: real() + shift_s):
        yield


def attempt(work: Callable[[], object]) -> str:
    """The error of ``work``, which must be one of ours; empty for none."""
    try:
        work()
    except RagserveError as error:
        if not error.hint:
            raise AssertionError(f"it does not say what to do: {error}") from None
        return str(error)
    except (OSError, sqlite3.Error) as error:
        raise AssertionError(f"a user would see {error!r}") from error
    return ""


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def index_write(folder: Path, chance: random.Random, trouble: Trouble) -> str:
    """Replace documents and save."""
    data = folder / "index"
    if not data.exists():
        with make(data):
            pass
    batch = [
        item(name, chance.randint(1, 40), edition=chance.randrange(10**6))
        for name in chance.sample(_NAMES, chance.randint(1, len(_NAMES)))
    ]

    def hashes(store: IndexStore) -> dict[str, str]:
        return {document.source: document.content_hash for document in store.documents("n")}

    with IndexStore(data) as store:
        before = hashes(store)
        after = before | {document.source: document.content_hash for document, _, _ in batch}
        with trouble():
            error = attempt(lambda: store.replace_documents("n", batch))
            attempt(store.save)
            assert hashes(store) == (before if error else after)
            texts(store, vectors_of("q"), 5)
        store.replace_documents("n", batch)
        store.save()
    with IndexStore(data) as store:
        assert hashes(store) == after
        assert_clean(store)
        assert store.check()[0].file == "current"
    return error


def start(folder: Path, chance: random.Random, trouble: Trouble) -> str:
    """Open an index and search it."""
    data = folder / "index"
    if not data.exists():
        with make(data):
            pass

    def search() -> None:
        with IndexStore(data) as store:
            texts(store, vectors_of("q"), 5)

    with trouble():
        error = attempt(search)
    search()
    return error


def page_write(folder: Path, chance: random.Random, trouble: Trouble) -> str:
    """Put documents' KV. It is a cache: the trouble is a counted fault, never an error."""
    space = f"space-{chance.randrange(3)}"
    there, new = (Sample(chance.randrange(10**6), chance.randint(1, 200), namespace=space) for _ in range(2))
    with opened(folder / "kv", disk_bytes=SIZE // 4) as store:
        there.put(store)
        flushed(store)
        with trouble():
            new.put(store)
            flushed(store)
            new.assert_pages(store)
            store.drop_host()
            assert there.load_and_check(store), "what was there before is not served"
            kept = new.found(store) is not None
            faults = store.stat()["faults"]
            assert kept or faults, "it was not kept, and nothing was counted"
            assert not kept or new.load_and_check(store)
        new.put(store)
        flushed(store)
        store.drop_host()
        assert new.load_and_check(store)
        assert store.verify().ok
        assert store.stat()["disk"]["bytes"] == bytes_under(folder / "kv")
        store.remove(there.key)
        store.remove(new.key)
        flushed(store)
    return str(faults or "")


class Rest:
    """Ingestion and removal over REST, in a server whose model and embedder are scripted."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.client = live.client()

    def write(self, folder: Path, chance: random.Random, trouble: Trouble) -> str:
        names = chance.sample(_NAMES, 2)
        rows = [{"name": name, "text": f"Text {chance.randrange(10**6)} of {name}. " * 30} for name in names]
        body = {"namespace": "disk", "texts": rows}
        self._done(self.client.post("/rag/ingest", json={"namespace": "disk", "texts": [self._old()]}))
        with trouble():
            error = self._refused(self.client.post("/rag/ingest", json=body))
            removed = self.client.delete(f"/rag/documents/{self._id('old')}", params={"namespace": "disk"})
            error = self._refused(removed) or error
            asked = self.client.post("/rag/query", json={"query": "Which text?", "namespace": "disk"})
            assert asked.status_code == httpx.codes.OK, asked.text
        self._all_ended()
        self._done(self.client.post("/rag/ingest", json=body))
        found = {row["source"] for row in self._documents()}
        assert set(names) <= found, f"{set(names) - found} is lost"
        assert ("old" in found) == removed.is_error, "what was removed is there, or the other way round"
        return error

    def _old(self) -> dict[str, str]:
        return {"name": "old", "text": "A document that was there before."}

    def _refused(self, answer: httpx.Response) -> str:
        """Empty for a success. An error must be one that says what to do."""
        if answer.is_success:
            return ""
        assert answer.status_code in (503, 507), f"{answer.status_code}: {answer.text}"
        assert answer.json()["error"]["hint"], answer.text
        return answer.text

    def _documents(self) -> list[dict[str, str]]:
        return list(self.client.get("/rag/documents", params={"namespace": "disk"}).json()["documents"])

    def _id(self, name: str) -> str:
        return next(row["doc_id"] for row in self._documents() if row["source"] == name)

    def _all_ended(self) -> None:
        deadline = time.monotonic() + _WAIT_S
        while any(job["state"] not in ENDED for job in self.client.get("/rag/jobs").json()["jobs"]):
            assert time.monotonic() < deadline, "a job of a full disk does not end"
            time.sleep(0.05)

    def _done(self, answer: httpx.Response) -> None:
        assert answer.status_code == httpx.codes.ACCEPTED, f"{answer.status_code}: {answer.text}"
        self._all_ended()
        job = self.client.get(answer.headers["location"]).json()
        assert (job["state"], job["counts"].get("failed", 0)) == ("done", 0), job


def run(progress: Progress) -> None:
    with contextlib.ExitStack() as stack:
        volume = Volume(progress.folder / "volume")
        live = stack.enter_context(serving(volume.path / "data", MODEL))
        rest = Rest(live)
        writes: dict[str, Callable[[Path, random.Random, Trouble], str]] = {
            "index": index_write,
            "start": start,
            "pages": page_write,
            "rest": rest.write,
        }
        while progress.goes_on():
            chance = progress.random()
            write, trouble = chance.choice(list(writes)), chance.choice(("full", "read-only", "clock"))
            left, shift = (
                chance.choice((0, 4096, 2**14, 2**16, 2**18)),
                chance.choice((-86400.0, 3600.0, -5.0)),
            )
            troubles: dict[str, Trouble] = {
                "full": lambda: volume.full(left),  # noqa: B023 - called in this pass
                "read-only": volume.read_only,
                "clock": lambda: clock(shift),  # noqa: B023
            }
            with progress.operation(f"{write}, {trouble}"):
                before = _descriptors()
                error = writes[write](volume.path, chance, troubles[trouble])
                assert not error or trouble != "clock", f"the clock makes it fail: {error}"
                if write != "rest":  # the server's own threads open and close files meanwhile
                    assert _descriptors() == before, f"{_descriptors() - before} file descriptors are left"
                progress.counts["refused"] += bool(error)
