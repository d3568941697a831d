"""Documents go down to disk and come up again, bit for bit, within every budget."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from sglang_ext.documents import page_format
from sglang_ext.documents.tier_store import TierStore
from sglang_ext.documents.types import DiskConfig, DocumentMeta, KvShape, StoreInUse
from tests.unit.documents.document_samples import (
    FINGERPRINT,
    SHAPE,
    Sample,
    bytes_under,
    files_of,
    flushed,
    opened,
)

PAGE = SHAPE.page_bytes
FILE_4 = page_format.ALIGN + 4 * PAGE  # a document of 4 pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_tokens", [1, 3, 4, 5, 63, 64, 300])
def test_kv_survives_the_way_through_all_tiers(tmp_path: Path, dtype: torch.dtype, n_tokens: int) -> None:
    shape = KvShape(3, 2, 8, dtype, 16)
    document = Sample(1, n_tokens, shape=shape)
    with opened(tmp_path, shape=shape) as store:
        document.put(store)
        document.assert_pages(store)
        flushed(store)
        assert store.drop_host() == 1
        assert not document.found(store).blocks_on_host.any()
        assert document.load_and_check(store)
    with opened(tmp_path, shape=shape) as store:
        resident = document.found(store)
        assert (resident.n_tokens, resident.namespace) == (n_tokens, "default")
        assert bool(resident.blocks_on_disk.all())
        assert not resident.blocks_on_host.any()
        assert document.load_and_check(store)


def test_strided_sources_are_taken_as_they_are(tmp_path: Path) -> None:
    document = Sample(1, 10)
    with opened(None) as store:
        k = document.k.transpose(0, 1).contiguous().transpose(0, 1)
        v = torch.stack([document.v, document.v])[1]
        assert not k.is_contiguous()
        store.put(document.meta, k, v)
        document.assert_pages(store)


def test_single_blocks_are_promoted_and_nothing_else_is_read(tmp_path: Path) -> None:
    document = Sample(1, 40)
    with opened(tmp_path) as store:
        document.put(store)
        flushed(store)
        store.drop_host()
        ticket = store.load(document.key, [7, 2, 3, 2])
        assert ticket.wait(30)
        assert ticket.ok
        assert ticket.bytes_ == 3 * PAGE == store.stat()["moved_bytes"]["from_disk"]
        assert store._tiers.disk.storage.get_stats() == {"bytes_read": 3 * PAGE}
        assert document.found(store).blocks_on_host.nonzero().flatten().tolist() == [2, 3, 7]
        document.assert_pages(store, [2, 3, 7])
        with pytest.raises(KeyError):
            store.pages(document.key, [3, 4])
        again = store.load(document.key, [2, 3])
        assert again.done()
        assert (again.ok, again.bytes_) == (True, 0)
        rest = store.load(document.key)
        assert rest.wait(30)
        assert rest.bytes_ == 7 * PAGE
        document.assert_pages(store)
        with pytest.raises(IndexError):
            store.load(document.key, [10])
        store.check_integrity()


def test_two_tickets_may_wait_for_the_same_blocks(tmp_path: Path) -> None:
    document = Sample(1, 40)
    with opened(tmp_path) as store:
        document.put(store)
        flushed(store)
        store.drop_host()
        tickets = [store.load(document.key, blocks) for blocks in ([0, 1, 2], [1, 2, 3], None)]
        assert all(ticket.wait(30) and ticket.ok for ticket in tickets)
        assert sum(ticket.bytes_ for ticket in tickets) == 10 * PAGE
        document.assert_pages(store)


def test_least_recently_used_documents_leave_host_first_and_pinned_ones_stay() -> None:
    documents = [Sample(i, 16) for i in range(4)]
    with opened(None, host_pages=12) as store:
        for document in documents[:3]:
            document.put(store)
        documents[0].found(store)
        store.pin(documents[1].key)
        documents[3].put(store)
        assert [document.found(store) is not None for document in documents] == [True, True, False, True]
        store.set_budget(host_bytes=0)
        assert [document.found(store) is not None for document in documents] == [False, True, False, False]
        documents[1].assert_pages(store)
        store.check_integrity()
        store.unpin(documents[1].key)
        assert store.stat()["host"]["bytes"] == 0
        assert store.stat()["evictions"]["host"] == 4
        with pytest.raises(KeyError):
            store.unpin(documents[1].key)
        with pytest.raises(KeyError):
            store.pin("unknown")
        with pytest.raises(ValueError, match="restart"):
            store.set_budget(host_bytes=13 * PAGE)
        store.check_integrity()


def test_a_load_without_room_fails_and_evicts_nothing(tmp_path: Path) -> None:
    small, large = Sample(1, 16), Sample(2, 40)
    with opened(tmp_path, host_pages=10) as store:
        large.put(store)
        flushed(store)
        small.put(store)
        flushed(store)
        store.pin(small.key)
        ticket = store.load(large.key)
        assert (ticket.done(), ticket.ok, ticket.reason) == (True, False, "no_room")
        assert store.load(large.key, [0, 1]).wait(30)
        large.assert_pages(store, [0, 1])
        assert store.load("unknown").reason == "unknown"
        store.check_integrity()


def test_without_room_on_host_a_document_goes_to_disk_only(tmp_path: Path) -> None:
    pinned, document = Sample(1, 16), Sample(2, 10)
    with opened(tmp_path, host_pages=4) as store:
        pinned.put(store)
        store.pin(pinned.key)
        document.put(store)
        flushed(store)
        resident = document.found(store)
        assert bool(resident.blocks_on_disk.all())
        assert not resident.blocks_on_host.any()
        store.unpin(pinned.key)
        assert document.load_and_check(store)
    with opened(tmp_path, host_pages=0) as store:
        assert document.found(store) is not None
        assert store.load(document.key).reason == "no_room"
        third = Sample(3, 10)
        third.put(store)
        flushed(store)
        assert third.found(store) is not None


def test_the_disk_keeps_its_budget_and_the_most_recently_used(tmp_path: Path) -> None:
    documents = [Sample(i, 16) for i in range(6)]
    with opened(tmp_path, disk_bytes=4 * FILE_4 + 100) as store:
        for document in documents[:4]:
            document.put(store)
            flushed(store)
        store.drop_host()
        documents[0].found(store)
        for document in documents[4:]:
            document.put(store)
            flushed(store)
            assert bytes_under(tmp_path) <= 4 * FILE_4 + 100
        store.drop_host()
        assert [document.found(store) is not None for document in documents] == [
            True,
            False,
            False,
            True,
            True,
            True,
        ]
        assert store.stat()["evictions"]["disk"] == 2
        store.set_budget(disk_bytes=FILE_4)
        assert len(files_of(tmp_path)) == 1
        store.check_integrity()
    with opened(tmp_path, disk_bytes=FILE_4 - 1) as store:  # a smaller budget after a restart
        flushed(store)
        assert files_of(tmp_path) == []
        documents[0].put(store)
        flushed(store)
        assert store.stat()["faults"] == {"too_large": 1}
        assert documents[0].found(store).blocks_on_host.all()


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    documents = [Sample(i, 16) for i in range(3)]
    with opened(tmp_path) as store:
        for document in documents:
            document.put(store)
        flushed(store)
    for age, index in enumerate((1, 0, 2)):
        path = next(path for path in files_of(tmp_path) if path.stem == documents[index].key)
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    with opened(tmp_path, disk_bytes=FILE_4) as store:
        flushed(store)
        assert [document.found(store) is not None for document in documents] == [False, True, False]


def test_a_full_queue_makes_documents_wait_on_host_not_the_caller(tmp_path: Path) -> None:
    documents = [Sample(i, 16) for i in range(20)]
    with opened(tmp_path, queue_bytes=4 * PAGE) as store:
        for document in documents:
            document.put(store)
            assert store.stat()["disk"]["queued_bytes"] <= 4 * PAGE
            store.check_integrity()
        flushed(store)
        assert store.room()["write_room_bytes"] == 4 * PAGE
        assert store.stat()["dropped_writes"] == 0
    with opened(tmp_path) as store:
        assert all(document.found(store) is not None for document in documents)


def test_without_room_on_host_or_in_the_queue_a_document_is_not_kept(tmp_path: Path) -> None:
    document = Sample(1, 16)
    with opened(tmp_path, host_pages=0, queue_bytes=PAGE) as store:
        document.put(store)
        flushed(store)
        assert document.found(store) is None
        assert store.stat()["dropped_writes"] == 1


def test_removed_means_removed_from_every_tier(tmp_path: Path) -> None:
    document, other = Sample(1, 16), Sample(2, 16)
    with opened(tmp_path) as store:
        document.put(store)
        other.put(store)
        assert store.remove(document.key)  # perhaps before it was written
        flushed(store)
        assert document.found(store) is None
        assert [path.stem for path in files_of(tmp_path)] == [other.key]
        document.put(store)
        flushed(store)
        store.drop_host()
        assert store.remove(document.key)
        assert not store.remove(document.key)
        assert len(files_of(tmp_path)) == 1
    with opened(tmp_path) as store:
        assert document.found(store) is None
        assert store.remove(other.key)  # before or after the scan has seen it
        assert files_of(tmp_path) == []


def test_a_pinned_document_is_readable_until_unpinned_but_found_by_nobody(tmp_path: Path) -> None:
    document = Sample(1, 16)
    with opened(tmp_path) as store:
        document.put(store)
        flushed(store)
        store.pin(document.key)
        assert store.remove(document.key)
        assert document.found(store) is None
        assert store.load(document.key).reason == "unknown"
        with pytest.raises(KeyError):
            store.pin(document.key)
        document.assert_pages(store)
        store.check_integrity()
        document.put(store)  # the same text comes back while the old pages are read
        assert document.found(store) is not None
        flushed(store)
        assert store.remove(document.key)
        store.unpin(document.key)
        assert store.stat()["host"]["pages"] == 0
        store.check_integrity()


def test_namespaces_never_see_each_other(tmp_path: Path) -> None:
    mine, theirs = Sample(1, 16, namespace="mine"), Sample(1, 16, namespace="theirs")
    assert list(mine.ids) == list(theirs.ids)
    assert mine.key != theirs.key
    with opened(tmp_path) as store:
        mine.put(store)
        flushed(store)
        assert theirs.found(store) is None
        for dropped in (False, True):
            if dropped:
                store.drop_host()
            assert store.lookup(mine.key, mine.ids, "theirs") is None  # even with the right key
            assert mine.found(store) is not None
        theirs.put(store)
        flushed(store)
        assert store.keys("theirs") == [theirs.key]
        assert store.stat()["disk"]["namespaces"]["mine"] == {"documents": 1, "bytes": FILE_4, "pages": 4}
        assert store.remove_namespace("mine") == 1
        assert mine.found(store) is None
        flushed(store)
        assert [path.parent.name for path in files_of(tmp_path)] == ["theirs"]
        assert theirs.load_and_check(store)
        with pytest.raises(ValueError, match="another document"):
            store.put(DocumentMeta(theirs.key, "mine", theirs.ids, 16, FINGERPRINT), theirs.k, theirs.v)
    with opened(tmp_path) as store:
        assert store.remove_namespace("theirs") == 1
        assert theirs.found(store) is None
        flushed(store)
        assert files_of(tmp_path) == []


def test_a_key_with_other_token_ids_is_a_miss(tmp_path: Path) -> None:
    document = Sample(1, 16)
    with opened(tmp_path) as store:
        document.put(store)
        flushed(store)
        for _ in range(2):
            assert store.lookup(document.key, [*document.ids[:-1], 5]) is None
            assert store.lookup(document.key, document.ids[:-1]) is None
            store.drop_host()
        assert store.stat()["faults"] == {"tokens": 4}
        assert store.lookup("../../etc/passwd", document.ids) is None
        assert store.lookup(document.key, document.ids, "../default") is None


def test_documents_are_found_after_a_restart_without_the_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_ext.documents.tiers import Tiers

    document = Sample(1, 16)
    with opened(tmp_path) as store:
        document.put(store)
        flushed(store)
    monkeypatch.setattr(Tiers, "scan", lambda self: None)
    with opened(tmp_path) as store:
        assert document.found(store) is not None
    with opened(tmp_path) as store:
        assert store.lookup(document.key, document.ids) is not None
        assert store.keys() == [document.key]


def test_clear_empties_both_tiers(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for i in range(5):
            Sample(i, 16, namespace=f"space-{i % 2}").put(store)
        store.clear()
        flushed(store)
        figures = store.stat()
        assert (figures["host"]["bytes"], figures["disk"]["bytes"], store.keys()) == (0, 0, [])
        assert files_of(tmp_path) == []


def test_a_folder_has_one_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext.documents import page_files as files

    with opened(tmp_path):
        original = files.DocumentFiles.acquire
        monkeypatch.setattr(files.DocumentFiles, "acquire", lambda self, timeout_s=0.0: original(self, 0.0))
        with pytest.raises(StoreInUse, match="another server"), opened(tmp_path):
            pass
    with opened(tmp_path):
        pass


def test_what_is_malformed_is_refused() -> None:
    document = Sample(1, 16)
    with opened(None) as store:
        with pytest.raises(ValueError, match="expected"):
            store.put(document.meta, document.k[:, :-1], document.v)
        with pytest.raises(ValueError, match="expected"):
            store.put(document.meta, document.k.half(), document.v.half())
        with pytest.raises(ValueError, match="another model"):
            Sample(1, 16, fingerprint="model-b").put(store)
        assert store.stat()["host"]["pages"] == 0
        store.check_integrity()
    with pytest.raises(RuntimeError, match="closed"):
        store.stat()
    for arguments in (("../x", "default"), ("ab", ".."), ("ab", ""), ("", "default")):
        with pytest.raises(ValueError, match="not a"):
            DocumentMeta(*arguments, [1], 1, FINGERPRINT)
    with pytest.raises(ValueError, match="n_tokens"):
        DocumentMeta("ab", "default", [1], 2, FINGERPRINT)
    with pytest.raises(ValueError, match="float64"):
        KvShape(1, 1, 1, torch.float64)
    with pytest.raises(ValueError, match="folder"):
        DiskConfig(None)


def test_close_ends_tickets_and_is_idempotent(tmp_path: Path) -> None:
    document = Sample(1, 40)
    with opened(tmp_path) as store:
        document.put(store)
        flushed(store)
        store.drop_host()
        ticket = store.load(document.key)
        store.close()
        store.close()
        assert ticket.done()
        assert ticket.ok or ticket.reason == "closed"


@pytest.mark.parametrize(
    ("shape", "n_tokens"),
    [
        (KvShape(32, 8, 128, torch.bfloat16, 16), 256),  # Llama-3.1-8B: 2 MiB a page
        (KvShape(10, 2, 64, torch.float32, 16), 256),  # ragserve-tiny: 160 KiB a page
        (KvShape(10, 2, 64, torch.float32, 16), 20),
    ],
)
def test_metadata_stays_within_three_percent_of_the_kv(tmp_path: Path, shape: KvShape, n_tokens: int) -> None:
    document = Sample(1, n_tokens, shape=shape)
    kv = shape.blocks(n_tokens) * shape.page_bytes
    with opened(tmp_path, shape=shape, host_pages=40) as store:
        document.put(store)
        flushed(store)
        figures = store.stat()
        assert figures["host"]["bytes"] == kv
        assert 0 < figures["host"]["metadata_bytes"] <= 0.03 * kv
        assert figures["disk"]["bytes"] == bytes_under(tmp_path) == kv + figures["disk"]["metadata_bytes"]
        assert 0 < figures["disk"]["metadata_bytes"] <= 0.03 * kv
        assert figures["disk"]["metadata_share"] == pytest.approx(
            figures["disk"]["metadata_bytes"] / kv, abs=1e-5
        )


def test_figures_and_metrics_count_what_happened(tmp_path: Path) -> None:
    from prometheus_client import REGISTRY

    def metric(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"ragserve_kv_{name}", labels) or 0.0

    before = {tier: metric("hits_total", tier=tier) for tier in ("host", "disk")}, metric("misses_total")
    document = Sample(1, 16)
    with opened(tmp_path) as store:
        assert document.found(store) is None
        document.put(store)
        flushed(store)
        document.found(store)
        store.drop_host()
        document.found(store)
        store.lookup(document.key, document.ids, count=False)
        figures = store.stat()
        assert json.loads(json.dumps(figures)) == figures
        assert (figures["hits"], figures["misses"]) == ({"device": 0, "host": 1, "disk": 1}, 1)
        assert figures["moved_bytes"] == {"to_host": 4 * PAGE, "to_disk": FILE_4, "from_disk": 0}
        assert metric("hits_total", tier="host") == before[0]["host"] + 1
        assert metric("hits_total", tier="disk") == before[0]["disk"] + 1
        assert metric("misses_total") == before[1] + 1
        assert metric("bytes", tier="disk") == FILE_4
        assert metric("bytes", tier="host") == 0


def test_each_rank_has_its_own_files(tmp_path: Path) -> None:
    document = Sample(1, 16)
    stores = [
        TierStore(
            SHAPE,
            fingerprint=FINGERPRINT,
            host_bytes=100 * PAGE,
            disk=DiskConfig(tmp_path),
            pin=False,
            rank=rank,
            world=2,
        )
        for rank in range(2)
    ]
    document.put(stores[0])
    flushed(stores[0])
    assert document.found(stores[1]) is None
    document.put(stores[1])
    flushed(stores[1])
    assert stores[0].remove_namespace("default") == 1
    assert document.load_and_check(stores[1])
    for store in stores:
        store.close()
