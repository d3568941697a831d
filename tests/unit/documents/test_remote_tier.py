"""The shared store behind the disk: a folder here; engines are stores with folders of their own."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.context.compose.locate import Locator
from sglang_ext.context.compose.request import tier_of
from sglang_ext.documents.pages.metrics import remote_metrics
from sglang_ext.documents.pages.types import DiskConfig, RemoteConfig
from sglang_ext.documents.remote.document_values import DocumentValues
from sglang_ext.documents.remote.folder_backend import FolderBackend
from sglang_ext.documents.tier_store import TierStore
from sglang_ext.process.control import answer
from sglang_ext.ranks.ranks import Ranks
from tests.unit.context.compose.test_locate import context_of, resolved
from tests.unit.documents.document_samples import FINGERPRINT, LARGE, SHAPE, Sample, flushed, pages_of

PAGE = SHAPE.page_bytes


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine's store is no store that is away."""
    monkeypatch.setattr("sglang_ext.documents.remote.tier.LOOKUP_S", 240)
    monkeypatch.setattr("sglang_ext.documents.promote.LOAD_S", 240)


@contextmanager
def engine(
    tmp: Path,
    name: str = "a",
    *,
    store: str = "shared",
    options: dict[str, Any] | None = None,
    min_value: float = 0.0,
    fingerprint: str = FINGERPRINT,
    host_pages: int = 1000,
    disk: bool = True,
    away: bool = False,
    rank: int = 0,
    world: int = 1,
) -> Iterator[TierStore]:
    """A store with host and disk of its own and one that engines share, which answers, or is ``away``."""
    shared = tmp / "shared"
    if options is None:
        options = {"folder": str(shared)}
        shared.mkdir(exist_ok=True)
    remote = RemoteConfig(
        store, options, tmp / name / "deletions.json", min_value=min_value, queue_bytes=LARGE, retry_s=0.02
    )
    tiers = TierStore(
        SHAPE,
        fingerprint=fingerprint,
        host_bytes=host_pages * PAGE,
        disk=DiskConfig(tmp / name, LARGE, queue_bytes=LARGE) if disk else None,
        remote=remote,
        pin=False,
        rank=rank,
        world=world,
    )
    try:
        until(lambda: away or not tiers.stat()["remote"]["away"])
        yield tiers
    finally:
        tiers.close()


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def found(store: TierStore, document: Sample) -> str:
    """The tier that has a document, once the shared store has been asked."""
    until(lambda: not store.looks_for(document.key, document.namespace))
    return store.where(document.key, document.namespace)[1]


def control(store: TierStore, op: str, **body: Any) -> dict[str, Any]:
    """The answer of a control operation, asked for again while it is pending."""
    documents = SimpleNamespace(
        document_tokens=dict,
        remove=lambda keys, namespace: sum(store.remove(key, namespace) for key in keys),
        remove_namespace=store.remove_namespace,
        clear=store.clear,
    )
    runtime = SimpleNamespace(tiers=store, documents=documents, ranks=Ranks(), sweep=lambda: None)
    deadline = time.monotonic() + 240
    while "pending" in (given := answer(runtime, {"op": op, **body})["response"][0]):
        assert time.monotonic() < deadline
        body["pending"] = given["pending"]
        time.sleep(0.002)
    return dict(given)


def removed(store: TierStore, document: Sample) -> dict[str, Any]:
    return control(store, "remove", keys=[document.key], namespace=document.namespace)


def resolved_tiers(store: TierStore, documents: list[Sample]) -> set[str]:
    """The tiers from which a request takes these documents."""
    nothing_on_device: Any = SimpleNamespace(document=lambda ids, key: None)
    locator = Locator(nothing_on_device, store, lambda key: False, SHAPE.block)
    context = context_of(documents, [range(document.meta.n_tokens) for document in documents])
    missing = resolved(locator, context)
    tiers = {"missing"} if missing else {tier_of(source) for source in context.located.sources}
    locator.unlock(context)
    return tiers


