"""Requests a second that an engine serves: Poisson arrivals over a retrieval trace, at the highest rate with
p99 TTFT within a limit.

Documents are computed and analysed beforehand and then held in host memory only, so composed contexts are
filled from there. For each strategy a short closed loop estimates what the engine can do; then rates are
tried, each with the same arrivals (only faster or slower) and the same queries in the same order. Strategies
other than ``full`` are tried at ``full``'s highest rate first: the KV slots of all strategies are compared
there."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ragserve.bench import model_shapes
from ragserve.bench.open_loop import SEED, LoadOutcome, capacity, offer
from ragserve.bench.retrieval_trace import Trace, cache_in, read_trace, require
from ragserve.config import DEFAULT_MODEL
from ragserve.engine.base import GenerateChunk, GenerateRequest, Sampling
from ragserve.errors import RagserveError
from ragserve.strategy_spec import StrategySpec, parse
from ragserve.verification.engine_run import first_token
from ragserve.verification.report import GrowingReport, percentile
from sglang_ext.wire.protocol import EXACT_STRATEGIES

STRATEGIES = "full,prefix,samkv:keep=0.15,concat:keep=0.15,concat:recompute=sentences"
NEW_TOKENS = 32
AT_ONCE = 32  # requests in flight in the closed loop
IDLE_S = 20.0
Compiled = list[dict[str, Any]]  # kernels: `what` and `seconds`
_CACHED = "load"  # the namespace whose documents are cached


@dataclass(frozen=True)
class Effort:
    """The length of a measurement. ``arrivals_s``: seconds of arrivals at one rate; ``rates``: tried for each
    strategy; ``probe_s``: seconds of the closed loop, after half as long of warm-up; ``limit_s``: for p99 of
    TTFT. The first rate is ``first`` times what the closed loop estimates, the next one ``step`` times the
    highest served. ``at_full``: try ``full``'s highest rate first, to compare KV slots.

    ``seconds`` bounds the whole measurement: a rate that would not end in time is not started."""

    arrivals_s: float = 15.0
    rates: int = 4
    probe_s: float = 4.0
    limit_s: float = 2.0
    first: float = 0.8
    step: float = 1.35
    at_full: bool = True
    seconds: float = math.inf


def run(
    out_dir: Path | None,
    *,
    quick: bool = False,
    traces: Sequence[Path] = (),
    n_queries: int = 120,
    passages: Sequence[int] = (0,),
    strategies: str = STRATEGIES,
    shape: str = "embedded",
    effort: Effort | None = None,
    over_http: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Measure a row per trace, number of passages and strategy; the JSON is rewritten after each.

    Args:
        passages: Passages of a query, see `retrieval_trace.read_trace`; 0: as many as the trace has.
        shape: `embedded` (the small model) or one of `model_shapes.SHAPES`, with random weights.
        over_http: Ask a worker over HTTP in place of an engine in this process.
        settings: Settings of the engine.

    Raises:
        InvalidRequest: No trace is given.
    """
    require(traces, "load")
    effort = effort or (Effort(3.0, 2, 1.0) if quick else Effort())
    specs = parse(strategies)
    parts = [
        read_trace(path, min(n_queries, 8) if quick else n_queries, DEFAULT_MODEL, passages=n)
        for path in traces
        for n in passages
    ]
    tiers = {
        "kv_disk_bytes": 0,
        "kv_analysis_bytes": 4 * 2**30,
        "kv_host_bytes": _host_bytes(parts, shape),
    }
    report = _report(out_dir / f"load-{shape}.json" if out_dir else None, shape, effort)

    async def work(engine: Any) -> None:
        info = engine.info
        report.workload |= {
            "asked": "over HTTP" if over_http else "in the process",
            "device": info.device,
            "attention": info.attention_backend,
            "KV slots": info.max_total_tokens,
        }
        deadline = asyncio.get_running_loop().time() + effort.seconds
        for trace in parts:
            await _Load(engine, trace, effort, deadline, report).run(specs)
        await engine.control("check")

    run_with = model_shapes.run_worker if over_http else model_shapes.run_engine
    run_with(shape, work, **tiers | settings)
    return report.show(_SHOWN)


