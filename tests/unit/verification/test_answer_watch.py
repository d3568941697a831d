"""Comparing answers in use: which are drawn, what is compared, and what is dropped."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragserve.answering.auto import Chooser
from ragserve.answering.in_flight import QueryLimiter
from ragserve.answering.prompt import Prompt, PromptBuilder, PromptDocument, Segment
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.errors import Unavailable
from ragserve.metrics import metrics
from ragserve.profiles.gate import Gate, record, set_of
from ragserve.profiles.in_use import InUseRecord
from ragserve.strategy_spec import StrategySpec
from ragserve.verification import answer_watch
from ragserve.verification.answer_watch import MAX_TOKENS, MOST_WAITING, AnswerWatch
from ragserve.verification.question_probes import SHORT
from ragserve_index import IndexStore
from sglang_ext.wire.protocol import Span
from tests.conftest import MODEL
from tests.unit.verification.idle_engine import FINGERPRINT, VERIFIED, IdleEngine, entry, fill

SECRET = 4242  # a token of the prompt
REQUEST = GenerateRequest(
    "user-1",
    [1, SECRET, 3, 4],
    "notes",
    "concat",
    Sampling(temperature=0.7, stop=("x",)),
    (Span(0, 1), Span(1, 3)),
)
WHOLE = replace(REQUEST, strategy="full", input_ids=[1, SECRET, 3, 5, 4], spans=(*REQUEST.spans, Span(3, 4)))
CONCAT = StrategySpec("concat")
RETRIEVER = "words, dense, k 5"


class Watched:
    """A watch over a store with a namespace."""

    def __init__(self, store: IndexStore, folder: Path, engine: IdleEngine, share: float = 1.0) -> None:
        fill(store, "notes", 1)
        self.store, self.folder = store, folder
        self.engine = engine
        self.limiter = QueryLimiter(4)
        record(folder / "gate.json", FINGERPRINT, {"concat": entry()})
        self.gate = Gate([folder / "gate.json"], FINGERPRINT, model="tiny", dtype="float32")
        self.record = InUseRecord(folder / "in-use.json", FINGERPRINT, dtype="float32", samkv="")
        draws = iter([0.005, 0.5] * 100)
        self.prompts = PromptBuilder.load(str(MODEL))
        self.watch = AnswerWatch(
            engine, store, self.gate, self.record, self.limiter, self.prompts, share, draw=lambda: next(draws)
        )

    @property
    def version(self) -> int:
        return self.store.namespace("notes").version

    def answered(self, spec: StrategySpec = CONCAT) -> None:
        self.watch.answered(spec, REQUEST, WHOLE, self.version, RETRIEVER)

    def work(self) -> None:
        """Compare what is waiting."""

        async def all_of_it() -> None:
            while (work := self.watch.work()) is not None:
                await work

        asyncio.run(all_of_it())


@pytest.fixture
def watched(store: IndexStore, tmp_path: Path) -> Watched:
    return Watched(store, tmp_path, IdleEngine())


def test_both_are_asked_again_for_a_short_answer(watched: Watched) -> None:
    watched.answered()
    watched.work()
    full, again = watched.engine.asked
    assert (full.strategy, again.strategy) == ("full", "concat")
    system = watched.prompts.system_ids(SHORT)
    assert again.input_ids == [*system, SECRET, 3, 4]
    assert full.input_ids == [*system, SECRET, 3, 5, 4]
    places = [
        [(span.start - len(system), span.end - len(system)) for span in each.spans[1:]]
        for each in (full, again)
    ]
    assert places == [[(0, 2), (2, 3)], [(0, 2)]]
    for each in (full, again):
        assert (each.sampling.temperature, each.sampling.max_new_tokens) == (0.0, MAX_TOKENS)
        assert (each.sampling.stop, each.background) == (("x",), True)
    found = watched.record.entries()["notes"]["concat"].figures
    assert (found["compared"], found["different"]) == (1, 0.0)
    assert not watched.limiter.queries


def test_a_strategy_that_differs_leaves_auto_in_its_namespace_and_says_so_without_texts(
    store: IndexStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(store, tmp_path, IdleEngine(wrong=["concat"]))
    fill(store, "others", 1)
    prompt = Prompt([0] * 64, (Segment("system", 0, 8), Segment("document", 8, 64)), 1, 56, 56)
    chooser = Chooser(watched.engine, watched.gate, tmp_path / "costs.json", watched.record)

    def choice(namespace: str) -> str:
        return asyncio.run(chooser.choose(prompt, namespace)).reason

    assert "no cost profile" in choice("notes")
    with caplog.at_level(logging.INFO, "ragserve"):
        for _ in range(2):
            for _ in range(MOST_WAITING):
                watched.answered()
            watched.work()
    assert "concat differed too often from full prefill in use: run ragserve tune" in choice("notes")
    assert "no cost profile" in choice("others")
    again = InUseRecord(tmp_path / "in-use.json", FINGERPRINT, dtype="float32", samkv="")
    assert again.taken_out("notes") == {"concat"}, "after a restart"
    assert "out of auto there until ragserve tune --namespace notes has run" in caplog.text
    assert str(SECRET) not in caplog.text
    shown = metrics().use_taken_out.labels("notes", "concat")
    assert shown._value.get() == 1


def test_what_stands_in_no_passage_is_counted(store: IndexStore, tmp_path: Path) -> None:
    watched = Watched(store, tmp_path, IdleEngine(wrong=["concat"]))
    text = "The tower of d1 by the sea is all made of granitework."
    prompt = watched.prompts.build(
        "What is it made of?", [PromptDocument("", "", text)], max_prompt_tokens=4096
    )
    full = replace(WHOLE, input_ids=prompt.input_ids, spans=prompt.spans)
    watched.watch.answered(CONCAT, replace(full, strategy="concat"), full, watched.version)
    watched.answered()  # its passages have neither answer
    watched.work()
    found = watched.record.entries()["notes"]["concat"]
    assert (found.compared, found.different, found.unsupported) == (2, 2, 1)
    assert metrics().use_unsupported.labels("notes", "concat")._value.get() == 50


def test_a_share_of_the_answers_of_verified_strategies_is_drawn(store: IndexStore, tmp_path: Path) -> None:
    watched = Watched(store, tmp_path, IdleEngine(), share=0.01)
    watched.answered()
    watched.answered()
    assert watched.watch.waiting == 1, "draws are 0.005 and 0.5"
    for _ in range(3 * MOST_WAITING):
        watched.answered()
    assert watched.watch.waiting == MOST_WAITING
    none = Watched(store, tmp_path, IdleEngine(), share=0.0)
    none.answered()
    assert none.watch.work() is None


def test_what_is_not_verified_is_not_compared(watched: Watched) -> None:
    """It takes no place in the queue; what leaves the record later is dropped there."""
    other = "words, hybrid, k 5"
    own = {set_of("notes", other): replace(VERIFIED, retriever=other)}
    record(watched.folder / "gate.json", FINGERPRINT, {"cacheblend": entry(own)})
    for _ in range(MOST_WAITING):
        watched.answered(StrategySpec("epic"))
        watched.answered(StrategySpec("cacheblend"))  # verified by another search
    assert watched.watch.waiting == 0
    watched.answered()
    (watched.folder / "gate.json").unlink()
    watched.work()
    assert (watched.engine.asked, watched.watch.waiting, watched.record.entries()) == ([], 0, {})


def test_an_answer_needs_no_registry_to_be_drawn(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given to the user by the same call, on the event loop."""

    def away(_: str) -> str:
        raise Unavailable("The registry does not answer.")

    monkeypatch.setattr(watched.gate, "_retriever", away)
    watched.answered()
    watched.work()
    assert watched.watch.dropped == 1