def test_engines_share_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.documents.remote.tier._ABSENT_S", 0.05)
    documents = [Sample(i, 40) for i in range(3)]
    with engine(tmp_path, "a") as one, engine(tmp_path, "b", disk=False) as other:
        for document in documents:
            assert found(other, document) == "absent"
            one.put(document.meta, document.k, document.v, b"analysis")
        flushed(one)
        for document in documents:
            until(lambda d=document: found(other, d) == "remote")  # type: ignore[misc]  # it remembers that it was not
        assert resolved_tiers(other, documents) == {"remote"}
        for document in documents:
            document.assert_pages(other)
        summary = other.summary(documents[0].key)
        assert summary.finished.wait(240)
        assert summary.data == b"analysis"
        assert other.stat()["moved_bytes"]["from_remote"] == 30 * PAGE
        where = control(other, "where", keys=[d.key for d in documents], tokens=[40] * 3, namespace="default")
        assert (where["on_host"], where["below"]) == ([True] * 3, ["remote"] * 3)
        other.drop_host()
        assert documents[1].load_and_check(other, [2, 3]), "a part of it"
        assert other.stat()["faults"] == {}
        other.check_integrity()
    with engine(tmp_path, "c") as third:
        assert resolved_tiers(third, documents[:1]) == {"remote"}
        flushed(third)
        assert third.where(documents[0].key, "default")[1] == "disk", "what came whole stays nearer"
    with engine(tmp_path, "d", fingerprint="model-b") as stranger:
        assert found(stranger, documents[0]) == "absent"


def test_each_rank_has_its_own_pages_of_a_document(tmp_path: Path) -> None:
    heads = [Sample(1, 40) for _ in range(2)]
    heads[1].k, heads[1].v = -heads[1].k, -heads[1].v
    # 40 tokens at 0.05 ms in 10 pages of 512 bytes a rank: 205 ms per MiB of both for each retrieval
    with (
        engine(tmp_path, "a0", rank=0, world=2, min_value=400.0) as first,
        engine(tmp_path, "a1", rank=1, world=2, min_value=400.0) as second,
    ):
        for store, own in zip((first, second), heads, strict=True):
            own.put(store)
            flushed(store)
            store.retrieved([own.key], "default")
            flushed(store)
            assert store.stat()["remote"]["stored"] == 0, "as much a MiB as in one process"
            store.retrieved([own.key], "default")
            flushed(store)
            assert store.stat()["remote"]["stored"] == 1
    with (
        engine(tmp_path, "b0", rank=0, world=2) as first,
        engine(tmp_path, "b1", rank=1, world=2) as second,
        engine(tmp_path, "c") as alone,
    ):
        for store, own in zip((first, second), heads, strict=True):
            assert found(store, own) == "remote"
            assert own.load_and_check(store)
        assert found(alone, heads[0]) == "absent", "an engine of another tp_size"
        for store, own in zip((first, second), heads, strict=True):
            assert removed(store, own) == {"removed": 1}
    assert not list((tmp_path / "shared").rglob("*.pages"))


def test_other_namespaces_cannot_name_a_document(tmp_path: Path) -> None:
    document = Sample(1, 16, namespace="mine")
    with engine(tmp_path, "a") as one, engine(tmp_path, "b") as other:
        document.put(one)
        flushed(one)
        until(lambda: not other.looks_for(document.key, "theirs"))
        assert other.host_pages(document.key, document.ids, "theirs") is None
        assert other.where(document.key, "theirs")[1] == "absent"


def test_a_document_is_stored_once_it_has_saved_enough_prefill(tmp_path: Path) -> None:
    often, seldom, unsaved = Sample(1, 40), Sample(2, 40), Sample(3, 40)
    # 40 tokens at 0.05 ms in 10 pages of 512 bytes: 410 ms per MiB for each retrieval
    with engine(tmp_path, min_value=1000.0) as store:
        for document in (often, seldom):
            document.put(store)
        store.put(unsaved.meta, unsaved.k, unsaved.v, to_disk=False)
        flushed(store)
        store.drop_host([seldom.key])
        for retrieved in ([often.key, seldom.key], [often.key, unsaved.key], [unsaved.key], [unsaved.key]):
            store.retrieved(retrieved, "default")
        flushed(store)
        assert store.stat()["remote"]["stored"] == 0
        store.retrieved([often.key], "default")
        flushed(store)
        assert store.stat()["remote"]["stored"] == 1
        assert store.demote([seldom.key], "default"), "for measurements anything is stored, here from disk"
        flushed(store)
        assert not store.demote([seldom.key], "default")
        assert store.where(seldom.key, "default")[1] == "remote"
        assert seldom.load_and_check(store)
    values = DocumentValues(1.0, PAGE, SHAPE.block, (0.0, 0.0, 1e-4))
    for key in ("short", "long"):
        values.note(key)
    assert values.value("long", 4000) > values.value("short", 40), "long prompts cost more a token"


