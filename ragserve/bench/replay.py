"""Replaying a retrieval trace: what each tier of the document cache catches, and the time to the first token,
beside the prefix cache.

Queries come one after another, as they did, to a real engine whose KV pool holds a share of all documents'
tokens. Each share is an engine of its own, in a process of its own, on one folder: the documents warmed by
the first are found by the others. Strategies answer the same prompts; ``prefix`` is SGLang's exact prefix
cache. After every query each tier must be within its budget."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.bench import model_shapes as in_process
from ragserve.bench.retrieval_trace import SEED, Trace, TraceQuery, cache, everything_of, read_trace
from ragserve.errors import InvalidRequest, RagserveError
from ragserve.measuring import report

if TYPE_CHECKING:
    from ragserve.engine.local import LocalEngine

SHARES = (0.05, 0.2, 1.0)
HOST_SHARE, DISK_SHARE = 0.3, 1.2  # of the documents' KV
NEW_TOKENS = 8
AT_ONCE = 4  # of the last case: load on every tier at the same time
TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class ReplayCase:
    """``warmed``: the documents are on disk when the replay begins, device and host empty; else everything
    is.
    """

    name: str
    strategy: str
    options: Mapping[str, Any]
    warmed: bool
    at_once: int = 1


CASES = (
    ReplayCase("prefix", "prefix", {}, warmed=False),
    ReplayCase("concat", "concat", {}, warmed=False),
    ReplayCase("concat, warmed", "concat", {}, warmed=True),
    ReplayCase("epic 16, warmed", "epic", {"first": 16}, warmed=True),
    ReplayCase(f"concat, warmed, {AT_ONCE} at once", "concat", {}, warmed=True, at_once=AT_ONCE),
)


def run(
    out_dir: Path | None,
    *,
    quick: bool = False,
    traces: Sequence[Path] = (),
    n_queries: int = 120,
    shares: Sequence[float] = SHARES,
) -> dict[str, Any]:
    """A row per trace, share and case, beside those of other shares on the same workload in the file. Raises
    InvalidRequest for no trace.

    ``shares``: of the documents' tokens, KV slots.
    """
    from ragserve.config import DEFAULT_MODEL

    if not traces:
        raise InvalidRequest(
            "replay needs a trace.", hint="Give --data NAME.trace.jsonl, with NAME.docs.jsonl[.gz] beside it."
        )
    n_queries, shares = (min(n_queries, 24), shares[:1]) if quick else (n_queries, shares)
    rows: list[dict[str, Any]] = []
    workload: dict[str, Any] = {"model": "ragserve-tiny", "queries": n_queries, "drawn with seed": SEED}
    out = out_dir / "replay.json" if out_dir else None
    for path in traces:
        trace = read_trace(path, n_queries, DEFAULT_MODEL)
        asked = sum(len(query.documents) for query in trace.queries)
        figures = f"{asked} asked for, {len(trace.unique)} different, {trace.tokens:,} tokens"
        workload |= {
            f"documents of {trace.name}": figures,
            "host": f"{HOST_SHARE:.0%} of their KV",
            "disk": f"{DISK_SHARE:.0%}",
        }
        with tempfile.TemporaryDirectory(prefix="ragserve-replay-") as folder:
            for share in shares:
                rows += _engine(trace, share, Path(folder))
                if out is not None:  # what is measured is kept, whatever becomes of the rest
                    report.save(
                        report.assemble("replay", workload, _with_earlier(out, workload, rows), note=_NOTE),
                        out,
                    )
    return report.write("replay", workload, _with_earlier(out, workload, rows), out=out, note=_NOTE)


_NOTE = (
    "Per cent of the documents asked for, by the fastest tier that had all of it on arrival; for prefix, of the prompts' tokens. "
    "KV slots: as a share of the documents' tokens. Every tier is empty at first; warmed: all documents are on disk, from where they "
    "come to host and stay there; on the device are those that were computed on it. "
    "metadata: of the bytes of KV alone. Every tier was within its budget after every query."
)


def _with_earlier(
    out: Path | None, workload: Mapping[str, Any], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """These rows, and those that the file has of other shares, if it is about the same workload; by trace and
    share.
    """
    earlier: list[dict[str, Any]] = []
    if out is not None and out.exists():
        try:
            before = json.loads(out.read_text(encoding="utf-8"))
            earlier = list(before["rows"]) if before["workload"] == workload else []
            fresh = {(row["trace"], row["KV slots"]) for row in rows}
            earlier = [row for row in earlier if (row["trace"], row["KV slots"]) not in fresh]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"{out} is not a report of this benchmark: {error!r}.", hint="Move it away, or give --out."
            ) from error
    return sorted([*earlier, *rows], key=lambda row: (row["trace"], float(row["KV slots"].rstrip("%"))))


def _engine(trace: Trace, share: float, folder: Path) -> list[dict[str, Any]]:
    """All cases on an engine of its own, in a process of its own: SGLang starts once in one."""
    job, result = folder / "job.json", folder / "result.json"
    queries = [[query.ids, query.spans, query.documents] for query in trace.queries]
    job.write_text(
        json.dumps(
            {
                "name": trace.name,
                "share": share,
                "folder": str(folder),
                "queries": queries,
                "unique": trace.unique,
            }
        )
    )
    result.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "ragserve.bench.replay", str(job), str(result)],
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode or not result.exists():
        raise RagserveError(
            f"The engine for {share:.0%} ended with {done.returncode}:\n{done.stderr[-3000:].decode(errors='replace')}"
        )
    return list(json.loads(result.read_text()))


def main(job_path: str, result_path: str) -> None:
    """One engine, all cases."""
    from ragserve.config import load
    from ragserve.engine.offline import run_once

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    job = json.loads(Path(job_path).read_text())
    queries = [
        TraceQuery(ids, [(a, b) for a, b in spans], documents) for ids, spans, documents in job["queries"]
    ]
    trace = Trace(job["name"], queries, job["unique"])
    kv_bytes = trace.tokens * in_process.embedded_kv_bytes_per_token()
    settings = load(
        data_dir=Path(job["folder"]) / "data",
        port=_port(),
        log_level="warning",
        max_total_tokens=max(
            int(trace.tokens * job["share"]), 2 * max(len(query.ids) for query in queries) + NEW_TOKENS
        ),
        kv_host_bytes=int(kv_bytes * HOST_SHARE),
        kv_disk_bytes=int(kv_bytes * DISK_SHARE),
    )

    async def work(engine: LocalEngine) -> list[dict[str, Any]]:
        return await _Replay(engine, trace, job["share"]).run()

    Path(result_path).write_text(json.dumps(run_once(settings, work)))


def _port() -> int:
    from ragserve.engine.ports import claim_port

    return claim_port("127.0.0.1", 0)


class _Replay:
    """The cases of one engine."""

    def __init__(self, engine: LocalEngine, trace: Trace, share: float) -> None:
        self._engine = engine
        self._trace = trace
        self._share = share
        self._most: Counter[str] = Counter()  # bytes, by tier

    async def run(self) -> list[dict[str, Any]]:
        rows = []
        for case in CASES:
            namespace = "warmed" if case.warmed else f"cold-{case.strategy}"
            if case.warmed:
                await self._warm(namespace)
            rows.append(await self._case(case, namespace))
            print(
                f"replay {self._trace.name} {self._share:.0%} {rows[-1]['strategy']}: {rows[-1]['ttft ms mean']} ms",
                flush=True,
            )
            if not case.warmed:
                await self._engine.control("remove_namespace", namespace=namespace)
        return rows

    async def _warm(self, namespace: str) -> None:
        """All documents and the system text on disk, and on disk only."""
        await cache(self._engine, namespace, self._trace)
        await self._engine.control("evict", tiers=list(TIERS[:2]))
        where = await self._engine.where(namespace, everything_of(self._trace))
        if set(where.fastest()) != {"disk"}:
            raise RagserveError(
                f"after warming, documents are on {Counter(where.fastest())}, not all on disk"
            )

    async def _case(self, case: ReplayCase, namespace: str) -> dict[str, Any]:
        self._most.clear()
        evicted = (await self._within_budget())["evictions"]
        found: Counter[str] = Counter()
        ttft: list[float] = []
        cached: list[float] = []
        waiting = asyncio.Semaphore(case.at_once)

        async def one(number: int, query: TraceQuery) -> None:
            async with waiting:
                if case.strategy != "prefix":
                    documents = [self._trace.unique[name] for name in query.documents]
                    found.update((await self._engine.where(namespace, documents)).fastest())
                seconds, share = await self._ask(case, namespace, query, number)
                ttft.append(seconds)
                cached.append(share)
                await self._within_budget()

        started = time.perf_counter()
        await asyncio.gather(*(one(number, query) for number, query in enumerate(self._trace.queries)))
        seconds = time.perf_counter() - started
        stat = await self._within_budget()
        row: dict[str, Any] = {
            "trace": self._trace.name,
            "KV slots": f"{self._share:.0%}",
            "strategy": case.name,
        }
        if case.strategy == "prefix":
            row["prefix %"] = round(100 * statistics.mean(cached), 1)
        else:
            row |= {f"{tier} %": round(100 * found[tier] / found.total(), 1) for tier in TIERS}
            row["miss %"] = round(100 * found["absent"] / found.total(), 1)
        row |= {"ttft ms mean": round(1e3 * statistics.mean(ttft), 1)}
        row |= {f"ttft ms p{q}": round(1e3 * report.percentile(ttft, q), 1) for q in (50, 99)}
        row["queries/s"] = round(len(ttft) / seconds, 1)
        row |= {f"{tier} evicted": n - evicted[tier] for tier, n in stat["evictions"].items()}
        row |= {f"{tier} MiB most": round(self._most[tier] / 2**20, 1) for tier in TIERS}
        for tier in ("host", "disk"):
            held = stat[tier]
            row[f"{tier} KiB a document"] = round(held["bytes"] / max(1, held["documents"]) / 1024, 1)
            row[f"{tier} metadata %"] = round(100 * held["metadata_share"], 2)
        return row

    async def _ask(
        self, case: ReplayCase, namespace: str, query: TraceQuery, number: int
    ) -> tuple[float, float]:
        """Seconds to the first token, and the share of the prompt found in the prefix cache. Raises where
        another strategy answered.
        """
        from ragserve.engine.base import GenerateRequest, Sampling
        from sglang_ext.protocol import Span

        spans = tuple(Span(a, b) for a, b in query.spans)
        request = GenerateRequest(
            f"replay-{number}",
            query.ids,
            namespace,
            case.strategy,
            Sampling(max_new_tokens=NEW_TOKENS),
            spans,
            case.options,
        )
        started, first, last = time.perf_counter(), 0.0, None
        async for chunk in self._engine.generate(request):
            first = first or time.perf_counter() - started
            last = chunk
        if last is None or last.fallback or (case.strategy != "prefix" and last.context is None):
            raise RagserveError(
                f"query {number} was not answered by {case.strategy}: {last and last.fallback}"
            )
        return first, last.usage.cached / last.usage.prompt

    async def _within_budget(self) -> dict[str, Any]:
        """The cache's figures. Raises where a tier holds more than it may."""
        stat = await self._engine.control("stat")
        for tier in TIERS:
            held, budget = stat[tier]["bytes"], stat[tier]["budget_bytes"]
            self._most[tier] = max(self._most[tier], held)
            if held > budget:
                raise RagserveError(f"the {tier} tier holds {held:,} bytes, {budget:,} allowed")
        return stat


if __name__ == "__main__":
    main(*sys.argv[1:3])
