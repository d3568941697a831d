"""Simulation of a fleet: which worker answers a request decides what of its documents is found there.

Workers have three tiers of documents, least recently used first out, and compute one prompt at a time.
Requests come at random (Poisson). What a token costs in each tier is taken from the measurements in
`benchmarks/results`. Every policy gets the same requests at the same times. With a shared store, a document
that its worker does not have is looked for there, and put there once it is worth it."""

from __future__ import annotations

import heapq
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ragserve.bench import fleet_replay
from ragserve.files import bundled
from ragserve.fleet.affinity import Holders, owners, ranked
from ragserve.verification.report import percentile, write
from sglang_ext.documents.remote.document_values import DocumentValues

COSTS_FROM = "benchmarks/results/h200-context-fa2.json"
STORE_COSTS_FROM, STORE = "benchmarks/results/shared-store.json", "mooncake"
DOCUMENT_TOKENS = 512
DOCUMENT_BYTES = DOCUMENT_TOKENS * 131_072  # KV of Llama-3.1-8B in bfloat16
TIERS = ("device", "host", "disk")
REMOTE = "remote"  # the shared store
STORE_CAPACITY = 262_144  # documents of the shared store: 16 TiB
STORE_VALUE = 1.0  # the default of `kv_shared_value`
BIG, OURS = "one big worker", "holders, less waiting (ours)"
CAPACITY = {"device": 1_400, "host": 4_096, "disk": 65_536}
"""Documents of a worker's tiers: a pool of 746,597 slots, 256 GiB and 4 TiB."""

BASE_TOKENS = 512  # of a request, whatever is found
DECODE_S = 0.4  # a request stays that long after its first token
BUSY = 0.6  # of the time that a worker would need for all its requests if one in two documents were cached
DOCUMENTS, TOPIC = 1_000_000, 64
TOPICAL = 0.8  # share of a request's documents that are of its topic
PASSAGES = 5
# RAGCache (arXiv 2404.12457), figure 5: 3 % of the documents take 60 % of the retrievals.
HEAD, HEAD_DRAWN = 0.03, 0.74
"""That share of draws leaves 60 % of the retrievals, because a request's documents differ."""

_BLOCK_TOKENS = 16  # of a page
_BLOCK = 2**21  # document-worker pairs at a time


@dataclass(frozen=True)
class TokenCosts:
    """Milliseconds: ``base`` a request, the rest a token of a document that was found there or in no tier.
    What a disk gives later than it is computed is computed."""

    base: float
    per_token: dict[str, float]

    @classmethod
    def measured(cls) -> TokenCosts:
        """Read the costs of 8,192 tokens of documents of 512, on one H200, and of reading a Mooncake Store.
        Raises KeyError if they are not in the files."""
        rows = json.loads(bundled(COSTS_FROM).read_text(encoding="utf-8"))["rows"]
        found = {
            (row["strategy"], row["tier"]): row
            for row in rows
            if row["context tokens"] == 8192 and row["document tokens"] == DOCUMENT_TOKENS
        }
        whole, part = "concat, all kept", "concat, 15 % kept"
        device = found[whole, "device"]["ttft ms"]
        disk = (found[part, "disk"]["ttft ms"] - found[part, "device"]["ttft ms"]) / found[part, "disk"][
            "kept"
        ]
        host = (found[whole, "host"]["ttft ms"] - device) / 8192
        absent = found["full", None]["ttft ms"] / 8192
        reads = json.loads(bundled(STORE_COSTS_FROM).read_text(encoding="utf-8"))["rows"]
        (read,) = [row["read CPU ms"] for row in reads if row["store"] == STORE]
        remote = read / DOCUMENT_TOKENS
        tokens = {"host": host, "disk": min(disk, absent), REMOTE: min(remote, absent), "absent": absent}
        return cls(device, {"device": 0.0} | tokens)


