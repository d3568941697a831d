"""Time to the first token of composed contexts beside full and prefix prefill, and where it goes: by length,
document size, tier, strategy.

Runs the engine in this process group, without retrieval: documents are random tokens of fixed length, so that
lengths are exact. All strategies answer in the same engine and run, in turn and in an order that moves on by
one each round, so that none is always first. With random weights what they answer means nothing; quality is
`ragserve eval`'s business."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ragserve.bench import auto
from ragserve.bench import model_shapes as in_process
from ragserve.bench import profiler_trace as trace
from ragserve.bench.context_rows import Measured
from ragserve.config import load
from ragserve.engine.base import GenerateChunk, GenerateRequest, Sampling
from ragserve.engine.offline import run_once
from ragserve.errors import EngineError, RagserveError
from ragserve.strategy_spec import StrategySpec
from sglang_ext.protocol import EXACT_STRATEGIES, Span

SYSTEM_TOKENS = 32
QUESTION_TOKENS = 32
VOCABULARY = (10, 8000)
TIERS = ("device", "host", "disk")
SHORT = 2048  # up to here `auto` is measured
AUTO_OF = "samkv"  # what it chooses from, beside exact prefill
WARM_UPS = 2
# Milliseconds from which on a case is measured fewer times: (warm-ups, repeats)
SLOW: tuple[tuple[float, tuple[int, int]], ...] = ((3000.0, (1, 1)), (400.0, (1, 3)))
# of requests that are not measured: after a flush the system still writes, and a GPU that idled is slow at
# first
SETTLE_S = 1.5
FLUSH_S = 120.0
NOTHING_WRITTEN_S = 0.1  # a flush that is done sooner had nothing to do
STAGES = ("load", "query", "select", "compose", "ask", "recompute", "extend")
_BOTH = ("device", "host")


@dataclass(frozen=True)
class ContextCase:
    """A strategy with options, and the tiers that its documents are taken from; exact strategies have none.

    ``every_size``: with all sizes of documents, not the first one only. ``profiled``: its launches are
    counted where that is asked for."""

    name: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    tiers: tuple[str, ...] = ("",)
    every_size: bool = True
    profiled: bool = False


_SAMKV = {"keep": 0.15}
_TENTH = {"recompute": "sentences", "share": 0.66}  # of what is kept: a tenth of all
_TWENTIETH = {"recompute": "sentences", "share": 0.33}
CASES = (
    ContextCase("full", "full", every_size=False),
    ContextCase("prefix, question new", "prefix", every_size=False, profiled=True),
    ContextCase("concat, 15 % kept", "concat", {"keep": 0.15}, TIERS, profiled=True),
    ContextCase("concat, all kept", "concat", {}, _BOTH),
    ContextCase("epic 16", "epic", {"first": 16}, _BOTH, profiled=True),
    ContextCase("cacheblend 15 %", "cacheblend", {"share": 0.15}, _BOTH, every_size=False),
    ContextCase(
        "concat, sentences 5 %", "concat", {"recompute": "sentences", "share": 0.05}, _BOTH, profiled=True
    ),
    ContextCase("concat, sentences 10 %", "concat", {"recompute": "sentences", "share": 0.1}, _BOTH),
    ContextCase("samkv, 15 % kept, none recomputed", "samkv", _SAMKV | {"recompute": "none"}, TIERS),
    ContextCase("samkv, 15 % kept, sentences 10 %", "samkv", _SAMKV | _TENTH, TIERS, profiled=True),
    ContextCase("samkv, 15 % kept, sentences 5 %", "samkv", _SAMKV | _TWENTIETH, _BOTH),
)


def run(
    out_dir: Path | None,
    *,
    quick: bool = False,
    lengths: Sequence[int] = (2048, 4096, 7680),
    document_tokens: Sequence[int] = (512,),
    shape: str = "embedded",
    cases: Sequence[ContextCase] = CASES,
    repeats: int = 5,
    profile: bool = False,
    merge: Path | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A row per length, document size, case and tier, the JSON written anew after each. A case that fails is
    a row with its error.

    Raises EngineError after the last case where any failed. ``shape``: `embedded` (the small model) or one of
    `in_process.SHAPES`, with random weights. ``profile``: count launches, copies and waits of one request of
    some cases, too. ``merge``: an earlier report whose rows stay unless they are measured again. ``settings``
    are the server's."""
    lengths = lengths[:1] if quick else lengths
    with tempfile.TemporaryDirectory(prefix="ragserve-context-") as folder:
        flags: dict[str, Any] = {"data_dir": Path(folder) / "data", "port": 30999, **settings}
        if shape != "embedded":
            flags["model"] = in_process.dummy_model(shape, Path(folder))
            flags["engine_args"] = {"load_format": "dummy", **flags.get("engine_args", {})}
            flags["dtype"] = "bfloat16"
            needed = (sum(lengths) + len(lengths) * 1024 + 4096) * in_process.kv_bytes_per_token(shape)
            flags = {"kv_host_bytes": needed, "kv_disk_bytes": 2 * needed, **flags}
        workload = {
            "model": shape,
            "system tokens": SYSTEM_TOKENS,
            "question tokens": QUESTION_TOKENS,
            f"repeats after {WARM_UPS} warm-ups": repeats,
        }
        measured = Measured(out_dir / f"context-{shape}.json" if out_dir else None, workload, merge)

        async def work(engine: Any) -> None:
            measured.workload |= {"device": engine.info.device, "attention": engine.info.attention_backend}
            for size in document_tokens:
                wanted = [case for case in cases if case.every_size or size == document_tokens[0]]
                for length in lengths:
                    async for row in _rows(engine, length, size, wanted, measured.full_ms, repeats):
                        measured.add(row)
                    if profile and size == document_tokens[0]:
                        await _profiles(engine, length, size, wanted, measured)
                if size == document_tokens[0]:
                    for length in (each for each in lengths if each <= SHORT and len(lengths) > 1):
                        async for row in _auto_rows(engine, length, size, wanted, measured, repeats):
                            measured.add(row)
                await engine.control("check")
                await engine.control("clear")

        run_once(load(**flags), work)
    result = measured.show()
    if measured.failed:
        raise EngineError(f"{len(measured.failed)} cases failed, the first one with: {measured.failed[0]}")
    return result


