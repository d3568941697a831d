"""Random operations on a real engine, with the state that must follow beside it: what was removed is not
found, the same prompt has the same answer whichever tier its documents come from, and after every operation
the accounts of all tiers are right.

So that an hour has many operations, model and embedder are small ones with random weights, documents have a
line each and answers a few tokens. A fault of a tier or a context changes answers all the same: they depend
on every token. A run that goes on after a kill begins with empty namespaces."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

import httpx

from ragserve.cache.evictions import GRACE_S
from tests.campaigns.progress import Progress
from tests.campaigns.site import Site
from tests.integration.models import small_models

TARGET = 100_000
SPACES = ("campaign-left", "campaign-right")
TREES = ("ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine")
NAMES = tuple(f"station {tree}" for tree in TREES)
KEEPERS = ("Ada Brandt", "Ivar Lund", "Mara Quist", "Olaf Reyn")  # of the editions of a document
SPECS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {}),
    ("prefix", {}),
    ("concat", {}),
    ("concat", {"keep": 0.5}),
    ("concat", {"recompute": "sentences", "share": 0.1}),
    ("concat", {"recompute": "all"}),
    ("epic", {"first": 4}),
    ("random", {"share": 0.2}),
    ("cacheblend", {"share": 0.3}),
    ("samkv", {}),
    ("samkv", {"selection": "shared"}),
    ("auto", {}),
)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # KV of a token: layers, K and V, KV heads, head size, float32
FLAGS: dict[str, Any] = {
    "force_strategies": "true",
    "max_total_tokens": 1024,  # about three contexts
    "kv_host_bytes": 512 * TOKEN_BYTES,  # about half of what both namespaces have
    "kv_disk_bytes": 1200 * TOKEN_BYTES,  # most of it, with the files' records
}
RESTART_EVERY = 5000
_ANSWERS = 20_000  # known ones that are kept


def text_of(name: str, edition: int) -> str:
    return f"The keeper of {name} is {KEEPERS[edition % len(KEEPERS)]}. Its lamp number {edition} is lit."


class World:
    """The server, and what it must have: the edition of each document by namespace."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.editions: dict[str, dict[str, int]] = {space: {} for space in SPACES}
        self.answers: dict[Any, str] = {}
        self.too_many: dict[tuple[str, str], float] = {}  # since when a tier has more than is indexed
        for space in SPACES:
            if site.documents(space):
                site.call("DELETE", f"/rag/namespaces/{space}")

    def put(self, chance: random.Random) -> None:
        space, names = chance.choice(SPACES), chance.sample(NAMES, chance.choice((1, 2, 4, 7)))
        editions = {name: chance.randrange(3) for name in names}
        self.site.put(space, {name: text_of(name, edition) for name, edition in editions.items()})
        self.editions[space] |= editions

    def remove(self, chance: random.Random) -> None:
        space = chance.choice(SPACES)
        if self.editions[space]:
            name = chance.choice(sorted(self.editions[space]))
            self.site.remove(space, name)
            del self.editions[space][name]

    def drop(self, chance: random.Random) -> None:
        space = chance.choice(SPACES)
        if self.editions[space]:
            self.site.call("DELETE", f"/rag/namespaces/{space}")
            self.editions[space] = {}

    def warm(self, chance: random.Random) -> None:
        space = chance.choice(SPACES)
        if self.editions[space]:
            job = self.site.warm(space)
            assert job["state"] == "done", job

    def evict(self, chance: random.Random) -> None:
        tiers = chance.choice((["device"], ["host"], ["device", "host"]))
        self.site.call("POST", "/rag/cache/evict", json={"tiers": tiers})

    def flush(self, chance: random.Random) -> None:
        self.site.call("DELETE", "/rag/cache")

    def leave(self, chance: random.Random) -> None:
        self.site.leave(
            chance.uniform(0, 0.1), **self._question(chance, new=100), stream=chance.random() < 0.5
        )

    def _question(self, chance: random.Random, new: int | None = None) -> dict[str, Any]:
        strategy, options = chance.choice(SPECS)
        force = {"force": True} if strategy not in ("full", "prefix", "auto") else {}
        return {
            "namespace": chance.choice([space for space in SPACES if self.editions[space]] or SPACES),
            "query": f"Who is the keeper of {chance.choice(NAMES)}?",
            "strategy": strategy,
            "strategy_options": options | force,
            "k": chance.choice((1, 3, 5, 16)),
            "max_new_tokens": new or chance.randint(1, 3),
        }

    def query(self, chance: random.Random) -> None:
        body = self._question(chance)
        space, k = body["namespace"], body["k"]
        editions = self.editions[space]
        if not editions:
            answer = self.site.client.post("/rag/query", json=body)
            assert answer.status_code == httpx.codes.NOT_FOUND or answer.json()["citations"] == [], (
                answer.text
            )
            return
        asked = self.site.ask(**body)
        known = {(name, text_of(name, edition)) for name, edition in editions.items()}
        assert set(asked.passages) <= known, f"{set(asked.passages) - known} is not in {space}"
        assert len(asked.passages) == len(set(asked.passages)) == min(k, len(known)), (body, asked.passages)
        assert asked.kept == len(asked.passages), asked.answer["context"]
        assert {(row["source"], row["text"]) for row in asked.answer["citations"]} <= known
        if not any("not fully analysed" in note for note in asked.answer["context"]["notes"]):
            self._same_answer(body, asked.passages, asked.answer["answer"])

    def _same_answer(self, body: dict[str, Any], passages: list[tuple[str, str]], answer: str) -> None:
        exact = body["strategy"] in ("full", "prefix", "auto") or "all" in body["strategy_options"].values()
        spec = "exact" if exact else (body["strategy"], str(body["strategy_options"]))
        prompt = (spec, body["query"], body["max_new_tokens"], tuple(passages))
        if len(self.answers) >= _ANSWERS:
            self.answers.clear()
        first = self.answers.setdefault(prompt, answer)
        assert answer == first, f"{body} answered {answer!r}, and {first!r} before"

    def restart(self, chance: random.Random) -> None:
        if self.site.own:
            self.site.down()
            self.site.up()

    def check(self) -> None:
        """Nothing is locked, pinned, lost or counted twice, and no tier keeps more than what is indexed."""
        figures = self.site.settled()
        assert figures["faults"] == {} or not self.site.own, figures["faults"]
        assert figures["device"]["bytes"] <= figures["device"]["budget_bytes"], figures["device"]
        for tier in ("host", "disk"):
            for space in SPACES:
                held = figures[tier]["namespaces"].get(space, {"documents": 0})["documents"]
                most = len(self.editions[space]) + 1  # and the system text
                if held <= most:
                    self.too_many.pop((tier, space), None)
                    continue
                # A client that left may have had a text computed that was removed meanwhile.
                since = self.too_many.setdefault((tier, space), time.monotonic())
                assert time.monotonic() - since < 2 * GRACE_S, (
                    f"{tier} has {held} documents of {space}, which has {most - 1}, for {2 * GRACE_S:g} s"
                )


OPERATIONS: tuple[tuple[Callable[[World, random.Random], None], int], ...] = (
    (World.query, 69),
    (World.put, 3),  # a job starts a parser process: it costs ten queries
    (World.remove, 6),
    (World.warm, 6),
    (World.evict, 8),
    (World.leave, 6),
    (World.flush, 1),
    (World.drop, 1),
)


def run(progress: Progress, site: Site | None = None) -> None:
    """Run to the end on ``site``, or on a server of our own."""
    with contextlib.ExitStack() as stack:
        if site is None:
            site = stack.enter_context(
                Site(folder=progress.folder / "data", **small_models(progress.folder), **FLAGS)
            )
        world = World(site)
        kinds, weights = zip(*OPERATIONS, strict=True)
        while progress.goes_on():
            chance = progress.random()
            (work,) = chance.choices(kinds, weights)
            if progress.operations % RESTART_EVERY == RESTART_EVERY - 1:
                work = World.restart
            with progress.operation(work.__name__):
                work(world, chance)
                world.check()
            if not site.is_up:
                progress.violation(f"the server ended:\n{site.running.log.read_text()[-3000:]}")
                site.ensure_up()
                world = World(site)
