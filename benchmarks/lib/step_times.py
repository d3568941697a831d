"""Timers and torch's profiler around decode steps, in an engine's process (gpu_offloaded_steps.py,
gpu_load_steps.py).

`install` belongs into the main module, where it runs in the processes that the engine spawns. A file
``measure`` in the folder that ``RAGSERVE_EXAMPLE_STEPS`` names, JSON with ``name``, ``steps`` and ``traced``,
starts a measurement: so many decode steps with timers around functions of the scheduler's thread, then
``traced`` with the profiler. ``NAME.json`` and ``NAME.trace.json`` there are what came of it."""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = "RAGSERVE_EXAMPLE_STEPS"
WAITS = "waits for the device"
_TIMED = {  # functions of the scheduler's thread, by module and class, "": none; each holds those it calls
    "sglang.srt.managers.scheduler": {
        "Scheduler": (
            "get_next_batch_to_run",
            "run_batch",
            "process_batch_result",
            "process_input_requests",
        )
    },
    "sglang_ext.attention.decode_runtime": {
        "DecodeRuntime": ("before_schedule", "before_forward", "after_forward", "_account", "_count_requests")
    },
    "sglang_ext.attention.decode.step_planner": {"StepPlanner": ("step",)},
    "sglang_ext.attention.decode.backend": {"SparseDecodeBackend": ("begin", "_before_forward", "taken")},
    "sglang_ext.attention.offload.lagged_selection": {"LaggedSelection": ("before", "after")},
    "sglang_ext.kv_offload.offloaded_rows": {"OffloadedRows": ("load", "copy", "arrive", "join", "resize")},
    "sglang_ext.context.scheduler.composition": {
        "Composition": ("attach", "before_forward", "_unlock", "after_forward", "before_result")
    },
    "sglang_ext.context.scheduler.selection_stage": {
        "SelectionStage": (
            "advance",
            "_located",
            "_analyse",
            "_query",
            "_read",
            "_attention",
            "_begin",
            "_end",
        )
    },
    "sglang_ext.context.scheduler.query_pass": {"QueryPass": ("__call__",)},
    "sglang_ext.context.scheduler.admission": {"Admission": ("admit",)},
    "sglang_ext.context.compose.composer": {
        "Composer": ("fill", "_gather_everywhere", "_choose_by_attention", "_attention", "_job")
    },
    "sglang_ext.context.compose.fused_question": {"FusedQuestion": ("run",)},
    "sglang_ext.context.selection.signals.attention": {"": ("_by_key", "head_attention")},
    "sglang_ext.context.recompute.question_attention": {"": ("_largest", "by_token")},
    "sglang_ext.context.recompute.graphs": {"RecomputeGraphs": ("replay",), "StaticRows": ("load",)},
}
_TEMPLATE = re.compile(r"<.*|\(.*")