class SimulatedStore:
    """What workers share, the documents read least recently out first. A worker puts a document there that is
    worth it by its own retrievals, as `DocumentValues` counts them."""

    def __init__(self, costs: TokenCosts, value: float, capacity: int = STORE_CAPACITY) -> None:
        """``value``: as `kv_shared_value`. ``capacity`` in documents."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._value, self._capacity = value, capacity
        self._prefill_ms = (0.0, costs.per_token["absent"], 0.0)
        self._by_worker: dict[SimulatedWorker, DocumentValues] = {}
        self.stored = 0  # documents

    def has(self, document: int) -> bool:
        """Whether a document is there, which counts as a read."""
        if document not in self._kept:
            return False
        self._kept.move_to_end(document)
        return True

    def retrieved(self, worker: SimulatedWorker, document: int) -> None:
        """Count a retrieval of a worker that has the document."""
        page_bytes = _BLOCK_TOKENS * DOCUMENT_BYTES // DOCUMENT_TOKENS
        values = self._by_worker.setdefault(
            worker, DocumentValues(self._value, page_bytes, _BLOCK_TOKENS, self._prefill_ms)
        )
        values.note(str(document))
        if document in self._kept or not values.admits(str(document), DOCUMENT_TOKENS):
            return
        self._kept[document] = None
        self.stored += 1
        if len(self._kept) > self._capacity:
            self._kept.popitem(last=False)


@dataclass(eq=False)
class SimulatedWorker:
    """A worker's tiers, and when it is free."""

    free_at: float = 0.0
    busy_s: float = 0.0
    in_flight: int = 0
    waiting: int = 0  # tokens that it was expected to compute, and has not
    tiers: dict[str, OrderedDict[int, None]] = field(
        default_factory=lambda: {tier: OrderedDict() for tier in TIERS}
    )

    def fetch(self, document: int, scale: int = 1, store: SimulatedStore | None = None) -> str:
        """The tier that has a document, which then is in all of the worker's; ``scale``: workers of this size
        in one."""
        found = next((tier for tier in TIERS if document in self.tiers[tier]), "absent")
        if store is not None:
            if found == "absent" and store.has(document):
                found = REMOTE
            store.retrieved(self, document)
        for tier in TIERS:
            kept = self.tiers[tier]
            kept[document] = None
            kept.move_to_end(document)
            if len(kept) > CAPACITY[tier] * scale:
                kept.popitem(last=False)
        return found


Policy = Callable[[Sequence[int], list[SimulatedWorker]], tuple[int, int]]
"""Chooses a worker for a request's documents, in rank order, and says how many tokens it expects that worker
to compute.
"""


def random_policy(seed: int) -> Policy:
    """Any worker."""
    draw = random.Random(seed)
    return lambda documents, workers: (draw.randrange(len(workers)), 0)


def round_robin() -> Policy:
    """One after the other."""
    turn = -1

    def choose(documents: Sequence[int], workers: list[SimulatedWorker]) -> tuple[int, int]:
        nonlocal turn
        turn = (turn + 1) % len(workers)
        return turn, 0

    return choose


def cache_aware(threshold: float = 0.3, apart: int = 64, times: float = 1.5) -> Policy:
    """As SGLang's router does it, with its defaults: the worker with the longest known prefix of tokens if
    that is over ``threshold`` of the prompt, else the one that was sent least; the least loaded one while
    loads are far apart. A prefix ends with a document here."""
    known: dict[tuple[int, ...], int] = {}
    sent: list[int] = []

    def choose(documents: Sequence[int], workers: list[SimulatedWorker]) -> tuple[int, int]:
        if not sent:
            sent.extend([0] * len(workers))
        loads = [worker.in_flight for worker in workers]
        least, most = min(loads), max(loads)
        best = loads.index(least)
        if not (most - least > apart and most > times * least):
            matched = next((n for n in range(len(documents), 0, -1) if tuple(documents[:n]) in known), 0)
            best = sent.index(min(sent))
            if matched / len(documents) > threshold:
                best = known[tuple(documents[:matched])]
        for n in range(1, len(documents) + 1):
            prefix = tuple(documents[:n])
            if known.get(prefix) != best:
                known[prefix] = best
                sent[best] += 1
        return best, 0

    return choose


def affinity(owner_of: dict[int, int], *, holders: bool, waits: bool) -> Policy:
    """As `ragserve.fleet.affinity`, within the bound on load: with ``holders`` the worker that holds most of
    the documents, else the one that owns most; with ``waits``, less for the tokens that wait there."""
    known = Holders()
    fresh = {
        "documents": [],
        "in_memory": 0,
        "memory_tokens": max(CAPACITY["device"], CAPACITY["host"]) * DOCUMENT_TOKENS,
        "disk_tokens": CAPACITY["disk"] * DOCUMENT_TOKENS,
    }
    size = BASE_TOKENS + PASSAGES * DOCUMENT_TOKENS

    def choose(documents: Sequence[int], workers: list[SimulatedWorker]) -> tuple[int, int]:
        if not known.workers:
            for number in range(len(workers)):
                known.begin(str(number), fresh)
        tokens = [0.0] * len(workers)
        for document in documents:
            there = {owner_of[document]: 1.0}
            if holders:
                there = {int(name): value for name, value in known.of(document).items()}
            for number, value in there.items():
                tokens[number] += value * DOCUMENT_TOKENS
        waiting = [worker.waiting if waits else 0 for worker in workers]
        best = ranked(tokens, [worker.in_flight for worker in workers], waiting, size)[0]
        known.note(str(best), [(document, DOCUMENT_TOKENS) for document in documents])
        return best, size - int(tokens[best])

    return choose