def test_removed_means_removed_from_the_shared_store(tmp_path: Path) -> None:
    documents = [Sample(i, 16, namespace=f"space-{i % 2}") for i in range(4)]
    with engine(tmp_path, "a") as one, engine(tmp_path, "b") as other:
        for document in documents:
            document.put(one)
        flushed(one)
        assert removed(one, documents[0]) == {"removed": 1}
        assert removed(other, documents[2]) == {"removed": 0}, "whoever has stored it"
        left = sorted(path.stem for path in (tmp_path / "shared").rglob("*.pages"))
        assert left == sorted((documents[1].key, documents[3].key))
        assert control(other, "remove_namespace", namespace="space-1") == {"removed": 0}
        assert not list((tmp_path / "shared").rglob("*.pages"))
        documents[0].put(one)  # the same text again
        flushed(one)
        assert list((tmp_path / "shared").rglob("*.pages"))
        assert control(one, "clear") == {}
        assert not list((tmp_path / "shared").rglob("*.pages"))


def test_a_document_that_comes_back_from_another_engine_is_the_one_that_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ext.documents.remote.tier._ABSENT_S", 0.05)
    document = Sample(1, 16)
    with engine(tmp_path, "a") as one, engine(tmp_path, "b") as other:
        document.put(one)
        flushed(one)
        one.pin(document.key)  # a request reads it
        pages = pages_of(one, document.key, range(4))
        assert removed(one, document) == {"removed": 1}
        assert resolved_tiers(one, [document]) == {"missing"}
        document.put(other)  # the same text again, elsewhere
        flushed(other)
        until(lambda: found(one, document) == "remote")
        assert resolved_tiers(one, [document]) == {"host"}
        assert pages_of(one, document.key, range(4)) == pages, "the next reader pins what the first one does"
        one.check_integrity()
        assert one.drop_host() == 0
        one.unpin(document.key)
        assert one.drop_host() == 1
        assert one.stat()["host"]["pages"] == 0


def test_a_store_that_is_away_costs_hits_and_keeps_deletions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone, kept, late = Sample(1, 16), Sample(2, 16), Sample(3, 16)
    shared, aside = tmp_path / "shared", tmp_path / "aside"
    with engine(tmp_path) as store:
        for document in (gone, kept):
            document.put(store)
        flushed(store)
        shared.rename(aside)
        until(lambda: store.stat()["remote"]["away"] or late.put(store))  # unmounted in use
        assert removed(store, gone) == {"removed": 1, "unconfirmed": 1}, "it does not wait for the store"
        assert found(store, gone) == "absent"
        store.drop_host()
        assert resolved_tiers(store, [kept]) == {"disk"}
        flushed(store)
        assert remote_metrics().up._value.get() == 0
    journal = json.loads((tmp_path / "a" / "deletions.json").read_text(encoding="utf-8"))
    assert journal["unconfirmed"] == [["default", gone.key]]
    with engine(tmp_path, options={"folder": str(shared)}, away=True) as store:  # away at the start, too
        until(lambda: store.stat()["faults"].get("remote_away"))
        assert found(store, gone) == "absent"
        aside.rename(shared)
        until(lambda: not store.stat()["remote"]["unconfirmed_deletions"])
        assert kept.key in {path.stem for path in shared.rglob("*.pages")}
        assert gone.key not in {path.stem for path in shared.rglob("*.pages")}
        until(lambda: json.loads((tmp_path / "a" / "deletions.json").read_text())["unconfirmed"] == [])
        late.put(store)
        flushed(store)
        assert late.key in {path.stem for path in shared.rglob("*.pages")}
    lines = [record for record in caplog.records if "is away" in record.message]
    assert 1 <= len(lines) <= 2, "one line for each time it goes"
    assert all(record.levelno == logging.WARNING for record in lines)


def test_a_store_that_hangs_keeps_no_request_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document, go = Sample(1, 16), threading.Event()
    monkeypatch.setattr("sglang_ext.documents.remote.tier.LOOKUP_S", 0.02)
    monkeypatch.setattr("sglang_ext.documents.promote.LOAD_S", 0.02)
    with engine(tmp_path, "a") as one:
        document.put(one)
        flushed(one)
    for method in ("find", "read"):
        with engine(tmp_path, f"b-{method}") as other, monkeypatch.context() as patch:
            original = getattr(FolderBackend, method)
            go.clear()
            patch.setattr(FolderBackend, method, lambda *a, f=original: go.wait(240) and f(*a))
            try:
                assert resolved_tiers(other, [document]) == {"missing"}
            finally:
                go.set()
            flushed(other)
            other.check_integrity()


def test_a_document_that_is_found_between_two_questions_is_no_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = Sample(1, 16)
    with engine(tmp_path, "a") as one:
        document.put(one)
        flushed(one)
    with engine(tmp_path, "b") as other:
        asked = other.host_pages

        def then_found(*given: Any) -> Any:
            pages, end = asked(*given), time.monotonic() + 0.3
            while other.looks_for(document.key, document.namespace) and time.monotonic() < end:
                time.sleep(0.002)
            return pages

        monkeypatch.setattr(other, "host_pages", then_found)
        assert resolved_tiers(other, [document]) == {"remote"}


