"""Time to the first token of composed contexts beside full and prefix prefill, and its stages: by length,
document size, tier and strategy.

Runs the engine in this process group, without retrieval. Documents are random tokens, so that lengths are
exact. All strategies run in the same engine, in turns; the order moves on by one each round, so that none is
always first. With random weights the answers mean nothing: `ragserve eval` measures quality."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ragserve.bench import auto, model_shapes
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.errors import EngineError, RagserveError
from ragserve.profiles.costs import CostSample
from ragserve.strategy_spec import StrategySpec
from ragserve.verification.engine_run import TIERS, TimedAnswer, first_token, in_tier, random_tokens
from ragserve.verification.report import GrowingReport, read_report
from sglang_ext.wire.protocol import EXACT_STRATEGIES, Span

SYSTEM_TOKENS = 32
QUESTION_TOKENS = 32
SHORT = 2048  # context tokens up to which `auto` is measured
AUTO_STRATEGY = "samkv"  # the strategy that `auto` may choose beside exact prefill
WARM_UPS = 2
# A case slower than this many milliseconds is measured fewer times: (warm-ups, repeats)
SLOW: tuple[tuple[float, tuple[int, int]], ...] = ((3000.0, (1, 1)), (400.0, (1, 3)))
# Unmeasured requests after a flush: the system may still be writing, and a GPU that idled is slow at first.
SETTLE_S = 1.5
FLUSH_S = 120.0
NOTHING_WRITTEN_S = 0.1  # a flush that takes less had nothing to write
STAGES = ("load", "query", "select", "compose", "ask", "recompute", "extend")
NOTE = (
    "Milliseconds, medians. queue: in SGLang's queue, without load (waiting for the disk), query (SamKV's "
    "query pass) and select; compose, ask (finding what the question attends to), recompute and extend: "
    "work on the device (in one pass, recompute includes the question and extend is its logits only); "
    "other: messages between processes, admission, launching, sampling and the way back. Rows of one run "
    "were measured together, in turns. Random weights if the model is only a shape: the answers mean "
    "nothing."
)
_BOTH = ("device", "host")
_KEY = ("context tokens", "document tokens", "strategy", "tier")

_MATTER = (*_KEY, "ttft ms", "times sooner than full", "error")  # of the columns, on a narrow terminal


@dataclass(frozen=True)
class ContextCase:
    """A strategy with options, and the tiers that its documents are read from ("": an exact strategy, none).

    ``every_size``: measure it with every document size, not the first one only; ``lengths``: at these context
    lengths only, all if empty."""

    name: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    tiers: tuple[str, ...] = ("",)
    every_size: bool = True
    lengths: tuple[int, ...] = ()


_SAMKV = {"keep": 0.15}
_TENTH = {"recompute": "sentences", "share": 0.66}  # of the kept tokens: a tenth of all document tokens
_TWENTIETH = {"recompute": "sentences", "share": 0.33}
CASES = (
    ContextCase("full", "full", every_size=False),
    ContextCase("prefix, question new", "prefix", every_size=False),
    ContextCase("concat, 15 % kept", "concat", {"keep": 0.15}, TIERS),
    ContextCase("concat, all kept", "concat", {}, _BOTH),
    ContextCase("epic 16", "epic", {"first": 16}, _BOTH),
    ContextCase("cacheblend 15 %", "cacheblend", {"share": 0.15}, _BOTH, every_size=False),
    ContextCase("concat, sentences 5 %", "concat", {"recompute": "sentences", "share": 0.05}, _BOTH),
    ContextCase("concat, sentences 10 %", "concat", {"recompute": "sentences", "share": 0.1}, _BOTH),
    # what is verified for the embedded model
    ContextCase("concat, sentences 15 %", "concat", {"recompute": "sentences", "share": 0.15}, _BOTH, False),
    ContextCase("concat, sentences 30 %", "concat", {"recompute": "sentences", "share": 0.3}, _BOTH, False),
    ContextCase("samkv, 15 % kept, none recomputed", "samkv", _SAMKV | {"recompute": "none"}, TIERS),
    ContextCase("samkv, 15 % kept, sentences 10 %", "samkv", _SAMKV | _TENTH, TIERS),
    ContextCase("samkv, 15 % kept, sentences 5 %", "samkv", _SAMKV | _TWENTIETH, _BOTH),
    ContextCase("samkv, 15 % kept", "samkv", _SAMKV, _BOTH),
    ContextCase("samkv", "samkv", {}, _BOTH),
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
    merge: Path | None = None,
    with_auto: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Measure a row per length, document size, case and tier; the JSON is rewritten after each.

    Args:
        lengths: Document tokens of a context.
        document_tokens: Sizes of one document.
        shape: `embedded` (the small model) or one of `model_shapes.SHAPES`, with random weights.
        merge: An earlier report, whose rows stay unless they are measured again.
        with_auto: Measure `auto` at short contexts, too.
        settings: Settings of the engine.

    Raises:
        EngineError: A case failed; raised after the last case. A failed case is a row with its error.
    """
    lengths = lengths[:1] if quick else lengths
    if shape != "embedded":
        needed = (sum(lengths) + len(lengths) * 1024 + 4096) * model_shapes.kv_bytes_per_token(shape)
        settings = {"kv_host_bytes": needed, "kv_disk_bytes": 2 * needed, **settings}
    report = GrowingReport(
        "context",
        out_dir / f"context-{shape}.json" if out_dir else None,
        note=NOTE,
        key=_KEY,
        earlier=read_report(merge)[1],
        order=lambda row: (row["document tokens"], row["context tokens"]),
    )
    report.workload = {
        "model": shape,
        "system tokens": SYSTEM_TOKENS,
        "question tokens": QUESTION_TOKENS,
        f"repeats after {WARM_UPS} warm-ups": repeats,
    }
    full_ms: dict[int, float] = {}  # TTFT of strategy `full` by context length
    run_at = time.strftime("%Y-%m-%d %H:%M")

    async def work(engine: Any) -> None:
        report.workload |= {"device": engine.info.device, "attention": engine.info.attention_backend}
        for size in document_tokens:
            wanted = [case for case in cases if case.every_size or size == document_tokens[0]]
            for length in lengths:
                here = [case for case in wanted if not case.lengths or length in case.lengths]
                async for row in _rows(engine, length, size, here, full_ms, repeats):
                    report.add(row, run=run_at)
            if with_auto and size == document_tokens[0] and len(lengths) > 1:
                samples = cost_samples(report.rows, wanted)
                for length in (each for each in lengths if each <= SHORT):
                    async for row in _auto_rows(engine, length, size, samples, repeats):
                        report.add(row, run=run_at)
            await engine.control("check")
            await engine.control("clear")

    model_shapes.run_engine(shape, work, **settings)
    result = report.show(narrow=_MATTER)
    if failed := [row["error"] for row in report.rows if "error" in row]:
        raise EngineError(f"{len(failed)} cases failed, the first one with: {failed[0]}")
    return result


