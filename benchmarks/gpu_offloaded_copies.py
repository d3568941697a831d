"""GB/s of the copies of offloaded requests: pages to the host, and pages of KV heads back into resident
blocks; and what they cost decode steps.

    python -m benchmarks.gpu_offloaded_copies OUT.json [--shape llama-3.1-8b] [--gb GB] [--requests N]

To the host: pages permuted on the device, with one copy for a run of host pages; as long runs and as single
pages; all in one call of `fill_pages`, with the permutation beside the copies, and with both in one stream;
permuted by one launch (`gather_pages`), as offloaded requests are, and layer by layer, as documents are. The
permutation alone, by either.
Then in calls of as many as `OffloadedRows.copy` launches beside a step, by the bytes that are put together at
a time. Back: `resident_gather` of random pages, by the number of its programs, and `shared_gather` of as
many. The rival is one copy of as many bytes between pinned memory and the device. Every figure is the best of
five.

Beside decode: the same loads beside steps of ``--requests`` requests, whose attention is `sparse_decode` over
resident blocks and whose other work has the shape of Llama-3.1-8B, in a CUDA graph: without a pause, which is
the worst case, and once a step, of as many pages as requests of 32k missed a step (`misses` of
h200-offloaded.json).

Progressive: attention of a step of 8 requests, in all layers, to 64 pages a KV head, in shared blocks of any
layer and head but for a share that the attention itself reads from the host; beside the time that the link
takes for them, and that of the step when all are on the device. A minute on an H200."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ragserve.bench.kernels.compose_beside import Decoding
from ragserve.bench.kernels.timing import median_ms, normal
from ragserve.bench.model_shapes import SHAPES
from ragserve.verification import report
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.paged import PagedBatch, PageSelection
from ragserve_kernels.progressive_decode import PagePlaces, SharedPages, progressive_decode
from ragserve_kernels.resident_gather import resident_gather
from ragserve_kernels.shared_gather import shared_gather
from ragserve_kernels.sparse_decode import sparse_decode
from sglang_ext.documents.fill import COPY_BYTES, DocumentKv, fill_pages
from sglang_ext.documents.pages.types import KvShape
from sglang_ext.kv_offload.host.host_pages import HostPages
from sglang_ext.kv_offload.offloaded_rows import STEP_BYTES

PAGE, CHOSEN = 64, 32  # tokens; pages that a layer and KV head misses
REPEATS = 5
MISSED = 61  # pages of KV heads that a request of 32k loads a step: 1,119,914 of 18 answers of 1,024
ATTENDED, REQUESTS = 64, 8  # pages of each head in a progressive step, and its requests
SHARES = (0.0, 0.1, 0.5, 1.0)  # of them on the host
PROGRAMS = (1, 2, 3, 4, 8, 32)
GROUPS = tuple(each * 2**20 for each in (16, 32, 64, 128))  # bytes put together at a time; last: no overlap


def gb_per_s(size: int, work: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        best = min(best, begun.elapsed_time(ended) / 1e3)
    return round(size / best / 1e9, 2)


def in_calls(
    pool: torch.Tensor, shape: KvShape, numbers: Sequence[int], source: DocumentKv, size: int, group: int
) -> None:
    """`fill_pages` in calls of ``size`` bytes, in each of which ``group`` bytes are put together at a time.

    Only with several groups in a call does it copy beside putting pages together."""
    step = max(1, size // shape.value_bytes)
    for at in range(0, len(numbers), step):
        some = numbers[at : at + step]
        fill_pages(pool, shape, range(at, at + len(some)), some, source, copy_bytes=group)


def decoding(requests: int, heads: int, dim: int) -> Decoding:
    """Steps of ``requests`` that each read half of their resident blocks, twice a choice."""
    resident_blocks = 2 * CHOSEN
    slots = requests * resident_blocks * PAGE
    pools = [tuple(normal(slots, heads, dim) for _ in range(2)) for _ in range(4)]
    table = torch.arange(requests * resident_blocks, dtype=torch.int32, device="cuda").view(
        requests, resident_blocks
    )
    lengths = torch.full((requests,), resident_blocks * PAGE, dtype=torch.int32, device="cuda")
    batch = PagedBatch(table, lengths, PAGE, PAGE)
    order = torch.argsort(torch.rand(requests, heads, resident_blocks, device="cuda"), -1)
    blocks = order[..., :CHOSEN].to(torch.int32).contiguous()
    chosen = PageSelection(blocks, torch.full_like(blocks[..., 0], CHOSEN))
    return Decoding(
        requests, lambda layer, q: sparse_decode(q.contiguous(), pools[layer % 4], batch, selection=chosen)
    )


def progressive(pages: HostPages, kv: KVLayers, share: float) -> Callable[[], torch.Tensor]:
    """Return the attention of a progressive step, which reads ``share`` of its pages from the host and says
    how many pages of KV heads those are."""
    layers, heads, dim, _ = kv.layout
    device, count = kv.device, kv.slots // PAGE
    q = torch.randn(REQUESTS, 4 * heads, dim, device=device).to(kv.k[0].dtype)
    table = torch.randint(count, (REQUESTS, ATTENDED), device=device, dtype=torch.int32)
    batch = PagedBatch(table, torch.full_like(table[:, 0], ATTENDED * PAGE), PAGE, PAGE)
    order = torch.argsort(torch.rand(REQUESTS, heads, ATTENDED, device=device), -1).to(torch.int32)
    ranking = PageSelection(order.contiguous(), torch.full_like(order[..., 0], ATTENDED).contiguous())
    hosts = torch.randint(len(pages.pool), (REQUESTS, 1, ATTENDED), device=device, dtype=torch.int32)
    places = (-1 - hosts).expand(-1, heads, -1)
    sizes = len(pages.pool), layers, heads
    of = torch.randint(count * layers * heads, sizes, device=device, dtype=torch.int32)
    of.masked_fill_(torch.rand(sizes, device=device) < share, -1)
    shared_blocks = SharedPages(of, kv)

    def step() -> torch.Tensor:
        read = [
            progressive_decode(
                q,
                (kv.k[layer], kv.v[layer]),
                batch,
                ranking,
                threshold=1.0,
                places=PagePlaces(places, pages.pool, layer, shared_blocks),
            ).from_host
            for layer in range(layers)
        ]
        return torch.stack([each for each in read if each is not None]).sum()

    return step


def progressive_rows(pages: HostPages, kv: KVLayers, head_page: int, link: float) -> list[dict[str, Any]]:
    """Measure steps by the share on the host; ``head_page``: bytes, ``link``: GB/s to the device."""
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        step = progressive(pages, kv, share)
        size, ms = int(step()) * head_page, round(median_ms(step), 3)
        limit = max(size / link / 1e6, rows[0]["ms"] if rows else ms)
        rows.append(
            {
                "copy": f"progressive step, {share:.0%} on the host",
                "GB/s": round(size / ms / 1e6, 2),
                "ms": ms,
                "link ms": round(size / link / 1e6, 3),
                "over the larger of link and device": round(ms / limit - 1, 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=18)
    given = parser.parse_args()
    model = SHAPES[given.shape]
    layers, heads, dim = model["num_hidden_layers"], model["num_key_value_heads"], model["head_dim"]
    shape = KvShape(layers, heads, dim, torch.bfloat16, PAGE)
    count = int(given.gb * 1e9) // shape.page_bytes
    pages = HostPages(shape, count * shape.page_bytes, pin=True)
    size = count * shape.page_bytes
    kv = KVLayers(
        *(
            [torch.randn(count * PAGE, heads, dim, device="cuda").bfloat16() for _ in range(layers)]
            for _ in range(2)
        )
    )
    source = DocumentKv(kv.k, kv.v, torch.arange(count * PAGE, device="cuda"), kv)
    by_layers = replace(source, layers=None)
    blocks, mixed = list(range(count)), random.Random(3).sample(range(count), count)
    flat, there = pages.pool.view(-1), torch.empty(pages.pool.numel(), dtype=torch.bfloat16, device="cuda")
    rows: list[dict[str, Any]] = [
        {"copy": "one, to the host", "GB/s": gb_per_s(size, lambda: flat.copy_(there, non_blocking=True))},
        {"copy": "one, to the device", "GB/s": gb_per_s(size, lambda: there.copy_(flat, non_blocking=True))},
    ]
    fill = partial(in_calls, pages.pool, shape)
    for name, numbers in (("in a row", blocks), ("scattered", mixed)):
        for form, call in (("", size), (", in one stream", COPY_BYTES)):
            for way, kv_of in (("", source), (", layer by layer", by_layers)):
                rate = gb_per_s(size, partial(fill, numbers, kv_of, call, COPY_BYTES))
                rows.append({"copy": f"pages to the host, {name}{form}{way}", "GB/s": rate})
    group = max(1, COPY_BYTES // shape.page_bytes)
    for way, kv_of in (("one launch", source), ("layer by layer", by_layers)):
        rate = gb_per_s(group * shape.page_bytes, partial(kv_of.pages, shape, blocks[:group]))
        rows.append({"copy": f"{group} pages put together on the device, {way}", "GB/s": rate})
    for group in GROUPS:
        rate = gb_per_s(size, partial(fill, blocks, source, STEP_BYTES, group))
        name = f"pages to the host, {STEP_BYTES >> 20} MiB a call, {group >> 20} together"
        rows.append({"copy": name, "GB/s": rate})

    def lists(chosen: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Random host pages for each layer and head, resident blocks for them, and their bytes."""
        order = torch.argsort(torch.rand(layers, heads, count, device="cuda"), -1)
        source = order[..., :chosen].to(torch.int32).contiguous()
        resident_blocks = (
            torch.arange(chosen, device="cuda", dtype=torch.int32).expand_as(source).contiguous()
        )
        return source, resident_blocks, source.numel() * shape.page_bytes // (layers * heads)

    wanted, target, moved = lists(CHOSEN)
    few, few_targets, few_moved = lists(-(-MISSED * given.requests // (layers * heads)))
    steps = decoding(given.requests, heads, dim)
    for programs in PROGRAMS:
        one, each = (
            partial(resident_gather, pages.pool, kv, *pair, programs=programs)
            for pair in ((wanted, target), (few, few_targets))
        )
        row = {
            "copy": "pages of heads to resident_blocks",
            "programs": programs,
            "GB/s": gb_per_s(moved, one),
        }
        found = steps.beside(one, moved / 1e9)
        row["GB/s beside decode"] = round(moved / 1e6 / found["ms"], 1)
        row["step ms alone"], row["beside"] = found["decode_alone_ms"], found["decode_beside_ms"]
        row["slowdown without a pause"] = found["decode_slowdown"]
        row["slowdown, a load a step"] = round(steps.alone_ms(each) / steps.alone_ms() - 1, 4)
        rows.append(row)
    del steps
    moves = wanted.flatten() * (layers * heads) + torch.arange(
        layers * heads, device="cuda"
    ).repeat_interleave(CHOSEN)
    shared_blocks = torch.randperm(count * layers * heads, device="cuda")[: len(moves)].int()
    every = torch.tensor([len(moves)], dtype=torch.int32, device="cuda")
    rate = gb_per_s(moved, partial(shared_gather, pages.pool, kv, moves.int(), shared_blocks, every))
    rows.append(
        {"copy": "pages of heads to shared blocks of any layer and head", "programs": 3, "GB/s": rate}
    )
    rows += progressive_rows(pages, kv, shape.page_bytes // (layers * heads), rows[1]["GB/s"])
    workload = {
        "model shape": given.shape,
        "page bytes": shape.page_bytes,
        "decode": f"{given.requests} requests, {CHOSEN} of {2 * CHOSEN} resident blocks a head",
        "progressive": f"{REQUESTS} requests, {ATTENDED} pages a head",
        "MB of a load without a pause": round(moved / 1e6, 1),
        "MB of a load a step": round(few_moved / 1e6, 1),
    }
    report.write("offloaded-copies", workload, rows, out=given.out)


if __name__ == "__main__":
    main()
