"""Documents go down to disk and come up again, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sglang_ext.documents.disk.disk import FileTier
from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.types import PAGE_BITS, DiskConfig, DocumentMeta, KvShape, StoreInUse
from sglang_ext.documents.tier_store import TierStore
from tests.unit.documents.document_samples import (
    FINGERPRINT,
    SHAPE,
    Sample,
    bytes_under,
    files_of,
    flushed,
    look_up,
    opened,
)

PAGE = SHAPE.page_bytes
FILE_4 = page_format.ALIGN + 4 * PAGE  # a document of 4 pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_tokens", [1, 3, 4, 5, 63, 64, 300])
@pytest.mark.parametrize("bits", PAGE_BITS)
def test_kv_survives_the_way_through_all_tiers(
    tmp_path: Path, dtype: torch.dtype, n_tokens: int, bits: int
) -> None:
    shape = KvShape(3, 2, 8, dtype, 16, bits)
    document = Sample(1, n_tokens, shape=shape)
    with opened(tmp_path, shape=shape) as store:
        document.put(store)
        document.assert_pages(store)
        flushed(store)
        assert store.drop_host() == 1
        assert not document.resident(store).blocks_on_host.any()
        assert document.load_and_check(store)
    with opened(tmp_path, shape=shape) as store:
        resident = document.resident(store)
        assert resident.on_disk
        assert not resident.blocks_on_host.any()
        assert document.load_and_check(store)


@pytest.mark.parametrize(("before", "after"), [(16, 8), (8, 16)])
def test_pages_of_other_bits_are_a_counted_miss(tmp_path: Path, before: int, after: int) -> None:
    def sample(bits: int) -> Sample:
        return Sample(1, 40, shape=KvShape(3, 2, 8, torch.float16, 16, bits))

    with opened(tmp_path, shape=sample(before).shape) as store:
        sample(before).put(store)
        flushed(store)
    document = sample(after)
    with opened(tmp_path, shape=document.shape) as store:
        assert document.found(store) is None
        assert store.stat()["faults"] == {"shape": 1}
        document.put(store)
        flushed(store)
    with opened(tmp_path, shape=document.shape) as store:
        assert document.load_and_check(store)
        assert store.stat()["faults"] == {}


def test_budgets_hold_twice_as_many_documents_of_8_bits(tmp_path: Path) -> None:
    shapes = [KvShape(2, 2, 64, torch.bfloat16, 16, bits) for bits in PAGE_BITS]
    held = []
    for shape in shapes:
        budget = 20 * shapes[0].page_bytes
        disk = DiskConfig(tmp_path / str(shape.bits), budget)
        store = TierStore(shape, fingerprint=FINGERPRINT, host_bytes=budget, disk=disk, pin=False)
        for number in range(40):
            Sample(number, 16, shape=shape).put(store)
        flushed(store)
        figures = store.stat()
        assert figures["host"]["bytes"] <= budget
        assert figures["disk"]["bytes"] <= budget
        assert bytes_under(tmp_path / str(shape.bits)) == figures["disk"]["bytes"]
        held.append((figures["host"]["documents"], figures["disk"]["documents"]))
        store.close()
    assert held[0] == (20, 16), "16,384 bytes a page, and 4,096 for a record"
    assert held[1] == (37, 25), "68 bytes for 128 a row"


def test_only_the_named_documents_leave_host_memory(tmp_path: Path) -> None:
    named, other = Sample(1, 40), Sample(2, 40)
    with opened(tmp_path) as store:
        for document in (named, other):
            document.put(store)
        flushed(store)
        assert store.drop_host([named.key, "never seen"]) == 1
        assert not named.resident(store).blocks_on_host.any()
        assert other.resident(store).blocks_on_host.all()


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
        assert ticket.wait(240)
        assert ticket.ok
        assert ticket.bytes_ == 3 * PAGE == store.stat()["moved_bytes"]["from_disk"]
        assert isinstance(store._tiers.disk, FileTier)
        assert store._tiers.disk.bytes_read == 3 * PAGE
        assert document.resident(store).blocks_on_host.nonzero().flatten().tolist() == [2, 3, 7]
        document.assert_pages(store, [2, 3, 7])
        again = store.load(document.key, [2, 3])
        assert again.done()
        assert (again.ok, again.bytes_) == (True, 0)
        rest = store.load(document.key)
        assert rest.wait(240)
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
        assert all(ticket.wait(240) and ticket.ok for ticket in tickets)
        assert sum(ticket.bytes_ for ticket in tickets) == 10 * PAGE
        document.assert_pages(store)


def test_a_key_with_other_token_ids_is_a_miss(tmp_path: Path) -> None:
    document = Sample(1, 16)
    with opened(tmp_path) as store:
        document.put(store)
        flushed(store)
        for _ in range(2):
            assert look_up(store, document.key, [*document.ids[:-1], 5]) is None
            assert look_up(store, document.key, document.ids[:-1]) is None
            store.drop_host()
        assert store.stat()["faults"] == {"tokens": 4}
        assert look_up(store, "../../etc/passwd", document.ids) is None
        assert look_up(store, document.key, document.ids, "../default") is None


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
        store.pin(document.key)  # by key alone: looked for in every namespace
        assert document.found(store) is not None
    with opened(tmp_path) as store:
        store.clear()
        assert files_of(tmp_path) == []


def test_a_folder_has_one_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext.documents.disk import page_files as files

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
    for head_dim, bits in ((8, 4), (6, 8)):
        with pytest.raises(ValueError, match="16 bits, or 8"):
            KvShape(1, 1, head_dim, torch.float16, bits=bits)
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
        (KvShape(15, 2, 64, torch.float32, 16), 256),  # ragserve-tiny: 240 KiB a page
        (KvShape(15, 2, 64, torch.float32, 16), 20),
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
        store.count(None)
        document.put(store)
        flushed(store)
        store.count("host")
        store.drop_host()
        store.count("disk")
        document.found(store)  # is not counted
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
