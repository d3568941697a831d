"""Replay a retrieval trace over real workers: what of its documents a request finds on the device and the
host of the worker that answers it, and how soon its first token comes, by what chooses the worker.

Workers are `ragserve serve --worker` on this machine, each on one core with budgets of its own; this process
is the server in front. Every policy begins with empty caches and gets the same queries in the same order,
`PER_WORKER` for each worker at a time; the second half counts. Rivals: one worker of the same size, for the
throughput, and one with the cores and the memory of all, for what is found. `OURS` over one worker shows what
the choosing itself costs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from ragserve.bench import model_shapes
from ragserve.bench.retrieval_trace import SEED, Trace, TraceQuery, read_trace, require
from ragserve.config import DEFAULT_MODEL, Settings, load
from ragserve.engine.base import Engine, GenerateRequest, Sampling
from ragserve.engine.ports import LOOPBACK, hold_port, port_of
from ragserve.errors import RagserveError, Unavailable
from ragserve.fleet.fleet_engine import FleetEngine
from ragserve.fleet.request_parts import documents_of
from ragserve.fleet.routing_key import ASK, MARK, ROUTING_KEY, WORKER
from ragserve.fleet.worker_engine import WorkerEngine
from ragserve.measuring.engine_run import TIERS, first_token
from ragserve.measuring.report import GrowingReport, percentile
from ragserve.measuring.running_router import is_installed, running_router
from ragserve.measuring.server import RunningServer, running_server

SIZES = (1, 2, 4)
DEVICE_SHARE, HOST_SHARE, DISK_SHARE = 0.1, 0.1, 0.3  # of the documents' KV, each worker's
PER_WORKER = 2  # queries in flight
NEW_TOKENS = 8
NAMESPACE = "fleet"
KEY = "bench-fleet"
ONE, BIG, CACHE_AWARE, OURS = "one worker", "one big worker", "cache_aware", "ours"

Asked = Callable[[GenerateRequest], Awaitable[tuple[list[str], Engine]]]
"""The fastest tier of each of a request's documents at the worker that gets it, and the engine to send it to
at once."""


def run(
    out_dir: Path | None,
    *,
    quick: bool = False,
    traces: Sequence[Path] = (),
    n_queries: int = 120,
    sizes: Sequence[int] = SIZES,
) -> dict[str, Any]:
    """Measure a row per trace, number of workers and policy. Raises InvalidRequest without a trace."""
    require(traces, "fleet")
    n_queries, sizes = (min(n_queries, 24), sizes[:2]) if quick else (n_queries, sizes)
    traced = [read_trace(path, n_queries, DEFAULT_MODEL) for path in traces]
    out = out_dir / "fleet-replay.json" if out_dir else None
    report = GrowingReport("fleet-replay", out, note=_NOTE)
    report.workload = {
        "model": "ragserve-tiny",
        "strategy": "concat",
        "queries": f"{n_queries}, drawn with seed {SEED}; the second half counts",
        "in flight": f"{PER_WORKER} for each worker",
        "budgets of a worker, of the documents' KV": (
            f"device {DEVICE_SHARE:.0%}, host {HOST_SHARE:.0%}, disk {DISK_SHARE:.0%}"
        ),
        **{f"documents of {trace.name}": f"{len(trace.unique)}, {trace.tokens:,} tokens" for trace in traced},
    }
    for trace in traced:
        for row in measured(trace, sorted(set(sizes))):
            report.add(row)
    return report.show()


_NOTE = (
    "Found: per cent of the documents asked for, by the fastest tier of the answering worker that had the "
    "whole document on arrival. Each worker has one core; more workers than cores share them. times one "
    "worker: queries/s over those of one worker; per core: that times workers over cores in use, which is "
    "what a core for each worker would give if nothing else held them back. cache_aware: SGLang's router smg "
    "is asked for each request's worker, with its tokens; the request then goes there directly. First "
    "tokens: from the sending to the worker."
)


def measured(trace: Trace, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rows of a trace."""
    cores = len(os.sched_getaffinity(0))
    one: float | None = None
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragserve-fleet-")))
        small = [
            stack.enter_context(_worker(trace, folder / f"small-{n}", 1, {n % cores}))
            for n in range(max(sizes))
        ]
        for size in sizes:
            urls = [worker.url for worker in small[:size]]
            for policy in (ONE, OURS) if size == 1 else policies():
                row = _row(trace, folder, urls, policy)
                one = row["queries/s"] if policy == ONE else one
                yield (
                    {"trace": trace.name, "workers": size, "policy": policy}
                    | row
                    | _times(row, one, size, cores)
                )
            if size > 1:
                with _worker(trace, folder / f"big-{size}", size, set(range(min(size, cores)))) as big:
                    row = _row(trace, folder, [big.url], BIG, at_once=PER_WORKER * size)
                yield {"trace": trace.name, "workers": size, "policy": BIG} | row