def _host_bytes(parts: Sequence[Trace], shape: str) -> int:
    """Bytes that hold all documents of all traces, each with one partly filled page."""
    tokens = sum(trace.tokens + 32 * (len(trace.unique) + 1) for trace in parts)
    return tokens * model_shapes.kv_bytes_per_token(shape) + 2**28


_NOTE = (
    "The highest rate whose p99 of TTFT, from the arrival on, was within the limit; the lowest rate that "
    "was not; and figures at the former. Arrivals are drawn once and sped up; requests are sent whether or "
    "not the engine keeps up. Documents are in host memory only at the beginning; for prefix the prefix "
    "cache is empty at the beginning of each rate. KV slots a request: of its context and its answer, mean. "
    "most KV slots: held at once by all running requests, at full's highest rate, where strategies compare, "
    "and at the strategy's own. A query has as many passages as stated: those of its own line of the trace, "
    "then those of the lines drawn after it; a question is made up if the trace has none. If there are more "
    "requests than queries, queries repeat: prefix % shows the effect."
)
_SHOWN = (
    "passages",
    "strategy",
    "requests/s",
    "too many/s",
    "ttft ms p50",
    "ttft ms p99",
    "of full's %",
    "most KV slots at full's rate",
)


def _report(out: Path | None, shape: str, effort: Effort) -> GrowingReport:
    report = GrowingReport("load", out, note=_NOTE)
    report.workload = {
        "model": shape,
        "answer tokens": NEW_TOKENS,
        "p99 TTFT limit s": effort.limit_s,
        "seconds of arrivals": effort.arrivals_s,
        "drawn with seed": SEED,
    }
    return report


