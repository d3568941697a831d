"""kill -9 of a worker every ten seconds, while clients ask a server with replicas. Answers are those that
were given before the first kill, only requests that ran when a worker died may fail, each with an error to
send it again, and the worker comes back by itself: without damaged pages, and having confirmed the removal of
a document that was removed while it was away. Whenever one serves again, documents are found on disk: workers
come back with what is on theirs.

A worker takes longer than ten seconds to come back on a slow machine. The next one is killed when two serve,
so that somebody is left to answer. That a request failed by its own worker's death is seen only by the time:
it ran at a kill, and its error is the one that a broken stream has. Answers are compared with those of the
calm before, where clients ask at the same time as well: sums differ in their last bits with the batch, and a
question whose answer did so there has several."""

from __future__ import annotations

import contextlib
import queue
import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import httpx
import psutil

from tests.campaigns.load import Done
from tests.campaigns.progress import Progress
from tests.campaigns.site import Site
from tests.campaigns.tenants import COMMON

TARGET = None
MINUTES = 10.0
SPACE = "campaign-fleet"
_PASSING = "campaign-fleet-passing"  # namespace of documents that are removed
ASKED = (("full", {}), ("prefix", {}), ("concat", {"force": True}))
CALM = 3  # times that each question is asked before the first kill
BACK_S = 240.0
_LOOK_S = 0.05
_LOST = "worker_lost"  # the error of a request whose worker died in the middle

Kill = Callable[[str], None]
"""Kills the worker at an address."""


@dataclass(frozen=True)
class Crowd:
    """Clients that ask about ``documents`` documents, ``k`` passages a question; a worker dies every
    ``every_s`` seconds."""

    clients: int = 4
    documents: int = 12
    k: int = 3
    every_s: float = 10.0


@dataclass
class Kills:
    """When workers were killed, from just before to just after, in seconds of time.monotonic()."""

    times: list[tuple[float, float]] = field(default_factory=list)

    def within(self, began: float, ended: float) -> bool:
        """Tell whether one fell between these times."""
        return any(began <= after and before <= ended for before, after in self.times[-8:])


