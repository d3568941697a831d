"""A document's KV goes from the model's pool to host pages in steps of bounded memory."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_ext.context.scheduler.composition import AnalysisConfig
from sglang_ext.context.scheduler.sglang_req import DocumentRequest
from sglang_ext.documents import fill
from sglang_ext.documents.pages.types import PAGE_BITS, KvShape
from sglang_ext.documents.tier_store import TierStore
from sglang_ext.process.runtime import ContextRuntime
from tests.unit.documents.document_samples import FINGERPRINT, Sample, flushed, opened

SHAPE = KvShape(layers=4, kv_heads=2, head_dim=16, dtype=torch.bfloat16, block=16)  # pages of 8 KiB


class Allocations(TorchDispatchMode):
    """The largest new tensor, in bytes, of all operations under it."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, made.untyped_storage().nbytes())
        return result


def saved(store: TierStore, document: Sample) -> int:
    """End a request that prefilled the document in scattered slots; the largest tensor made meanwhile."""
    layers, n = document.shape.layers, document.meta.n_tokens
    slots = torch.randperm(2 * n, generator=torch.Generator().manual_seed(1))[:n]
    buffers = torch.zeros((2, layers, 2 * n, *document.k.shape[2:]), dtype=document.shape.dtype)
    buffers[0][:, slots], buffers[1][:, slots] = document.k, document.v
    pool = SimpleNamespace(
        bits=8,  # composes nothing, so no model is needed
        layer_num=layers,
        get_key_buffer=lambda layer: buffers[0][layer],
        get_value_buffer=lambda layer: buffers[1][layer],
    )
    runner = SimpleNamespace(
        tp_group=None,
        token_to_kv_pool=pool,
        model_config=SimpleNamespace(context_len=4096),
        max_total_num_tokens=4096,
    )
    runtime = ContextRuntime(
        model_runner=runner,
        tree=SimpleNamespace(token_to_kv_pool_allocator=None),
        tiers=store,
        fingerprint=FINGERPRINT,
        block=document.shape.block,
        analysis=AnalysisConfig(),
        texts=lambda: pytest.fail("nothing is analysed"),
    )
    ids = array("q", document.ids)
    req = SimpleNamespace(ragserve=DocumentRequest(document.key, document.namespace, ids, analyse=False))
    with Allocations() as allocations:
        runtime.on_document(req, slots)
    return allocations.largest


@pytest.mark.parametrize("host_pages", [1000, 10], ids=["to host", "aside, to disk only"])
@pytest.mark.parametrize("n_tokens", [1, 16, 511, 5000])
@pytest.mark.parametrize("bits", PAGE_BITS)
def test_no_temporary_is_larger_than_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_tokens: int, host_pages: int, bits: int
) -> None:
    shape = replace(SHAPE, bits=bits)
    monkeypatch.setattr(fill, "COPY_BYTES", bound := 8 * shape.value_bytes)
    document = Sample(3, n_tokens, shape=shape)
    staged = document.blocks * shape.page_bytes  # the write queue's copy of what has no room on host
    with opened(tmp_path, shape=shape, host_pages=host_pages) as store:
        largest = saved(store, document)
        assert largest <= (bound if document.blocks <= host_pages else max(bound, staged))
        flushed(store)
    with opened(tmp_path, shape=shape) as store:
        assert document.load_and_check(store)