class _Load:
    """Measures all strategies over one trace."""

    def __init__(
        self, engine: Any, trace: Trace, effort: Effort, deadline: float, report: GrowingReport
    ) -> None:
        """``deadline``: on the event loop's clock."""
        self._engine = engine
        self._trace = trace
        self._effort = effort
        self._report = report
        self._clock = asyncio.get_running_loop().time
        self._deadline = deadline
        self._order = random.Random(SEED).sample(range(len(trace.queries)), len(trace.queries))
        self._runs = 0
        self._full_rate: float | None = None
        self._full_slots = 0.0

    async def run(self, specs: Sequence[StrategySpec]) -> None:
        """Cache the trace's documents and add a row for each strategy."""
        trace = self._trace
        tokens = [query.spans[-1].end - query.spans[0].end for query in trace.queries]
        self._report.workload[f"{trace.name}, {len(trace.queries[0].documents)} passages"] = (
            f"{len(trace.queries)} queries, {len(trace.unique)} documents, "
            f"{min(tokens):,} to {max(tokens):,} tokens of context"
        )
        started = self._clock()
        print(f"{trace.name}: {len(trace.unique)} documents, {trace.tokens:,} tokens to cache", flush=True)
        await cache_in(self._engine, _CACHED, trace, "host")
        print(f"cached in {self._clock() - started:.0f} s", flush=True)
        for spec in specs:
            self._report.add(await self._row(spec))

    async def _row(self, spec: StrategySpec) -> dict[str, Any]:
        row: dict[str, Any] = {
            "trace": self._trace.name,
            "passages": len(self._trace.queries[0].documents),
            "strategy": spec.label,
        }
        limit = self._effort.limit_s
        try:
            await self._check(spec)
            tried, most, compiled = await self._rates(spec)
        except RagserveError as error:  # the other strategies go on
            return row | {"error": str(error)}
        served = [each for each in tried if each.within(limit)]
        best = max(served, key=lambda each: each.rate, default=None)
        too_many = [each.rate for each in tried if not each.within(limit)]
        row["requests/s"] = round(best.rate, 2) if best else None
        row["too many/s"] = round(min(too_many), 2) if too_many else None
        if best is None:
            return row | {"tried": _tried(tried, limit), "longest": _longest(tried, compiled)}
        slots = statistics.mean(_slots(chunk) for chunk in best.last)
        if spec.name == "full":
            self._full_rate, self._full_slots = best.rate, slots
        reports = [chunk.context for chunk in best.last if chunk.context is not None]
        kept = [each.kept / each.document_tokens for each in reports]
        recomputed = [each.recomputed / each.document_tokens for each in reports]
        cached = [chunk.usage.cached / chunk.usage.prompt for chunk in best.last]
        common = [most[i] for i, each in enumerate(tried) if each.rate == self._full_rate]
        return row | {
            "requests": best.arrivals,
            "ttft ms p50": round(1e3 * percentile(best.ttft_s, 50), 1),
            "ttft ms p99": round(1e3 * best.p99_s, 1),
            "answer tokens/s": round(sum(chunk.usage.completion for chunk in best.last) / best.seconds, 1),
            "kept %": _percent(kept),
            "recomputed %": _percent(recomputed),
            "prefix %": _percent(cached),
            "KV slots a request": round(slots),
            "of full's %": round(100 * slots / self._full_slots, 1) if self._full_slots else None,
            "most KV slots at full's rate": common[0] if common else None,
            "most KV slots": most[tried.index(best)],
            "answered otherwise": sum(chunk.fallback is not None for chunk in best.last),
            "tried": _tried(tried, limit),
            "longest": _longest(tried, compiled),
        }

    async def _rates(self, spec: StrategySpec) -> tuple[list[LoadOutcome], list[int], list[Compiled]]:
        """Try rates. Returns the outcomes, the most KV slots held at once in each, and the kernels that the
        engine compiled or loaded in each."""
        tried: list[LoadOutcome] = []
        most: list[int] = []
        compiled: list[Compiled] = []
        limit = self._effort.limit_s
        if self._clock() + 1.5 * self._effort.probe_s + self._effort.arrivals_s + 2 * limit > self._deadline:
            raise RagserveError("there was no time left to try a rate")
        # kernels are compiled on first use
        await capacity(self._engine, self._maker(spec), AT_ONCE, self._effort.probe_s / 2)
        guess = await capacity(self._engine, self._maker(spec), AT_ONCE, self._effort.probe_s)
        await self._idle()
        print(f"{spec.label}: {guess:.2f} first tokens a second, {AT_ONCE} requests in flight", flush=True)
        low, high = 0.0, math.inf
        at_full = self._effort.at_full and spec.name != "full"
        first = self._full_rate if at_full else None
        while len(tried) < self._effort.rates:
            if self._clock() + self._effort.arrivals_s + 2 * limit > self._deadline:
                print(f"{spec.label}: no time for another rate", flush=True)
                break
            rate = first if first is not None and not tried else _next_rate(low, high, guess, self._effort)
            await self._engine.control("slots")
            before = (await self._engine.control("compiled"))["count"]
            outcome = await offer(self._engine, self._maker(spec), rate, self._effort.arrivals_s, limit)
            most.append((await self._engine.control("slots"))["most"])
            compiled.append((await self._engine.control("compiled", since=before))["latest"])
            await self._idle()
            tried.append(outcome)
            figures = f"{_tried([outcome], limit)}, {outcome.arrivals} requests"
            print(f"  {figures}, {outcome.errors[:1] or ''}", flush=True)
            if outcome.within(limit):
                low = max(low, rate)
            else:
                high = min(high, rate)
        if not tried:
            raise RagserveError("there was no time left to try a rate")
        return tried, most, compiled

    def _maker(self, spec: StrategySpec) -> Callable[[int], GenerateRequest]:
        """Make the requests of one run, by number: the same queries in the same order in every run."""
        self._runs += 1
        run = self._runs
        # Composed contexts read the cached documents. The prefix cache, keyed by namespace, must begin empty.
        namespace = f"run-{run}" if spec.name in EXACT_STRATEGIES else _CACHED
        sampling = Sampling(NEW_TOKENS, ignore_eos=True)
        requests = [
            self._trace.queries[i].request("load", namespace, spec.name, spec.options, sampling)
            for i in self._order
        ]
        return lambda number: replace(requests[number % len(requests)], rid=f"load-{run}-{number}")

    async def _check(self, spec: StrategySpec) -> None:
        """Send one request alone. Raises RagserveError if another strategy answers it, or another tier than
        host."""
        last = (await first_token(self._engine, self._maker(spec)(0))).last
        await self._idle()
        if last.finish_reason != "length" or last.usage.completion != NEW_TOKENS:
            raise RagserveError(f"a single request is not answered as expected: {last}")
        if spec.name in EXACT_STRATEGIES:
            return
        if last.fallback or last.context is None or set(last.context.by_tier) != {"host"}:
            raise RagserveError(
                f"a single request is not composed from host: {last.fallback or last.context}"
            )

    async def _idle(self) -> None:
        """Wait until no request holds KV slots. Raises RagserveError after IDLE_S seconds."""
        until = self._clock() + IDLE_S
        while (held := (await self._engine.control("slots"))["now"]) > 0:
            if self._clock() > until:
                raise RagserveError(f"{held} KV slots are held {IDLE_S:g} s after the last request ended")
            await asyncio.sleep(0.05)