def policies() -> tuple[str, ...]:
    """Ways to choose among several workers; `CACHE_AWARE` where its router is installed."""
    return ("random", "round robin", *((CACHE_AWARE,) if is_installed() else ()), OURS)


def _times(row: Mapping[str, Any], one: float | None, size: int, cores: int) -> dict[str, Any]:
    if one is None:
        return {}
    times = row["queries/s"] / one
    return {"times one worker": round(times, 2), "per core": round(times * size / min(size, cores), 2)}


@contextlib.contextmanager
def _worker(trace: Trace, folder: Path, scale: int, cores: Collection[int]) -> Iterator[RunningServer]:
    """Start a worker that has ``scale`` times the budgets, on the cores of these numbers of ours."""
    kv_bytes = scale * trace.tokens * model_shapes.kv_bytes_per_token("embedded")
    longest = max(len(query.ids) for query in trace.queries)
    ours = os.sched_getaffinity(0)
    numbers = sorted(ours)
    with contextlib.ExitStack() as stack:
        os.sched_setaffinity(0, {numbers[core] for core in cores})  # which its processes inherit
        try:
            worker = stack.enter_context(
                running_server(
                    worker=True,
                    data_dir=folder,
                    api_key=KEY,
                    env={"OMP_NUM_THREADS": str(len(cores))},
                    log_level="warning",
                    max_total_tokens=max(
                        int(scale * trace.tokens * DEVICE_SHARE), 4 * (longest + NEW_TOKENS)
                    ),
                    kv_host_bytes=int(kv_bytes * HOST_SHARE),
                    kv_disk_bytes=int(kv_bytes * DISK_SHARE),
                )
            )
        finally:
            os.sched_setaffinity(0, ours)
        yield worker


def _row(
    trace: Trace, folder: Path, urls: Sequence[str], policy: str, at_once: int | None = None
) -> dict[str, Any]:
    """Run one policy over workers, from empty caches."""
    settings = load(
        data_dir=folder / "front",
        workers=",".join(urls),
        engine_api_key=SecretStr(KEY),
        log_level="warning",
    )
    with contextlib.ExitStack() as stack:
        router = ""
        if policy == CACHE_AWARE:
            with hold_port() as held:
                port = port_of(held)
            stack.enter_context(
                running_router(urls, folder / "router.log", KEY, port=port, policy="cache_aware")
            )
            router = f"http://{LOOPBACK}:{port}"
        return asyncio.run(replayed(trace, settings, urls, policy, router, at_once or PER_WORKER * len(urls)))


