"""An hour of mixed load on a real engine: all strategies, sparse and dense decoding; half of the clients
leave, and documents are replaced meanwhile. No slot or page is left, memory is flat, and answers take as long
at the end as at the beginning. With ``burst_every``, all clients ask at the same moment now and then.

Memory is what all processes of the server hold, without pages of files: those of weights come into memory
when they are first read, for an hour and longer, and leave it when it is needed. Its mean of each minute is
taken, and its slope fitted from the eleventh minute on, within each life of the server where the campaign was
resumed. Latencies are compared
for each strategy and decode mode by themselves: the mean of the logarithms of the medians' quotients."""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.campaigns.operations import SPECS
from tests.campaigns.progress import Progress
from tests.campaigns.site import Site, looks
from tests.campaigns.tenants import COMMON

TARGET = None
MINUTES = 60.0
CLIENTS = 6
SPACE = "campaign-load"
WINDOW_MIN = 10.0  # beginning and end that are compared, and what memory has to settle; at most a quarter
SLOWER = 1.10  # allowed
SIGMAS = 3.0  # of the slope of the memory, from which on it is no noise
_SAMPLE_S = 5.0
_REPLACE_S = 2.0
DECODE: tuple[dict[str, Any], ...] = (
    {"mode": "dense"},
    {"mode": "hierarchical", "budget": 64, "reuse": 4, "dense_below": 0},
    {"mode": "progressive", "threshold": 0.9, "dense_below": 0},
)
FLAGS: dict[str, Any] = {
    "force_strategies": "true",
    "sparse_attention": "on",
    "decode_mode": "dense",
    "decode_page_size": 16,
    "decode_logical_page": 4,  # a budget of 64 tokens is four pages
}
_TAKEN_BACK = "its documents were evicted meanwhile"  # a request that gave its slots to others


@dataclass(frozen=True)
class Done:
    """Request of a client that has ended: how long it took, or how it failed."""

    kind: str
    label: str = ""
    seconds: float = 0.0
    failure: str = ""


@dataclass(frozen=True)
class Crowd:
    """``k`` passages a question; documents with ``entries`` more sentences of about 14 tokens;
    ``burst_every``: of so many requests of a client, one is sent when all clients are ready for it. 0:
    none."""

    clients: int = CLIENTS
    documents: int = 60
    k: int = 4
    entries: int = 0
    burst_every: int = 0


