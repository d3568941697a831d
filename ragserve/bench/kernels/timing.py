"""How the kernel benchmarks measure: CUDA events around graph replays, a cold L2, medians; and the two
ceilings of this machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ragserve.errors import InvalidRequest, RagserveError

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128  # Llama-3.1-8B
L2_FLUSH_BYTES = 256 << 20  # several times the L2 of an H200 (60 MB)


def require_cuda(name: str) -> torch.device:
    """The current CUDA device.

    Raises:
        InvalidRequest: there is none; a kernel's time in the interpreter says nothing.
    """
    import torch

    if not torch.cuda.is_available():
        raise InvalidRequest(
            f"`ragserve bench {name}` measures GPU kernels and found no CUDA device.",
            hint="Run it on a machine with one.",
        )
    return torch.device("cuda", torch.cuda.current_device())


def median_ms(
    run: Callable[[], object], *, repeats: int = 15, graph: bool = True, flush: bool = True
) -> float:
    """Median milliseconds of ``run`` on the GPU.

    ``graph`` captures it in a CUDA graph, so that launches cost what they cost inside an engine's graph;
    ``flush`` empties the L2 before."""
    import torch

    run()
    run()
    torch.cuda.synchronize()
    call: Callable[[], object] = run
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        call = captured.replay
        call()
    cold = torch.empty(L2_FLUSH_BYTES if flush else 0, dtype=torch.int8, device="cuda")
    pairs = []
    for _ in range(repeats):
        cold.zero_()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        pairs.append((before, after))
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in pairs)


def copy_gb_per_s(gib: int = 4) -> float:
    """Device-to-device copy bandwidth, counting bytes read and written. Not from a graph, whose copy node is
    slower (2.8 TB/s seen).
    """
    import torch

    source = torch.empty(gib << 28, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source), graph=False, flush=False) / 1e6


def link_gb_per_s(mib: int = 512) -> tuple[float, float]:
    """Bandwidth of one large copy from pinned host memory to the device, and back."""
    import torch

    host = torch.zeros(mib << 20, dtype=torch.int8, pin_memory=True).random_()
    device = torch.empty_like(host, device="cuda")
    up = median_ms(lambda: device.copy_(host, non_blocking=True), repeats=5, graph=False, flush=False)
    down = median_ms(lambda: host.copy_(device, non_blocking=True), repeats=5, graph=False, flush=False)
    return host.nbytes / up / 1e6, host.nbytes / down / 1e6


def agree(got: Any, want: Any, what: str, limit: float = 1e-2) -> None:
    """Raises: RagserveError if the relative error is over ``limit`` (or not a number)."""
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error < limit:
        raise RagserveError(
            f"{what} disagrees with its reference: relative error {error:.3g}.",
            hint="Nothing was timed; run tests/kernels.",
        )


def bandwidth(case: str, variant: str, ms: float, gb: float, ceiling: float, **extra: Any) -> Row:
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
