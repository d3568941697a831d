"""A full disk, a read-only disk, a clock that is set back or forward, or no file descriptors left, during
every kind of write: of the index, of documents' KV, of API keys, of the gate's record and the cost profile,
of the rows of `tune`, and of ingestion and removal over REST.

The error is one that says what to do. Reading goes on, nothing is half written, what was there before is
there after, the same write works once the trouble is over, and no file descriptor is left. The server of the
writes over REST is one process throughout: it answers after each trouble, also clients that came during it,
and the number of its open files does not grow.

The disk is a small tmpfs in a mount namespace of the process. It is made read-only by a read-only mount on
top of it: files that are open go on, as with a disk whose files are open when it fails, and no file can be
made, renamed or removed."""

from __future__ import annotations

import contextlib
import functools
import random
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx

from ragserve.errors import RagserveError, explained
from ragserve.profiles import gate
from ragserve.profiles.costs import COSTS, CostSample, fit
from ragserve.tenants.key_file import KeyFile
from ragserve.tenants.keyring import Keyring
from ragserve.verification import rows
from ragserve_index import IndexStore
from sglang_ext.documents.tier_store import TierStore
from tests.campaigns.progress import Progress
from tests.campaigns.site import ENDED
from tests.campaigns.troubles import SIZE, Volume, clock, few_descriptors, open_descriptors
from tests.conftest import MODEL
from tests.unit.api.scripted_server import Live, serving
from tests.unit.documents.document_samples import Sample, bytes_under, flushed, opened
from tests.unit.index.index_samples import assert_clean, item, make, texts, vectors_of

TARGET = 1_000
_NAMES = ("a", "b", "c", "d", "e", "f")
TROUBLES = ("full", "read-only", "clock", "descriptors")
_WAIT_S = 240.0
_MANY = 10  # operations of the server, before its open files are judged


@dataclass(frozen=True)
class Trouble:
    """Begins when called. ``reads``: reading goes on meanwhile; else it may be refused."""

    begin: Callable[[], AbstractContextManager[None]]
    reads: bool = True

    def __call__(self) -> AbstractContextManager[None]:
        return self.begin()


def attempt(work: Callable[[], object], *, of_command: bool = False) -> str:
    """The error of ``work``, which must be one of ours, or one that ``of_command`` the command line explains;
    empty for none."""
    try:
        work()
    except RagserveError as error:
        if not error.hint:
            raise AssertionError(f"it does not say what to do: {error}") from None
        return str(error)
    except (OSError, sqlite3.Error) as error:
        if of_command and isinstance(error, OSError) and (said := explained(error)):
            return str(said)
        raise AssertionError(f"a user would see {error!r}") from error
    return ""


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
            assert not trouble.reads or hashes(store) == (before if error else after)
            refused = attempt(lambda: texts(store, vectors_of("q"), 5))
            assert not (refused and trouble.reads), refused
        assert hashes(store) == (before if error else after)
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
            served, faults = _served(there, store), store.stat()["faults"]
            assert served or not trouble.reads, "what was there before is not served"
            kept = new.found(store) is not None
            assert kept or faults, "it was not kept, and nothing was counted"
            assert not kept or not trouble.reads or new.load_and_check(store)
        assert _served(there, store), "what was there before is not served afterwards"
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


def _served(document: Sample, store: TierStore) -> bool:
    with contextlib.suppress(KeyError):  # it cannot be found
        return document.load_and_check(store)
    return False


def keys(folder: Path, chance: random.Random, trouble: Trouble) -> str:
    """Make and revoke API keys, beside a server that admits them."""
    file = KeyFile(folder / "keys")
    old, secret = file.create(f"old {chance.randrange(10**9)}", ["a"], ["read"])
    server = Keyring(folder / "keys", None)

    def admitted(secret: str) -> bool:
        with contextlib.suppress(RagserveError):
            return server.admit(f"Bearer {secret}".encode()).name != "nobody"
        return False

    assert admitted(secret)
    made: list[tuple[str, str]] = []

    def make_one() -> None:
        key, its = file.create(f"new {chance.randrange(10**9)}", ["b"], ["read"])
        made.append((key.key_id, its))

    with trouble():
        error = attempt(make_one, of_command=True)
        assert bool(made) == (not error)
        revoked = not attempt(lambda: file.revoke(old.key_id), of_command=True)
    make_one()
    assert all(admitted(its) for _, its in made), "a key that was made is not admitted"
    assert admitted(secret) != revoked, "a revoked key is admitted, or the other way round"
    for name, _ in made + ([] if revoked else [(old.key_id, secret)]):
        file.revoke(name)
    assert file.read().keys == []
    _only(folder / "keys", "keys.json", "keys.lock")
    return error


