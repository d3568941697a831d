"""Replay a retrieval trace over real workers: what of its documents a request finds on the device and the
host of the worker that answers it, and how soon its first token comes, by what chooses the worker.

Workers are `ragserve serve --worker` on this machine, each on one core with budgets of its own; this process
is the server in front. Every policy begins with empty caches and gets the same queries in the same order,
`PER_WORKER` for each worker at a time; the second half counts. Rivals: one worker of the same size, for the
throughput, and one with the cores and the memory of all, for what is found. `OURS` over one worker shows what
the choosing itself costs.

With ``shared`` the workers share a folder that has room for all documents, and these are warmed before every
policy as the product warms what it ingests: by their owners, until the disks are full."""

from __future__ import annotations

import asyncio
import contextlib
import json
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
from ragserve.bench.retrieval_trace import SEED, Trace, TraceQuery, read_trace, require, warm_missing
from ragserve.bench.running_router import is_installed, running_router
from ragserve.config import DEFAULT_MODEL, Settings, load
from ragserve.engine.base import Engine, GenerateRequest, Sampling
from ragserve.engine.ports import LOOPBACK, hold_port, port_of
from ragserve.engine.running_server import RunningServer, running_server
from ragserve.errors import InvalidRequest, RagserveError, Unavailable
from ragserve.fleet.fleet_engine import FleetEngine
from ragserve.fleet.request_parts import documents_of
from ragserve.fleet.routing_key import ASK, MARK, ROUTING_KEY, WORKER
from ragserve.fleet.worker_engine import WorkerEngine
from ragserve.verification.engine_run import REMOTE, TIERS, first_token
from ragserve.verification.report import GrowingReport, percentile, read_report

SIZES = (1, 2, 4)
DEVICE_SHARE, HOST_SHARE, DISK_SHARE = 0.1, 0.1, 0.3  # of the documents' KV, each worker's
_STORED = 1.1  # bytes of a document's file to those of its KV, at most
PER_WORKER = 2  # queries in flight
NEW_TOKENS = 8
NAMESPACE = "fleet"
KEY = "bench-fleet"
ONE, BIG, CACHE_AWARE, OURS = "one worker", "one big worker", "cache_aware", "ours"
POLICIES = ("random", "round robin", CACHE_AWARE, OURS)

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
    shared: bool = False,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure a row per trace, number of workers and policy (``only`` these, if given). Rows of the same
    workload that are not measured again stay in the file. Raises InvalidRequest without a trace, and for a
    policy that there is not."""
    require(traces, "fleet")
    if unknown := sorted(set(only) - {ONE, BIG, *POLICIES}):
        raise InvalidRequest(
            f"There is no policy {unknown[0]!r}.", hint=f"One of: {', '.join((ONE, *POLICIES, BIG))}."
        )
    n_queries, sizes = (min(n_queries, 24), sizes[:2]) if quick else (n_queries, sizes)
    traced = [read_trace(path, n_queries, DEFAULT_MODEL) for path in traces]
    name = "fleet-replay-shared" if shared else "fleet-replay"
    out = out_dir / f"{name}.json" if out_dir else None
    workload = {
        "model": "ragserve-tiny",
        "strategy": "concat",
        "queries": f"{n_queries}, drawn with seed {SEED}; the second half counts",
        "in flight": f"{PER_WORKER} for each worker",
        "budgets of a worker, of the documents' KV": (
            f"device {DEVICE_SHARE:.0%}, host {HOST_SHARE:.0%}, disk {DISK_SHARE:.0%}"
        ),
        "shared store": "a folder for all documents" if shared else "none",
        "documents at first": "on their owners' disks, as far as there is room" if shared else "nowhere",
    }
    before, earlier = read_report(out)
    earlier = earlier if before.items() >= workload.items() else []
    report = GrowingReport(
        name,
        out,
        note=_NOTE,
        key=("trace", "workers", "policy"),
        earlier=earlier,
        order=lambda row: (row["trace"], row["workers"]),
    )
    sizes_of = {f"documents of {t.name}": f"{len(t.unique)}, {t.tokens:,} tokens" for t in traced}
    report.workload = before | sizes_of if earlier else workload | sizes_of
    for trace in traced:
        one = next((row for row in earlier if (row["trace"], row["policy"]) == (trace.name, ONE)), None)
        for row in measured(trace, sorted(set(sizes)), only or (ONE, *policies(), BIG), shared, one):
            report.add(row)
    return report.show()


_NOTE = (
    "Found: per cent of the documents asked for, by the fastest tier that the answering worker had the whole "
    "document in on arrival; remote: the shared store. Each worker has one core; more workers than cores "
    "share them. times one worker: queries/s over those of one worker. CPU ms a query: of the workers' "
    "processes. times one worker by CPU: CPU time of one worker for the queries over that of the "
    "busiest worker, which is what a core for each worker would give if nothing else held them back. "
    "cache_aware: SGLang's router smg is asked for each request's worker, with its tokens; the request then "
    "goes there directly. First tokens: from the sending to the worker."
)


def measured(
    trace: Trace, sizes: Sequence[int], only: Collection[str], shared: bool, one: Mapping[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """The rows of a trace by the policies ``only``. ``one``: an earlier row of one worker."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragserve-fleet-")))
        small = [
            stack.enter_context(_worker(trace, folder / f"small-{n}", 1, {n % cores}, shared))
            for n in range(max(sizes) if set(only) != {BIG} else 0)
        ]
        for size in sizes:
            for policy in (ONE, OURS) if size == 1 else policies():
                if policy in only:
                    row = _row(trace, folder, small[:size], policy, shared)
                    one = row if policy == ONE else one
                    times = {} if one is None else _times(row, one, size)
                    yield {"trace": trace.name, "workers": size, "policy": policy} | row | times
            if size > 1 and BIG in only:
                with _worker(
                    trace, folder / f"big-{size}", size, set(range(min(size, cores))), shared
                ) as big:
                    row = _row(trace, folder, [big], BIG, shared, at_once=PER_WORKER * size)
                yield {"trace": trace.name, "workers": size, "policy": BIG} | row