@pytest.mark.parametrize("how", ["changed", "dropped", "evicted"])
def test_texts_that_may_be_gone_are_not_computed_again(watched: Watched, how: str) -> None:
    watched.answered()
    if how == "changed":
        fill(watched.store, "notes", 0, names=["d9"])
    elif how == "dropped":
        watched.store.drop_namespace("notes")
    else:
        watched.engine.tier = "absent"
    watched.work()
    assert not watched.engine.asked
    assert not watched.record.entries()
    assert watched.watch.dropped == 1


def test_what_reads_no_stored_kv_is_compared_wherever_that_is(watched: Watched) -> None:
    fewer = StrategySpec("passages", {"count": 1})
    record(watched.folder / "gate.json", FINGERPRINT, {fewer.label: entry()})
    watched.engine.tier = "absent"
    watched.watch.answered(fewer, replace(REQUEST, strategy="prefix"), WHOLE, watched.version)
    watched.work()
    assert [each.strategy for each in watched.engine.asked] == ["full", "prefix"]
    assert watched.record.entries()["notes"][fewer.label].compared == 1


def test_what_is_stopped_is_compared_later_and_known_to_removals_meanwhile(watched: Watched) -> None:
    async def run() -> None:
        watched.engine.hold.clear()
        work: Any = watched.watch.work()
        task = asyncio.create_task(work)
        while not watched.engine.asked:
            await asyncio.sleep(0.001)
        (known,) = watched.limiter.queries
        assert (known.documents[-1], watched.limiter.in_flight) == ([SECRET, 3], 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (watched.engine.aborted, watched.watch.waiting) == (1, 1)
        assert not watched.limiter.queries
        watched.engine.hold.set()
        again: Any = watched.watch.work()
        await again

    watched.answered()
    asyncio.run(run())
    assert watched.record.entries()["notes"]["concat"].compared == 1


def test_what_takes_too_long_is_dropped_and_counted(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(answer_watch, "_LIMIT_S", 0.0)
    watched.engine.hold.clear()
    watched.answered()
    with caplog.at_level(logging.INFO, "ragserve"):
        watched.work()
    assert (watched.watch.dropped, watched.watch.waiting) == (1, 0)
    assert not watched.record.entries()
    assert "took more than 0 s" in caplog.text


def test_drops_are_shown_by_namespace_as_long_as_there_is_one(watched: Watched) -> None:
    shown = metrics().use_dropped.labels("notes", "concat")
    before = shown._value.get()
    watched.engine.tier = "absent"
    watched.answered()
    watched.work()
    assert shown._value.get() == before + 1
    watched.answered()
    watched.store.drop_namespace("notes")
    watched.work()
    assert (watched.watch.dropped, shown._value.get()) == (2, before + 1)