def _request(length: int, size: int) -> tuple[GenerateRequest, random.Random]:
    """Documents of random tokens, the same at each call, and what questions are drawn from."""
    draw = random.Random(length * 1000 + size)
    end = SYSTEM_TOKENS + length
    context = [draw.randrange(*VOCABULARY) for _ in range(end)]
    spans = (Span(0, SYSTEM_TOKENS), *(Span(a, min(a + size, end)) for a in range(SYSTEM_TOKENS, end, size)))
    return GenerateRequest(
        "bench", context, f"bench-{length}-{size}", sampling=Sampling(max_new_tokens=2), spans=spans
    ), draw


async def _rows(
    engine: Any, length: int, size: int, cases: Sequence[ContextCase], full_ms: dict[int, float], repeats: int
) -> AsyncIterator[dict[str, Any]]:
    """Exact strategies and documents on the device first, those below afterwards: what is above has been
    evicted by then.
    """
    request, draw = _request(length, size)
    for tiers in (("", "device"), ("host",), ("disk",)):
        group = [(tier, case) for case in cases for tier in tiers if tier in case.tiers]
        if tiers[-1] == "device" and any(tier or case.tiers != ("",) for tier, case in group):
            await _cache(engine, request, draw)
        found = await _in_turn(engine, request, group, draw, repeats)
        for (tier, case), (runs, error) in zip(group, found, strict=True):
            row: dict[str, Any] = {
                "context tokens": length,
                "document tokens": size,
                "strategy": case.name,
                "tier": tier or None,
            }
            if error:
                yield row | {"error": error}
                continue
            times = [run.ttft_ms for run in runs]
            ttft = statistics.median(times)
            if case.strategy == "full":
                full_ms[length] = ttft
            row |= {
                "ttft ms": round(ttft, 2),
                "fastest ms": round(min(times), 2),
                "slowest ms": round(max(times), 2),
                "runs": len(runs),
            }
            row["times sooner than full"] = round(full_ms[length] / ttft, 1) if length in full_ms else None
            yield row | _breakdown(runs)


async def _in_turn(
    engine: Any,
    request: GenerateRequest,
    group: Sequence[tuple[str, ContextCase]],
    draw: random.Random,
    repeats: int,
) -> list[tuple[list[_CaseRun], str]]:
    """Runs of each case after its warm-ups, or why it failed; a round is one run of each that needs more."""
    runs: list[list[_CaseRun]] = [[] for _ in group]
    errors = [""] * len(group)

    def times(own: list[_CaseRun]) -> tuple[int, int]:
        """Warm-ups and repeats."""
        for above, (warm_ups, count) in SLOW:
            if own and own[-1].ttft_ms > above:
                return warm_ups, min(count, repeats)
        return WARM_UPS, repeats

    for round_ in range(WARM_UPS + repeats):
        for at in _rotated(len(group), round_):
            tier, case = group[at]
            if errors[at] or len(runs[at]) >= sum(times(runs[at])):
                continue
            try:
                runs[at].append(
                    await _first_token(
                        engine, replace(request, strategy=case.strategy, options=case.options), tier, draw
                    )
                )
            except RagserveError as error:
                errors[at] = str(error)
    return [(own[times(own)[0] :], error) for own, error in zip(runs, errors, strict=True)]


def _rotated(count: int, by: int) -> Iterator[int]:
    return ((at + by) % count for at in range(count))


async def _profiles(
    engine: Any, length: int, size: int, cases: Sequence[ContextCase], measured: Measured
) -> None:
    """What one request of each profiled case launches, with its documents on the device."""
    request, draw = _request(length, size)
    await _cache(engine, request, draw)
    for case in (case for case in cases if case.profiled):
        asked = replace(request, strategy=case.strategy, options=case.options)
        await _first_token(engine, asked, "", draw)

        async def once(asked: GenerateRequest = asked) -> None:
            await _first_token(engine, asked, "", draw)

        place = {"context tokens": length, "document tokens": size, "strategy": case.name}
        measured.add_profile(place | await trace.profiled(engine, once))