def install() -> None:
    """Let the plugin of this process's SGLang, which is loaded later, watch steps if the variable is set."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    from sglang_ext import plugin

    original = plugin._wrap_attention

    def wrap_attention() -> None:
        original()
        _Watch(Path(folder)).patch()

    plugin._wrap_attention = wrap_attention


class _Watch:
    """The measurements of one engine process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seconds: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._left = 0  # steps of the part at hand
        self._asked: dict[str, Any] = {}
        self._began = 0.0
        self._profile: Any = None

    def patch(self) -> None:
        import importlib

        import torch

        for module, classes in _TIMED.items():
            for owner, names in classes.items():
                there = importlib.import_module(module)
                for name in names:
                    self._time(getattr(there, owner) if owner else there, name, f"{owner}.{name}".lstrip("."))
        self._time(torch.cuda.Event, "synchronize", WAITS)
        from sglang.srt.managers.scheduler import Scheduler

        run_batch = Scheduler.run_batch

        @functools.wraps(run_batch)
        def step(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if batch.forward_mode.is_decode():
                self.step(scheduler.ps.tp_rank)
            return run_batch(scheduler, batch, *args, **kwargs)

        Scheduler.run_batch = step

    def _time(self, owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._seconds[label] += time.perf_counter() - begun
                self._calls[label] += 1

        setattr(owner, name, call)

    def step(self, rank: int) -> None:
        """Begin, go on with or end a measurement; called before each decode step."""
        if rank:
            return
        if not self._asked:
            path = self._folder / "measure"
            if not path.exists():
                return
            self._asked = json.loads(path.read_text(encoding="utf-8"))
            path.unlink()
            self._left, self._began = self._asked["steps"], time.perf_counter()
            self._seconds.clear()
            self._calls.clear()
            return
        self._left -= 1
        if self._left > 0:
            return
        if self._profile is None:
            self._note_times()
            if self._asked["traced"]:
                self._trace()
            else:
                self._asked = {}
        else:
            self._end()

    def _note_times(self) -> None:
        steps, seconds = self._asked["steps"], time.perf_counter() - self._began
        found = {
            "steps": steps,
            "ms a step": 1e3 * seconds / steps,
            "host ms a step": {name: 1e3 * each / steps for name, each in self._seconds.items()},
            "calls a step": {name: each / steps for name, each in self._calls.items()},
        }
        _write(self._folder / f"{self._asked['name']}.json", found)

    def _trace(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        self._profile = profile(activities=[kind], acc_events=True)
        self._profile.start()
        self._left = self._asked["traced"]

    def _end(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        part = self._folder / f"{self._asked['name']}.part"
        self._profile.export_chrome_trace(str(part))
        part.rename(self._folder / f"{self._asked['name']}.trace.json")
        self._profile, self._asked = None, {}


def _write(path: Path, found: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found), encoding="utf-8")
    part.rename(path)


def read_trace(path: Path, steps: int) -> dict[str, Any]:
    """Sum up a trace of ``steps`` steps: what the device did in a step, by kernel, and how long nothing.

    ``ms``: of a step; ``busy``: in which a kernel or a copy ran, on any stream, and on the forward passes'
    own, that which is busiest; ``kernels``: milliseconds and calls a step, by name, ``beside`` those of other
    streams; ``launches``: calls of the CUDA runtime a step."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    device = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    runtime = [each for each in events if each.get("cat") in ("cuda_runtime", "cuda_driver")]
    if not device:  # a CPU
        device = [each for each in events if each.get("cat") == "cpu_op"]
    by_stream: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for each in device:
        by_stream[_stream(each)].append((each["ts"], each["ts"] + each["dur"]))
    if not device:
        return {}
    union = {stream: _union(spans) for stream, spans in by_stream.items()}
    main = max(union, key=lambda stream: union[stream])
    spans = [span for each in by_stream.values() for span in each]
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    ms = 1e-3 / steps
    return {
        "ms": (last - first) * ms,
        "busy": _union(spans) * ms,
        "busy on its own stream": union[main] * ms,
        "kernels": _sums((each for each in device if _stream(each) == main), ms),
        "beside": _sums((each for each in device if _stream(each) != main), ms),
        "launches": _sums(runtime, ms),
    }


def _stream(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("stream", event.get("tid"))


def _sums(events: Iterable[dict[str, Any]], ms: float) -> dict[str, list[float]]:
    """Milliseconds and calls a step by name, the longest first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in events:
        name = _TEMPLATE.sub("", each["name"].removeprefix("void ")).strip() or each["name"][:60]
        sums[name][0] += each["dur"] * ms
        sums[name][1] += ms * 1e3
    ordered = sorted(sums.items(), key=lambda pair: -pair[1][0])
    return {name: [round(value, 4) for value in pair] for name, pair in ordered[:60]}


def _union(spans: list[tuple[float, float]]) -> float:
    """Return how long at least one of the spans lasts."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total