def policies() -> tuple[str, ...]:
    """Ways to choose among several workers; `CACHE_AWARE` where its router is installed."""
    return tuple(policy for policy in POLICIES if policy != CACHE_AWARE or is_installed())


def _times(row: Mapping[str, Any], one: Mapping[str, Any], size: int) -> dict[str, Any]:
    busiest = row["CPU ms a query"] * row["busiest / mean"] / size
    return {
        "times one worker": round(row["queries/s"] / one["queries/s"], 2),
        "times one worker by CPU": round(one["CPU ms a query"] / busiest, 2),
    }


@contextlib.contextmanager
def _worker(
    trace: Trace, folder: Path, scale: int, cores: Collection[int], shared: bool
) -> Iterator[RunningServer]:
    """Start a worker that has ``scale`` times the budgets, on the cores of these numbers of ours; ``shared``:
    with a store for all documents, beside its own folder."""
    all_bytes = trace.tokens * model_shapes.kv_bytes_per_token("embedded")
    kv_bytes = scale * all_bytes
    store: dict[str, Any] = {}
    if shared:
        mount = folder.parent / "shared"
        mount.mkdir(exist_ok=True)
        options = {"folder": str(mount), "bytes": int(_STORED * all_bytes)}
        store = {"kv_storage": "shared", "kv_storage_args": json.dumps(options)}
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
                    kv_analysis="lazy",  # nothing of `concat` needs one
                    **store,
                )
            )
        finally:
            os.sched_setaffinity(0, ours)
        yield worker


def _row(
    trace: Trace,
    folder: Path,
    workers: Sequence[RunningServer],
    policy: str,
    warm: bool,
    at_once: int | None = None,
) -> dict[str, Any]:
    """Run one policy over workers."""
    urls = [worker.url for worker in workers]
    settings = load(
        data_dir=folder / "front",
        workers=",".join(urls),
        engine_api_key=SecretStr(KEY),
        log_level="warning",
    )
    at_once = at_once or PER_WORKER * len(urls)
    with contextlib.ExitStack() as stack:
        router = ""
        if policy == CACHE_AWARE:
            with hold_port() as held:
                port = port_of(held)
            stack.enter_context(
                running_router(urls, folder / "router.log", KEY, port=port, policy="cache_aware")
            )
            router = f"http://{LOOPBACK}:{port}"
        return asyncio.run(
            replayed(
                trace,
                settings,
                urls,
                policy,
                router,
                at_once,
                warm=warm,
                cpu=[worker.cpu_seconds for worker in workers],
            )
        )