async def replayed(
    trace: Trace, settings: Settings, urls: Sequence[str], policy: str, router: str, at_once: int
) -> dict[str, Any]:
    """Replay a trace over the workers at ``urls``, ``at_once`` queries at a time, from empty caches.

    Args:
        policy: ``random``, ``round robin``, `CACHE_AWARE` by ``router``, `OURS`, or any other for one worker.

    Returns:
        What the second half of the queries has found, waited for, and the queries a second.

    Raises:
        RagserveError: A query was not answered by composing, or a worker does not answer."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [WorkerEngine(settings, url) for url in urls]
        for engine in engines:
            stack.push_async_callback(engine.close)
            await engine.start()
            await engine.control("clear")
        if policy == OURS:
            fleet = FleetEngine(settings, urls)
            stack.push_async_callback(fleet.close)
            await fleet.start()
            asked = _by_fleet(fleet)
        elif policy == CACHE_AWARE:
            assert settings.engine_api_key is not None
            key = {"Authorization": f"Bearer {settings.engine_api_key.get_secret_value()}"}
            client = await stack.enter_async_context(httpx.AsyncClient(headers=key, timeout=60))
            asked = _by(engines, _router_choice(client, router, engines))
        else:
            asked = _by(engines, _plain_choice(policy, len(engines)))
        return await _replay(trace, asked, at_once)


async def _replay(trace: Trace, asked: Asked, at_once: int) -> dict[str, Any]:
    found: Counter[str] = Counter()
    first_ms: list[float] = []
    half, began = len(trace.queries) // 2, 0.0
    waiting = asyncio.Semaphore(at_once)

    async def one(number: int, query: TraceQuery) -> None:
        nonlocal began
        async with waiting:
            if number == half:
                began = time.perf_counter()
            sampling = Sampling(max_new_tokens=NEW_TOKENS)
            request = query.request(f"fleet-{number}", NAMESPACE, "concat", {}, sampling)
            tiers, engine = await asked(request)
            answer = await first_token(engine, request)
            if answer.context is None:
                raise RagserveError(f"query {number} was not composed: {answer.last.fallback}")
            if number >= half:
                found.update(tiers)
                first_ms.append(answer.ttft_ms)

    await asyncio.gather(*(one(number, query) for number, query in enumerate(trace.queries)))
    seconds = time.perf_counter() - began
    shares = {f"{tier} %": round(100 * found[tier] / found.total(), 1) for tier in (*TIERS, "absent")}
    return {
        "device + host %": round(100 * (found["device"] + found["host"]) / found.total(), 1),
        **shares,
        **{f"first token ms p{q}": round(percentile(first_ms, q), 1) for q in (50, 99)},
        "queries/s": round(len(first_ms) / seconds, 2),
    }


def _by_fleet(fleet: FleetEngine) -> Asked:
    """The fleet's own choice. It is looked at before the request is sent, and again after what is there was
    asked for: nothing comes between the second look and the sending."""

    async def asked(request: GenerateRequest) -> tuple[list[str], Engine]:
        documents = documents_of(request)
        while True:
            worker = fleet.answering(request.namespace, documents)
            found = (await worker.where(request.namespace, documents[1:])).fastest()
            if fleet.answering(request.namespace, documents) is worker:
                return list(found), fleet

    return asked


def _by(engines: Sequence[WorkerEngine], choose: Callable[[GenerateRequest], Awaitable[int]]) -> Asked:
    """The worker of the number that ``choose`` gives."""

    async def asked(request: GenerateRequest) -> tuple[list[str], Engine]:
        worker = engines[await choose(request)]
        found = (await worker.where(request.namespace, documents_of(request)[1:])).fastest()
        return list(found), worker

    return asked


def _plain_choice(policy: str, count: int) -> Callable[[GenerateRequest], Awaitable[int]]:
    """At random, or one after the other."""
    draw, turn = random.Random(SEED), -1

    async def choose(_: GenerateRequest) -> int:
        nonlocal turn
        turn = (turn + 1) % count
        return draw.randrange(count) if policy == "random" else turn

    return choose


def _router_choice(
    client: httpx.AsyncClient, router: str, engines: Sequence[WorkerEngine]
) -> Callable[[GenerateRequest], Awaitable[int]]:
    """Where SGLang's router would send the request's tokens, for which it takes the request as sent."""
    names = [engine.name for engine in engines]

    async def choose(request: GenerateRequest) -> int:
        body = {"input_ids": request.input_ids, "sampling_params": {"max_new_tokens": NEW_TOKENS}}
        headers = {MARK: ASK, ROUTING_KEY: "bench/0"}
        response = await client.post(f"{router}/generate", json=body, headers=headers)
        if (name := response.headers.get(WORKER)) not in names:
            raise Unavailable(f"The router answered {response.status_code}: {response.text[:200]}")
        return names.index(name)

    return choose