async def _auto_rows(
    engine: Any, length: int, size: int, cases: Sequence[ContextCase], measured: Measured, repeats: int
) -> AsyncIterator[dict[str, Any]]:
    """`auto` beside `full`, calibrated by this run's rows: at short contexts it must not lose what the choice
    costs.

    In a namespace of its own: nothing of it is in the prefix cache, so where it chooses `prefix` that does
    what `full` does."""
    request, draw = _request(length, size)
    request = replace(request, namespace=f"{request.namespace}-auto")
    question = [draw.randrange(*VOCABULARY) for _ in range(QUESTION_TOKENS)]
    specs = {case.name: StrategySpec(case.strategy, case.options) for case in cases}
    samples = measured.samples(
        {name: spec.label for name, spec in specs.items() if spec.name == AUTO_OF},
        SYSTEM_TOKENS,
        QUESTION_TOKENS,
    )
    await _cache(engine, request, draw)
    prompt = auto.prompt_of(request, question)
    for tier in _BOTH:
        if tier == "host":
            await engine.control("evict", tiers=["device"])
        with auto.chooser(engine, samples) as chooser:
            await chooser.choose(prompt, request.namespace)  # reads the profile
            started = time.perf_counter()
            chosen = await chooser.choose(prompt, request.namespace)
            choice_ms = (time.perf_counter() - started) * 1e3
        exact = chosen.spec.name in EXACT_STRATEGIES
        name, options = ("full", {}) if exact else (chosen.spec.name, dict(chosen.spec.options))
        group = [
            ("", ContextCase("full", "full")),
            ("" if exact else tier, ContextCase("auto", name, options)),
        ]
        (full, lost), (own, failed) = await _in_turn(engine, request, group, draw, repeats)
        row: dict[str, Any] = {
            "context tokens": length,
            "document tokens": size,
            "strategy": "auto",
            "tier": tier,
            "chosen": chosen.reason,
        }
        if lost or failed:
            yield row | {"error": lost or failed}
            continue
        exact_ms, ttft = (statistics.median(run.ttft_ms for run in runs) for runs in (full, own))
        row |= {"ttft ms": round(ttft, 2), "runs": len(own), "choice ms": round(choice_ms, 2)}
        yield row | {"times sooner than full": round(exact_ms / (ttft + choice_ms), 2)} | _breakdown(own)


async def _cache(engine: Any, request: GenerateRequest, draw: random.Random) -> None:
    """The documents in all tiers, nothing on its way any more, and the machine at its usual speed."""
    await engine.warm(request)
    started = time.monotonic()
    await engine.control("flush", timeout_s=FLUSH_S)  # writing to disk would compete with what is measured
    flushed = time.monotonic()
    settle = engine.info.device == "cuda" and flushed - started > NOTHING_WRITTEN_S
    exact = replace(request, strategy="full")  # caches nothing
    while settle and time.monotonic() < flushed + SETTLE_S:
        await _first_token(engine, exact, "", draw)


@dataclass(frozen=True)
class _CaseRun:
    ttft_ms: float
    first: GenerateChunk


async def _first_token(engine: Any, request: GenerateRequest, tier: str, draw: random.Random) -> _CaseRun:
    """One request with a question of its own, its documents in ``tier``; EngineError where they came from
    elsewhere.
    """
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
    if tier and (
        first.context is None or {name for name, tokens in first.context.by_tier.items() if tokens} != {tier}
    ):
        raise EngineError(f"The documents should have come from {tier}: {first.fallback or first.context}")
    return _CaseRun(ttft, first)


def _breakdown(runs: Sequence[_CaseRun]) -> dict[str, Any]:
    """Medians of the stages in milliseconds, and how many document tokens were kept and recomputed."""
    reports = [run.first.context for run in runs if run.first.context is not None]
    if not reports:
        return {}
    columns: dict[str, list[float]] = {
        f"{stage} ms": [getattr(each, f"{stage}_ms") for each in reports] for stage in STAGES
    }
    columns["recompute ms"] = [
        each.recompute_ms - each.ask_ms for each in reports
    ]  # the report's holds the question's pass, too
    queued = [run.first.timings.queue_ms or 0.0 for run in runs]
    waited = [each.load_ms + each.query_ms + each.select_ms for each in reports]
    columns["queue ms"] = [max(0.0, queue - each) for queue, each in zip(queued, waited, strict=True)]
    columns["other ms"] = [
        run.ttft_ms - sum(times[i] for times in columns.values()) for i, run in enumerate(runs)
    ]
    row = {name: round(statistics.median(times), 2) for name, times in columns.items()}
    last = reports[-1]
    by_graph = {"recompute graph": last.recompute_graph} if last.recomputed else {}
    return {"kept": last.kept, "recomputed": last.recomputed, **by_graph, "one pass": last.one_pass, **row}
