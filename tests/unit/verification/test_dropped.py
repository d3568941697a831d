"""What was measured in a namespace goes with it, and says nothing of one that is made again by its name."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ragserve.errors import InvalidRequest
from ragserve.profiles import gate as gates
from ragserve.profiles.gate import FILE_NAME, Gate, record, set_of
from ragserve.profiles.in_use import FILE_NAME as IN_USE
from ragserve.profiles.in_use import InUseRecord
from ragserve.retrieval.retriever import Retriever
from ragserve.verification import idle_tuner, rows
from ragserve.verification.dropped import forget, forget_outdated
from ragserve_index import IndexStore
from tests.unit.verification.idle_engine import VERIFIED, entry, fill
from tests.unit.verification.tuned_server import LABELS, Tuned, steps


def test_all_of_a_namespace_goes_and_nothing_of_others(tmp_path: Path) -> None:
    forget(tmp_path, "a")
    assert not list(tmp_path.iterdir()), "nothing is made of nothing"
    spaces = ["a", "a-0123456789ab", "ab", "a.b"]
    for name in spaces:
        own = {set_of(name): VERIFIED, set_of(name, "words, dense, k 2"): VERIFIED, "set": VERIFIED}
        record(tmp_path / FILE_NAME, "one model", {"concat": entry(own)}, keep_sets=True)
        record(tmp_path / FILE_NAME, "other", {"epic": entry({set_of(name): VERIFIED})})
        use = InUseRecord(tmp_path / IN_USE, "other", dtype="float32", samkv="")
        use.add(name, "epic", False, made_at=dict.fromkeys(spaces, 1.0))
        folder = tmp_path / "tune" / f"{name}-ba9876543210"
        with rows.appending(folder / "rows-0.jsonl") as append:
            append({"set": "s", "id": "1", "strategy": "full"})
        for suffix in ("json", "html"):
            (tmp_path / "tune" / f"tune-{name}.{suffix}").write_text("{}")
    forget(tmp_path, "a")
    for model in ("one model", "other"):
        assert Gate([tmp_path / FILE_NAME], model, model="m", dtype="float32").namespaces() == sorted(
            spaces[1:]
        )
    assert Gate([tmp_path / FILE_NAME], "one model", model="m", dtype="float32").verified() == ["concat"]
    assert sorted(use.entries()) == sorted(spaces[1:])
    left = sorted(path.name for path in (tmp_path / "tune").iterdir())
    kept = [[f"{name}-ba9876543210", f"tune-{name}.json", f"tune-{name}.html"] for name in spaces[1:]]
    assert left == sorted(name for each in kept for name in each)


def test_a_record_that_is_none_is_left_and_said(tmp_path: Path) -> None:
    text = json.dumps({"version": 3, "models": {"f": {"concat": 3}}})
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(InvalidRequest, match="not a gate's file"):
        forget(tmp_path, "a")
    assert (tmp_path / FILE_NAME).read_text() == text


@pytest.mark.usefixtures("_few_questions")
def test_what_another_server_drops_is_not_verified_when_it_is_made_again(tuned: Tuned) -> None:
    """The other one cleans its own data folder, and this one's tuner may be off."""
    fill(tuned.store, "notes", 18)
    tuned.run()
    forget_outdated(tuned.folder, tuned.store)
    assert sorted(tuned.gate.verified("notes")) == sorted(LABELS), "it is the one that was measured"
    record(tuned.folder / FILE_NAME, "other", {"epic": entry({set_of("notes"): VERIFIED})})
    with IndexStore(tuned.store.data_dir) as other:
        other.drop_namespace("notes")
    fill(tuned.store, "notes", 18)
    forget_outdated(tuned.folder, tuned.store)
    assert tuned.gate.verified("notes") == []
    assert not list((tuned.folder / "tune").rglob("rows-*.jsonl"))


def test_texts_of_an_earlier_version_go_and_its_figures_stay(store: IndexStore, tmp_path: Path) -> None:
    folder, about = tmp_path / "tune" / "notes-0123456789ab", {"set": "s", "id": "1", "strategy": "full"}
    texts = {"question": "Who is it?", "answer": "Ada", "references": ["Ada"]}
    with rows.appending(folder / "rows-0.jsonl") as append:
        append(about | texts | {"score": 1.0})
    with (folder / "rows-0.jsonl").open("a") as file:
        file.write('{"question": "Who is\n')
    forget_outdated(tmp_path, store)
    assert list(rows.read(folder).values()) == [about | {"score": 1.0}]
    assert "Who" not in (folder / "rows-0.jsonl").read_text()


@pytest.mark.usefixtures("_few_questions")
def test_a_registry_without_the_namespace_forgets_nothing(tuned: Tuned, tmp_path: Path) -> None:
    """It may be another one, of a start without its settings, or restored after the data folder."""
    fill(tuned.store, "notes", 18)
    tuned.run()
    with IndexStore(tmp_path / "empty") as other:
        forget_outdated(tuned.folder, other)
    assert sorted(tuned.gate.verified("notes")) == sorted(LABELS)
    assert list((tuned.folder / "tune").rglob("rows-*.jsonl"))


