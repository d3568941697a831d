"""Random dialogues of several turns on a real engine, three at once: KV is evicted between turns, that of
sessions to the host, dialogues are computed anew, clients leave, two turns of one session come together,
documents are removed. Every turn must go on from the one before, exact strategies must say what full prefill
says of the same dialogue, also where a budget shortens it by words, and when all sessions have ended, no
slot, page or session is left, on the device or on the host. Some dialogues are prefilled sparsely: whoever
asks the same exactly afterwards gets the answer of full prefill.

An operation is a dialogue. Model and embedder are small ones with random weights, as in `operations`. A
server that tests share may neither keep sessions on the host, nor compute them anew, nor prefill sparsely."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.campaigns.load import assert_nothing_left
from tests.campaigns.operations import FLAGS, NAMES, text_of
from tests.campaigns.progress import Progress
from tests.campaigns.site import Site
from tests.integration.models import random_llama, small_models

TARGET = 1000
LANES = 3  # dialogues at once, each in a namespace of its own
MOST_TURNS = 5
REFRESH = 2  # turns after which a composed dialogue is computed anew
HEAD = 64  # elements of a head: the least that sparse prefill takes
_TOKEN_BYTES = 2 * 2 * 2 * HEAD * 4  # KV of a token: layers, K and V, KV heads, float32
_SERVER: dict[str, Any] = FLAGS | {
    "kv_host_bytes": 1024 * _TOKEN_BYTES,  # documents and sessions of all lanes take more
    "kv_disk_bytes": 1200 * _TOKEN_BYTES,
    "sparse_attention": "on",
    "decode_mode": "dense",
    "decode_page_size": 16,
    "session_on_host": True,
    "session_refresh_turns": REFRESH,
    "control_routes": True,  # for /dumper, which evicts sessions
    "env": {"DUMPER_SERVER_PORT": "reuse"},
}
SPECS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {}),
    ("prefix", {}),
    ("prefix", {}),  # more often, since most of these are prefilled sparsely
    ("prefix", {}),
    ("concat", {"recompute": "all"}),
    ("concat", {"recompute": "sentences", "share": 0.3}),
    ("concat", {}),
    ("epic", {"first": 4}),
    ("cacheblend", {"share": 0.3}),
    ("auto", {}),
)
SPARSE: tuple[dict[str, Any], ...] = (
    {},
    {"mode": "vertical_slash", "share": 0.3, "observe": 16, "dense_last": 16, "dense_below": 100},
    {"mode": "block_sparse", "share": 0.3, "dense_last": 16, "dense_below": 100},
)
_TAKEN_BACK = "its documents were evicted meanwhile"  # a request that gave its slots to others


class Lane:
    """A namespace, and the dialogues in it, one after the other."""

    def __init__(self, site: Site, number: int) -> None:
        self.site = site
        self.refresh = REFRESH if site.own else 0
        self.space = f"campaign-dialogues-{number}"
        self.editions: dict[str, int] = {}
        self.did: Counter[str] = Counter()

    def fill(self, chance: random.Random) -> None:
        """Add the documents that are missing."""
        missing = {name: chance.randrange(3) for name in NAMES if name not in self.editions}
        if missing:
            self.site.put(self.space, {name: text_of(name, edition) for name, edition in missing.items()})
            self.editions |= missing

    def dialogue(self, seed: str) -> None:
        """Hold a dialogue, and end its session."""
        chance = random.Random(seed)
        self.fill(chance)
        talk = Talk(self, chance)
        try:
            talk.hold()
            if talk.exact and talk.turns:
                talk.repeat_in_full()
            if talk.prefill:
                talk.ask_exactly()
        finally:
            talk.end()
        own = [each for each in self._sessions() if each["namespace"] == self.space]
        assert all(each["turns"] for each in own), f"a session without a turn is left: {own}"
        for each in own:  # begun by a client that left after its answer was complete
            self.site.call("DELETE", f"/rag/sessions/{each['id']}")

    def turns_of(self, session: str) -> int:
        found = [each["turns"] for each in self._sessions() if each["id"] == session]
        assert found, f"session {session} is not listed"
        return int(found[0])

    def _sessions(self) -> list[dict[str, Any]]:
        return list(self.site.call("GET", "/rag/sessions")["sessions"])


class Talk:
    """A session that is asked turn by turn. ``turns``: what was asked and answered, as far as all of it is
    known; None once a client has left, or documents are gone."""

    def __init__(self, lane: Lane, chance: random.Random) -> None:
        self.lane, self.chance, self.site = lane, chance, lane.site
        strategy, options = chance.choice(SPECS)
        self.composed = strategy not in ("full", "prefix", "auto")
        force = {"force": True} if self.composed else {}
        self.named = {"strategy": strategy, "strategy_options": options | force}
        self.budget = chance.choice((0, 0, 40, 120))
        self.prefill = chance.choice(SPARSE) if strategy == "prefix" and self.site.own else {}
        self.exact = not self.prefill and (strategy in ("full", "prefix") or "all" in options.values())
        self.session, self.number, self.tokens = "new", 0, 0
        self.sources: set[str] = set()
        self.turns: list[tuple[dict[str, Any], dict[str, Any]]] | None = []

    def hold(self) -> None:
        for _ in range(self.chance.randint(2, MOST_TURNS)):
            if not self.turn():
                return
            between = self.chance.choices(
                (None, self.evict, self.leave, self.together, self.remove), (8, 6, 4, 2, 1)
            )[0]
            if between is not None:
                self.lane.did[between.__name__] += 1
                if not between():
                    return

    def turn(self) -> bool:
        """Ask a turn; False if the session is full, or its slots went to others."""
        body = self._question()
        answer = self._asked(body)
        if answer is not None and self.turns is not None:
            self.turns.append((body, answer))
        return answer is not None

    def evict(self) -> bool:
        tiers = self.chance.choice((["device"], ["host"], ["device", "host"], ["sessions"], ["sessions"]))
        if tiers != ["sessions"]:
            self.site.call("POST", "/rag/cache/evict", json={"tiers": tiers})
        elif self.site.own:
            self.site.call("POST", "/dumper/ragserve", json={"op": "evict", "tiers": tiers})
            figures = self.site.call("GET", "/rag/cache")
            self.lane.did["to the host"] += figures["host"]["sessions"] > 0
        if self.chance.random() < 0.2:
            self.site.call("DELETE", "/rag/cache")
        return True

    def leave(self) -> bool:
        """Close the connection in the middle: the turn counts whole or not at all."""
        body = self._question() | {"session": self.session, "max_new_tokens": 60}
        self.site.leave(self.chance.uniform(0, 0.1), **body, stream=self.chance.random() < 0.5)
        after = self._asked(self._question(), beside=True)  # waits for the turn before
        self.turns = None
        return after is not None

    def together(self) -> bool:
        """Ask two turns at once: they come one after the other."""
        bodies = [self._question() | {"session": self.session} for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda body: self.site.client.post("/rag/query", json=body), bodies))
        self.turns = None
        if any(self._is_refused(answer) for answer in answers):
            return False
        said = sorted((answer.json() for answer in answers), key=lambda each: each["session"]["turn"])
        numbers = [each["session"]["turn"] for each in said]
        assert numbers == [self.number + 1, self.number + 2], f"two turns at once are {numbers}"
        for each in said:
            self._goes_on(each)
        return True

    def remove(self) -> bool:
        """Remove a document that the session rests on: the session ends, and says so."""
        held = sorted(self.sources & self.lane.editions.keys())
        if not held:
            return True
        name = self.chance.choice(held)
        self.site.remove(self.lane.space, name)
        del self.lane.editions[name]
        answer = self.site.client.post("/rag/query", json=self._question() | {"session": self.session})
        assert answer.status_code == httpx.codes.CONFLICT, answer.text
        assert answer.json()["error"]["code"] == "session_outdated", answer.text
        self.turns = None
        return False

    def repeat_in_full(self) -> None:
        """Hold the same dialogue with every turn prefilled whole, and compare, up to a turn for which
        attention has chosen what stays of earlier ones."""
        self.lane.did["repeat_in_full"] += 1
        session: str = "new"
        named: dict[str, Any] = {"strategy": "full", "strategy_options": {}, "session_budget": self.budget}
        try:
            for body, before in self.turns or ():
                now = self.site.call("POST", "/rag/query", json=body | named | {"session": session})
                session, named = now["session"]["id"], {}
                if _is_chosen_by_attention(before):  # to KV that `full` has none of
                    self.lane.did["chosen by attention"] += 1
                    return
                assert now["answer"] == before["answer"], (
                    f"turn {now['session']['turn']} of {self.named} said {before['answer']!r}, in full "
                    f"{now['answer']!r}"
                )
                assert now["session"]["tokens"] == before["session"]["tokens"]
        finally:
            if session != "new":
                self.site.call("DELETE", f"/rag/sessions/{session}")

    def ask_exactly(self) -> None:
        """Nothing that was prefilled sparsely is found by an exact request for the same text."""
        body = self._question() | {"k": len(NAMES), "max_new_tokens": 8}
        sparse = self.site.call("POST", "/rag/query", json=body | {"strategy": "prefix"})
        assert sparse["prefill"] is not None, sparse
        del body["prefill"]
        said = [
            self.site.call("POST", "/rag/query", json=body | {"strategy": strategy})
            for strategy in ("prefix", "full")
        ]
        self.lane.did["sparse says something else"] += sparse["answer"] != said[1]["answer"]
        assert said[0]["answer"] == said[1]["answer"], f"{body}: {[each['answer'] for each in said]}"
        self.lane.did["asked exactly"] += 1

    def end(self) -> None:
        if self.session == "new":
            return
        self.site.call("DELETE", f"/rag/sessions/{self.session}")
        gone = self.site.client.post("/rag/query", json=self._question() | {"session": self.session})
        assert gone.status_code == httpx.codes.NOT_FOUND, gone.text
        assert gone.json()["error"]["code"] == "session_not_found", gone.text

    def _question(self) -> dict[str, Any]:
        return {
            "namespace": self.lane.space,
            "query": f"Who is the keeper of {self.chance.choice(NAMES)}?",
            "k": self.chance.choice((1, 1, 2)),
            "follow_ups": "alone",
            "max_new_tokens": self.chance.randint(1, 3),
            **({"prefill": self.prefill} if self.prefill else {}),
        }

    def _asked(self, body: dict[str, Any], *, beside: bool = False) -> dict[str, Any] | None:
        """Ask, and check what the answer says of the session; None if it is refused. ``beside``: a turn whose
        client has left may come before."""
        first = self.named | {"session_budget": self.budget} if self.session == "new" else {}
        response = self.site.client.post("/rag/query", json=body | first | {"session": self.session})
        if self._is_refused(response):
            return None
        answer = dict(response.json())
        use = answer["session"]
        assert use["turn"] - self.number in ((1, 2) if beside else (1,)), f"turn {use} after {self.number}"
        assert use["tokens_held"] + use["tokens_computed"] <= use["tokens"], use
        assert use["tokens_held"] <= answer["usage"]["cached"], answer
        assert use["tokens_held"] == answer["context"]["tokens_by_tier"]["session"], answer
        assert self.session in ("new", use["id"]), f"{use['id']} answers {self.session}"
        known = {(name, text_of(name, edition)) for name, edition in self.lane.editions.items()}
        cited = {(row["source"], row["text"]) for row in answer["citations"]}
        assert cited <= known, f"{cited - known} is not in {self.lane.space}"
        self.session = use["id"]
        self._goes_on(answer)
        self.sources |= {source for source, _ in cited}
        self.lane.did["turn"] += 1
        assert self.lane.turns_of(self.session) == self.number
        return answer

    def _goes_on(self, answer: dict[str, Any]) -> None:
        """The prompt has all that was said before, and is what the next turn goes on from."""
        prompt, use = answer["usage"]["prompt"], answer["session"]
        self.lane.did["refreshed"] += use["refreshed"]
        if (sparse := answer["prefill"]) is not None:
            assert self.prefill, f"{self.named} is prefilled sparsely"
            assert sparse["tokens"] == prompt - answer["usage"]["cached"], answer
            self.lane.did["sparse"] += 1
        if self.budget:
            self._is_within(use)
        else:
            assert prompt > self.tokens, f"a prompt of {prompt} tokens after {self.tokens}"
            self._is_anew_in_time(use)
        assert use["tokens"] >= prompt, f"{use} of a prompt of {prompt} tokens"
        self.number, self.tokens = use["turn"], use["tokens"]

    def _is_anew_in_time(self, use: dict[str, Any]) -> None:
        """Every so many turns a composed dialogue is computed anew."""
        every, before = self.lane.refresh, use["turn"] - 1
        due = self.composed and every > 0 and before > 0 and before % every == 0
        if self.named["strategy"] != "auto":  # which may choose either
            assert use["refreshed"] == due, f"{self.named}: {use}"

    def _is_within(self, use: dict[str, Any]) -> None:
        """Turns before the last one keep to the budget, and the last one is whole."""
        *earlier, last = use["earlier"] or [{"turn": 0, "tokens": 0, "tokens_kept": 0}]
        assert last["turn"] == use["turn"] - 1, use
        assert last["tokens"] == last["tokens_kept"], f"the last turn is not whole: {use}"
        kept = sum(one["tokens_kept"] for one in earlier)
        assert kept <= self.budget, f"{kept} tokens with a budget of {self.budget}: {use}"
        self.lane.did["shortened"] += kept < sum(one["tokens"] for one in earlier)

    def _is_refused(self, response: httpx.Response) -> bool:
        if response.is_success:
            return False
        self.lane.did["refused"] += 1
        full = response.json()["error"]["code"] == "session_full"
        assert full or _TAKEN_BACK in response.text, f"{response.status_code}: {response.text[:500]}"
        return True


def _is_chosen_by_attention(answer: dict[str, Any]) -> bool:
    return any(each["rule"] in ("attention", "mixed") for each in answer["session"]["earlier"] or ())


def _models(folder: Path) -> dict[str, Any]:
    return small_models(folder) | {"model": random_llama(folder / "model", kv_heads=2, head_dim=HEAD)}


@contextlib.contextmanager
def _lanes(site: Site) -> Iterator[list[Lane]]:
    lanes = [Lane(site, number) for number in range(LANES)]
    try:
        yield lanes
    finally:
        for lane in lanes:
            if site.is_up and site.documents(lane.space):
                site.call("DELETE", f"/rag/namespaces/{lane.space}")


def run(progress: Progress, site: Site | None = None) -> None:
    """Run to the end on ``site``, or on a server of our own."""
    with contextlib.ExitStack() as stack:
        if site is None:
            site = stack.enter_context(
                Site(folder=progress.folder / "data", **_models(progress.folder), **_SERVER)
            )
        lanes = stack.enter_context(_lanes(site))
        pool = stack.enter_context(ThreadPoolExecutor(LANES))
        while progress.goes_on():
            number, seed = progress.operations, f"dialogues {progress.seed}"
            running = [pool.submit(lane.dialogue, f"{seed} {number + i}") for i, lane in enumerate(lanes)]
            for each in running:
                with progress.operation("dialogue"):
                    each.result()
            with progress.operation("settled", 0):
                on_host = site.settled()["host"]["sessions"]
                assert on_host == 0, f"{on_host} sessions that have ended are still on the host"
            progress.data["figures"] = dict(sum((lane.did for lane in lanes), Counter()))
            if not site.is_up:
                progress.violation(f"the server ended:\n{site.running.log.read_text()[-3000:]}")
                return
        with progress.operation("nothing left", 0):
            assert_nothing_left(site)