async def replayed(
    trace: Trace,
    settings: Settings,
    urls: Sequence[str],
    policy: str,
    router: str,
    at_once: int,
    *,
    warm: bool = False,
    cpu: Sequence[Callable[[], float]] = (),
) -> dict[str, Any]:
    """Replay a trace over the workers at ``urls``, ``at_once`` queries at a time, from empty caches.

    Args:
        policy: ``random``, ``round robin``, `CACHE_AWARE` by ``router``, `OURS`, or any other for one worker.
        warm: Warm the documents first, each on its owner, until the disks are full.
        cpu: The seconds of CPU time that each worker has used so far.

    Returns:
        What the second half of the queries has found, waited for and cost, and the queries a second.

    Raises:
        RagserveError: A query was not answered by composing, or a worker does not answer."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [WorkerEngine(settings, url) for url in urls]
        for engine in engines:
            stack.push_async_callback(engine.close)
            await engine.start()
            await engine.control("clear")
        fleet = FleetEngine(settings, urls)
        stack.push_async_callback(fleet.close)
        if warm or policy == OURS:
            await fleet.start()
        if warm:
            await _warm(fleet, trace)
        if policy == OURS:
            asked = _by_fleet(fleet)
        elif policy == CACHE_AWARE:
            if settings.engine_api_key is None:
                raise InvalidRequest("Policy cache_aware needs the workers' key.", hint="Set engine_api_key.")
            key = {"Authorization": f"Bearer {settings.engine_api_key.get_secret_value()}"}
            client = await stack.enter_async_context(httpx.AsyncClient(headers=key, timeout=60))
            asked = _by(engines, _router_choice(client, router, engines))
        else:
            asked = _by(engines, _plain_choice(policy, len(engines)))
        return await _replay(trace, asked, at_once, cpu)


async def _warm(fleet: FleetEngine, trace: Trace) -> None:
    """Compute the system text and the documents, in an order of their own, but no more than the disks hold
    without evicting, as a warm-up of what was ingested does."""
    room = await fleet.where(NAMESPACE, [])
    first = trace.queries[0]
    needed, size = [first.ids[: first.spans[0].end]], 0
    documents = list(trace.unique.values())
    random.Random(SEED).shuffle(documents)  # those of the first queries are no more likely to be there
    for document in documents:
        own = room.bytes_of(len(document))
        if room.budget_bytes is None or size + own <= room.budget_bytes:
            needed.append(document)
            size += own
    await warm_missing(fleet, NAMESPACE, needed)
    await fleet.control("flush")


async def _replay(
    trace: Trace, asked: Asked, at_once: int, cpu: Sequence[Callable[[], float]]
) -> dict[str, Any]:
    found: Counter[str] = Counter()
    first_ms: list[float] = []
    half, began = len(trace.queries) // 2, 0.0
    used: list[float] = []
    waiting = asyncio.Semaphore(at_once)

    async def one(number: int, query: TraceQuery) -> None:
        nonlocal began, used
        async with waiting:
            if number == half:
                began, used = time.perf_counter(), [seconds() for seconds in cpu]
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
    spent = [after() - before for after, before in zip(cpu, used, strict=True)]
    tiers = (*TIERS, REMOTE, "absent")
    shares = {f"{tier} %": round(100 * found[tier] / found.total(), 1) for tier in tiers}
    row = {
        "found %": round(100 * (1 - found["absent"] / found.total()), 1),
        "device + host %": round(100 * (found["device"] + found["host"]) / found.total(), 1),
        **shares,
        **{f"first token ms p{q}": round(percentile(first_ms, q), 1) for q in (50, 99)},
        "queries/s": round(len(first_ms) / seconds, 2),
    }
    if spent:
        row["CPU ms a query"] = round(1e3 * sum(spent) / len(first_ms), 1)
        row["busiest / mean"] = round(max(spent) * len(spent) / sum(spent), 2)
    return row


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