class Clients:
    """Threads that ask, one question at a time each, until ``stop``. ``answers`` has those that were given in
    the calm, and is extended until ``calm`` is over."""

    def __init__(self, site: Site, seed: str, crowd: Crowd, kills: Kills) -> None:
        self.results: queue.Queue[Done] = queue.Queue()
        self.answers: defaultdict[tuple[int, str], set[str]] = defaultdict(set)
        self._site, self._seed, self._crowd, self._kills = site, seed, crowd, kills
        self._calm = queue.SimpleQueue[tuple[int, str, dict[str, Any]]]()
        self._calm_over, self._end = threading.Event(), threading.Event()
        questions = [(n, *asked) for n in range(crowd.documents) for asked in ASKED]
        for question in questions * CALM:
            self._calm.put(question)
        self._threads = [
            threading.Thread(target=self._client, args=(number,), daemon=True)
            for number in range(crowd.clients)
        ]
        for thread in self._threads:
            thread.start()

    def calm(self) -> None:
        """Wait until every question has been asked `CALM` times. Raises AssertionError if one failed."""
        for _ in range(self._crowd.documents * len(ASKED) * CALM):
            done = self.results.get(timeout=BACK_S)
            assert not done.failure, done.failure
        self._calm_over.set()

    def stop(self) -> None:
        self._end.set()
        self._calm_over.set()
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        chance = random.Random(f"{self._seed} client {number}")
        with httpx.Client(base_url=self._site.url, timeout=300) as client:
            for document, strategy, options in self._first():
                answer = self._send(client, document, strategy, options)
                if answer is not None:
                    self.answers[document, strategy].add(answer)
                    self.results.put(Done("calm"))
            self._calm_over.wait()
            while not self._end.is_set():
                strategy, options = chance.choice(ASKED)
                document = chance.randrange(self._crowd.documents)
                answer = self._send(client, document, strategy, options)
                if answer is not None:
                    known = self.answers[document, strategy]
                    wrong = f"{strategy} of {document} answers {answer!r}, and {known} before"
                    self.results.put(Done("asked", failure="" if answer in known else wrong))

    def _first(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        with contextlib.suppress(queue.Empty):
            while not self._end.is_set():
                yield self._calm.get_nowait()

    def _send(
        self, client: httpx.Client, document: int, strategy: str, options: dict[str, Any]
    ) -> str | None:
        """The answer, after sending again what a dying worker broke off; None if it failed, which is put into
        the results."""
        body = _question(document, self._crowd.k, strategy, options)
        while True:
            began = time.monotonic()
            try:
                response = client.post("/rag/query", json=body)
            except httpx.HTTPError as error:
                self.results.put(Done("asked", failure=repr(error)))
                self._end.wait(1.0)
                return None
            if response.is_success:
                return str(response.json()["answer"])
            said = f"{response.status_code}: {response.text[-400:]}"
            own = _LOST in response.text and self._kills.within(began, time.monotonic())
            self.results.put(Done("sent again" if own else "asked", failure="" if own else said))
            if not own:
                self._end.wait(1.0)
                return None


class Fleet:
    """What is seen of the workers, and what is done to them."""

    def __init__(self, site: Site, kill: Kill) -> None:
        self._site, self._kill = site, kill

    def workers(self) -> list[dict[str, Any]]:
        return list(self._site.call("GET", "/info")["engine"]["workers"])

    def serving(self) -> list[str]:
        """Addresses of those that serve."""
        return [one["url"] for one in self.workers() if one["state"] == "serving"]

    def until_serving(self, what: str) -> float:
        """Wait until all serve; how long that took, in seconds."""
        began = time.monotonic()
        while len(self.serving()) < len(workers := self.workers()):
            assert time.monotonic() - began < BACK_S, f"{what}: {workers}"
            time.sleep(_LOOK_S)
        return time.monotonic() - began

    def kill_one(self, kills: Kills, chance: random.Random) -> str:
        """Kill a worker that serves, and remove a document while it is away. Returns its address."""
        name = f"passing {len(kills.times)}"
        self._site.put(_PASSING, {name: f"{name} is removed while a worker is away."})
        # which a warm-up would not cache before the clients leave it time
        body = {"query": name, "namespace": _PASSING, "strategy": "concat", "max_new_tokens": 1}
        self._site.call("POST", "/rag/query", json=body | {"strategy_options": {"force": True}})
        victim, before = chance.choice(self.serving()), time.monotonic()
        # the end of the interval is not known yet, and a request may fail before it is
        kills.times.append((before, before + BACK_S))
        self._kill(victim)
        kills.times[-1] = (before, time.monotonic())
        self._site.remove(_PASSING, name)
        assert not self._site.documents(_PASSING), "it was removed"
        return victim

    def tiers(self, crowd: Crowd) -> Counter[str]:
        """The tokens of each document's passages by the tier that they come from now."""
        found: Counter[str] = Counter()
        for number in range(crowd.documents):
            body = _question(number, crowd.k, "concat", {"force": True})
            found.update(self._site.call("POST", "/rag/query", json=body)["context"]["tokens_by_tier"])
        return found

    def assert_nothing_left(self, documents: int) -> None:
        """All serve, have confirmed every removal, and every document is there."""
        self.until_serving("a worker does not come back")
        left = {one["url"]: one["unconfirmed_deletions"] for one in self.workers()}
        assert not any(left.values()), f"removals that are not confirmed: {left}"
        found = set(self._site.documents(SPACE))
        assert found == {_name(number) for number in range(documents)}, f"documents: {sorted(found)}"


def _name(number: int) -> str:
    return f"station {number}"


def _question(document: int, k: int, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "query": f"Who was the keeper of station {document}?",
        "namespace": SPACE,
        "k": k,
        "strategy": strategy,
        "strategy_options": options,
        "max_new_tokens": 8,
    }


def run(progress: Progress, site: Site | None = None, kill: Kill | None = None, **options: Any) -> None:
    """``options`` are fields of `Crowd`, and settings of the server, e.g. ``replicas``."""
    ours = {each.name for each in fields(Crowd)} & options.keys()
    crowd = Crowd(**{name: options.pop(name) for name in ours})
    with contextlib.ExitStack() as stack:
        if site is None:
            flags = {"replicas": 2, "force_strategies": "true"} | options
            site = stack.enter_context(Site(folder=progress.folder / "data", **flags))
        fleet = Fleet(site, kill or _killer(site))
        for name in site.documents(_PASSING):  # of a campaign that was killed
            site.remove(_PASSING, name)
        text = COMMON["station 0"]
        site.put(SPACE, {_name(n): text.replace("number 0", f"number {n}") for n in range(crowd.documents)})
        fleet.until_serving("a worker does not start")
        kills = Kills()
        clients = Clients(site, f"fleet {progress.seed} {progress.operations}", crowd, kills)
        tiers: Counter[str] = Counter()
        try:
            clients.calm()
            back = _kill_until_the_end(progress, fleet, clients, kills, crowd, tiers)
        finally:
            clients.stop()
        while not clients.results.empty():  # what was under way at the end
            _count(progress, clients.results.get())
        with progress.operation("ended"):
            fleet.assert_nothing_left(crowd.documents)
            if site.own:  # workers of others may have no disk
                assert tiers["disk"] or not back, f"workers came back without their disks: {dict(tiers)}"
                site.settled()
        progress.data["figures"] = {
            "kills": len(kills.times),
            "back after s, median": round(statistics.median(back), 1) if back else None,
            "back after s, most": round(max(back), 1) if back else None,
            "tokens by tier, when one served again": dict(tiers),
            "questions with several answers": sum(len(each) > 1 for each in clients.answers.values()),
        }


def _kill_until_the_end(
    progress: Progress, fleet: Fleet, clients: Clients, kills: Kills, crowd: Crowd, tiers: Counter[str]
) -> list[float]:
    """Returns how long each killed worker took until it served again, in seconds. Adds to ``tiers`` where
    documents come from when one does."""
    back: list[float] = []
    due, away = time.monotonic(), dict[str, float]()  # when the workers that are away were killed
    lost: set[str] = set()  # of these, those that the server has missed
    while progress.goes_on():
        with contextlib.suppress(queue.Empty):
            _count(progress, clients.results.get(timeout=_LOOK_S))
        serving, now = set(fleet.serving()), time.monotonic()
        lost |= away.keys() - serving
        if returned := serving & lost:
            back += [now - away.pop(url) for url in returned]
            lost -= returned
            tiers.update(fleet.tiers(crowd))
        if now >= due and len(serving) >= 2:
            with progress.operation("killed"):
                away[fleet.kill_one(kills, progress.random())] = now
            due = now + crowd.every_s
        elif any(now - killed > BACK_S for killed in away.values()):
            progress.violation(f"a worker does not come back: {fleet.workers()}")
            break
    return back


def _count(progress: Progress, done: Done) -> None:
    with progress.operation(done.kind):
        assert not done.failure, done.failure


def _killer(site: Site) -> Kill:
    """Kills the process of a replica, which the server then starts again."""

    def kill(url: str) -> None:
        port = url.rpartition(":")[2]
        for process in psutil.Process(site.running.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "--worker" in (line := process.cmdline()) and port in line:
                    process.kill()
                    return
        raise AssertionError(f"no process of {url} is there to be killed")

    return kill