def test_single_blocks_come_from_their_own_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a document lacks on host are filled in, in pages that do not follow each other."""
    monkeypatch.setattr(fill, "COPY_BYTES", 3 * SHAPE.page_bytes)
    document, others = Sample(1, 250, shape=SHAPE), [Sample(i, 16, shape=SHAPE) for i in range(2, 9)]
    with opened(tmp_path, shape=SHAPE, host_pages=40) as store:
        document.put(store)
        flushed(store)
        store.drop_host()
        for other in others:
            other.put(store)
        store.pin(document.key)
        assert store.load(document.key, [0, 3, 4, 9]).wait(240)
        for other in others[::2]:
            store.remove(other.key)
        saved(store, document)
        document.assert_pages(store)
        store.unpin(document.key)
        store.check_integrity()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GROUP = 3  # pages put together at a time


class Filled:
    """A document of 10 pages and a half in scattered slots, and a host pool of 20 pages of NaN."""

    def __init__(self, device: str) -> None:
        self.sample = Sample(1, 168, shape=SHAPE)
        n = self.sample.meta.n_tokens
        slots = torch.randperm(2 * n, generator=torch.Generator().manual_seed(1))[:n]
        buffers = torch.full((2, SHAPE.layers, 2 * n, SHAPE.kv_heads, SHAPE.head_dim), torch.nan)
        buffers = buffers.to(SHAPE.dtype)
        buffers[0][:, slots], buffers[1][:, slots] = self.sample.k, self.sample.v
        self.buffers = buffers.to(device)
        self.kv = fill.DocumentKv.of(list(self.buffers[0]), list(self.buffers[1]), slots.to(device))
        self.pool = torch.full((20, *SHAPE.block_shape), torch.nan, dtype=SHAPE.dtype)
        if device == "cuda":
            self.pool = self.pool.pin_memory()
            torch.cuda._sleep(20_000_000)  # what follows is launched before any of it runs

    def fill(self, pages: list[int]) -> None:
        fill.fill_pages(
            self.pool, SHAPE, range(len(pages)), pages, self.kv, copy_bytes=GROUP * SHAPE.value_bytes
        )

    def give_slots_back(self) -> None:
        """Let the next owner of the slots write to them, in the order of the current stream; wait for it."""
        self.buffers.fill_(torch.nan)
        if self.buffers.is_cuda:
            torch.cuda.current_stream().synchronize()

    def expected(self, block: int) -> torch.Tensor:
        """A page of the document: [2, layers, kv_heads, tokens, head_dim], zero behind its end."""
        tokens = slice(block * SHAPE.block, (block + 1) * SHAPE.block)
        rows = torch.stack([self.sample.k[:, tokens], self.sample.v[:, tokens]]).transpose(2, 3)
        padding = SHAPE.block - rows.shape[3]
        return torch.nn.functional.pad(rows, (0, 0, 0, padding))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pages", [[*range(11)], [19, 3, 4, 5, 6, 0, 17, 12, 11, 8, 9]], ids=str)
def test_all_pages_are_filled_with_more_groups_than_are_staged(device: str, pages: list[int]) -> None:
    filled = Filled(device)
    assert filled.sample.blocks == len(pages) > GROUP * fill.STAGED
    filled.fill(pages)
    filled.give_slots_back()
    for block, page in enumerate(pages):
        assert torch.equal(filled.pool[page], filled.expected(block)), f"block {block}"
    others = sorted(set(range(20)) - set(pages))
    assert filled.pool[others].isnan().all(), "pages of others were written to"


@pytest.mark.parametrize("device", DEVICES)
def test_slots_may_be_given_back_after_a_fill_that_failed(device: str) -> None:
    """Copies that were launched before the fault read what the model left, not what the next owner writes."""
    filled = Filled(device)
    with pytest.raises(RuntimeError):
        filled.fill([*range(9), 19, 20])  # the pool ends at 19
    filled.give_slots_back()
    for page in range(9):
        assert torch.equal(filled.pool[page], filled.expected(page)), f"page {page}"
    assert filled.pool[9:].isnan().all()


@pytest.mark.parametrize("there", [[], [3, 4]], ids=["absent", "in part"])
def test_a_document_whose_fill_fails_gets_no_pages(
    there: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it goes to disk either: its pages hold whatever was there before."""
    monkeypatch.setattr(fill, "COPY_BYTES", 3 * SHAPE.page_bytes)
    document = Sample(1, 250, shape=SHAPE)
    slots = torch.arange(250)
    slots[200] = 250  # the buffers end at 249, and the first groups are copied before that is met
    with opened(tmp_path, shape=SHAPE) as store:
        if there:
            document.put(store)
            flushed(store)
            store.drop_host()
            store.pin(document.key)
            assert store.load(document.key, there).wait(240)
            store.unpin(document.key)
        with pytest.raises((IndexError, RuntimeError)):
            store.put(document.meta, document.k, document.v, b"analysis", slots=slots)
        flushed(store)
        found = document.found(store)
        if there:
            assert found is not None
            assert found.blocks_on_host.nonzero().flatten().tolist() == there
            document.assert_pages(store, there)
        else:
            assert found is None
            assert store.stat()["host"]["pages"] == store.stat()["disk"]["documents"] == 0
        document.put(store)
        flushed(store)
        document.assert_pages(store)
        store.drop_host()
        assert document.load_and_check(store)
