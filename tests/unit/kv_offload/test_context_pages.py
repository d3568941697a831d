"""A composed context that is read in its documents' host pages is the one that a copy of it would be."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ragserve_kernels.kv import KVLayers
from ragserve_kernels.page_stats import PageStats
from sglang_ext.context.compose.composer import filling_of
from sglang_ext.context.compose.gather import Gather
from sglang_ext.context.compose.host_context import context_on_host
from sglang_ext.context.compose.host_fill import gather_to_host
from sglang_ext.context.compose.request import DocumentOnDevice, DocumentOnHost
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.documents.tier_store import TierStore
from sglang_ext.kv_offload.documents import context_reader
from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.kv_offload.documents.context_reader import PieceMemory
from sglang_ext.kv_offload.documents.host_documents import WantedDocument
from sglang_ext.kv_offload.host_admission import HostAdmission
from sglang_ext.kv_offload.host_prefixes import HostPrefixes
from tests.unit.documents.document_samples import Sample, files_of, flushed, opened
from tests.unit.kv_offload.offloaded_bench import DIM, HEADS, LAYERS, PROMPT, TAIL, Bench, drawn
from tests.unit.kv_offload.offloaded_documents import (
    BEHIND,
    ROTATION,
    SHAPE,
    Composed,
    documents_of,
    entered,
    reader,
    reserved,
    store_of,
)
from tests.unit.kv_offload.test_host_admission import Adder


@pytest.mark.parametrize(
    ("resident_blocks", "page", "whole"), [(2, 16, False), (1, 16, True), (2, 64, False)]
)
def test_resident_blocks_hold_what_copies_would_and_no_host_page_is_taken(
    resident_blocks: int, page: int, whole: bool
) -> None:
    composed = Composed(page + resident_blocks, PROMPT * page + BEHIND, whole=whole)
    with store_of(composed.samples, pages=600) as store:
        bench = Bench(cached=0, host=3, resident_blocks=resident_blocks, page=page, more=PROMPT + TAIL)
        prefix = reserved(bench, composed, store)
        assert prefix is not None
        row = entered(bench, composed, prefix)
        assert (bench.pages.used, bench.pages.elsewhere) == (0, PROMPT)
        assert row.blocks.table is not None
        selection = drawn()
        placed = bench.rows.load(row, selection)
        assert bench.arrives(row, placed)
        for _ in range(12 if page == 16 else 3):
            bench.attends(selection, placed)
            selection_after = drawn()
            placed_after = bench.rows.load(row, selection_after)
            bench.attends(selection, placed)
            assert bench.arrives(row, placed_after)
            bench.rows.check()
            selection, placed = selection_after, placed_after
        assert row.counts.misses
        row.blocks.table.held[0, 0, 0] = (row.blocks.table.held[0, 0, 0] + 1) % PROMPT  # type: ignore[union-attr]
        with pytest.raises(IntegrityError, match="differ from host pages"):
            bench.rows.check()
        row.blocks.table.held[0, 0, 0] = -1  # type: ignore[union-attr]
        bench.ended(row)
        assert (bench.pages.elsewhere, bench.rows.documents.used) == (0, 0)  # type: ignore[union-attr]
        assert store.drop_host() == len(composed.samples), "nobody reads them any more"


@pytest.mark.parametrize("piece", [1, 2**26], ids=["page-by-page", "whole"])
@pytest.mark.parametrize("page", [16, 64])
def test_a_layer_is_read_as_it_lies_and_its_statistics_are_made_once(
    monkeypatch: pytest.MonkeyPatch, piece: int, page: int
) -> None:
    monkeypatch.setattr(context_reader, "PIECE_BYTES", piece)
    composed = Composed(3, PROMPT * page + BEHIND)
    with store_of(composed.samples, pages=600) as store:
        bench = Bench(cached=0, host=3, page=page, more=PROMPT)
        prefix = reserved(bench, composed, store)
        assert prefix is not None
        row = entered(bench, composed, prefix)
        where = bench.rows.first_host + row.host.long()
        want = PageStats.zeros(bench.kv, page, 4, PROMPT + 3)
        rows = want.rows(where)
        for again in (False, True):
            ours = reader(bench, row)
            for layer in range(LAYERS):
                got = [(k.clone(), v.clone()) for k, v in ours.pieces(layer, 5 * page)]
                assert max(k.shape[1] for k, _ in got) == (5 * page if piece > 1 else page)
                for each, own in zip(zip(*got, strict=True), (composed.k, composed.v), strict=True):
                    assert torch.equal(torch.cat(each, 1).transpose(0, 1), own[layer][: PROMPT * page])
                if not again:
                    keys = composed.k[layer][: PROMPT * page].unflatten(0, (PROMPT, page))
                    want.store(layer, where, keys)
            got_tables = bench.statistics
            assert torch.equal(got_tables.k_min[:, rows], want.k_min[:, rows])
            assert torch.equal(got_tables.k_max[:, rows], want.k_max[:, rows])
            assert torch.equal(got_tables.k_center[:, where], want.k_center[:, where])
            got_tables.k_min[:, rows] = want.k_min[:, rows] = 0  # another part of the question leaves them
        bench.ended(row)


def test_all_readers_of_a_pass_take_the_memory_of_one_piece() -> None:
    composed = Composed(14, PROMPT * 16 + BEHIND)
    with store_of(composed.samples, pages=600) as store:
        bench = Bench(cached=0, host=3, more=PROMPT)
        prefix = reserved(bench, composed, store)
        assert prefix is not None
        row = entered(bench, composed, prefix)
        memory = PieceMemory(bench.kv, 16)
        places = set()
        for tokens in (
            9 * 16,
            4 * 16,
            7 * 16,
        ):  # another question has room for longer pieces, or shorter ones
            ours, at = reader(bench, row, memory), 0
            for k, v in ours.pieces(1, tokens):
                for got, own in ((k, composed.k), (v, composed.v)):
                    assert torch.equal(got.transpose(0, 1), own[1][at : at + got.shape[1]])
                at += k.shape[1]
                places.add((k.data_ptr(), v.data_ptr()))
            assert at == PROMPT * 16
        assert len(places) == 1
        bench.ended(row)


class Copy:
    """Takes a copy of a context, as host pages do."""

    piece, is_there = 48, False

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.k, self.v = ([torch.zeros(tokens, HEADS, DIM) for _ in range(LAYERS)] for _ in "kv")

    def write(self, first: int, k: Any, v: Any) -> None:
        for mine, given in zip((*self.k, *self.v), (*k, *v), strict=True):
            mine[first : first + len(given)] = given


@pytest.mark.parametrize(("seed", "bits"), [(0, 16), (1, 16), (2, 8), (3, 8)])
def test_it_is_bit_for_bit_what_is_copied_where_it_cannot_be_read_in_place(seed: int, bits: int) -> None:
    composed = Composed(seed, 7 * 16 + BEHIND)
    with store_of(composed.samples, bits=bits) as store:
        documents = documents_of(store)
        found = composed.held(documents, 16)
        k, v = ([torch.zeros(400, HEADS, DIM) for _ in range(LAYERS)] for _ in "kv")
        pool = SimpleNamespace(
            k_buffer=k,
            v_buffer=v,
            layer_num=LAYERS,
            get_key_buffer=k.__getitem__,
            get_value_buffer=v.__getitem__,
        )
        composed.context.located.sources = [
            DocumentOnHost(key, pages) for key, pages in zip(found.keys, found.sources, strict=True)
        ]
        filling = filling_of(composed.context, torch.arange(1, composed.context.slots + 1))
        copy = Copy(found.count * 16)
        gather = Gather(pool, ROTATION, store.pages)
        gather_to_host(gather, pool, filling, copy)
        into = KVLayers(*([torch.zeros(copy.tokens, HEADS, DIM) for _ in range(LAYERS)] for _ in "kv"))
        every = torch.arange(found.count, dtype=torch.int32).expand(LAYERS, HEADS, -1).contiguous()
        found.gather(into, every, every)
        for got, want in zip((*into.k, *into.v), (*copy.k, *copy.v), strict=True):
            assert torch.equal(got, want)
        behind = [each.clone() for each in (*k, *v)]
        for each in (*k, *v):
            each.zero_()
        copy.is_there, copy.write = True, None  # type: ignore[method-assign, assignment]
        gather_to_host(gather, pool, filling, copy)
        for got, want in zip((*k, *v), behind, strict=True):
            assert torch.equal(got, want), "what fills no page has slots in any case"
        found.release()


def test_codes_do_not_stand_for_what_the_device_has_exactly() -> None:
    composed = Composed(4, 100)
    on_device = DocumentOnDevice(torch.arange(4), "node")
    for bits, sources, found in ((8, [], True), (8, [on_device], False), (16, [on_device], True)):
        composed.context.located.sources = list(sources)
        with store_of(composed.samples, bits=bits) as store:
            held = context_on_host(composed.context, documents_of(store), 16)
            assert (held is not None) == found
            if held is not None:
                held.release()


def assert_kept_from_others(found: ContextPages, composed: Composed, store: TierStore) -> None:
    """Other documents come and take what pages there are; what is read is the context's as before."""
    for n in range(4):
        Sample(20 + n, 300, shape=SHAPE).put(store)
    into = KVLayers(*([torch.zeros(12 * 16, HEADS, DIM) for _ in range(LAYERS)] for _ in "kv"))
    every = torch.arange(12, dtype=torch.int32).expand(LAYERS, HEADS, -1).contiguous()
    found.gather(into, every, every)
    for got, want in zip((*into.k, *into.v), (*composed.k, *composed.v), strict=True):
        assert torch.equal(got, want[: 12 * 16])