def cost_samples(rows: Sequence[Mapping[str, Any]], cases: Sequence[ContextCase]) -> list[CostSample]:
    """The samples that `ragserve calibrate` would have measured: those of `full`, `prefix` and
    AUTO_STRATEGY."""
    by_name = {case.name: case for case in cases}
    found = []
    for row in rows:
        case = by_name.get(row["strategy"])
        if case is None or "error" in row:
            continue
        context, ms = SYSTEM_TOKENS + row["context tokens"], row["ttft ms"]
        if case.strategy in EXACT_STRATEGIES:
            cached = 0 if case.strategy == "full" else context
            found.append(CostSample(context + QUESTION_TOKENS, ms, cached=cached))
        elif case.strategy == AUTO_STRATEGY:
            label = StrategySpec(case.strategy, case.options).label
            found.append(CostSample(context, ms, strategy=label, tier=row["tier"]))
    return found


def _request(length: int, size: int) -> tuple[GenerateRequest, random.Random]:
    """A request over random documents, the same at each call, and the generator that questions are drawn
    from."""
    draw = random.Random(length * 1000 + size)
    end = SYSTEM_TOKENS + length
    spans = (Span(0, SYSTEM_TOKENS), *(Span(a, min(a + size, end)) for a in range(SYSTEM_TOKENS, end, size)))
    ids, sampling = random_tokens(draw, end), Sampling(max_new_tokens=2)
    return GenerateRequest("bench", ids, f"bench-{length}-{size}", sampling=sampling, spans=spans), draw


async def _rows(
    engine: Any, length: int, size: int, cases: Sequence[ContextCase], full_ms: dict[int, float], repeats: int
) -> AsyncIterator[dict[str, Any]]:
    """Measure exact strategies and documents on the device first, then tier by tier downwards, because
    measuring a tier evicts those above it."""
    request, draw = _request(length, size)
    cached = False
    for tiers in (("", "device"), ("host",), ("disk",)):
        group = [(tier, case) for case in cases for tier in tiers if tier in case.tiers]
        if not cached and any(case.tiers != ("",) for _, case in group):
            await _cache(engine, request, draw)
            cached = True
        found = await _in_turn(engine, request, group, draw, repeats)
        for (tier, case), (runs, error) in zip(group, found, strict=True):
            row: dict[str, Any] = dict(zip(_KEY, (length, size, case.name, tier or None), strict=True))
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
                "times sooner than full": round(full_ms[length] / ttft, 1) if length in full_ms else None,
            }
            yield row | breakdown(runs)