def test_damaged_and_dropped_pages_are_misses(tmp_path: Path) -> None:
    documents = [Sample(i, 16) for i in range(2)]
    with engine(tmp_path, "a") as one:
        for document in documents:
            document.put(one)
        flushed(one)
    damaged = next((tmp_path / "shared").rglob(f"{documents[0].key}.pages"))
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    with engine(tmp_path, "b") as other:
        assert resolved_tiers(other, documents[:1]) == {"missing"}
        assert other.stat()["faults"] == {"crc": 1}
        flushed(other)
        assert not damaged.exists()
        documents[0].put(other)  # computed
        flushed(other)
        assert damaged.exists(), "and stored again"
        assert found(other, documents[1]) == "remote"
        next((tmp_path / "shared").rglob(f"{documents[1].key}.pages")).unlink()  # evicted by another engine
        assert resolved_tiers(other, documents[1:]) == {"missing"}
        assert other.stat()["faults"] == {"crc": 1}
        other.check_integrity()


def test_a_shared_folder_stays_within_its_bytes(tmp_path: Path) -> None:
    documents = [Sample(i, 16) for i in range(8)]
    options = {"folder": str(tmp_path / "shared"), "bytes": 5 * (4096 + 4 * PAGE)}
    (tmp_path / "shared").mkdir()
    with engine(tmp_path, "a", options=options) as one, engine(tmp_path, "b", options=options) as other:
        for number, document in enumerate(documents):
            document.put(one if number % 2 else other)
            flushed(one)
            flushed(other)
            if document is documents[1]:
                assert resolved_tiers(one, documents[:1]) == {"remote"}
                reading = next((tmp_path / "shared").rglob(f"{documents[0].key}.pages")).open("rb")
        with reading:
            left = {path.stem for path in (tmp_path / "shared").rglob("*.pages")}
            assert 3 <= len(left) <= 5
            assert documents[0].key not in left
            assert documents[7].key in left
            assert len(reading.read()) == 4096 + 4 * PAGE, "a read that has begun ends"
    with engine(tmp_path, "c", options=options | {"bytes": 100}) as small:
        Sample(99, 16).put(small)
        flushed(small)
        assert small.stat()["remote"]["refused"] == 1


def test_host_pages_stay_until_they_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that are put meanwhile evict others, never the one that is being written."""
    go, original = threading.Event(), FolderBackend.write
    monkeypatch.setattr(FolderBackend, "write", lambda *a: go.wait(240) and original(*a))
    first = Sample(0, 16)
    with engine(tmp_path, host_pages=8) as store:
        first.put(store)
        until(lambda: store.stat()["disk"]["documents"] == 1)
        for number in range(1, 5):
            Sample(number, 16).put(store)
        go.set()
        flushed(store)
        data = next((tmp_path / "shared").rglob(f"{first.key}.pages")).read_bytes()
        assert torch.equal(
            torch.frombuffer(bytearray(data[4096 : 4096 + PAGE]), dtype=torch.float32).view(SHAPE.page_shape)[
                0
            ],
            first.k[:, :4].transpose(1, 2),
        )


def test_a_deletion_waits_for_a_copy_that_a_summary_overtook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind another document's copy wait a summary, and after a removal the same document again."""
    other, document = Sample(0, 16), Sample(1, 16)
    reached, go = ({each.key: threading.Event() for each in (other, document)} for _ in range(2))
    original = FolderBackend.write

    def held(backend: FolderBackend, record: Any, *rest: Any) -> bool:
        reached[record.key].set()
        return go[record.key].wait(240) and original(backend, record, *rest)

    with engine(tmp_path, disk=False) as store:
        document.put(store)
        flushed(store)
        monkeypatch.setattr(FolderBackend, "write", held)
        other.put(store)
        assert reached[other.key].wait(240)
        assert store.put_summary(document.key, b"analysis")
        assert removed(store, document) == {"removed": 1}
        document.put(store)
        go[other.key].set()
        assert reached[document.key].wait(240)
        assert store.remove(document.key, "default")
        time.sleep(0.1)  # the keeper looks every 0.02 s
        left = store.unconfirmed([document.key], "default")
        go[document.key].set()
        assert left == (1, True), "it was being written"
        until(lambda: not store.unconfirmed([document.key], "default")[0])
        flushed(store)
        assert [path.stem for path in (tmp_path / "shared").rglob("*.pages")] == [other.key]
