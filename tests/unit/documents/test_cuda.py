"""The host tier with a GPU above it: pinned pages, copies that are only enqueued, and nothing overtaking
them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragserve_kernels.kv import KVLayers
from sglang_ext.documents import fill
from sglang_ext.documents.pages.types import PAGE_BITS, DiskConfig, KvShape
from sglang_ext.documents.tier_store import TierStore
from tests.unit.documents.document_samples import FINGERPRINT, Sample, flushed, pages_of

pytestmark = pytest.mark.gpu
SHAPE = KvShape(32, 8, 128, torch.bfloat16, 16)  # Llama-3.1-8B


def _store(folder: Path, pages: int, shape: KvShape = SHAPE) -> TierStore:
    return TierStore(
        shape, fingerprint=FINGERPRINT, host_bytes=pages * shape.page_bytes, disk=DiskConfig(folder), pin=True
    )


@pytest.mark.parametrize("bits", PAGE_BITS)
def test_kv_from_the_device_survives_all_tiers(tmp_path: Path, bits: int) -> None:
    shape = replace(SHAPE, bits=bits)
    documents = [Sample(i, n, shape=shape) for i, n in enumerate((1, 16, 300, 777))]
    store = _store(tmp_path, 200, shape)
    for document in documents:
        k, v = document.k.cuda(), document.v.cuda()
        store.put(document.meta, k, v)
        k.zero_()  # on the same stream: the copy was enqueued before
        v.zero_()
    for document in documents:
        document.assert_pages(store)
    flushed(store)
    store.drop_host()
    for document in documents:
        assert document.load_and_check(store)
        store.pin(document.key)
        pages = pages_of(store, document.key, range(document.blocks))
        assert torch.equal(store.pages.pool[pages].cuda().cpu(), store.pages.pool[pages])
        store.unpin(document.key)
    store.close()


def test_more_pages_than_are_staged_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "COPY_BYTES", 3 * SHAPE.value_bytes)
    store = _store(tmp_path, 200)
    for document in [Sample(i, n, shape=SHAPE) for i, n in enumerate((777, 95, 513))]:
        k, v = document.k.cuda(), document.v.cuda()
        store.put(document.meta, k, v)
        k.zero_()
        v.zero_()
        document.assert_pages(store)
    store.close()


def test_pages_are_not_reused_before_the_device_has_filled_them(tmp_path: Path) -> None:
    documents = [Sample(i, 160, shape=SHAPE) for i in range(6)]
    store = _store(tmp_path, 20)
    for _ in range(3):
        for document in documents:
            torch.cuda._sleep(20_000_000)
            store.put(document.meta, document.k.cuda(non_blocking=True), document.v.cuda(non_blocking=True))
    flushed(store)
    assert store.verify().ok
    for document in documents:
        if document.found(store) is not None:
            assert document.load_and_check(store)
    store.close()


def test_pages_put_together_in_one_launch_are_those_put_together_by_layers() -> None:
    """Slots anywhere in a pool, and several groups of pages on their way at once."""
    count, device = 11, torch.device("cuda")
    shape = (3 * count * SHAPE.block, SHAPE.kv_heads, SHAPE.head_dim)
    k, v = ([torch.randn(shape, device=device).bfloat16() for _ in range(SHAPE.layers)] for _ in range(2))
    slots = torch.randperm(shape[0], device=device)[: count * SHAPE.block - 5]  # the last page is not full
    pages, pools = torch.randperm(count + 3)[:count].tolist(), []
    for layers in (None, KVLayers(k, v)):
        pool = SHAPE.empty_pages(count + 3).zero_().pin_memory()
        source = fill.DocumentKv(k, v, slots, layers)
        fill.fill_pages(pool, SHAPE, range(count), pages, source, copy_bytes=3 * SHAPE.value_bytes)
        pools.append(pool)
    torch.cuda.synchronize()
    assert torch.equal(*pools)
    page = pools[0].view(-1, 2, SHAPE.layers, SHAPE.kv_heads, SHAPE.block, SHAPE.head_dim)[pages[1]]
    assert torch.equal(page[1, 7, 2], v[7][slots[SHAPE.block : 2 * SHAPE.block], 2].cpu())


def test_the_pool_is_pinned_and_let_go(tmp_path: Path) -> None:
    for _ in range(2):  # the second start would fail on memory that is still registered
        store = _store(tmp_path, 50)
        assert store.pages.pool.is_pinned()
        store.close()