class Clients:
    """Threads that ask, each one at a time, and one that replaces documents, until ``stop``."""

    def __init__(self, site: Site, seed: str, crowd: Crowd) -> None:
        self.results: queue.Queue[Done] = queue.Queue()
        self._site, self._seed, self._crowd, clients = site, seed, crowd, crowd.clients
        self._end = threading.Event()
        self._together = threading.Barrier(clients)
        self._threads = [
            threading.Thread(target=self._client, args=(i,), daemon=True) for i in range(clients)
        ]
        self._threads.append(threading.Thread(target=self._writer, daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._end.set()
        self._together.abort()
        for thread in self._threads:
            thread.join()

    def _body(self, chance: random.Random) -> tuple[str, dict[str, Any]]:
        strategy, options = chance.choice(SPECS)
        decode = chance.choice(DECODE) if self._site.own else {}
        force = {"force": True} if strategy not in ("full", "prefix", "auto") else {}
        label = f"{strategy} {options} {decode.get('mode', '')}"
        return label, {
            "query": f"Who was the keeper of station {chance.randrange(self._crowd.documents)}?",
            "namespace": SPACE,
            "k": self._crowd.k,
            "strategy": strategy,
            "strategy_options": options | force,
            "decode": decode,
            "max_new_tokens": 16,
            "stream": chance.random() < 0.5,
        }

    def _client(self, number: int) -> None:
        chance = random.Random(f"{self._seed} client {number}")
        every = self._crowd.burst_every
        with httpx.Client(base_url=self._site.url, timeout=300) as client:
            for turn in itertools.count():
                if every and turn % every == 0:
                    with contextlib.suppress(threading.BrokenBarrierError):  # the end
                        self._together.wait()
                if self._end.is_set():
                    return
                label, body = self._body(chance)
                try:
                    if chance.random() < 0.5:
                        self._site.leave(chance.uniform(0, 1.0), **body)
                        self.results.put(Done("left"))
                        continue
                    began = time.monotonic()
                    answer = client.post("/rag/query", json=body)
                    self.results.put(self._done(answer, label, time.monotonic() - began))
                except (httpx.HTTPError, OSError) as error:
                    self.results.put(Done("asked", failure=repr(error)))
                    self._end.wait(1.0)

    def _done(self, answer: httpx.Response, label: str, seconds: float) -> Done:
        if _TAKEN_BACK in answer.text:
            return Done("retracted")
        whole = answer.is_success and "event: error" not in answer.text
        return Done("asked", label, seconds, "" if whole else f"{answer.status_code}: {answer.text[-400:]}")

    def _writer(self) -> None:
        chance = random.Random(f"{self._seed} writer")
        while not self._end.is_set():
            try:
                number, edition = chance.randrange(self._crowd.documents), chance.randrange(10**6)
                self._site.put(SPACE, dict([document(number, edition, self._crowd.entries)]))
                self.results.put(Done("replaced"))
            except (AssertionError, httpx.HTTPError) as error:
                self.results.put(Done("replaced", failure=repr(error)))
            self._end.wait(_REPLACE_S)


def document(number: int, edition: int, entries: int) -> tuple[str, str]:
    text = COMMON["station 0"].replace("number 0", f"number {number}")
    nights = (
        f"Night {n}: lamp {(n * 7919 + edition) % 97} burned until {n % 7 + 1}. " for n in range(entries)
    )
    return f"station {number}", f"Edition {edition} of the log of station {number}. {text}{''.join(nights)}"


class Watch:
    """Memory and latencies by minute, kept in the campaign's state."""

    def __init__(self, progress: Progress, site: Site) -> None:
        self._progress, self._site = progress, site
        data = progress.data
        self._lives: list[list[list[float]]] = data.setdefault("memory", [])  # life, sample: minute, MiB
        self._by_process: dict[str, list[list[float]]] = data.setdefault("memory by process", {})
        self._latencies: list[list[Any]] = data.setdefault("latencies", [])  # minute, label, ms
        self._lives.append([])
        self._began = self._sampled = time.monotonic()

    def took(self, done: Done) -> None:
        minute = round(self._progress.seconds / 60, 2)
        self._latencies.append([minute, done.label, round(1000 * done.seconds)])

    def sample(self) -> None:
        now = time.monotonic()
        if now - self._sampled >= _SAMPLE_S:
            self._sampled = now
            minute = round((now - self._began) / 60, 3)
            held = held_mib(processes(self._site))
            self._lives[-1].append([minute, round(sum(held.values()), 2)])
            for name, mib in held.items():
                self._by_process.setdefault(name, []).append([minute, round(mib, 2)])

    def figures(self, minutes: float) -> dict[str, Any]:
        window = min(WINDOW_MIN, minutes / 4)
        slope, error = slope_of([by_minute(life, window) for life in self._lives])
        later, later_error = slope_of([by_minute(life, minutes / 2) for life in self._lives])
        last = [mib for life in self._lives for _, mib in life][-1:]
        first, end = (self._medians(low, high) for low, high in ((0, window), (minutes - window, minutes)))
        both = sorted(set(first) & set(end))
        slower = math.exp(statistics.fmean(math.log(end[x] / first[x]) for x in both)) if both else None
        every = [ms for _, _, ms in self._latencies]
        return {
            "window, minutes": round(window, 1),
            "memory MiB": round(last[0]) if last else None,
            "memory slope MiB/h": _rounded(slope),
            "its standard error": _rounded(error),
            "slope of the second half": _rounded(later),
            "standard error of that": _rounded(later_error),
            "slope by process": {name: _slope(samples, window) for name, samples in self._by_process.items()},
            "latency ms p50": statistics.median(every) if every else None,
            "latency last/first": None if slower is None else round(slower, 3),
            "compared": len(both),
            "server starts": len(self._lives),
        }

    def _medians(self, low: float, high: float) -> dict[str, float]:
        by_label: defaultdict[str, list[float]] = defaultdict(list)
        for minute, label, ms in self._latencies:
            if low <= minute < high:
                by_label[label].append(ms)
        return {label: statistics.median(ms) for label, ms in by_label.items() if len(ms) >= 3}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _slope(samples: list[list[float]], after: float) -> float | None:
    """MiB an hour of one process; restarts of the server are not told apart."""
    return _rounded(slope_of([by_minute(samples, after)])[0])


def by_minute(samples: list[list[float]], after: float) -> list[tuple[float, float]]:
    """Means by minute of the samples that are later than ``after``: neighbours are not independent."""
    minutes: defaultdict[int, list[float]] = defaultdict(list)
    for minute, mib in samples:
        if minute >= after:
            minutes[int(minute)].append(mib)
    return [(minute, statistics.fmean(values)) for minute, values in sorted(minutes.items())]


def slope_of(lives: list[list[tuple[float, float]]]) -> tuple[float | None, float | None]:
    """The common slope of several series of (minute, value), per hour, and its standard error; each series
    has its own level. None for fewer than four points."""
    x: list[float] = []
    y: list[float] = []
    for life in filter(None, lives):
        mean_x, mean_y = (statistics.fmean(column) for column in zip(*life, strict=True))
        x += [minute / 60 - mean_x / 60 for minute, _ in life]
        y += [value - mean_y for _, value in life]
    spread = sum(each * each for each in x)
    freedom = len(x) - 1 - sum(map(bool, lives))
    if freedom < 2 or not spread:
        return None, None
    slope = sum(a * b for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / freedom / spread)


def assert_nothing_left(site: Site) -> None:
    """No request runs, no slot is locked, no page pinned, and every tier can be emptied."""
    site.warmed()
    _nobody_is_answered(site)
    site.analysed()
    site.settled()
    site.call("DELETE", "/rag/cache")
    figures = site.settled()
    left = figures["device"]["tokens"], figures["host"]["pages"], figures["disk"]["documents"]
    assert left == (0, 0, 0), f"{left} device tokens, host pages, files are left of an empty cache"


def _nobody_is_answered(site: Site) -> None:
    """Wait until the server has noticed that the last clients have left."""
    for last in looks():
        text = site.client.get("/metrics").text
        running = 0.0
        for gauge in ("ragserve_queries_in_flight", "sglang:num_running_reqs", "sglang:num_queue_reqs"):
            values = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(gauge)]
            assert values, f"{gauge} is not among the metrics"
            running += sum(values)
        if not running:
            return
        assert not last, f"{running:.0f} requests run although nobody asks"


def run(progress: Progress, site: Site | None = None, **options: Any) -> None:
    """``options`` are fields of `Crowd`, and settings of the server, e.g. ``context_length``."""
    ours = {field.name for field in fields(Crowd)} & options.keys()
    crowd = Crowd(**{name: options.pop(name) for name in ours})
    with contextlib.ExitStack() as stack:
        if site is None:
            site = stack.enter_context(Site(folder=progress.folder / "data", **(FLAGS | options)))
        before = descriptors_of(site)
        site.put(SPACE, dict(document(number, 0, crowd.entries) for number in range(crowd.documents)))
        clients = Clients(site, f"load {progress.seed} {progress.operations}", crowd)
        figures = watched(progress, site, clients)
        figures["file descriptors more"] = descriptors_of(site) - before
        _judge_latencies(progress, figures)


def watched(progress: Progress, site: Site, clients: Any) -> dict[str, Any]:
    """Count the ``results`` of clients and sample the memory of the server until the campaign's end; then
    ``stop`` them, and judge what is left and whether memory grows."""
    watch = Watch(progress, site)
    try:
        while progress.goes_on() and site.is_up:
            with contextlib.suppress(queue.Empty):
                _count(progress, watch, clients.results.get(timeout=1.0))
            watch.sample()
    finally:
        clients.stop()
    while not clients.results.empty():  # what was under way at the end
        _count(progress, watch, clients.results.get())
    with progress.operation("ended"):
        assert site.is_up, f"the server ended:\n{site.running.log.read_text()[-3000:]}"
        assert_nothing_left(site)
    figures = watch.figures(progress.seconds / 60)
    progress.data["figures"] = figures
    # A cache that is filled once, late, raises the slope of the whole hour; a leak goes on to the end.
    slope, error = figures["slope of the second half"], figures["standard error of that"]
    if slope is not None and slope > SIGMAS * error:
        progress.violation(f"memory grows by {slope} MiB/h in the second half, standard error {error}")
    return figures


def _count(progress: Progress, watch: Watch, done: Done) -> None:
    with progress.operation(done.kind):
        assert not done.failure, done.failure
        if done.label:
            watch.took(done)


def _judge_latencies(progress: Progress, figures: dict[str, Any]) -> None:
    slower = figures["latency last/first"]
    if slower is not None and progress.minutes and progress.minutes >= 4 * WINDOW_MIN and slower > SLOWER:
        progress.violation(f"latencies at the end are {slower} times those at the beginning")


def processes(site: Site) -> list[psutil.Process]:
    main = psutil.Process(site.running.process.pid)
    return [main, *main.children(recursive=True)]


def held_mib(of: Iterable[psutil.Process]) -> dict[str, float]:
    """Resident memory that is no file's, by name of the process."""
    held: defaultdict[str, float] = defaultdict(float)
    for process in of:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it has ended
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            kib = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
            held[process.name()] += sum(kib) / 2**10
    return held


def descriptors_of(site: Site) -> int:
    """Open files of all processes of the server."""
    return sum(process.num_fds() for process in processes(site))
