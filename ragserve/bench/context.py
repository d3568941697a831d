"""Time to the first token of composed contexts beside full and prefix prefill, and where it goes: by length, document size, tier, strategy.

Runs the engine in this process group, without retrieval: documents are random tokens of fixed length, so that lengths are exact. All
strategies answer in the same engine and run; quality is `ragserve eval`'s business.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ragserve.bench import in_process, report
from ragserve.config import load
from ragserve.engine.base import GenerateChunk, GenerateRequest, Sampling
from ragserve.engine.once import run_once
from ragserve.errors import EngineError, RagserveError
from sglang_ext.protocol import Span

SYSTEM_TOKENS = 32
QUESTION_TOKENS = 32
VOCABULARY = (10, 8000)
TIERS = ("device", "host", "disk")
LONG = 16_384  # tokens from which on one run of `full` is enough, after one warm-up
WARM_UPS = 2
SETTLE_S = 1.5  # of requests that are not measured: after a flush the system still writes, and a GPU that idled is slow at first
FLUSH_S = 120.0
NOTHING_WRITTEN_S = 0.1  # a flush that is done sooner had nothing to do
STAGES = ("load", "query", "select", "compose", "ask", "recompute", "extend")


@dataclass(frozen=True)
class Case:
    """A strategy with options, and the tiers that its documents are taken from; exact strategies have none.

    ``early``: measured at all lengths before the other cases. ``every_size``: from device and host with all sizes of documents, not the
    first one only.
    """

    name: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    tiers: tuple[str, ...] = ("",)
    early: bool = False
    every_size: bool = False


CASES = (
    Case("full", "full", early=True),
    Case("prefix, question new", "prefix", early=True),
    Case("concat, 15 % kept", "concat", {"keep": 0.15}, ("device", "host", "disk"), early=True, every_size=True),
    Case("concat, all kept", "concat", {}, ("device", "host")),
    Case("epic 16", "epic", {"first": 16}, ("device", "host"), every_size=True),
    Case("cacheblend 15 %", "cacheblend", {"share": 0.15}, ("device",)),
    Case("samkv, 15 % kept", "samkv", {"keep": 0.15}, ("device", "host", "disk")),
    Case("samkv, 15 % kept, 10 % of them recomputed", "samkv", {"keep": 0.15, "recompute": "sentences", "share": 0.1}, ("device", "host")),
    Case("samkv, 15 % kept, by layer", "samkv", {"keep": 0.15, "selection": "layers"}, ("host",)),
)


def run(
    out_dir: Path | None,
    *,
    quick: bool = False,
    lengths: Sequence[int] = (2048, 4096, 7680),
    document_tokens: Sequence[int] = (512,),
    shape: str = "embedded",
    cases: Sequence[Case] = CASES,
    repeats: int = 5,
    **settings: Any,
) -> dict[str, Any]:
    """A row per length, document size, case and tier, the JSON written anew after each length. A case that fails is a row with its error.

    Raises EngineError after the last case where any failed.
    ``shape``: `embedded` (the small model) or one of `in_process.SHAPES`, with random weights. ``settings`` are the server's.
    """
    lengths = lengths[:1] if quick else lengths
    with tempfile.TemporaryDirectory(prefix="ragserve-context-") as folder:
        flags: dict[str, Any] = {"data_dir": Path(folder) / "data", "port": 30999, **settings}
        if shape != "embedded":
            flags["model"] = in_process.dummy_model(shape, Path(folder))
            flags["engine_args"] = {"load_format": "dummy", **flags.get("engine_args", {})}
            flags["dtype"] = "bfloat16"
            needed = (sum(lengths) + len(lengths) * 1024 + 4096) * in_process.kv_bytes_per_token(shape)
            flags = {"kv_host_bytes": needed, "kv_disk_bytes": 2 * needed, **flags}
        measured = _Measured(out_dir / f"context-{shape}.json" if out_dir else None, shape, repeats)

        async def work(engine: Any) -> None:
            measured.describe(engine.info)
            for size in document_tokens:
                for part in _order(cases, first_size=size == document_tokens[0]):
                    for length in lengths:
                        async for row in _rows(engine, length, size, part, measured.full_ms, repeats):
                            measured.add(row)
                        measured.save()
                await engine.control("check")
                await engine.control("clear")

        run_once(load(**flags), work)
    result = measured.show()
    if measured.failed:
        raise EngineError(f"{len(measured.failed)} cases failed, the first one with: {measured.failed[0]}")
    return result


def _order(cases: Sequence[Case], *, first_size: bool) -> list[list[tuple[str, Case]]]:
    """Tiers and cases in parts: what matters most first, disk last. In each the tiers come from the top: those above have been evicted."""
    parts: list[list[tuple[str, Case]]] = [[], [], []]
    for tier in ("", *TIERS):
        for case in cases:
            if tier in case.tiers and (first_size or (case.every_size and tier != "disk")):
                parts[2 if tier == "disk" else 0 if case.early else 1].append((tier, case))
    return [part for part in parts if part]


class _Measured:
    """Rows so far."""

    def __init__(self, out: Path | None, shape: str, repeats: int) -> None:
        self._out = out
        self.workload: dict[str, Any] = {
            "model": shape,
            "system tokens": SYSTEM_TOKENS,
            "question tokens": QUESTION_TOKENS,
            f"repeats after {WARM_UPS} warm-ups": repeats,
        }
        self._rows: list[dict[str, Any]] = []
        self.full_ms: dict[int, float] = {}  # TTFT of `full` by length
        self.failed: list[str] = []

    def describe(self, info: Any) -> None:
        self.workload |= {"device": info.device, "attention": info.attention_backend}

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if "error" in row:
            self.failed.append(row["error"])
        print("  ".join(f"{name}: {value}" for name, value in row.items()), flush=True)

    def save(self) -> None:
        if self._out is not None:
            report.save(report.assemble("context", self.workload, self._rows, note=_NOTE), self._out)

    def show(self) -> dict[str, Any]:
        return report.write("context", self.workload, self._rows, out=self._out, note=_NOTE)


_NOTE = (
    "Milliseconds. queue: in SGLang's queue, without load (waiting for the disk), query (SamKV's query pass) and select; compose, ask (what"
    " the question attends to), recompute and extend: the work on the device; other: messages between processes, admission, launching, "
    "sampling and the way back. Medians."
)


async def _rows(
    engine: Any, length: int, size: int, part: Sequence[tuple[str, Case]], full_ms: dict[int, float], repeats: int
) -> AsyncIterator[dict[str, Any]]:
    draw = random.Random(length * 1000 + size)
    end = SYSTEM_TOKENS + length
    context = [draw.randrange(*VOCABULARY) for _ in range(end)]
    spans = (Span(0, SYSTEM_TOKENS), *(Span(a, min(a + size, end)) for a in range(SYSTEM_TOKENS, end, size)))
    request = GenerateRequest("bench", context, f"bench-{length}-{size}", sampling=Sampling(max_new_tokens=2), spans=spans)
    cached = False
    for tier, case in part:
        asked = replace(request, strategy=case.strategy, options=case.options)
        row: dict[str, Any] = {"context tokens": length, "document tokens": size, "strategy": case.name, "tier": tier or None}
        try:
            if tier and not cached:
                await _cache(engine, asked, draw)
                cached = True
            long = case.strategy == "full" and length > LONG
            warm_ups, count = (1, 1) if long else (WARM_UPS, repeats)
            runs = [await _first_token(engine, asked, tier, draw) for _ in range(warm_ups + count)][warm_ups:]
        except RagserveError as error:
            yield row | {"error": str(error)}
            continue
        times = [run.ttft_ms for run in runs]
        ttft = statistics.median(times)
        if case.strategy == "full":
            full_ms[length] = ttft
        row |= {"ttft ms": round(ttft, 2), "fastest ms": round(min(times), 2), "slowest ms": round(max(times), 2)}
        row["times sooner than full"] = round(full_ms[length] / ttft, 1) if length in full_ms else None
        yield row | _breakdown(runs)


async def _cache(engine: Any, request: GenerateRequest, draw: random.Random) -> None:
    """The documents in all tiers, nothing on its way any more, and the machine at its usual speed."""
    await engine.warm(request)
    started = time.monotonic()
    await engine.control("flush", timeout_s=FLUSH_S)  # writing to disk would compete with what is measured
    flushed = time.monotonic()
    settle = engine.info.device == "cuda" and flushed - started > NOTHING_WRITTEN_S
    while settle and time.monotonic() < flushed + SETTLE_S:
        await _first_token(engine, request, "", draw)


@dataclass(frozen=True)
class _Run:
    ttft_ms: float
    first: GenerateChunk


async def _first_token(engine: Any, request: GenerateRequest, tier: str, draw: random.Random) -> _Run:
    """One request with a question of its own, its documents in ``tier``; EngineError where they came from elsewhere."""
    if tier in TIERS[1:]:
        await engine.control("evict", tiers=TIERS[: TIERS.index(tier)])
    question = [draw.randrange(*VOCABULARY) for _ in range(QUESTION_TOKENS)]
    request = replace(request, input_ids=request.input_ids + question)
    started = time.perf_counter()
    ttft, first = 0.0, None
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            if first is None:
                ttft, first = (time.perf_counter() - started) * 1e3, chunk
    if first is None:
        raise EngineError("The engine answered nothing.")
    if tier and (first.context is None or set(first.context.by_tier) != {tier}):
        raise EngineError(f"The documents should have come from {tier}: {first.fallback or first.context}")
    return _Run(ttft, first)


def _breakdown(runs: Sequence[_Run]) -> dict[str, Any]:
    """Medians of the stages in milliseconds, and how many document tokens were kept and recomputed."""
    reports = [run.first.context for run in runs if run.first.context is not None]
    if not reports:
        return {}
    columns: dict[str, list[float]] = {f"{stage} ms": [getattr(each, f"{stage}_ms") for each in reports] for stage in STAGES}
    columns["recompute ms"] = [each.recompute_ms - each.ask_ms for each in reports]  # the report's holds the question's pass, too
    queued = [run.first.timings.queue_ms or 0.0 for run in runs]
    waited = [each.load_ms + each.query_ms + each.select_ms for each in reports]
    columns["queue ms"] = [max(0.0, queue - each) for queue, each in zip(queued, waited, strict=True)]
    columns["other ms"] = [run.ttft_ms - sum(times[i] for times in columns.values()) for i, run in enumerate(runs)]
    row = {name: round(statistics.median(times), 2) for name, times in columns.items()}
    return {"kept": reports[-1].kept, "recomputed": reports[-1].recomputed, **row}