def _next_rate(low: float, high: float, guess: float, effort: Effort) -> float:
    """Choose a rate halfway between the highest served and the lowest not served, or a step beyond the one
    known."""
    if low and math.isfinite(high):
        return (low + high) / 2
    if low:
        return max(effort.step * low, effort.first * guess)
    below = max(2 - effort.step, 0.5)
    return below * high if math.isfinite(high) else max(effort.first * guess, 0.05)


def _percent(shares: Sequence[float]) -> float | None:
    return round(100 * statistics.mean(shares), 1) if shares else None


def _slots(chunk: GenerateChunk) -> int:
    """KV slots of a finished request: its context, question and answer."""
    left_out = 0 if chunk.context is None else chunk.context.document_tokens - chunk.context.kept
    return chunk.usage.prompt - left_out + chunk.usage.completion


def _longest(outcomes: Sequence[LoadOutcome], compiled: Sequence[Compiled]) -> list[dict[str, Any]]:
    """What each rate's longest first token was made of, in milliseconds: where a stall comes from.

    ``others``: requests without a first token when it had its own; ``kernels``: what was compiled or loaded
    at any time of the rate, and in how many seconds."""
    found = []
    for each, kernels in zip(outcomes, compiled, strict=True):
        if each.longest is None:
            continue
        took, arrived, others, last = each.longest
        context = last.context
        stages = (
            {}
            if context is None
            else {
                name: round(value, 1)
                for name, value in asdict(context).items()
                if name.endswith("_ms") and value
            }
        )
        found.append(
            {
                "requests/s": round(each.rate, 2),
                "ttft ms": round(1e3 * took, 1),
                "p50 ms": round(1e3 * percentile(each.ttft_s, 50), 1),
                "arrived s": round(arrived, 2),
                "others": others,
                "queue_ms": last.timings.queue_ms,
                "prefill_ms": last.timings.prefill_ms,
                "kernels": kernels,
                **stages,
            }
        )
    return found


def _tried(outcomes: Sequence[LoadOutcome], limit_s: float) -> str:
    return ", ".join(
        f"{round(each.rate, 2)}/s {'within' if each.within(limit_s) else 'not within'} "
        f"(p99 {'given up' if each.broken else f'{1e3 * each.p99_s:.0f} ms'})"
        for each in outcomes
    )