def test_documents_are_kept_once_for_all_that_read_them_until_the_last_one_has() -> None:
    composed = Composed(5, 200)
    other = Sample(9, 300, shape=SHAPE)
    with store_of(composed.samples, pages=60) as store:
        documents = documents_of(store)
        first, second = (composed.held(documents, 16) for _ in range(2))
        pages = sum(sample.blocks for sample in composed.samples)
        assert (documents.documents, documents.used) == (2, pages)
        documents.check([*first.keys, *second.keys])
        with pytest.raises(IntegrityError, match="in place"):
            documents.check(first.keys)
        first.release()
        first.release()  # once is enough
        assert documents.used == pages
        assert store.drop_host() == 0, "they are being read"
        assert all(store.remove(sample.key) for sample in composed.samples)
        assert context_on_host(composed.context, documents, 16) is None, "they are not found any more"
        assert_kept_from_others(second, composed, store)
        store.check_integrity()
        second.release()
        documents.check([])
        assert (documents.documents, documents.used) == (0, 0)
        other.put(store)
        other.assert_pages(store)
        store.check_integrity()


def test_a_document_that_is_found_again_while_it_is_read_has_one_place(tmp_path: Path) -> None:
    """It was removed, and comes back from below: its first reader's pages serve the next one."""
    composed = Composed(10, 200)
    with opened(tmp_path, shape=SHAPE, host_pages=60) as store:
        documents = documents_of(store)
        for sample in composed.samples:
            sample.put(store)
        flushed(store)
        kept = {path: path.read_bytes() for path in files_of(tmp_path)}
        first = composed.held(documents, 16)
        assert all(store.remove(sample.key) for sample in composed.samples)
        for path, content in kept.items():  # another engine's copy, or what could not be deleted
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        assert all(sample.load_and_check(store) for sample in composed.samples if sample.found(store))
        second = composed.held(documents, 16)
        first.release()
        assert_kept_from_others(second, composed, store)
        second.release()
        documents.check([])
        store.check_integrity()