def test_what_use_has_shown_goes_without_verdicts_too(store: IndexStore, tmp_path: Path) -> None:
    fill(store, "notes", 1)
    use = InUseRecord(tmp_path / IN_USE, "m", dtype="float32", samkv="")
    use.add("notes", "epic", False, made_at=store.made_at())
    with IndexStore(tmp_path / "empty") as other:
        forget_outdated(tmp_path, other)
    forget_outdated(tmp_path, store)
    assert list(use.entries()) == ["notes"], "it is the one that was asked"
    store.drop_namespace("notes")
    fill(store, "notes", 1)
    forget_outdated(tmp_path, store)
    assert not use.entries()


def test_what_the_log_says_was_dropped_goes_before_it_is_made_again(
    store: IndexStore, tmp_path: Path
) -> None:
    for name in ("notes", "others"):
        fill(store, name, 1)
        record(tmp_path / FILE_NAME, "m", {"epic": entry({set_of(name): VERIFIED})})
        InUseRecord(tmp_path / IN_USE, "m", dtype="float32", samkv="").add(
            name, "epic", False, made_at=store.made_at()
        )
        store.drop_namespace(name)
    fill(store, "others", 1)
    forget_outdated(tmp_path, store, {"notes", "nowhere"})
    gate = Gate([tmp_path / FILE_NAME], "m", model="m", dtype="float32")
    assert gate.namespaces() == []
    assert not InUseRecord(tmp_path / IN_USE, "m", dtype="float32", samkv="").entries()


def test_a_figure_that_is_not_finite_costs_its_own_strategy_alone(tmp_path: Path) -> None:
    place = tmp_path / FILE_NAME
    odd = replace(VERIFIED, answer_kl=float("inf"))
    record(place, "m", {"epic": entry({set_of("n"): odd}), "concat": entry({set_of("n"): VERIFIED})})
    assert Gate([place], "m", model="m", dtype="float32").verified("n") == ["concat"]


def test_records_that_do_not_say_when_their_namespace_was_made_count(
    store: IndexStore, tmp_path: Path
) -> None:
    fill(store, "notes", 1)
    record(tmp_path / FILE_NAME, "m", {"epic": entry({set_of("notes"): VERIFIED})})
    forget_outdated(tmp_path, store)
    assert Gate([tmp_path / FILE_NAME], "m", model="m", dtype="float32").verified("notes") == ["epic"]


def test_a_record_that_cannot_be_read_is_said(
    store: IndexStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_text("?")
    forget_outdated(tmp_path, store)
    assert "not a gate's file" in caplog.text


@pytest.mark.usefixtures("_few_questions")
def test_a_namespace_that_is_made_again_is_verified_anew(tuned: Tuned) -> None:
    fill(tuned.store, "notes", 18)

    async def run() -> None:
        retriever = Retriever(tuned.store, tuned.searched)
        tuner = tuned.tuner(retriever)
        await steps(tuner)
        assert sorted(tuned.gate.verified("notes")) == sorted(LABELS)
        before = next((tuned.folder / "tune").rglob("rows-*.jsonl")).read_text()
        tuned.store.drop_namespace("notes")
        fill(tuned.store, "notes", 18)
        tuned.engine.wrong = {"concat"}
        tuned.now += 60
        states = [state["state"] for state in await steps(tuner)]
        assert "verifying" in states, "its time is its own"
        assert tuned.gate.verified("notes") == []
        (kept,) = (tuned.folder / "tune").rglob("rows-*.jsonl")
        kept.write_text(before)  # as of a server that did not hear of the drop
        tuned.engine.wrong = set()
        (tuned.folder / gates.FILE_NAME).unlink()
        await steps(tuned.tuner(retriever), 3)
        assert tuned.gate.verified("notes") == [], "rows from before are not its own"
        await retriever.close()

    asyncio.run(run())


def test_a_request_that_stops_the_forgetting_leaves_it_to_the_next_step(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two namespaces that ended without a verdict are made again; a request comes while the first is
    forgotten."""
    held, go = threading.Event(), threading.Event()

    def slow(data_dir: Path, namespace: str) -> None:
        held.set()
        go.wait(240)
        forget(data_dir, namespace)

    async def run() -> None:
        retriever = Retriever(tuned.store, tuned.searched)
        tuner = tuned.tuner(retriever)
        for name in ("first", "second"):
            fill(tuned.store, name, 3)
        await steps(tuner)
        assert {tuner.progress("first"), tuner.progress("second")} == {None}, "they ended"
        for name in ("first", "second"):
            tuned.store.drop_namespace(name)
            fill(tuned.store, name, 3)
        tuned.now += 60
        monkeypatch.setattr(idle_tuner, "forget_or_log", slow)
        work = tuner.work()
        assert work is not None
        step = asyncio.create_task(work)
        await asyncio.to_thread(held.wait, 240)
        step.cancel()
        go.set()
        await asyncio.gather(step, return_exceptions=True)
        states = await steps(tuner)
        assert {state["namespace"] for state in states if "namespace" in state} == {"first", "second"}
        await retriever.close()

    asyncio.run(run())
