"""Documents in the host tier, and contexts composed of them, for tests of offloaded requests that read
them.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import torch

from sglang_ext.context.compose.host_context import context_on_host
from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.context.selection.base import ModelShape
from sglang_ext.context.selection.strategies import partial_selection
from sglang_ext.documents.pages.types import KvShape
from sglang_ext.documents.tier_store import TierStore
from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.kv_offload.documents.context_reader import ContextReader, PieceMemory
from sglang_ext.kv_offload.documents.host_documents import HostDocuments
from sglang_ext.kv_offload.host.copy_stream import CopyStream
from sglang_ext.kv_offload.host_admission import HostAdmission
from sglang_ext.kv_offload.host_prefix import HostPrefix
from sglang_ext.kv_offload.host_prefixes import HostPrefixes
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import ContextPlan, OffloadCounts, Span
from tests.unit.documents.document_samples import FINGERPRINT, Sample
from tests.unit.kv_offload.offloaded_bench import DIM, HEADS, LAYERS, LIMIT, PROMPT, TAIL, Bench
from tests.unit.kv_offload.test_host_admission import Adder
from tests.unit.request_shapes import prefix_of

SHAPE = KvShape(LAYERS, HEADS, DIM, torch.float32)
ROTATION = Rotation(torch.linspace(1, 0.1, 20), 40, neox=True)  # of some of the dimensions
CPU = torch.device("cpu")
BEHIND = 5  # tokens of the context that fill no page


@contextmanager
def store_of(samples: Sequence[Sample], pages: int = 400, bits: int = 16) -> Iterator[TierStore]:
    """A store of so many host pages, with the samples in it."""
    shape = replace(SHAPE, bits=bits)
    store = TierStore(
        shape, fingerprint=FINGERPRINT, host_bytes=pages * shape.page_bytes, disk=None, pin=False
    )
    try:
        for sample in samples:
            sample.put(store)
        yield store
    finally:
        store.close()


def documents_of(store: TierStore) -> HostDocuments:
    return HostDocuments(store, ROTATION, CopyStream(CPU), CPU)


class Composed:
    """A context of drawn documents, one of them twice, of which some tokens are left out: ``tokens`` stay.

    Attributes:
        k, v: per layer [tokens, kv_heads, head_dim]: what a request reads, keys at their positions.
    """

    def __init__(self, seed: int, tokens: int, *, whole: bool = False) -> None:
        draw = random.Random(seed)
        few = draw.randint(1, 47)
        longest = tokens - 2 * few if whole else tokens
        self.samples = [Sample(1000 * seed + n, each, shape=SHAPE) for n, each in enumerate((few, longest))]
        order = [self.samples[n] for n in (0, 1, 0)]
        ends = [0]
        for sample in order:
            ends.append(ends[-1] + sample.meta.n_tokens)
        spans = tuple(Span(a, b) for a, b in pairwise(ends))
        kept = sorted(draw.sample(range(ends[-1]), tokens))
        options = {} if whole else {"experimental": {"kept": kept}}
        plan = ContextPlan("compose", order[0].namespace, "concat", spans, options)
        ids = array("q", [int(i) for sample in order for i in sample.ids] + [7, 8, 9])
        partial = partial_selection(plan, ModelShape(LAYERS))
        self.context = ComposedContext(plan, ids, tuple(sample.key for sample in order), partial)
        self.context.decided = partial.settle()
        assert self.context.slots == tokens
        assert self.context.selection.is_copied
        at = torch.tensor(kept)
        shifts = torch.cat([torch.full((b - a,), a) for a, b in pairwise(ends)])
        every_k, every_v = (torch.cat([getattr(sample, name) for sample in order], 1) for name in "kv")
        self.k = [ROTATION.rotate(layer, shifts)[at] for layer in every_k]
        self.v = [layer[at] for layer in every_v]

    def held(self, documents: HostDocuments, page: int) -> ContextPages:
        found = context_on_host(self.context, documents, page)
        assert found is not None
        return found


def located(bench: Bench, composed: Composed, documents: HostDocuments) -> ContextPages | None:
    """The context in its documents' pages, with what a progressive request needs to read it there."""
    context = context_on_host(composed.context, documents, bench.page)
    if context is not None and bench.shared and bench.rows.contexts is not None:
        bench.rows.contexts.open(documents.host)
        assert bench.rows.contexts.take(context)
    return context


def reserved(bench: Bench, composed: Composed, store: TierStore) -> HostPrefix | None:
    """Let the bench's request wait with a context in documents; nothing of it is on the device any more."""
    bench.allocator.free(bench.row_before[: (PROMPT + TAIL) * bench.page].long())
    bench.spoil_free_pages()
    bench.table[1] = 0
    documents = bench.rows.documents = documents_of(store)
    tokens = composed.context.slots
    prefix = HostPrefixes(bench.rows).reserve(
        *(bench.req, tokens, LIMIT, bench.resident_blocks, OffloadCounts()),
        shared=bench.shared,
        find=lambda: located(bench, composed, documents),
    )
    bench.req.output_ids = []
    bench.req.full_untruncated_fill_ids = [0] * (tokens + 20)
    bench.req.sampling_params = SimpleNamespace(max_new_tokens=20)
    return prefix


def entered(bench: Bench, composed: Composed, prefix: HostPrefix) -> OffloadedRow:
    """Admit it, and bring to the device what follows its pages."""
    adder = Adder()
    _, row = HostAdmission(bench.rows, bench.tree).admit(adder, prefix, lambda: adder.add(bench.req))
    assert row is not None
    end = PROMPT * bench.page
    more = bench.allocator.alloc((TAIL - 1) * bench.page)
    assert more is not None
    prefix_slots = prefix_of(bench.req)
    last = prefix_slots[-1] // bench.page * bench.page + torch.arange(BEHIND, bench.page)
    slots = torch.cat((prefix_slots, last, more))
    bench.table[1, : len(slots)] = slots.int()
    old = bench.row_before[: len(slots)].long()
    for original, kv, own in zip(
        (bench.original.k, bench.original.v), (bench.kv.k, bench.kv.v), (composed.k, composed.v), strict=True
    ):
        for layer in range(LAYERS):
            original[layer][old[:end]] = own[layer][:end]
            kv[layer][slots[end:]] = original[layer][old[end:]]
    HostPrefixes(bench.rows).enter(row, 1, prefix.tail)
    return row


def reader(bench: Bench, row: OffloadedRow, memory: PieceMemory | None = None) -> ContextReader:
    assert row.context is not None
    where = bench.rows.first_host + row.host.long()
    memory = memory or PieceMemory(bench.kv, bench.page)
    return ContextReader(row.context, memory, bench.statistics, where)
