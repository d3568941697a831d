"""Random histories of the document cache inside the real engine, against a dict.

``CACHE_STEPS=2000`` makes them longer, with restarts in them.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from sglang_ext.protocol import ContextPlan
from tests.integration.context_client import composed, generate, missing_of, plan_of, result
from tests.integration.reference import Generated
from tests.integration.small_engine import FILES, HOST_PAGES, NEW, PAGE, SIZES, SPACES, STRATEGIES, TEXTS, Document, Engine

LONG = "CACHE_STEPS" in os.environ
STEPS = int(os.environ.get("CACHE_STEPS", "300"))
LENGTH = 50  # steps of one history
RESTARTS = 4 if LONG else 0

documents = st.tuples(st.integers(0, len(SPACES) - 1), st.integers(0, len(SIZES) - 1))
spaces = st.integers(0, len(SPACES) - 1)
contexts = st.lists(st.integers(1, len(SIZES) - 1), min_size=1, max_size=4, unique=True)
strategies = st.sampled_from(sorted(STRATEGIES))
ARGUMENTS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "ask": {"space": spaces, "texts": contexts, "strategy": strategies, "settled": st.booleans()},
    "ask_exactly": {"space": spaces, "texts": contexts},
    "ask_together": {"crowd": st.lists(st.tuples(spaces, contexts, strategies), min_size=3, max_size=5)},
    "abort": {
        "kind": st.sampled_from(["compose", "document", "plain"]),
        "space": spaces,
        "texts": contexts,
        "strategy": strategies,
        "after": st.sampled_from([0.002, 0.01, 0.03, 0.1]),
        "n_new": st.sampled_from([1, 300]),
    },
    "put": {"document": documents},
    "remove": {"document": documents},
    "remove_namespace": {"space": spaces},
    "settle": {},
    "evict": {"tiers": st.sampled_from([["device"], ["device", "host"]])},
    "resize_host": {"pages": st.sampled_from([0, 4, 12, HOST_PAGES, HOST_PAGES])},
    "resize_disk": {"share": st.sampled_from([0.0, 0.3, 1.0, 1.0])},
    "restart": {"kill": st.booleans()},
}
WEIGHTS = {"ask": 14, "ask_together": 3, "abort": 5, "put": 4, "remove": 2, "settle": 2, "evict": 3}
actions = st.sampled_from([name for name in ARGUMENTS for _ in range(WEIGHTS.get(name, 1))])


class History:
    """``live``: documents put and not removed, which may be found. ``sure``: those that must be, whatever tier they are in. ``loose``:
    live, but a budget became too small for them or their request was cut off, so nobody can say until they are put again."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.reset()
        self.live: set[Document] = set()
        self.sure: set[Document] = set()
        self.loose: set[Document] = set()
        self.host_pages = HOST_PAGES
        self.disk_bytes = FILES
        self.dropped = engine.control("stat")["dropped_writes"]
        engine.tally["histories"] += 1

    def begin(self) -> None:
        for text in range(len(SIZES)):
            self.put((0, text))
        self.settle()

    def _was_put(self, document: Document) -> None:
        self.live.add(document)
        self.loose.discard(document)

    def put(self, document: Document) -> None:
        self.engine.put(document)
        self._was_put(document)

    def settle(self) -> None:
        """Everything is written: what was put and fits must be found from now on."""
        self.engine.control("flush")
        figures = self.engine.control("stat")
        if figures["dropped_writes"] != self.dropped:  # evicted from host before the disk had them
            self.dropped = figures["dropped_writes"]
            self.loose |= self.live - self.sure
        if self.disk_bytes == FILES:
            self.sure = self.live - self.loose

    def ask(self, space: int, texts: list[int], strategy: str, settled: bool) -> None:
        if settled:
            self.engine.control("flush")  # what is being written cannot make room on host
        name, options = STRATEGIES[strategy]
        ids, spans = self.engine.prompt(texts)
        answer = generate(self.engine.client, ids, plan_of(spans, name, SPACES[space], **options), n_new=NEW)
        wanted = [(space, text) for text in (0, *texts)]
        missing = {wanted[i] for i in missing_of(answer)}
        if settled and self.host_pages == HOST_PAGES:  # or there is no room to load into
            assert not missing & self.sure, "a document that must be found is not"
        assert {document for document in wanted if document not in self.live} <= missing, "a document is found that is not there"
        if missing:
            answer = composed(self.engine.client, ids, spans, name, SPACES[space], on_document=self._put_by, n_new=NEW, **options)
        self.engine.right(strategy, texts, result(answer))
        self.engine.tally["prefilled" if missing else "found"] += 1

    def _put_by(self, space: str, ids: list[int]) -> None:
        self._was_put((SPACES.index(space), TEXTS.index(ids)))

    def ask_exactly(self, space: int, texts: list[int]) -> None:
        ids, _ = self.engine.prompt(texts)
        self.engine.right("plain", texts, result(generate(self.engine.client, ids, n_new=NEW, extra_key=f"namespace:{SPACES[space]}")))

    def ask_together(self, crowd: list[tuple[int, list[int], str]]) -> None:
        """All at once, in a pool that does not hold them all; each answer is that of the request alone."""

        def one(request: tuple[int, list[int], str]) -> Generated | None:
            space, texts, strategy = request
            name, options = STRATEGIES[strategy]
            ids, spans = self.engine.prompt(texts)
            try:
                answer = composed(
                    self.engine.client, ids, spans, name, SPACES[space], on_document=self._put_by, tries=8, n_new=NEW, **options
                )
            except LookupError:  # the others took its documents' place each time
                return None
            return result(answer)

        with ThreadPoolExecutor(len(crowd)) as pool:
            answers = list(pool.map(one, crowd))
        for (_, texts, strategy), answer in zip(crowd, answers, strict=True):
            if answer is not None:
                self.engine.right(strategy, texts, answer)

    def abort(self, kind: str, space: int, texts: list[int], strategy: str, after: float, n_new: int) -> None:
        """A request is aborted: before it is admitted, while it is composed, while it decodes."""
        ids, spans = self.engine.prompt(texts)
        plan = None
        if kind == "compose":
            plan = plan_of(spans, STRATEGIES[strategy][0], SPACES[space], **STRATEGIES[strategy][1])
        elif kind == "document":
            document = (space, texts[0])
            ids, plan = TEXTS[texts[0]], ContextPlan("document", SPACES[space])
            if document not in self.live:
                self.loose.add(document)
            self.live.add(document)
        self.engine.tally["aborted"] += 1
        rid = f"aborted-{self.engine.tally['aborted']}"
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(generate, self.engine.client, ids, plan, n_new=n_new, rid=rid)
            time.sleep(after)
            self.engine.client.post("/abort_request", json={"rid": rid})
            request.result()  # it has ended: what comes next comes after it

    def remove(self, document: Document) -> None:
        found = self.engine.control("remove", keys=[self.engine.key(document)], namespace=SPACES[document[0]])["removed"]
        assert found >= (document in self.sure)
        assert found <= (document in self.live)
        self._forget({document})

    def remove_namespace(self, space: int) -> None:
        gone = {document for document in self.live if document[0] == space}
        removed = self.engine.control("remove_namespace", namespace=SPACES[space])["removed"]
        assert len(gone & self.sure) <= removed <= len(gone)
        self._forget(gone)

    def _forget(self, gone: set[Document]) -> None:
        for known in (self.live, self.sure, self.loose):
            known -= gone

    def evict(self, tiers: list[str]) -> None:
        self.engine.control("evict", tiers=tiers)
        if "host" in tiers and self.disk_bytes < FILES:
            self.loose |= self.live

    def resize_host(self, pages: int) -> None:
        self.engine.control("budget", host_bytes=pages * PAGE)
        self.host_pages = pages

    def resize_disk(self, share: float) -> None:
        self.disk_bytes = int(FILES * share)
        self.engine.control("budget", disk_bytes=self.disk_bytes)
        if share < 1:
            self.loose |= self.live
            self.sure.clear()

    def restart(self, kill: bool) -> None:
        """Only what is on disk is left; what must be found was written before."""
        if self.engine.tally["restarts"] == RESTARTS:
            return  # a start takes longer than a history
        self.engine.tally["restarts"] += 1
        if kill:
            self.engine.scheduler().send_signal(signal.SIGKILL)
        self.engine.down()
        present = {(space, text) for space in range(len(SPACES)) for text in range(len(SIZES)) if self.engine.file((space, text)).exists()}
        assert self.sure <= present
        self._forget(self.live - present)
        self.loose |= self.live - self.sure
        self.engine.up()
        self.host_pages, self.dropped = HOST_PAGES, 0
        self.engine.control("budget", disk_bytes=self.disk_bytes)

    def check(self) -> None:
        """The accounts of all tiers."""
        self.engine.tally["steps"] += 1
        figures = self.engine.check()
        disk = figures["disk"]
        if not disk["queued_bytes"] and disk["scanned"]:
            assert disk["bytes"] <= self.disk_bytes
            assert figures["host"]["bytes"] <= self.host_pages * PAGE

    def end(self) -> None:
        self.engine.reset()
        figures = self.engine.idle()
        assert (figures["device"]["tokens"], figures["host"]["pages"], figures["disk"]["bytes"]) == (0, 0, 0)


def test_random_histories(small_engine: Engine) -> None:
    @settings(
        max_examples=max(1, -(-STEPS // LENGTH)),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # a failure on an engine is told as it happened: running it again to shorten it takes minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def live(data: st.DataObject) -> None:
        history = History(small_engine)
        history.begin()
        for _ in range(LENGTH):
            name = data.draw(actions)
            arguments = {argument: data.draw(values) for argument, values in ARGUMENTS[name].items()}
            note(f"{name} {arguments}")
            getattr(history, name)(**arguments)
            history.check()
        history.end()

    live()
    tally = small_engine.tally
    print(dict(tally))
    assert tally["steps"] >= STEPS
    assert tally["found"] > STEPS / 20
    assert tally["prefilled"] > STEPS / 20
