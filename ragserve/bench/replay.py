"""Replay a retrieval trace: what each tier of the document cache serves, and the time to the first token,
beside the prefix cache.

Queries come one after another, as recorded, to a real engine whose KV pool holds a share of all documents'
tokens. Each share has an engine and a process of its own; all share one folder, so the documents warmed by
the first are found by the others. Strategies answer the same prompts; ``prefix`` is SGLang's exact prefix
cache. After every query each tier must be within its budget."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragserve.answering.auto import Chooser
from ragserve.bench import model_shapes
from ragserve.bench.auto import measured_chooser, prompt_of
from ragserve.bench.retrieval_trace import SEED, Trace, TraceQuery, cache_in, read_trace, require
from ragserve.children import end_with_parent
from ragserve.config import DEFAULT_MODEL, load
from ragserve.engine.base import Sampling
from ragserve.engine.local import LocalEngine
from ragserve.engine.offline import run_once
from ragserve.engine.server_args import resolve_sparse_attention
from ragserve.errors import RagserveError
from ragserve.profiles.costs import FILE_NAME as COSTS_FILE
from ragserve.strategy_spec import parse
from ragserve.verification.costs import CostSchedule
from ragserve.verification.engine_run import TIERS, TimedAnswer, first_token
from ragserve.verification.report import GrowingReport, percentile, read_report

SHARES = (0.05, 0.2, 1.0)
HOST_SHARE, DISK_SHARE = 0.3, 1.2  # budgets, as shares of the documents' KV
NEW_TOKENS = 8
AT_ONCE = 4  # requests in flight in the last case: load on every tier at the same time


@dataclass(frozen=True)
class ReplayCase:
    """A strategy to replay the trace with. ``warmed``: the documents, or a ``part`` of them, are on disk when
    the replay begins, with device and host empty; else every tier is empty. ``auto`` chooses among `AUTO` and
    `prefix` by costs that the first engine measures; its times include the choice."""

    name: str
    strategy: str
    options: Mapping[str, Any]
    warmed: bool
    at_once: int = 1
    part: float = 1.0

    @property
    def namespace(self) -> str:
        if not self.warmed:
            return f"cold-{self.strategy}"
        return "warmed" if self.part == 1 else f"warmed-{self.part:.0%}".rstrip("%")


AUTO = parse("concat:recompute=sentences,share=0.15")[0]  # verified for the embedded model
CASES = (
    ReplayCase("prefix", "prefix", {}, warmed=False),
    ReplayCase("concat", "concat", {}, warmed=False),
    ReplayCase("concat, warmed", "concat", {}, warmed=True),
    ReplayCase("epic 16, warmed", "epic", {"first": 16}, warmed=True),
    ReplayCase(f"concat, warmed, {AT_ONCE} at once", "concat", {}, warmed=True, at_once=AT_ONCE),
    ReplayCase("auto", "auto", {}, warmed=False),
    ReplayCase("auto, warmed", "auto", {}, warmed=True),
    ReplayCase("auto, half warmed", "auto", {}, warmed=True, part=0.5),
)


def run(
    out_dir: Path | None,
    *,
    quick: bool = False,
    traces: Sequence[Path] = (),
    n_queries: int = 120,
    shares: Sequence[float] = SHARES,
) -> dict[str, Any]:
    """Measure a row per trace, share and case; the file's rows of other shares of the same workload stay.

    Args:
        shares: KV slots of the engines, as shares of the documents' tokens.

    Raises:
        InvalidRequest: No trace is given, or the file is not a report of this benchmark.
    """
    require(traces, "replay")
    n_queries, shares = (min(n_queries, 24), shares[:1]) if quick else (n_queries, shares)
    traced = [read_trace(path, n_queries, DEFAULT_MODEL) for path in traces]
    workload: dict[str, Any] = {"model": "ragserve-tiny", "queries": n_queries, "drawn with seed": SEED}
    for trace in traced:
        asked = sum(len(query.documents) for query in trace.queries)
        figures = f"{asked} asked for, {len(trace.unique)} different, {trace.tokens:,} tokens"
        workload |= {
            f"documents of {trace.name}": figures,
            "host": f"{HOST_SHARE:.0%} of their KV",
            "disk": f"{DISK_SHARE:.0%}",
        }
    out = out_dir / "replay.json" if out_dir else None
    before, earlier = read_report(out)
    report = GrowingReport(
        "replay",
        out,
        note=_NOTE,
        key=("trace", "KV slots", "strategy"),
        earlier=earlier if before == workload else (),
        order=lambda row: (row["trace"], float(row["KV slots"].rstrip("%"))),
    )
    report.workload = workload
    for trace in traced:
        with tempfile.TemporaryDirectory(prefix="ragserve-replay-") as folder:
            for share in shares:
                for row in _engine(trace, share, Path(folder)):
                    report.add(row)
    return report.show()


_NOTE = (
    "Per cent of the documents asked for, by the fastest tier that had the whole document on arrival; for "
    "prefix, of the prompts' tokens. vs prefix: how much later the first token of a query came than by "
    "prefix on the same engine, the median over all queries; composed vs prefix: over those that a composed "
    "strategy answered. composed: of the queries of auto. KV slots: as a share of the documents' tokens. "
    "Every tier is empty at first; warmed: all documents are on disk, from where they come to host and stay "
    "there; on the device are those that were computed on it. metadata: as a share of the KV bytes. Every "
    "tier was within its budget after every query."
)


def _engine(trace: Trace, share: float, folder: Path) -> list[dict[str, Any]]:
    """Run all cases on one engine, in a process of its own because SGLang starts only once in a process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, end_with_parent, (os.getpid(),)) as process:
        try:
            return process.submit(_measured, trace, share, folder).result()
        except BrokenProcessPool:
            raise RagserveError(f"The engine for {share:.0%} ended early: see its output above.") from None


