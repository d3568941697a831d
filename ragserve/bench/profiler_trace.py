"""What the scheduler launches for one request: torch's profiler through SGLang, and its trace in figures."""

from __future__ import annotations

import asyncio
import gzip
import json
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragserve.engine.local import LocalEngine
from ragserve.errors import EngineError

_WRITTEN_S = 30.0  # the scheduler writes the trace after it has answered
_TOP = 14
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize")
_ALLOCATES = ("cudaMalloc", "cudaHostAlloc", "cudaFree", "cudaFreeHost", "cudaMallocHost")


async def profiled(engine: LocalEngine, work: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    """Profile the scheduler while ``work`` runs; :func:`summary` of what was seen. Raises EngineError where
    no trace comes.
    """
    with tempfile.TemporaryDirectory(prefix="ragserve-trace-") as folder:
        async with engine.profiled(Path(folder)):
            await work()
        return summary(await _trace(Path(folder)))


async def _trace(folder: Path) -> list[Mapping[str, Any]]:
    until = time.monotonic() + _WRITTEN_S
    while time.monotonic() < until:
        events = await asyncio.to_thread(_read, folder)
        if events is not None:
            return events
        await asyncio.sleep(0.1)
    raise EngineError("The scheduler left no trace of the request.", hint="See the server's log.")


def _read(folder: Path) -> list[Mapping[str, Any]] | None:
    """None while there is none, or only a part of it."""
    for path in folder.glob("*.trace.json*"):
        try:
            text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            return list(json.loads(text)["traceEvents"])
        except (EOFError, OSError, ValueError):
            return None
    return None


def summary(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts and milliseconds of a trace in Chrome's format.

    ``device span``: from the first piece of work on the device to the end of the last; ``device busy``: of
    that, when any ran. ``launches``: calls that put kernels or graphs on a stream. ``waits``: calls in which
    the host waits for the device; ``allocations``: calls that make or free device or pinned memory, which
    wait, too."""
    whole = [event for event in events if event.get("ph") == "X"]
    device = sorted((event for event in whole if event.get("cat") in _DEVICE), key=lambda event: event["ts"])
    calls = [event for event in whole if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    busy, end = 0.0, 0.0
    for event in device:
        start, stop = max(event["ts"], end), event["ts"] + event["dur"]
        busy, end = busy + max(0.0, stop - start), max(end, stop)
    copies: dict[str, list[float]] = {}
    for event in device:
        if event["cat"] == "gpu_memcpy":
            own = copies.setdefault(event["name"], [0, 0.0, 0.0])
            own[0] += 1
            own[1] += event.get("args", {}).get("bytes", 0) / 2**20
            own[2] += event["dur"] / 1e3
    kernels = [event for event in device if event["cat"] == "kernel"]
    return {
        "device span ms": round((end - device[0]["ts"]) / 1e3, 3) if device else 0.0,
        "device busy ms": round(busy / 1e3, 3),
        "kernels": len(kernels),
        "launches": sum("Launch" in event["name"] for event in calls),
        "graphs": sum("GraphLaunch" in event["name"] for event in calls),
        "waits": _by_name([event for event in calls if event["name"] in _WAITS]),
        "allocations": _by_name([event for event in calls if event["name"] in _ALLOCATES]),
        "copies, MiB, ms": {
            name: [int(n), round(size, 3), round(ms, 3)] for name, (n, size, ms) in copies.items()
        },
        "kernels by time": _by_name(kernels),
        "host by time": _by_name([event for event in whole if event.get("cat") == "cpu_op"]),
    }


def _by_name(events: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """[count, milliseconds] of the names that took longest."""
    count: Counter[str] = Counter()
    took: Counter[str] = Counter()
    for event in events:
        name = event["name"][:80]
        count[name] += 1
        took[name] += event["dur"]
    return {name: [count[name], round(spent / 1e3, 3)] for name, spent in took.most_common(_TOP)}
