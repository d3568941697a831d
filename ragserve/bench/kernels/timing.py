"""Timing of the kernel benchmarks: medians, and this machine's two ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ragserve.errors import RagserveError

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128  # Llama-3.1-8B
L2_FLUSH_BYTES = 256 << 20  # several times the L2 of an H200 (60 MB)


def median_ms(run: Callable[[], object], *, graph: bool = True) -> float:
    """Return the median milliseconds of ``run`` on the GPU by ``do_bench``, which empties the L2.

    ``graph`` captures ``run`` in a CUDA graph, so that launches cost what they cost inside an engine's
    graph."""
    import torch
    from triton.testing import do_bench

    if not graph:
        return float(do_bench(run, return_mode="median"))
    run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        run()
    return float(do_bench(captured.replay, return_mode="median"))


def event_ms(run: Callable[[], object], repeats: int = 7) -> float:
    """Return the median milliseconds of ``run`` on the GPU, after one that warms up.

    For work of milliseconds: launches count, and the L2 is as the run before has left it."""
    import torch

    run()
    times = []
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return round(statistics.median(times), 3)


def normal(*shape: int) -> torch.Tensor:
    """Return a bfloat16 CUDA tensor of standard normal numbers."""
    import torch

    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def copy_gb_per_s() -> float:
    """Return the device-to-device copy bandwidth, counting bytes read and written.

    Measured without a graph, whose copy node is slower (2.8 TB/s seen)."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source), graph=False) / 1e6


def link_gb_per_s() -> tuple[float, float]:
    """Return the bandwidth of one large copy from pinned host memory to the device, and back."""
    import torch

    host = torch.zeros(512 << 20, dtype=torch.int8, pin_memory=True).random_()
    device = torch.empty_like(host, device="cuda")
    up = median_ms(lambda: device.copy_(host, non_blocking=True), graph=False)
    down = median_ms(lambda: host.copy_(device, non_blocking=True), graph=False)
    return host.nbytes / up / 1e6, host.nbytes / down / 1e6


def relative_error(got: Any, want: Any) -> float:
    """Return the norm of the difference over that of ``want``."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def agree(got: Any, want: Any, what: str, limit: float = 1e-2) -> None:
    """Raise RagserveError if the relative error is over ``limit`` or not a number."""
    error = relative_error(got, want)
    if not error < limit:
        raise RagserveError(
            f"{what} disagrees with its reference: relative error {error:.3g}.",
            hint="Nothing was timed; run tests/kernels.",
        )


def bandwidth(case: str, variant: str, ms: float, gb: float, ceiling: float, **extra: Any) -> Row:
    """Return a result row: the bandwidth of ``gb`` in ``ms``, beside the ``ceiling`` in GB/s."""
    rate = gb / ms * 1e3
    return {
        "case": case,
        "variant": variant,
        "ms": round(ms, 4),
        "gb": round(gb, 4),
        "gb_per_s": round(rate, 1),
        "of_ceiling": round(rate / ceiling, 3),
        **extra,
    }