def profiles(folder: Path, chance: random.Random, trouble: Trouble) -> str:
    """Write the gate's record and the cost profile of a model, as `tune`, `eval` and `calibrate` do."""
    place = folder / "profiles"
    figures = gate.Figures(200, None, None, 0.0, 100.0, 10.0)
    label = f"concat:share={chance.random():.6f}"
    entry = gate.Entry({gate.set_of("n"): figures}, "tiny", "2026-01-01", "a CPU", "float32")
    costs = fit(
        [CostSample(n, chance.uniform(1, 9) * n) for n in (512, 1024, 2048)],
        model="tiny", hardware="a CPU", date="2026-01-01",
    )  # fmt: skip
    record_at, costs_at = place / gate.FILE_NAME, place / "costs.json"
    server = gate.Gate([record_at], "print", model="tiny", dtype="float32")
    before = server.entries("n"), COSTS.load(costs_at, "print")
    with trouble():
        error = attempt(lambda: gate.record(record_at, "print", {label: entry}), of_command=True)
        other = attempt(lambda: COSTS.save(costs_at, "print", costs), of_command=True)
        server.entries("n")
    known = before[0] if error else {**before[0], label: entry.own("n")}
    assert server.entries("n") == known, "the record is not what was written"
    assert COSTS.load(costs_at, "print") == (before[1] if other else costs)
    gate.record(record_at, "print", {label: entry})
    COSTS.save(costs_at, "print", costs)
    assert label in server.entries("n")
    assert COSTS.load(costs_at, "print") == costs
    _only(place, *(f"{each.name}{end}" for each in (record_at, costs_at) for end in ("", ".lock")))
    return error or other


def tune_rows(folder: Path, chance: random.Random, trouble: Trouble) -> str:
    """Write the rows of `tune`, which are what the next run goes on from."""
    place = folder / f"tune-{chance.randrange(10**9)}"
    new = [{"set": "s", "id": f"{i}", "strategy": "concat", "text": "x" * 500} for i in range(40)]
    written = 0

    def write(batch: list[rows.Row]) -> None:
        nonlocal written
        with rows.appending(place / "rows-0.jsonl") as append:
            for row in batch:
                append(row)
                written += 1

    write(new[:10])
    with trouble():
        error = attempt(lambda: write(new[10:]), of_command=True)
        assert bool(error) == (written < len(new))
    found = list(rows.read(place).values())
    assert found == new[: len(found)]
    assert len(found) >= written, "a row that was written is lost"
    write(new[len(found) :])
    assert list(rows.read(place).values()) == new
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    return error


def _only(folder: Path, *names: str) -> None:
    found = {path.name for path in folder.iterdir()}
    assert found <= set(names), f"{found - set(names)} are left"


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
        old = self._id("old")
        with self._newcomer() as connect, trouble():
            connect()
            error = self._refused(self.client.post("/rag/ingest", json=body))
            removed = self.client.delete(f"/rag/documents/{old}", params={"namespace": "disk"})
            error = self._refused(removed) or error
            asked = self.client.post("/rag/query", json={"query": "Which text?", "namespace": "disk"})
            error = error if asked.is_success else self._refused(asked)
            assert asked.is_success or not trouble.reads, asked.text
        self._all_ended()
        self._done(self.client.post("/rag/ingest", json=body))
        found = {row["source"] for row in self._documents()}
        assert set(names) <= found, f"{set(names) - found} is lost"
        assert ("old" in found) == removed.is_error, "what was removed is there, or the other way round"
        return error

    @contextlib.contextmanager
    def _newcomer(self) -> Iterator[Callable[[], None]]:
        """A client that connects when it is told to. It is answered in the end, or turned away."""
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        host, port = self.live.url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.settimeout(_WAIT_S)

            def connect() -> None:
                connection.connect((host, int(port)))
                connection.sendall(request)

            yield connect
            with contextlib.suppress(ConnectionError):
                answer = connection.recv(4096)
                assert answer[:12] in (b"HTTP/1.1 200", b""), answer
        assert self.live.client().get("/health").is_success

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
            "keys": keys,
            "profiles": profiles,
            "tune": tune_rows,
            "rest": rest.write,
        }
        opened_files: list[int] = progress.data.setdefault("open files", [])
        while progress.goes_on():
            chance = progress.random()
            write, trouble = chance.choice(list(writes)), chance.choice(TROUBLES)
            left, shift = (
                chance.choice((0, 4096, 2**14, 2**16, 2**18)),
                chance.choice((-86400.0, 3600.0, -5.0)),
            )
            troubles: dict[str, Trouble] = {
                "full": Trouble(functools.partial(volume.full, left)),
                "read-only": Trouble(volume.read_only),
                "clock": Trouble(functools.partial(clock, shift)),
                "descriptors": Trouble(functools.partial(few_descriptors, chance.randrange(5)), reads=False),
            }
            with progress.operation(f"{write}, {trouble}"):
                before = open_descriptors()
                error = writes[write](volume.path, chance, troubles[trouble])
                assert not error or trouble != "clock", f"the clock makes it fail: {error}"
                if write != "rest":  # the server's own threads open and close files meanwhile
                    left_open = open_descriptors() - before
                    assert not left_open, f"{left_open} file descriptors are left"
                else:
                    opened_files.append(open_descriptors())
                progress.counts["refused"] += bool(error)
        judge_descriptors(progress, opened_files)


def judge_descriptors(progress: Progress, opened: list[int]) -> None:
    """The server's open files after each of its operations must not grow from the first half of the run to
    the last quarter. Its pools fill in the first half."""
    half, quarter = opened[: len(opened) // 2], opened[-(len(opened) // 4) :]
    if len(quarter) < _MANY:
        return
    progress.data["figures"] = {"open files, first half": max(half), "last quarter": min(quarter)}
    if min(quarter) > max(half):
        progress.violation(f"the server's open files grow: {progress.data['figures']}")
