"""Progressive requests read composed contexts in their documents' host pages: the table that names the pages
follows who comes and goes, and what is attended to is what a copy would hold."""

from __future__ import annotations

import pytest
import torch

from ragserve_kernels.kv import KVLayers
from sglang_ext.attention.offload.requests import _in_table
from sglang_ext.documents.pages.types import IntegrityError, KvShape
from sglang_ext.kv_offload.documents.context_table import ContextTable
from sglang_ext.kv_offload.host_admission import HostAdmission
from sglang_ext.kv_offload.host_prefixes import HostPrefixes
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow
from sglang_ext.kv_offload.resident.shared_blocks import SharedTable
from tests.unit.attention.decode.test_progressive_attention import attend, ranked, set_lengths, spoilt, tables
from tests.unit.kv_offload.offloaded_bench import DIM, HEADS, LAYERS, POOL, PROMPT, TAIL, Bench
from tests.unit.kv_offload.offloaded_documents import (
    BEHIND,
    CPU,
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

NUMBERS = PROMPT + TAIL + 3


def table_of(page: int = 16, bits: int = 16, numbers: int = NUMBERS) -> ContextTable:
    shape = KvShape(LAYERS, HEADS, DIM, torch.float32, SHAPE.block, bits)
    return ContextTable(shape, ROTATION.rotary_dim // 2, numbers, page, CPU)


def bench_of(page: int = 16, bits: int = 16, resident_blocks: int = 2) -> Bench:
    """Without host pages for the context: it is read where it lies, or not at all."""
    return Bench(
        cached=0,
        host=3,
        resident_blocks=resident_blocks,
        page=page,
        more=PROMPT + TAIL,
        shared=True,
        contexts=table_of(page, bits),
    )


def with_statistics_of(bench: Bench, kv: KVLayers) -> None:
    for layer in range(LAYERS):
        keys = kv.k[layer].view(POOL, bench.page, HEADS, DIM)
        bench.statistics.store(layer, torch.arange(POOL), keys)


def original_of(bench: Bench, row: OffloadedRow) -> None:
    """Let the device's pages, which are the truth, have what documents do, in codes or not."""
    assert row.context is not None
    every = torch.arange(PROMPT, dtype=torch.int32).expand(LAYERS, HEADS, -1).contiguous()
    target = (bench.row_before[:: bench.page] // bench.page).int()[:PROMPT].expand_as(every).contiguous()
    row.context.gather(bench.original, every, target)


@pytest.mark.parametrize("threshold", [0.4, 1.0])
@pytest.mark.parametrize(
    ("page", "resident_blocks", "bits", "whole"), [(16, 2, 16, False), (64, 1, 16, True), (16, 2, 8, False)]
)
def test_what_is_attended_to_is_what_a_copy_would_hold(
    page: int, resident_blocks: int, bits: int, whole: bool, threshold: float
) -> None:
    composed = Composed(page + resident_blocks, PROMPT * page + BEHIND, whole=whole)
    with store_of(composed.samples, pages=900, bits=bits) as store:
        bench = bench_of(page, bits, resident_blocks)
        resident = tables(bench)
        prefix = reserved(bench, composed, store)
        assert prefix is not None
        row = entered(bench, composed, prefix)
        assert (bench.pages.used, bench.pages.elsewhere) == (0, PROMPT)
        original_of(bench, row)
        now, bench.table[1] = bench.table[1].clone(), bench.row_before
        with_statistics_of(bench, bench.original)
        set_lengths(resident, bench, None)
        q = 2 * torch.randn(LAYERS, 2, 2 * HEADS, DIM)
        want, used, _ = attend(resident, bench, bench.original, q, threshold)
        bench.table[1] = now
        with_statistics_of(bench, bench.kv)
        ours = reader(bench, row)
        for layer in range(LAYERS):
            assert list(ours.pieces(layer, 5 * page))
        made = tables(bench)
        set_lengths(made, bench, bench.rows.statistics_of)
        for number in range(3):
            if number:
                assert bench.arrives(row, bench.rows.load(row, ranked()))
                bench.rows.check()
            pool, found = spoilt(bench, row)
            assert bool(found.any()) == bool(number)
            got, pages, reads = attend(made, bench, pool, q, threshold)
            assert torch.equal(got, want)
            assert torch.equal(pages, used)
            assert reads.any()
            if threshold == 1.0:
                assert torch.equal(reads, PROMPT - found)
        row.collect()
        assert row.counts.loaded_bytes == row.counts.misses * row.head_bytes > 0
        bench.ended(row)
        assert store.drop_host() == len(composed.samples), "nobody reads them any more"


def test_a_shared_block_that_was_overwritten_is_found() -> None:
    composed = Composed(21, PROMPT * 16 + BEHIND)
    with store_of(composed.samples) as store:
        bench = bench_of()
        prefix = reserved(bench, composed, store)
        assert prefix is not None
        row = entered(bench, composed, prefix)
        assert isinstance(row.blocks.table, SharedTable)
        assert bench.arrives(row, bench.rows.load(row, ranked()))
        bench.rows.check()
        shared_block = int(bench.rows.shared_blocks.places.of[row.numbers].max())
        buffer = bench.kv.k[shared_block // HEADS % LAYERS]
        place = shared_block // (LAYERS * HEADS) * bench.page + 3, shared_block % HEADS, 5
        buffer[place] += 1
        with pytest.raises(IntegrityError, match="1 resident blocks of request r differ"):
            bench.rows.check()
        buffer[place] -= 1
        bench.ended(row)


def gone(bench: Bench) -> None:
    """Nothing of any context is left, once a forward pass has come."""
    contexts = bench.rows.contexts
    assert contexts is not None
    bench.rows.join()
    assert contexts.used == 0
    assert (contexts.contexts.tokens[:, 0, 0] < 0).all()
    bench.rows.check()
    assert (bench.pages.used, bench.pages.elsewhere) == (0, 0)
    assert (bench.rows.shared_blocks.of == -1).all()


@pytest.mark.parametrize("stage", ["resident_blocks", "queue", "admitted", "loaded", "retracted", "back"])
def test_a_request_that_ends_at_any_stage_leaves_nothing_behind(stage: str) -> None:
    composed = Composed(22, PROMPT * 16 + BEHIND)
    with store_of(composed.samples) as store:
        bench = bench_of()
        contexts = bench.rows.contexts
        assert contexts is not None
        prefix = reserved(bench, composed, store)
        assert prefix is not None
        assert contexts.used == len(composed.context.keys)
        bench.rows.check()
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
            told = contexts.contexts.tokens[row.host.long()].clone()
            assert (told >= 0).all()
            if stage != "admitted":
                assert bench.arrives(row, bench.rows.load(row, ranked()))
            if stage in ("retracted", "back"):
                kept = HostPrefixes(bench.rows).retract(row, (PROMPT + 1) * 16 - 2)
                assert kept is not None
                bench.rows.join()
                assert torch.equal(contexts.contexts.tokens[row.host.long()], told), "it is still read so"
                bench.rows.check()
                if stage == "back":
                    adder = Adder()
                    _, row = admission.admit(adder, kept, lambda: adder.add(bench.req))
                    assert row is not None
                    HostPrefixes(bench.rows).enter(row, 1, [])
                    assert torch.equal(contexts.contexts.tokens[row.host.long()], told)
                    bench.rows.check()
                    bench.rows.release(row)
                else:
                    HostPrefixes(bench.rows).forget(kept)
            else:
                bench.rows.release(row)
        gone(bench)
        assert store.drop_host() == len(composed.samples)


def test_without_numbers_for_its_pages_a_context_lets_its_angles_go() -> None:
    composed = Composed(27, PROMPT * 16 + BEHIND)
    with store_of(composed.samples) as store:
        bench = Bench(cached=0, host=3, shared=True, contexts=table_of())
        assert reserved(bench, composed, store) is None
        gone(bench)
        assert store.drop_host() == len(composed.samples)


@pytest.mark.parametrize("part", ["upload", "torch.stack"])
def test_a_device_without_memory_for_what_is_told_ends_the_request_only(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    composed = Composed(28, PROMPT * 16 + BEHIND)
    with store_of(composed.samples) as store:
        bench = bench_of()
        prefix = reserved(bench, composed, store)
        assert prefix is not None

        def short(*given: object) -> None:
            raise torch.OutOfMemoryError("none is left")

        assert prefix.context is not None
        assert prefix.context.tensors, "made before"
        with monkeypatch.context() as patched:
            patched.setattr(f"sglang_ext.kv_offload.documents.context_table.{part}", short)
            with pytest.raises(torch.OutOfMemoryError):
                entered(bench, composed, prefix)
        (row,) = bench.rows._rows.values()
        bench.rows.release(row)
        gone(bench)
        assert store.drop_host() == len(composed.samples)


def test_numbers_that_another_request_gets_are_told_anew() -> None:
    """First by a context, then by a copy, whose pages lie in host memory of their own."""
    first, second = Composed(23, PROMPT * 16 + BEHIND), Composed(24, PROMPT * 16 + BEHIND)
    with store_of([*first.samples, *second.samples], pages=900) as store:
        documents, contexts = documents_of(store), table_of(numbers=PROMPT)
        contexts.open(documents.host)
        numbers = torch.arange(PROMPT, dtype=torch.int32)
        one, other = (each.held(documents, 16) for each in (first, second))
        for context in (one, other):
            assert contexts.take(context)
            contexts.settle()
            contexts.enter(context, numbers)
            context_tokens, turns, _ = context.tensors
            told = contexts.contexts.tokens
            assert torch.equal(told[..., 0], context_tokens[..., 0])
            rows = told[..., 1].long()
            assert torch.equal(contexts.contexts.turns[rows], turns[context_tokens[..., 1].long()])
            contexts.check([context])
            context.release()
        contexts._free.pop()
        with pytest.raises(IntegrityError, match="rows of angles"):
            contexts.check([])
        assert (contexts.contexts.tokens[:, 0, 0] < 0).all()


def test_without_room_for_a_contexts_angles_it_is_not_held() -> None:
    composed = Composed(25, 200)
    with store_of(composed.samples) as store:
        documents, contexts = documents_of(store), table_of(numbers=2)
        assert _in_table(contexts, lambda: None) is None
        assert _in_table(contexts, lambda: composed.held(documents, 16)) is None, "three documents"
        documents.check([])
        assert (contexts.used, documents.documents) == (0, 0)
        enough = table_of(numbers=3)
        held = _in_table(enough, lambda: composed.held(documents, 16))
        assert held is not None
        assert enough.used == 3
        enough.enter(held, torch.arange(12, dtype=torch.int32) % 2)
        with pytest.raises(IntegrityError, match="pages are told"):
            enough.check([held])
        held.release()
        held.release()  # once is enough
        assert enough.used == 0


def test_a_context_without_angles_is_not_told() -> None:
    composed = Composed(26, 200)
    with store_of(composed.samples) as store:
        held = composed.held(documents_of(store), 16)
        with pytest.raises(IntegrityError, match="has no angles"):
            table_of().enter(held, torch.arange(12, dtype=torch.int32))
        held.release()
