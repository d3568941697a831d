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


class Decoding:
    """Decode steps of the model's shape in a CUDA graph: its matrix products, and ``attend(layer, q)``, from
    and to ``[batch, heads, head_dim]``. The weights of four layers stand for all 32."""

    def __init__(self, batch: int, attend: Callable[[int, Any], Any]) -> None:
        import torch

        hidden, wide = 4096, 14336
        shapes = ((hidden, 6144), (hidden, hidden), (hidden, 2 * wide), (wide, hidden))
        self._layers = [[normal(*shape) * 0.02 for shape in shapes] for _ in range(4)]
        self._x, self._attend = normal(batch, hidden), attend
        self._step()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = self._step()
        self._side = torch.cuda.Stream()

    def _step(self) -> torch.Tensor:
        import torch.nn.functional as F

        h = self._x
        for i in range(LAYERS):
            qkv, o, up, down = self._layers[i % 4]
            q = (h @ qkv)[:, :4096].view(len(h), QUERY_HEADS, HEAD_DIM)
            h = self._attend(i, q).reshape(h.shape) @ o
            gate, value = (h @ up).chunk(2, -1)
            h = (F.silu(gate) * value) @ down
        return h

    def _steps(self, n: int, each: Callable[[], object] | None = None) -> list[Any]:
        """Launch steps, with ``each`` beside every one of them; return the events between them."""
        import torch

        events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        events[0].record()
        for event in events[1:]:
            if each is not None:
                self._side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._side):
                    each()
            self._graph.replay()
            event.record()
        return events

    def alone_ms(self, each: Callable[[], object] | None = None) -> float:
        """Return the median milliseconds of a step; ``each``: what is launched beside every one of them."""
        import torch

        events = self._steps(12, each)
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in pairwise(events[2:]))

    def beside(self, load: Callable[[], object], gb: float) -> dict[str, Any]:
        """Measure a load of ``gb`` and the steps while it is repeated without a pause. ``ms`` is a load's,
        beside steps. Raises RagserveError if no step ran meanwhile."""
        import torch

        def submit() -> tuple[Any, Any]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(self._side):
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
        base = self.alone_ms()
        start, end = submit()
        events = self._steps(12)
        torch.cuda.synchronize()
        # only steps that ran wholly while loads were running
        within = [
            (a, b) for a, b in pairwise(events[1:]) if start.elapsed_time(a) > 0 and b.elapsed_time(end) > 0
        ]
        if not within:
            raise RagserveError("No decode step ran while loads did.", hint="Raise the number of loads.")
        beside = statistics.median(a.elapsed_time(b) for a, b in within)
        base = (base + self.alone_ms()) / 2
        return {
            "ms": start.elapsed_time(end) / LOADS,
            "decode_alone_ms": round(base, 3),
            "decode_beside_ms": round(beside, 3),
            "decode_slowdown": round(beside / base - 1, 4),
            "alone_gb_per_s": round(gb / unhindered * 1e3, 1),
            "steps": len(within),
        }


def beside_decode_rows(ceiling: dict[str, float], quick: bool) -> Iterator[Row]:
    import torch
    import torch.nn.functional as F

    from ragserve_kernels.rotate_gather.triton import rotate_gather_triton

    args = compose_case(2048, 8, True)
    gb = 2048 * 2 * LAYERS * KV_HEADS * HEAD_DIM * 2 / 1e9
    caches = [normal(2, 8, KV_HEADS, 8192, HEAD_DIM) for _ in range(4)]

    def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
        k, v = caches[layer % 4]
        return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    decoding = Decoding(8, attend)

    def measure(variant: str, load: Callable[[], object], gb: float = gb) -> Row:
        found = decoding.beside(load, gb)
        return bandwidth(CASE, variant, found.pop("ms"), gb, ceiling["link_up_gb_per_s"], **found)

    for programs in (4,) if quick else (4, 1, 2, 3, 6, 8, 32, 64):
        load = partial(rotate_gather_triton, *args, tile_tokens=BLOCK, programs=programs)
        yield measure(f"programs {programs}", load)
    codes = compose_case(2048, 8, True, codes=True)
    half = gb / 2 * (1 + 4 / HEAD_DIM)  # a scale and a zero point for each row of a head
    for programs in () if quick else (3, 4, 6, 8, 12, 16):
        load = partial(rotate_gather_triton, *codes, tile_tokens=BLOCK, programs=programs)
        yield measure(f"8 bits, programs {programs}", load, half)
    host = torch.empty(round(gb * 1e9), dtype=torch.int8, pin_memory=True)
    copy = partial(torch.empty_like(host, device="cuda").copy_, host, non_blocking=True)
    yield measure("floor: one plain copy of as many bytes, by the copy engine", copy)