class Passing:
    """An event that the device has passed once it is told so."""

    passed = False

    def query(self) -> bool:
        return self.passed


def test_documents_stay_until_the_device_has_read_them() -> None:
    composed = Composed(7, 100)
    with store_of(composed.samples) as store:
        documents, events = documents_of(store), [Passing(), Passing()]
        waiting = iter(events)
        documents._copies = SimpleNamespace(all_so_far=lambda: next(waiting))  # type: ignore[assignment]
        first, second = (composed.held(documents, 16) for _ in range(2))
        first.release()
        second.release()
        documents.check([])
        assert documents.documents == 2
        events[1].passed = True
        documents.poll()
        assert store.drop_host() == 0, "one event passes behind the other"
        events[0].passed = True
        documents.poll()
        documents.check([])
        assert documents.documents == 0
        assert store.drop_host() == 2


def test_what_is_not_all_on_the_host_or_takes_more_than_half_of_it_is_not_kept() -> None:
    composed = Composed(6, 200)
    blocks = sum(sample.blocks for sample in composed.samples)
    with store_of(composed.samples, pages=2 * blocks - 1) as store:
        documents = documents_of(store)
        assert context_on_host(composed.context, documents, 16) is None
        store.drop_host([composed.samples[1].key])
        wanted = [
            WantedDocument(sample.key, sample.namespace, array("i", sample.ids), np.arange(1))
            for sample in composed.samples
        ]
        assert documents.hold(wanted) is None
        assert documents.used == 0
        documents.check([])
        assert store.drop_host() == 1