def _measured(trace: Trace, share: float, folder: Path) -> list[dict[str, Any]]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    kv_bytes = trace.tokens * model_shapes.kv_bytes_per_token("embedded")
    longest = max(len(query.ids) for query in trace.queries)
    given = load(
        log_level="warning",
        max_total_tokens=max(int(trace.tokens * share), 2 * longest + NEW_TOKENS),
        kv_host_bytes=int(kv_bytes * HOST_SHARE),
        kv_disk_bytes=int(kv_bytes * DISK_SHARE),
        kv_storage="file",
    )
    settings, _ = resolve_sparse_attention(given)  # its record is in the data folder
    settings = settings.model_copy(update={"data_dir": folder / "data"})

    async def work(engine: LocalEngine) -> list[dict[str, Any]]:
        longest = max(256, *(query.spans[-1].end for query in trace.queries))
        sizes = statistics.mean(map(len, trace.unique.values()))
        schedule = CostSchedule(max_tokens=longest, document_tokens=round(sizes), repeats=2)
        auto = await measured_chooser(engine, folder / COSTS_FILE, AUTO, schedule)
        return await _Replay(engine, trace, share, auto).run()

    return run_once(settings, work)


class _Replay:
    """The cases of one engine."""

    def __init__(self, engine: LocalEngine, trace: Trace, share: float, auto: Chooser | None = None) -> None:
        """Without ``auto``, cases of that strategy are left out."""
        self._engine = engine
        self._trace = trace
        self._share = share
        self._most: Counter[str] = Counter()  # highest bytes by tier
        self._chooser = auto
        self._chosen: Counter[str] = Counter()
        self._exact: dict[int, float] = {}  # milliseconds of case `prefix`, by query

    async def run(self) -> list[dict[str, Any]]:
        rows = []
        for number, case in enumerate(CASES):
            if case.strategy == "auto" and self._chooser is None:
                continue
            namespace = case.namespace
            if case.warmed:
                names = list(self._trace.unique)
                wanted = names[: max(1, round(case.part * len(names)))]
                part = replace(self._trace, unique={name: self._trace.unique[name] for name in wanted})
                await cache_in(self._engine, namespace, part, "disk")
            rows.append(await self._case(case, namespace))
            print(
                f"{self._trace.name} {self._share:.0%} {case.name}: {rows[-1]['ttft ms mean']} ms", flush=True
            )
            if namespace not in {later.namespace for later in CASES[number + 1 :]}:  # make room on the disk
                await self._engine.control("remove_namespace", namespace=namespace)
        return rows

    async def _case(self, case: ReplayCase, namespace: str) -> dict[str, Any]:
        self._most.clear()
        self._chosen.clear()
        evicted = (await self._within_budget())["evictions"]
        found: Counter[str] = Counter()
        ttft: dict[int, float] = {}  # milliseconds, by query
        composed: set[int] = set()
        cached: list[float] = []
        waiting = asyncio.Semaphore(case.at_once)

        async def one(number: int, query: TraceQuery) -> None:
            async with waiting:
                if case.strategy != "prefix":
                    documents = [self._trace.unique[name] for name in query.documents]
                    found.update((await self._engine.where(namespace, documents)).fastest())
                answer = await self._ask(case, namespace, query, number)
                ttft[number] = answer.ttft_ms
                if answer.context is not None:
                    composed.add(number)
                cached.append(answer.last.usage.cached / answer.last.usage.prompt)
                await self._within_budget()

        started = time.perf_counter()
        await asyncio.gather(*(one(number, query) for number, query in enumerate(self._trace.queries)))
        seconds = time.perf_counter() - started
        stat = await self._within_budget()
        row: dict[str, Any] = {"trace": self._trace.name, "KV slots": f"{self._share:.0%}"}
        row["strategy"] = case.name
        if case.strategy == "prefix":
            self._exact = ttft
            row["prefix %"] = round(100 * statistics.mean(cached), 1)
        else:
            row |= {f"{tier} %": round(100 * found[tier] / found.total(), 1) for tier in TIERS}
            row["miss %"] = round(100 * found["absent"] / found.total(), 1)
        if case.strategy == "auto":
            row["composed %"] = round(100 * self._chosen[AUTO.name] / self._chosen.total(), 1)
        if case.strategy != "prefix":
            row["vs prefix %"] = self._longer(ttft, ttft.keys())
            row["composed vs prefix %"] = self._longer(ttft, composed)
        times = list(ttft.values())
        row |= {"ttft ms mean": round(statistics.mean(times), 1)}
        row |= {f"ttft ms p{q}": round(percentile(times, q), 1) for q in (50, 99)}
        row["queries/s"] = round(len(times) / seconds, 1)
        row |= {f"{tier} evicted": n - evicted[tier] for tier, n in stat["evictions"].items()}
        row |= {f"{tier} MiB most": round(self._most[tier] / 2**20, 1) for tier in TIERS}
        for tier in ("host", "disk"):
            figures = stat[tier]
            row[f"{tier} KiB a document"] = round(figures["bytes"] / max(1, figures["documents"]) / 1024, 1)
            row[f"{tier} metadata %"] = round(100 * figures["metadata_share"], 2)
        return row

    def _longer(self, ttft: Mapping[int, float], queries: Collection[int]) -> float | None:
        """Median over some queries of the percent by which the first token came later than with `prefix`;
        None without any."""
        ratios = [ttft[number] / self._exact[number] for number in queries if number in self._exact]
        return round(100 * (statistics.median(ratios) - 1), 1) if ratios else None

    async def _ask(self, case: ReplayCase, namespace: str, query: TraceQuery, number: int) -> TimedAnswer:
        """Raises RagserveError if another strategy answered."""
        sampling = Sampling(max_new_tokens=NEW_TOKENS)
        request = query.request(f"replay-{number}", namespace, case.strategy, case.options, sampling)
        started = time.perf_counter()
        if self._chooser is not None and case.strategy == "auto":
            documents, end = replace(request, input_ids=query.ids[: query.spans[-1].end]), query.spans[-1].end
            choice = await self._chooser.choose(prompt_of(documents, query.ids[end:]), namespace)
            self._chosen[choice.spec.name] += 1
            request = replace(request, strategy=choice.spec.name, options=choice.spec.options)
        answer = await first_token(self._engine, request, started=started)
        if answer.last.fallback or (request.strategy != "prefix" and answer.context is None):
            raise RagserveError(
                f"query {number} was not answered by {request.strategy}: {answer.last.fallback}"
            )
        return answer

    async def _within_budget(self) -> dict[str, Any]:
        """Returns the cache's figures. Raises RagserveError if a tier holds more than its budget."""
        stat = await self._engine.control("stat")
        for tier in TIERS:
            used, budget = stat[tier]["bytes"], stat[tier]["budget_bytes"]
            self._most[tier] = max(self._most[tier], used)
            if used > budget:
                raise RagserveError(f"the {tier} tier holds {used:,} bytes, {budget:,} allowed")
        return stat