def owner_table(requests: Sequence[Sequence[int]], count: int) -> dict[int, int]:
    """The owner of every document of the requests among ``count`` workers."""
    unique = np.unique(np.concatenate([np.asarray(each) for each in requests])).astype(np.uint64)
    # document keys are hashes
    hashes = (unique + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    names = [f"worker-{number}" for number in range(count)]
    step = max(1, _BLOCK // count)
    found = np.concatenate([owners(hashes[at : at + step], names) for at in range(0, len(hashes), step)])
    return dict(zip(unique.tolist(), found.tolist(), strict=True))


@dataclass
class Outcome:
    """Figures of the second half of the requests, when the caches have filled."""

    tiers: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*TIERS, REMOTE, "absent"), 0))
    stored: int = 0
    first_token_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)

    def row(self, requests: int) -> dict[str, Any]:
        tokens = sum(self.tiers.values())
        moved = (self.tiers["host"] + self.tiers["disk"]) * DOCUMENT_BYTES
        computed = self.tiers["absent"] * DOCUMENT_BYTES
        mean = sum(self.busy_s) / len(self.busy_s)
        store = {
            "MB from the store a request": round(self.tiers[REMOTE] * DOCUMENT_BYTES / requests / 1e6, 1),
            "MB to the store a request": round(self.stored * DOCUMENT_BYTES / requests / 1e6, 1),
        }
        return {
            **{f"{tier} %": round(100 * self.tiers[tier] / tokens, 1) for tier in (*TIERS, REMOTE)},
            "found %": round(100 * (1 - self.tiers["absent"] / tokens), 1),
            "device + host %": round(100 * (self.tiers["device"] + self.tiers["host"]) / tokens, 1),
            "first token ms p50": round(1e3 * percentile(self.first_token_s, 50), 1),
            "first token ms p99": round(1e3 * percentile(self.first_token_s, 99), 1),
            "busiest / mean": round(max(self.busy_s) / mean, 2),
            "GPU ms a request": round(1e3 * sum(self.busy_s) / requests, 1),
            "MB loaded a request": round(moved / requests / 1e6, 1),
            "MB computed a request": round(computed / requests / 1e6, 1),
            **store,
        }


def simulate(
    requests: Sequence[Sequence[int]],
    count: int,
    policy: Policy,
    costs: TokenCosts,
    seed: int,
    scale: int = 1,
    store: SimulatedStore | None = None,
) -> Outcome:
    """Send the requests to ``count`` workers. ``scale``: how many each of them stands for. ``store``: what
    they share."""
    draw = random.Random(seed)
    workers = [SimulatedWorker() for _ in range(count)]
    ending: list[tuple[float, int, int, int]] = []  # when, whose, requests and tokens less
    outcome = Outcome()
    half = costs.base + PASSAGES * DOCUMENT_TOKENS * costs.per_token["absent"] / 2
    rate = BUSY * count * scale / (half / 1e3)
    now = 0.0
    for number, documents in enumerate(requests):
        now += draw.expovariate(rate)
        while ending and ending[0][0] <= now:
            _, ended, fewer, computed = heapq.heappop(ending)
            workers[ended].in_flight -= fewer
            workers[ended].waiting -= computed
        if store is not None and number == len(requests) // 2:
            outcome.stored = -store.stored
        chosen, tokens = policy(documents, workers)
        worker = workers[chosen]
        tiers = [worker.fetch(document, scale, store) for document in documents]
        took = (costs.base + sum(DOCUMENT_TOKENS * costs.per_token[tier] for tier in tiers)) / 1e3 / scale
        worker.free_at = max(worker.free_at, now) + took
        worker.in_flight += 1
        worker.waiting += tokens
        heapq.heappush(ending, (worker.free_at, chosen, 0, tokens))
        heapq.heappush(ending, (worker.free_at + DECODE_S, chosen, 1, 0))
        if 2 * number >= len(requests):
            worker.busy_s += took
            outcome.first_token_s.append(worker.free_at - now)
            for tier in tiers:
                outcome.tiers[tier] += 1
    outcome.busy_s = [worker.busy_s * scale for worker in workers]
    outcome.stored += 0 if store is None else store.stored
    return outcome


def skew(documents: int) -> float:
    """The exponent of Zipf's law with which the first `HEAD` of documents get `HEAD_DRAWN` of the draws."""
    ranks = np.arange(1, documents + 1, dtype=np.float64)
    low, high = 0.0, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        weights = ranks**-middle
        if weights[: int(HEAD * documents)].sum() / weights.sum() < HEAD_DRAWN:
            low = middle
        else:
            high = middle
    return high


