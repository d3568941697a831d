"""Tuning in idle time: verification and costs step by step, what a request stops, and what is left alone."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.profiles import gate as gates
from ragserve.profiles.costs import COSTS
from ragserve.profiles.costs import FILE_NAME as COSTS_FILE
from ragserve.profiles.gate import record, set_of
from ragserve.retrieval.retriever import Retriever
from ragserve.strategy_spec import candidates
from ragserve.verification import course, idle_tuner
from ragserve.verification.comparison import ALONE
from tests.unit.verification.idle_engine import FINGERPRINT, entry, fill
from tests.unit.verification.tuned_server import LABELS, SameVector, Tuned, steps


@pytest.mark.usefixtures("_few_questions")
def test_a_server_that_knows_nothing_verifies_and_measures(tuned: Tuned) -> None:
    fill(tuned.store, "notes", 40)
    states = [state["state"] for state in tuned.run()]
    assert list(dict.fromkeys(states)) == ["verifying", "measuring costs", "waiting"]
    assert states[-1] == "waiting"
    assert sorted(tuned.gate.verified("notes")) == sorted(LABELS)
    assert tuned.gate.verified("others") == []
    costs = COSTS.load(tuned.folder / COSTS_FILE, FINGERPRINT)
    assert costs is not None
    assert set(costs.composed) == set(LABELS)
    assert set(costs.composed[LABELS[0]]) == {"device", "host", "disk", "absent"}
    assert all(each["keys"] for each in tuned.engine.evicted), "documents of users stay where they are"
    assert all(len(each.spans) == 1 for each in tuned.engine.warmed), "one document at a time"
    (kept,) = (tuned.folder / "tune").rglob("rows-*.jsonl")
    assert "granite" not in kept.read_text()
    assert "lighthouse" not in kept.read_text()
    asked = len(tuned.engine.asked)
    assert tuned.run()[-1]["state"] == "waiting"
    assert len(tuned.engine.asked) == asked, "nothing is left to do"


@pytest.mark.usefixtures("_few_questions")
def test_a_chunk_counts_once_however_many_sentences_it_has(tuned: Tuned) -> None:
    """Ten questions decide nothing."""
    fill(tuned.store, "notes", 10, sentences=3)
    tuned.run()
    assert tuned.gate.verified("notes") == []
    asked = [text for text in tuned.searched.asked if "missing" in text]
    assert len(asked) == len(set(asked)) == 10


def test_of_many_candidates_some_are_picked_and_verified_on_other_questions(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_tuner, "candidates", candidates)
    monkeypatch.setattr(course, "PICK", 8)
    monkeypatch.setattr(course, "_GAIN", math.inf)  # the stand-in's times say nothing
    tuned.margin = 30.0
    tuned.engine.wrong = {"concat"}
    fill(tuned.store, "notes", 40)
    states = [state for state in tuned.run() if state["state"] == "verifying"]
    assert [*dict.fromkeys(state["phase"] for state in states)] == ["pick", "verify"]
    assert len(states[0]["strategies"]) > 6
    assert {label.partition(":")[0] for label in states[-1]["strategies"]} <= {"passages"}
    verified = tuned.gate.verified("notes")
    assert verified
    assert all(label.startswith("passages") for label in verified), "what answers otherwise is not"
    costs = COSTS.load(tuned.folder / COSTS_FILE, FINGERPRINT)
    assert costs is not None
    assert (costs.composed, costs.exact_ms(1000) > 0) == ({}, True), "those of exact prefill are enough"
    figures = tuned.gate.entries("notes")[verified[0]].sets[set_of("notes")]
    assert figures.references < 40 - 8 + 1
    assert figures.retriever == "words, dense, k 2"


@pytest.mark.usefixtures("_few_questions")
def test_questions_of_users_are_asked_before_those_about_chunks(tuned: Tuned) -> None:
    fill(tuned.store, "notes", 40)
    asked = ["Of which stone is Corran 7?", "of which stone is corran 7?", "Where is it?"]
    asyncio.run(tuned.log(asked))
    states = [state for state in tuned.run() if state["state"] == "verifying"]
    assert [*dict.fromkeys(tuned.searched.asked)][:2] == [asked[2], asked[1]]
    assert [state["questions"] for state in states[:3]] == [{}, {"asked": 1}, {"asked": 2}]
    last = states[-1]["questions"]
    assert last["asked"] == 2
    assert sum(last.values()) >= states[-1]["compared"] > 10
    assert tuned.gate.verified("notes")
    (kept,) = (tuned.folder / "tune").rglob("rows-*.jsonl")
    assert "stone" not in kept.read_text()


def test_what_falls_short_is_refused_and_said(tuned: Tuned) -> None:
    tuned.engine.wrong = {"concat"}
    fill(tuned.store, "notes", 40)
    states = tuned.run()
    verifying = [state for state in states if state["state"] == "verifying"]
    assert verifying[-1]["compared"] >= 7, "few answers show that nothing agrees"
    assert tuned.gate.verified("notes") == []
    entries = tuned.gate.entries("notes")
    assert set(entries) == set(LABELS)
    assert all(set_of("notes") in one.sets for one in entries.values())
    assert not (tuned.folder / COSTS_FILE).exists(), "there is nothing to choose from"


@pytest.mark.usefixtures("_few_questions")
def test_a_namespace_is_opened_again_when_its_users_have_asked_enough(tuned: Tuned) -> None:
    """What was refused on questions about chunks is decided by users' questions alone, once there are as
    many."""
    fill(tuned.store, "notes", 40)
    tuned.engine.wrong = {"concat"}

    async def run() -> None:
        retriever = Retriever(tuned.store, tuned.searched)
        tuner = tuned.tuner(retriever)

        async def later(questions: list[str]) -> list[dict[str, Any]]:
            await tuned.log(questions)
            tuned.now += 60
            return await steps(tuner)

        first = [state for state in await steps(tuner) if state["state"] == "verifying"]
        compared = first[-1]["compared"] + 1  # the last question ends the run
        least = 20
        assert compared < least
        assert {len(tuned.gate.verified("notes")), tuner.progress("notes")} == {0, None}
        tuned.engine.wrong = set()
        asked = len(tuned.engine.asked)
        known = [f"Is Corran {number} of granite?" for number in range(least - 1)]
        assert await later(known) == [{"state": "waiting"}], "one is missing"
        assert await later([known[3].upper()]) == [{"state": "waiting"}], "it is not a new one"
        assert len(tuned.engine.asked) == asked
        states = [state for state in await later(["What stands on the coast?"]) if "compared" in state]
        assert states[0]["questions"].get("asked", 0) == 0
        assert states[-1]["questions"]["asked"] > 10
        assert sum(states[-1]["questions"].values()) == compared + states[-1]["questions"]["asked"]
        assert sorted(tuned.gate.verified("notes")) == sorted(LABELS)
        figures = tuned.gate.entries("notes")[LABELS[0]].sets[set_of("notes")]
        assert (figures.references, figures.different) == (figures.n, 0.0)
        await retriever.close()

    asyncio.run(run())


def test_every_further_run_takes_as_many_questions_as_the_one_before(tuned: Tuned) -> None:
    fill(tuned.store, "notes", 40)
    tuned.engine.wrong = {"concat"}

    async def run() -> list[int]:
        retriever = Retriever(tuned.store, tuned.searched)
        tuner = tuned.tuner(retriever)
        await steps(tuner)
        opened = []
        for count in range(10, 130, 10):
            await tuned.log([f"Is Corran {number} of granite?" for number in range(count - 10, count)])
            tuned.now += 60
            if any(state["state"] == "verifying" for state in await steps(tuner)):
                opened.append(count)
        await retriever.close()
        return opened

    assert asyncio.run(run()) == [20, 40, 80], "20 at least, then as many as decided last"


def test_where_something_is_verified_only_costs_are_measured(tuned: Tuned) -> None:
    fill(tuned.store, "notes", 3)
    record(tuned.folder / gates.FILE_NAME, FINGERPRINT, {LABELS[0]: entry()})
    states = {state["state"] for state in tuned.run()}
    assert states == {"measuring costs", "waiting"}
    costs = COSTS.load(tuned.folder / COSTS_FILE, FINGERPRINT)
    assert costs is not None
    assert list(costs.composed) == [LABELS[0]]
    assert not [each for each in tuned.engine.asked if each.forced]


@pytest.mark.parametrize(("margin", "goes_on"), [(4.0, True), (1.9, False)])
def test_what_tune_has_verified_goes_on_to_the_last_margin(
    tuned: Tuned, margin: float, goes_on: bool
) -> None:
    fill(tuned.store, "notes", 3)
    about: dict[str, Any] = {"margin": margin, "references": 300, "retriever": "words, dense, k 2"}
    figures = replace(entry().sets["s"], f1=None, f1_vs_full=None, **about)
    record(tuned.folder / gates.FILE_NAME, FINGERPRINT, {LABELS[0]: entry({set_of("notes"): figures})})
    states = [state["state"] for state in tuned.run()]
    assert ("verifying" in states) == goes_on
    assert tuned.gate.verified("notes") == [LABELS[0]], "three questions take nothing away"


def test_costs_of_other_hardware_are_measured_again(tuned: Tuned) -> None:
    fill(tuned.store, "notes", 3)
    record(tuned.folder / gates.FILE_NAME, FINGERPRINT, {LABELS[0]: entry()})
    tuned.run()
    here = COSTS.load(tuned.folder / COSTS_FILE, FINGERPRINT)
    assert here is not None
    composed = {**here.composed, "epic": here.composed[LABELS[0]]}
    there = replace(here, hardware="another CPU", composed=composed)
    COSTS.save(tuned.folder / COSTS_FILE, FINGERPRINT, there)
    asked = len(tuned.engine.asked)
    tuned.run()
    again = COSTS.load(tuned.folder / COSTS_FILE, FINGERPRINT)
    assert again is not None
    assert (again.hardware, list(again.composed)) == (here.hardware, [LABELS[0]])
    assert len(tuned.engine.asked) > asked
    asked = len(tuned.engine.asked)
    tuned.run()
    assert len(tuned.engine.asked) == asked, "once"


def test_what_recomputes_least_is_measured_first_and_kept_beside_the_others(tuned: Tuned) -> None:
    few, many = (f"concat:recompute=sentences,share={share}" for share in (0.15, 0.3))
    fill(tuned.store, "notes", 3)
    record(tuned.folder / gates.FILE_NAME, FINGERPRINT, {label: entry() for label in (many, few)})
    measured = [each["strategies"] for each in tuned.run() if each["state"] == "measuring costs"]
    assert list(dict.fromkeys(map(tuple, measured))) == [(few,), (many,)]
    costs = COSTS.load(tuned.folder / COSTS_FILE, FINGERPRINT)
    assert costs is not None
    assert list(costs.composed) == [few, many]


def test_what_use_has_taken_out_is_not_verified_again(tuned: Tuned) -> None:
    fill(tuned.store, "notes", 30)
    for label in LABELS:
        for _ in range(12):
            tuned.in_use.add("notes", label, True, made_at={"notes": 1.0})
    assert tuned.run()[-1] == {"state": "waiting"}
    assert not tuned.engine.asked


def test_time_for_a_namespace_is_bounded_and_jobs_come_first(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tuned.store, "notes", 30)
    tuned.job = True
    (waiting,) = tuned.run()
    assert waiting == {"state": "waiting", "for": "ingestions and warm-ups that run or wait"}
    assert not tuned.engine.asked
    tuned.job = False
    monkeypatch.setattr(idle_tuner, "MOST_S", 0.0)
    assert tuned.run()[-1] == {"state": "waiting"}
    assert not tuned.engine.asked


def test_times_are_kept_of_prefills_as_users_have_them_alone(tuned: Tuned) -> None:
    """Prefills in the background are computed in short chunks: their times say nothing."""
    fill(tuned.store, "notes", 30)
    tuned.run()
    whole = [request for request in tuned.engine.asked if len(request.spans) == 3]
    timed = {tuple(request.input_ids) for request in whole if not request.background}
    later = {tuple(request.input_ids) for request in whole if request.background}
    assert (len(timed), bool(later), timed & later) == (ALONE, True, set())
    (kept,) = (tuned.folder / "tune").rglob("rows-*.jsonl")
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    with_times = [row["id"] for row in rows if row.get("ttft_ms") is not None]
    assert len(with_times) == ALONE * (1 + len(LABELS))


def test_changed_documents_have_their_time_again_after_namespaces_that_had_none(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an hour is used up after a few questions, which decide nothing."""
    monkeypatch.setattr(idle_tuner, "MOST_S", 100.0)
    answer = tuned.engine.generate

    def generate(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        tuned.now += 10.0
        return answer(request)

    monkeypatch.setattr(tuned.engine, "generate", generate)
    fill(tuned.store, "notes", 20)

    async def run() -> None:
        retriever = Retriever(tuned.store, tuned.searched)
        tuner = tuned.tuner(retriever)

        async def verified() -> list[str]:
            tuned.now += 60
            states = [state for state in await steps(tuner) if state["state"] == "verifying"]
            return [*dict.fromkeys(state["namespace"] for state in states)]

        assert await verified() == ["notes"]
        assert await verified() == [], "its time is over"
        fill(tuned.store, "notes", 22)
        fill(tuned.store, "pages", 20)
        assert await verified() == ["pages", "notes"]
        assert await verified() == []
        await retriever.close()

    asyncio.run(run())


def test_a_question_that_a_request_stops_is_asked_again(tuned: Tuned) -> None:
    fill(tuned.store, "notes", 2)

    async def run() -> None:
        retriever = Retriever(tuned.store, SameVector())
        tuner = tuned.tuner(retriever)

        async def step() -> None:
            work: Any = tuner.work()
            await work

        assert tuner.progress("notes") == "the server tunes itself while it is idle"
        await step()  # prepares the namespace
        assert "verifies strategies while it is idle (0 questions" in str(tuner.progress("notes"))
        tuned.engine.hold.clear()
        task = asyncio.create_task(step())
        while not tuned.engine.asked:
            await asyncio.sleep(0.001)
        assert {query.namespace for query in tuned.limiter.queries} == {"notes"}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (tuned.engine.aborted, len(tuned.limiter.queries)) == (1, 0)
        assert not list((tuned.folder / "tune").rglob("rows-*.jsonl"))
        stopped = tuned.engine.asked[0].input_ids
        tuned.engine.hold.set()
        await step()
        assert tuned.engine.asked[1].input_ids == stopped
        while tuner.progress("notes") is not None:
            await step()
        await retriever.close()

    asyncio.run(run())
    assert not tuned.gate.verified("notes"), "two texts decide nothing"


@pytest.mark.usefixtures("_few_questions")
def test_a_namespace_is_verified_by_its_own_search_and_anew_when_that_changes(tuned: Tuned) -> None:
    fill(tuned.store, "notes", 40)
    tuned.store.set_settings("notes", {"k": 3})

    def retrievers() -> list[str]:
        entries = tuned.gate.entries("notes")
        return [entries[label].sets[set_of("notes")].retriever for label in tuned.gate.verified("notes")]

    async def run() -> None:
        retriever = Retriever(tuned.store, tuned.searched)
        tuner = tuned.tuner(retriever)
        await steps(tuner)
        assert retrievers() == ["words, dense, k 3"] * 2
        assert any(len(request.spans) == 4 for request in tuned.engine.asked), "the system text and three"
        tuned.store.set_settings("notes", {})
        tuned.engine.wrong = {"concat"}
        tuned.now += 60
        assert "verifying" in [state["state"] for state in await steps(tuner)]
        assert tuned.gate.verified("notes") == []
        tuned.store.set_settings("notes", {"retrieval": "lexical"})
        tuned.engine.wrong = set()
        tuned.now += 60
        assert "verifying" in [state["state"] for state in await steps(tuner)], "it had ended"
        assert retrievers() == ["words, lexical, k 2"] * 2
        await retriever.close()

    asyncio.run(run())