@pytest.mark.parametrize(("bits", "row_bytes"), [(16, 4 * DIM), (8, DIM + 4)])
def test_loads_are_counted_as_the_link_moves_them(bits: int, row_bytes: int) -> None:
    composed = Composed(13, PROMPT * 16 + BEHIND)
    with store_of(composed.samples, bits=bits) as store:
        bench = Bench(cached=0, host=3, more=PROMPT + TAIL)
        prefix = reserved(bench, composed, store)
        assert prefix is not None
        row = entered(bench, composed, prefix)
        bench.rows.load(row, drawn())
        row.collect()
        assert row.counts.misses
        assert row.counts.loaded_bytes == row.counts.misses * 2 * 16 * row_bytes
        bench.ended(row)


def test_what_is_kept_is_counted_anew_when_more_of_a_document_has_come(tmp_path: Path) -> None:
    sample = Sample(11, 20 * 16, shape=SHAPE)
    with opened(tmp_path, shape=SHAPE, host_pages=32) as store:
        sample.put(store)
        flushed(store)
        store.drop_host()
        assert sample.load_and_check(store, [0])
        documents = documents_of(store)
        wanted = [WantedDocument(sample.key, sample.namespace, array("i", sample.ids), np.arange(1))]
        assert documents.hold(wanted) is not None
        assert documents.used == 1
        assert sample.load_and_check(store), "others need all of it"
        assert documents.hold(wanted) is None, "it takes more than half of the host now"
        documents.let_go([sample.key])
        documents.check([])
        assert store.drop_host() == 1


def test_a_context_whose_documents_cannot_all_be_kept_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = Composed(12, 200)
    with store_of(composed.samples) as store:
        documents, pin = documents_of(store), store.pin

        def pin_one(key: str) -> None:
            if documents.documents:
                raise KeyError(f"document {key} is in no tier")
            pin(key)

        monkeypatch.setattr(store, "pin", pin_one)
        with pytest.raises(KeyError, match="in no tier"):
            composed.held(documents, 16)
        documents.check([])
        assert store.drop_host() == len(composed.samples)


@pytest.mark.parametrize("copied", [False, True])
def test_a_device_without_memory_for_the_numbers_of_pages_takes_none(
    monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    composed = Composed(8, PROMPT * 16 + BEHIND)
    with store_of(composed.samples) as store:
        bench = Bench(cached=0, more=PROMPT)

        def short(*given: Any) -> Any:
            raise torch.OutOfMemoryError("none is left")

        with monkeypatch.context() as patched:
            patched.setattr("sglang_ext.kv_offload.offloaded_rows.upload", short)
            with pytest.raises(torch.OutOfMemoryError):
                bench.begun() if copied else reserved(bench, composed, store)
        assert (bench.pages.used, bench.pages.elsewhere) == (0, 0)
        bench.rows.check()
        assert store.drop_host() == len(composed.samples)
        assert bench.rows.own(1) is not None, "the next request is offloaded"


@pytest.mark.parametrize("stage", ["numbers", "resident_blocks", "queue", "admitted", "retracted"])
def test_a_request_that_ends_at_any_stage_lets_its_documents_go(stage: str) -> None:
    composed = Composed(8, PROMPT * 16 + BEHIND)
    with store_of(composed.samples) as store:
        bench = Bench(cached=0, host=3, more=0 if stage == "numbers" else PROMPT)
        prefix = reserved(bench, composed, store)
        if stage == "numbers":
            assert prefix is None, "fewer than its pages"
        else:
            assert prefix is not None
            admission = HostAdmission(bench.rows, bench.tree)
            if stage == "resident_blocks":
                adder = Adder(room=10)
                _, row = admission.admit(adder, prefix, lambda: adder.add(bench.req))
                assert row is None
                HostPrefixes(bench.rows).forget(prefix)
            elif stage == "queue":
                admission.drop_gone([])
            else:
                row = entered(bench, composed, prefix)
                if stage == "admitted":
                    bench.rows.release(row)
                else:
                    kept = HostPrefixes(bench.rows).retract(row, (PROMPT + 1) * 16 - 2)
                    assert kept is not None
                    assert (kept.context, bench.pages.used) == (row.context, 1)
                    bench.rows.check()
                    HostPrefixes(bench.rows).forget(kept)
        assert (bench.pages.used, bench.pages.elsewhere) == (0, 0)
        bench.rows.check()
        assert store.drop_host() == len(composed.samples)