def skewed_requests(count: int, documents: int, seed: int) -> Iterator[list[int]]:
    """Draw requests of documents: a topic by the popularity of one of its documents, and others of the topic
    by theirs."""
    draw = np.random.default_rng(seed)
    shares = np.arange(1, documents + 1, dtype=np.float64) ** -skew(documents)
    cumulative = np.cumsum(shares / shares.sum())
    topics = draw.permutation(documents)  # a topic has popular documents and others
    places = np.empty_like(topics)
    places[topics] = np.arange(documents)

    def popular() -> int:
        return min(int(np.searchsorted(cumulative, draw.random())), documents - 1)

    for _ in range(count):
        first = popular()
        begin = int(places[first]) // TOPIC * TOPIC
        members = topics[begin : begin + TOPIC]
        weights = shares[members] / shares[members].sum()
        found = {first: None}
        while len(found) < PASSAGES:
            topical = draw.random() < TOPICAL
            found[int(draw.choice(members, p=weights)) if topical else popular()] = None
        yield draw.permutation(list(found)).tolist()


def head_share(requests: Sequence[Sequence[int]], documents: int) -> float:
    """The share of the retrievals that the first `HEAD` of the documents take."""
    return float(np.mean(np.concatenate([np.asarray(each) for each in requests]) < HEAD * documents))


def run(
    out_dir: Path | None,
    *,
    quick: bool = False,
    simulate_only: bool = False,
    sizes: Sequence[int] = (),
    shared: bool = False,
    seed: int = 0,
    **replay: Any,
) -> dict[str, Any]:
    """Simulate all policies at every size if ``simulate_only``, else replay traces over real workers:
    ``replay`` are further arguments of `ragserve.bench.fleet_replay.run`."""
    if not simulate_only:
        return fleet_replay.run(
            out_dir, quick=quick, sizes=sizes or fleet_replay.SIZES, shared=shared, **replay
        )
    sizes = sizes or (8, 64, 512)
    costs = TokenCosts.measured()
    documents = 20_000 if quick else DOCUMENTS
    rows, head = [], 0.0
    for count in sizes[:1] if quick else sizes:
        number = 2_000 if quick else max(40_000, 200 * count)
        requests = list(skewed_requests(number, documents, seed))
        head = head_share(requests, documents)
        table = owner_table(requests, count)
        policies: dict[str, tuple[Callable[[], Policy], int, int]] = {
            BIG: (lambda: lambda documents, workers: (0, 0), 1, count),
            "random": (partial(random_policy, seed), count, 1),
            "round robin": (round_robin, count, 1),
            "cache_aware": (cache_aware, count, 1),
            "owner": (partial(affinity, table, holders=False, waits=False), count, 1),
            "holders": (partial(affinity, table, holders=True, waits=False), count, 1),
            OURS: (partial(affinity, table, holders=True, waits=True), count, 1),
        }
        runs = [(name, STORE_VALUE) for name in policies] + [(name, 0.0) for name in (BIG, OURS) if shared]
        for name, value in runs:
            policy, workers, scale = policies[name]
            store = SimulatedStore(costs, value) if shared else None
            outcome = simulate(requests, workers, policy(), costs, seed, scale, store)
            stored = {"store value": value} if shared else {}
            rows.append({"workers": count, "policy": name} | stored | outcome.row(number // 2))
    workload = {
        "documents": documents,
        "tokens of a document": DOCUMENT_TOKENS,
        "documents of a request": PASSAGES,
        "requests": "2,000" if quick else "40,000, or 200 a worker; the second half counts",
        "skew": f"{HEAD:.0%} of the documents take {head:.0%} of the retrievals, "
        f"{TOPICAL:.0%} of a request's are of one topic of {TOPIC}",
        "tiers of a worker": {tier: f"{CAPACITY[tier]:,} documents" for tier in TIERS},
        "costs, ms": {"a request": costs.base} | {k: round(v, 5) for k, v in costs.per_token.items()},
        "costs from": f"{COSTS_FROM}, {STORE_COSTS_FROM}",
        "shared store": "none",
        "seed": seed,
    }
    if shared:
        workload["shared store"] = f"{STORE_CAPACITY:,} documents, of the value given and more"
    note = (
        "Simulated, not measured. One big worker has the memory and the speed of all. cache_aware compares "
        "prefixes of tokens, as SGLang's router does with its defaults."
    )
    name = "fleet-simulated-shared" if shared else "fleet-simulated"
    out = None if out_dir is None else out_dir / f"{name}.json"
    return write(name, workload, rows, out=out, note=note)
