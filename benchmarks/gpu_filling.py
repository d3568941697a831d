"""Times a decode step's attention that reads pages from the host and fills shared blocks with them, beside
loads.

    python -m benchmarks.gpu_filling OUT.json [--page 64] [--requests 8] [--tokens 32768] [--attended 4096]

One layer with the heads of Llama-3.1-8B in bfloat16. Each KV head of a request attends to random pages, half
to one and a half times ``--attended`` tokens, of which a share is in no shared block of the pool. These lie
in host pages of the requests (own), or in documents' host pages, anywhere, whose keys are turned on the way.

resident: no page is missing. reads: attention reads missing pages from the host. reads and fills: and writes
them to their shared blocks. load, then attend: the engine's kernel loads them, with as many programs as there
or with 16, and attention follows. load beside: attention reads them while they are loaded on another stream,
as the engine did before it filled shared blocks.

ResidentBlocks: missing: share of what is attended to. output ms: until attention is done; ms: until the loads
are, too; medians with a cold L2, without making tables of shared blocks. GB: over the link; GB/s: of these,
in ms. link
ms: of one copy of the missing pages. over bound: ms over the larger of link ms and the resident step, less 1.

Each output is compared with the plain forward, and the pool with what a plain load makes of it; a difference
ends the run. Pinned memory: 5 GB. Half a minute on an H200, beside a minute or two of compiling. Without a
GPU all is tiny and runs in Triton's interpreter, to check the script."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_context_reads import BLOCK, LENGTH, context_of
from ragserve.bench.kernels.timing import HEAD_DIM, KV_HEADS, L2_FLUSH_BYTES, agree, link_gb_per_s
from ragserve.verification.report import GrowingReport
from ragserve_kernels.context_gather import HostContexts, context_shared_gather
from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.paged import PagedBatch, PageSelection
from ragserve_kernels.progressive_decode import PagePlaces, Progressive, SharedPages, progressive_decode
from ragserve_kernels.shared_assign import SharedMoves, SharedState, shared_arrive, shared_expect
from ragserve_kernels.shared_gather import shared_gather
from sglang_ext.documents.pages.types import KvShape
from sglang_ext.kv_offload.host.copy_stream import CopyStream
from sglang_ext.kv_offload.host.host_pages import HostPages

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32  # the interpreter turns keys too coarsely in bfloat16
LIMIT = 1e-2 if GPU else 2e-3  # relative error, as in tests/kernels
LAYERS, LAYER, GROUP = 4, 1, 4  # of the pool; the one that attends; query heads of a KV head
DOCUMENT = LENGTH if GPU else 37  # tokens
SHARES = (0.05, 0.2, 0.5, 1.0) if GPU else (0.4, 1.0)
MANY = 16  # programs of a load beside which nothing runs
WAYS = ("reads", "reads and fills", "load, then attend", f"load by {MANY}, then attend", "load beside")
REPEATS = 21 if GPU else 1
HOLD_CYCLES = 1 << 23  # of the GPU's clock, some 5 ms, in which a step is launched
NOTE = (
    "Medians with a cold L2. output ms: until attention is done; ms: until the loads are, too. link ms: of "
    "one copy of the missing pages. over bound: over the larger of link ms and the resident step, less 1."
)


class Step:
    """Attention of a step in one layer, with a shared block for each page and head that it attends to."""

    def __init__(self, shape: KvShape, given: Any, host: torch.Tensor, contexts: HostContexts | None) -> None:
        requests, pages, heads = given.requests, given.tokens // given.page, shape.kv_heads
        order = torch.rand(requests, heads, pages, device=DEVICE).argsort(-1)
        mean = given.attended // given.page
        counts = torch.randint(mean // 2, mean + mean // 2 + 1, (requests, heads), device=DEVICE)
        self._ranking = PageSelection(order.int(), counts.int())
        numbers = torch.randperm(requests * pages, device=DEVICE).view(requests, 1, -1).expand_as(order)
        head = torch.arange(heads, device=DEVICE)[:, None]
        entries = (numbers.gather(-1, order) * LAYERS + LAYER) * heads + head
        entries = entries[torch.arange(pages, device=DEVICE) < counts[..., None]]
        room, lists = 2 * len(entries) // (LAYERS * heads) + 1, LAYERS * heads
        shared_blocks = torch.randperm(room * lists, device=DEVICE)[: len(entries)]
        self._moves = torch.stack((entries, shared_blocks), -1).int()[
            torch.randperm(len(shared_blocks), device=DEVICE)
        ]
        form = LAYERS, room * given.page, heads, shape.head_dim
        self.values = torch.full((2, *form), torch.nan, dtype=DTYPE, device=DEVICE)
        self._pool = KVLayers(*(list(each) for each in self.values))
        # one launch for what the engine launches by request
        self.load: Callable[..., None] = partial(shared_gather, host, self._pool)
        if contexts is not None:
            self.load = partial(context_shared_gather, contexts, self._pool)
        self._limit = 0.0 if contexts is None else LIMIT  # keys of contexts are turned
        named = len(host) if contexts is None else len(contexts.tokens)
        of, held = (torch.full((n * lists + 1,), -1, dtype=torch.int32, device=DEVICE) for n in (named, room))
        self.state = SharedState(of, held, torch.zeros_like(held), torch.zeros_like(held[:1]))
        self._q = torch.randn(requests, GROUP * heads, shape.head_dim, dtype=DTYPE, device=DEVICE)
        lengths = torch.full((requests,), given.tokens, dtype=torch.int32, device=DEVICE)
        table = torch.zeros(requests, pages, dtype=torch.int32, device=DEVICE)  # not read
        self._batch = PagedBatch(table, lengths, given.page)
        in_pool = SharedPages(of[:-1].view(named, LAYERS, heads), self._pool)
        self.places = PagePlaces(-1 - numbers.int(), host, LAYER, in_pool, contexts)

    def attend(self, places: PagePlaces) -> Progressive:
        kv = self._pool.k[LAYER], self._pool.v[LAYER]
        given = self._q, kv, self._batch, self._ranking
        return progressive_decode(*given, threshold=1.0, bound="round", places=places)

    def parts(self, share: float) -> tuple[SharedMoves, ...]:
        """Return the moves of what is there and of the ``share`` that is missing."""
        at = round(share * len(self._moves))
        tally = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        return tuple(
            SharedMoves(*(each.contiguous() for each in part.unbind(-1)), tally[:1] + len(part), tally)
            for part in (self._moves[at:], self._moves[:at])
        )

    def loaded(self, moves: SharedMoves) -> torch.Tensor:
        """Return the pool with these pages, by the plain forward, and NaN elsewhere."""
        self.values.fill_(torch.nan)
        with forced_naive():
            self.load(*moves[:3])
        return self.values.clone()

    def set_tables(self, there: SharedMoves, expected: SharedMoves) -> None:
        for each in self.state[:2]:
            each.fill_(-1)
        if len(there.entries):
            shared_arrive(there, self.state)
        shared_expect(expected, self.state)

    def check_pool(self, wanted: torch.Tensor, what: str) -> None:
        """Raise ValueError unless the pool is ``wanted``, bit by bit but for keys that were turned."""
        if not torch.allclose(self.values, wanted, self._limit, self._limit / 10, equal_nan=True):
            raise ValueError(
                f"{what}: shared blocks do not hold what a load brings, or others have been written"
            )


def instant() -> Any:
    """Return an event of the current stream, or the time on a CPU."""
    if not GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def ms_between(begun: Any, ended: Any) -> float:
    return float(begun.elapsed_time(ended) if GPU else 1e3 * (ended - begun))


def medians(reset: Callable[[], None], run: Callable[[], tuple[Any, Any]]) -> list[float]:
    """Return the milliseconds until both instants that ``run`` returns. The device is held until all is
    launched, as from a CUDA graph."""
    flush = torch.empty(L2_FLUSH_BYTES if GPU else 0, dtype=torch.int8, device=DEVICE)
    found = []
    for _ in range(REPEATS):
        reset()
        flush.zero_()
        if GPU:
            torch.cuda._sleep(HOLD_CYCLES)
        begun, ends = instant(), run()
        if not GPU or not begun.query():
            found.append([partial(ms_between, begun, end) for end in ends])
    if 2 * len(found) <= REPEATS:
        raise RuntimeError(f"{REPEATS - len(found)} of {REPEATS} steps began before all was launched")
    if GPU:
        torch.cuda.synchronize()
    return [round(statistics.median(each() for each in ms), 4) for ms in zip(*found, strict=True)]


def measure(step: Step, source: str, shape: KvShape, link: float, report: GrowingReport) -> None:
    """Add the rows of a source; ``link``: GB/s of one copy."""
    copies = CopyStream(DEVICE)

    def run(way: str, missing: SharedMoves) -> tuple[Progressive, Any, Any]:
        if way == "load beside":
            with copies.behind(*missing):
                step.load(*missing[:3])
        elif way.startswith("load"):
            step.load(*missing[:3], programs=MANY if way.startswith("load by") else None)
        found = step.attend(step.places)
        output = instant()
        copies.join()
        return found, output, instant()

    with forced_naive():
        plain = step.attend(step.places._replace(shared_blocks=None)).out
    every, none = step.parts(0.0)
    full, resident_ms = step.loaded(every), 0.0
    for share in (0.0, *SHARES):
        there, missing = step.parts(share)
        before, count = step.loaded(there), len(missing.entries)
        for way in WAYS if share else ("resident",):
            what = f"{source}, {share:.0%} missing, {way}"
            is_first = way.endswith("then attend")  # what is loaded is there when attention begins
            expected = missing if way == "reads and fills" else none
            reset = partial(step.set_tables, every if is_first else there, expected)
            reset()
            step.values.copy_(before)
            got, *_ = run(way, missing)
            agree(got.out, plain, what, LIMIT)
            step.check_pool(before if way in ("reads", "resident") else full, what)
            read = 0 if got.from_host is None else int(got.from_host.sum())
            if read != (0 if is_first else count) or (step.state.of < -1).any():
                raise ValueError(f"{what}: read {read} of {count} pages on the host, or did not enter them")
            output_ms, ms = medians(reset, lambda way=way, missing=missing: run(way, missing)[1:])
            resident_ms = resident_ms or ms
            size = count * shape.page_bytes / (LAYERS * shape.kv_heads) / 1e6
            moved = 2 * size if way == "load beside" else size
            row = {"source": source, "missing": share, "way": way, "output ms": output_ms, "ms": ms}
            row |= {"GB": round(moved / 1e3, 4), "GB/s": round(moved / ms, 2)}
            over = ms / max(resident_ms, size / link) - 1
            report.add(row | {"link ms": round(size / link, 4), "over bound": round(over, 3)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--page", type=int, default=64, choices=(16, 32, 64, 128))
    parser.add_argument("--requests", type=int, default=8 if GPU else 2)
    parser.add_argument("--tokens", type=int, default=32_768 if GPU else 512)
    parser.add_argument("--attended", type=int, default=4096 if GPU else 256)
    given = parser.parse_args()
    if given.tokens % given.page or given.attended < 2 * given.page:
        parser.error("--tokens are whole pages, and --attended two of them at least")
    if not GPU:
        os.environ["TRITON_INTERPRET"] = "1"  # a kernel's first call imports triton
    torch.manual_seed(7)
    shape = KvShape(LAYERS, KV_HEADS if GPU else 2, HEAD_DIM if GPU else 64, DTYPE, given.page)
    documents = -(-given.requests * given.tokens // DOCUMENT)
    tokens = documents * -(-DOCUMENT // BLOCK) * BLOCK
    host = HostPages(shape, -(-tokens // given.page) * shape.page_bytes, pin=GPU).pool
    host.copy_(torch.randn(host.shape, dtype=DTYPE, device=DEVICE))
    # the same memory as documents' pages
    blocks = host.view(-1, 2, LAYERS, shape.kv_heads, BLOCK, shape.head_dim)
    form: dict[str, Any] = {"page": given.page, "length": DOCUMENT, "device": DEVICE}
    context = context_of(len(blocks), shape.head_dim, scattered=True, **form)
    contexts = HostContexts(blocks, torch.tensor([blocks.data_ptr()], device=DEVICE), *context)
    link = link_gb_per_s()[0] if GPU else torch.inf
    report = GrowingReport("filling shared_blocks", given.out, note=NOTE)
    report.workload = {
        "requests": f"{given.requests} of {given.tokens} tokens, {given.attended} attended to in the mean",
        "page": given.page,
        "documents": f"{DOCUMENT} tokens each, in pages of {BLOCK}",
        "one copy, GB/s": round(link, 2) if GPU else None,
    }
    for source, of in (("own", None), ("documents", contexts)):
        measure(Step(shape, given, host, of), source, shape, link, report)
    report.show()


if __name__ == "__main__":
    main()