async def _in_turn(
    engine: Any,
    request: GenerateRequest,
    group: Sequence[tuple[str, ContextCase]],
    draw: random.Random,
    repeats: int,
) -> list[tuple[list[TimedAnswer], str]]:
    """Run the cases in turns until each has its repeats: the runs of each after its warm-ups, or its
    error."""
    runs: list[list[TimedAnswer]] = [[] for _ in group]
    errors = [""] * len(group)

    def times(own: list[TimedAnswer]) -> tuple[int, int]:
        """Warm-ups and repeats."""
        for above, (warm_ups, count) in SLOW:
            if own and own[-1].ttft_ms > above:
                return warm_ups, min(count, repeats)
        return WARM_UPS, repeats

    for round_ in range(WARM_UPS + repeats):
        for number in range(len(group)):
            at = (number + round_) % len(group)
            tier, case = group[at]
            if errors[at] or len(runs[at]) >= sum(times(runs[at])):
                continue
            try:
                own = replace(request, strategy=case.strategy, options=case.options)
                runs[at].append(await _ask(engine, own, tier, draw))
            except RagserveError as error:
                errors[at] = str(error)
    return [(own[times(own)[0] :], error) for own, error in zip(runs, errors, strict=True)]


async def _auto_rows(
    engine: Any, length: int, size: int, samples: Sequence[CostSample], repeats: int
) -> AsyncIterator[dict[str, Any]]:
    """Measure `auto`, calibrated by ``samples``, beside `full`: at short contexts it must lose no more than
    the choice costs.

    In a namespace of its own with an empty prefix cache, where `prefix` costs what `full` does."""
    request, draw = _request(length, size)
    request = replace(request, namespace=f"{request.namespace}-auto")
    question = random_tokens(draw, QUESTION_TOKENS)
    await _cache(engine, request, draw)
    prompt = auto.prompt_of(request, question)
    for tier in _BOTH:
        await in_tier(engine, tier)
        with auto.chooser(engine, samples) as chooser:
            await chooser.choose(prompt, request.namespace)  # reads the profile
            started = time.perf_counter()
            chosen = await chooser.choose(prompt, request.namespace)
            choice_ms = (time.perf_counter() - started) * 1e3
        exact = chosen.spec.name in EXACT_STRATEGIES
        name, options = ("full", {}) if exact else (chosen.spec.name, dict(chosen.spec.options))
        own_case = ("" if exact else tier, ContextCase("auto", name, options))
        group = [("", ContextCase("full", "full")), own_case]
        (full, lost), (own, failed) = await _in_turn(engine, request, group, draw, repeats)
        row: dict[str, Any] = dict(zip(_KEY, (length, size, "auto", tier), strict=True))
        row["chosen"] = chosen.reason
        if lost or failed:
            yield row | {"error": lost or failed}
            continue
        exact_ms, ttft = (statistics.median(run.ttft_ms for run in runs) for runs in (full, own))
        row |= {"ttft ms": round(ttft, 2), "runs": len(own), "choice ms": round(choice_ms, 2)}
        yield row | {"times sooner than full": round(exact_ms / (ttft + choice_ms), 2)} | breakdown(own)


async def _cache(engine: Any, request: GenerateRequest, draw: random.Random) -> None:
    """Bring the documents into all tiers, wait until they are written, and bring the machine to its usual
    speed."""
    await engine.warm(request)
    started = time.monotonic()
    await engine.control("flush", timeout_s=FLUSH_S)  # writing to disk would disturb the measurement
    flushed = time.monotonic()
    settle = engine.info.device == "cuda" and flushed - started > NOTHING_WRITTEN_S
    exact = replace(request, strategy="full")  # caches nothing
    while settle and time.monotonic() < flushed + SETTLE_S:
        await _ask(engine, exact, "", draw)


async def _ask(engine: Any, request: GenerateRequest, tier: str, draw: random.Random) -> TimedAnswer:
    """Ask one new question with the documents in ``tier``. Raises EngineError if they came from elsewhere."""
    if tier:
        await in_tier(engine, tier)
    question = random_tokens(draw, QUESTION_TOKENS)
    answer = await first_token(engine, replace(request, input_ids=request.input_ids + question))
    if tier and answer.tiers != {tier}:
        raise EngineError(
            f"The documents should have come from {tier}: {answer.first.fallback or answer.context}"
        )
    return answer


def breakdown(runs: Sequence[TimedAnswer]) -> dict[str, Any]:
    """Medians of the stages in milliseconds, and how many document tokens were kept and recomputed."""
    reports = [run.context for run in runs if run.context is not None]
    if not reports:
        return {}
    columns: dict[str, list[float]] = {
        f"{stage} ms": [getattr(each, f"{stage}_ms") for each in reports] for stage in STAGES
    }
    # the report's figure includes the pass that asks
    columns["recompute ms"] = [each.recompute_ms - each.ask_ms for each in reports]
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
