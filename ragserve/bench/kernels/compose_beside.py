"""Host loads beside decode: their bandwidth while a decode step runs, and that step's slowdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ragserve.bench.kernels.compose_load import BLOCK, compose_case
from ragserve.bench.kernels.timing import HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS, Row, bandwidth, normal
from ragserve.errors import RagserveError

if TYPE_CHECKING:
    import torch

CASE = "host, 2048 tokens, beside decode of 8 x 8192"
LOADS = 16


def _decode_graph(batch: int, context: int) -> tuple[Any, Any]:
    """Capture a decode step of the model's shape: its matrix products and dense attention.

    The weights and KV of four layers stand for all 32. Returns the graph and what must be kept alive for
    it."""
    import torch
    import torch.nn.functional as F

    hidden, wide = 4096, 14336
    shapes = ((hidden, 6144), (hidden, hidden), (hidden, 2 * wide), (wide, hidden))
    layers = [[normal(*shape) * 0.02 for shape in shapes] for _ in range(4)]
    caches = [normal(2, batch, KV_HEADS, context, HEAD_DIM) for _ in range(4)]
    x = normal(batch, hidden)

    def step() -> torch.Tensor:
        h = x
        for i in range(LAYERS):
            qkv, o, up, down = layers[i % 4]
            q = (h @ qkv)[:, :4096].view(batch, QUERY_HEADS, 1, HEAD_DIM)
            k, v = caches[i % 4]
            h = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).reshape(batch, hidden) @ o
            gate, value = (h @ up).chunk(2, -1)
            h = (F.silu(gate) * value) @ down
        return h

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, (layers, caches, x, out)


def beside_decode_rows(ceiling: dict[str, float], quick: bool) -> Iterator[Row]:
    import torch

    from ragserve_kernels.rotate_gather.triton import rotate_gather_triton

    args = compose_case(2048, 8, True)
    gb = 2048 * 2 * LAYERS * KV_HEADS * HEAD_DIM * 2 / 1e9
    graph, kept = _decode_graph(8, 8192)
    side = torch.cuda.Stream()

    def steps(n: int) -> list[Any]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        return events

    def alone() -> float:
        events = steps(12)
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in pairwise(events[2:]))

    def measure(variant: str, load: Callable[[], object]) -> Row:
        def submit() -> tuple[Any, Any]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(side):
                load()
                start.record()
                for _ in range(LOADS):
                    load()
                end.record()
            return start, end

        torch.cuda.synchronize()
        start, end = submit()
        torch.cuda.synchronize()
        unhindered = start.elapsed_time(end) / LOADS
        base = alone()
        start, end = submit()
        events = steps(12)
        torch.cuda.synchronize()
        # only steps that ran wholly while loads were running
        within = [
            (a, b) for a, b in pairwise(events[1:]) if start.elapsed_time(a) > 0 and b.elapsed_time(end) > 0
        ]
        if not within:
            raise RagserveError("No decode step ran while loads did.", hint="Raise the number of loads.")
        beside = statistics.median(a.elapsed_time(b) for a, b in within)
        base = (base + alone()) / 2
        extra = {
            "decode_alone_ms": round(base, 3),
            "decode_beside_ms": round(beside, 3),
            "decode_slowdown": round(beside / base - 1, 4),
            "alone_gb_per_s": round(gb / unhindered * 1e3, 1),
        }
        ms = start.elapsed_time(end) / LOADS
        return bandwidth(CASE, variant, ms, gb, ceiling["link_up_gb_per_s"], **extra, steps=len(within))

    for programs in (4,) if quick else (4, 1, 2, 3, 6, 8, 32, 64):
        load = partial(rotate_gather_triton, *args, tile_tokens=BLOCK, programs=programs)
        yield measure(f"programs {programs}", load)
    host = torch.empty(round(gb * 1e9), dtype=torch.int8, pin_memory=True)
    copy = partial(torch.empty_like(host, device="cuda").copy_, host, non_blocking=True)
    yield measure("floor: one plain copy of as many bytes, by the copy engine", copy)
    del kept
