"""What `ragserve tune` asks, and what it reports of that."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragserve.commands.tune import _print
from ragserve.config import Settings
from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.errors import EngineError, Unavailable
from ragserve.profiles import gate
from ragserve.profiles.decode import DECODE, FILE_NAME, DecodeProfile, Point, options_of
from ragserve.profiles.in_use import InUseRecord
from ragserve.retrieval import embedder
from ragserve.strategy_spec import parse
from ragserve.verification.calibration import samkv
from ragserve.verification.calibration.tune_worker import RESULT, TuneJob, _profile, _tune
from ragserve_index import IndexStore
from tests.conftest import MODEL
from tests.unit.verification.idle_engine import FINGERPRINT, IdleEngine, entry, fill
from tests.unit.verification.tuned_server import logged

USERS = ["Of which stone is Corran 1?", "And where does it stand?"]


class Vectors:
    """Stands where the embedder does, and notes what is searched for."""

    name = "words"
    asked: list[str]

    @classmethod
    def of(cls, settings: Settings) -> Vectors:
        return cls(settings.embedder)

    def __init__(self, *_: Any, **__: Any) -> None:
        Vectors.asked = []

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        Vectors.asked += texts
        return np.tile(np.asarray([1.0, 0.0, 0.0, 0.0], dtype=np.float32), (len(texts), 1))


@pytest.fixture
def decidable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings with which the documents of "notes" are enough for a verdict."""
    monkeypatch.setattr(embedder, "Embedder", Vectors)
    with IndexStore(tmp_path) as store:
        fill(store, "notes", 30)
    return Settings(data_dir=tmp_path, model=str(MODEL), top_k=2, verify_margin=30.0)


def tuned(
    settings: Settings,
    questions: Path | None,
    most: int = 6,
    engine: Any = None,
    *,
    spent: float = 0.0,
) -> dict[str, Any]:
    """Tune in this process with a scripted engine, a share of the time being ``spent``, and return the
    result."""
    folder = settings.data_dir / "job"
    folder.mkdir(exist_ok=True)
    now = time.monotonic()
    job = TuneJob(
        "notes",
        ["concat"],
        str(folder),
        str(settings.data_dir / "tune"),
        now - 1e6 * spent,
        now + 1e6 * (1 - spent),
        most,
        at_once=1,
        questions=None if questions is None else str(questions),
    )
    asyncio.run(_tune(job, settings, parse("concat"), engine or IdleEngine(), lambda *_: None))
    return dict(json.loads((folder / RESULT).read_text()))


def test_the_decode_profile_is_found_where_sparse_decoding_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine of these tests does not decode several requests at once, so only a known profile, and why
    there is none, can be said here; `tests/unit/calibration` measures."""
    monkeypatch.setattr(embedder, "Embedder", Vectors)
    settings = Settings(data_dir=tmp_path, model=str(MODEL), top_k=2, decode_budget=512)
    with IndexStore(tmp_path) as store:
        fill(store, "notes", 3)
    engine = IdleEngine()
    assert tuned(settings, None, 1, engine)["decode"] is None, "sparse decoding is off"
    engine.info = replace(engine.info, sparse_decode=True, max_total_tokens=2048)
    said = tuned(settings, None, 1, engine)["decode"]
    assert said.startswith("from which length sparse decoding pays is unknown: Contexts of")
    options = options_of(settings)
    profile = DecodeProfile(3000, options, 4, (Point(1024, 1.0, 3.0), Point(4096, 4.0, 3.0)), "m", "h", "d")
    DECODE.save(tmp_path / FILE_NAME, FINGERPRINT, profile)
    assert tuned(settings, None, 1, engine)["decode"] == "requests decode densely up to 3000 tokens"


def test_users_questions_come_first_and_the_report_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedder, "Embedder", Vectors)
    settings = Settings(data_dir=tmp_path, model=str(MODEL), top_k=2)
    with IndexStore(tmp_path) as store:
        fill(store, "notes", 20)
        asyncio.run(logged(tmp_path, store, USERS))
    result = tuned(settings, None)
    assert [*dict.fromkeys(Vectors.asked)][:2] == USERS[::-1], "the newest first"
    assert len(Vectors.asked) > 2
    assert result["questions"] == {"asked": 2, "cloze": 4}
    _print(result, "notes", 10, 6)
    assert "2 asked by users, 4 sentences with a gap" in capsys.readouterr().out
    kept = "".join(path.read_text() for path in (tmp_path / "tune").rglob("*.jsonl"))
    assert not [text for text in ("stone", "granite", "tower") if text in kept], "nor of chunks"

    given = tmp_path / "questions.txt"
    given.write_text("Where is it?\n")
    assert tuned(settings, given)["questions"] == {"given": 1}, "a file's questions are asked alone"
    assert set(Vectors.asked) == {"Where is it?"}


def test_comparisons_have_the_time_of_costs_while_there_is_nothing_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedder, "Embedder", Vectors)
    settings = Settings(data_dir=tmp_path, model=str(MODEL), top_k=2)
    with IndexStore(tmp_path) as store:
        fill(store, "notes", 3)
    assert sum(tuned(settings, None, spent=0.95)["questions"].values()) == 0
    later = tuned(settings, None, spent=0.8)
    assert (sum(later["questions"].values()), later["finished"]) == (3, True)
    assert later["costs"] == "no costs were measured: nothing is verified"


def test_a_record_without_room_is_written_by_the_next_run_from_what_was_compared(
    decidable: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / gate.FILE_NAME
    gate.record(place, FINGERPRINT, {"epic": entry()})
    before = place.read_text()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=f"No space left on device: '{re.escape(str(place))}'"):
            tuned(decidable, None, 30)
    assert place.read_text() == before, "the old record is whole"
    assert not list(tmp_path.glob("*.tmp"))
    assert [one["decision"] for one in tuned(decidable, None, 30)["verdicts"]] == ["verified"]
    assert Vectors.asked == [], "no question is asked again"
    assert sorted(json.loads(place.read_text())["models"][FINGERPRINT]) == ["concat", "epic"]


def test_what_use_has_taken_out_comes_back_by_new_questions_alone(decidable: Settings) -> None:
    def decision(engine: IdleEngine, spent: float = 0.0) -> list[str]:
        return [one["decision"] for one in tuned(decidable, None, 30, engine, spent=spent)["verdicts"]]

    engine = IdleEngine()
    assert decision(engine) == ["verified"]
    in_use = InUseRecord.of(decidable, **engine.info.gate_identity)
    shown = in_use.add("notes", "concat", False, made_at={"notes": 0.0})
    assert decision(engine) == ["verified"], "from the same rows"
    assert in_use.entries()["notes"]["concat"] == shown, "what use has shown goes on"
    while not in_use.taken_out("notes"):
        in_use.add("notes", "concat", True, made_at={"notes": 0.0})
    assert decision(IdleEngine(), spent=0.95) == [], "its rows are older"
    assert in_use.taken_out("notes") == {"concat"}
    asked = IdleEngine()
    assert decision(asked) == ["verified"]
    assert (in_use.taken_out("notes"), bool(asked.asked)) == (set(), True)
    assert decision(IdleEngine(), spent=0.95) == ["verified"], "the new rows count"


def test_a_run_that_the_engine_does_not_survive_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has answered five questions, and is asked one more under the strategy when it dies."""
    monkeypatch.setattr(embedder, "Embedder", Vectors)
    settings = Settings(data_dir=tmp_path, model=str(MODEL), top_k=2, verify_margin=30.0)
    with IndexStore(tmp_path) as store:
        fill(store, "notes", 30)
    engine, composed = IdleEngine(), count()
    answer, here = engine.generate, gate.Gate.of(settings, **engine.info.gate_identity)

    def generate(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if next(composed) >= 5 if request.strategy == "concat" else dead:
            dead.append(True)
            raise Unavailable("The engine has died.")
        return answer(request)

    dead: list[bool] = []
    monkeypatch.setattr(engine, "generate", generate)
    with pytest.raises(Unavailable, match="has died"):
        tuned(settings, None, 30, engine)
    assert here.entries("notes") == {}
    assert [one["decision"] for one in tuned(settings, None, 30)["verdicts"]] == ["verified"]


def test_what_was_measured_on_documents_that_are_gone_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedder, "Embedder", Vectors)
    settings = Settings(data_dir=tmp_path, model=str(MODEL), top_k=2, verify_margin=30.0)
    right, wrong = IdleEngine(), IdleEngine(wrong=["concat"])
    here = gate.Gate.of(settings, **right.info.gate_identity)

    def ingest(*names: str) -> None:
        with IndexStore(tmp_path) as store:
            fill(store, "notes", 30, names=names)

    def asked(engine: IdleEngine, questions: Path | None = None) -> int:
        tuned(settings, questions, 30, engine)
        return len(set(Vectors.asked))

    ingest()
    with IndexStore(tmp_path) as store:
        asyncio.run(logged(tmp_path, store, USERS))
    assert (asked(right) > 12, here.verified("notes")) == (True, ["concat"])
    assert asked(right) == 0
    ingest()
    assert (asked(wrong) > 7, here.verified("notes")) == (True, [])
    assert {*USERS} <= {*Vectors.asked}, "over the new documents"
    given = tmp_path / "given.txt"
    given.write_text("Where is it?")
    assert (asked(right, given), asked(right, given)) == (1, 0)
    ingest("d7")
    assert asked(right, given) == 0, "it was answered from others"
    ingest()
    assert asked(right, given) == 1


def test_documents_that_change_during_a_run_leave_nothing_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are replaced before the last question: the first twelve verify otherwise."""
    monkeypatch.setattr(embedder, "Embedder", Vectors)
    settings = Settings(data_dir=tmp_path, model=str(MODEL), top_k=2, verify_margin=30.0)
    engine, composed = IdleEngine(), count()
    answer = engine.generate
    with IndexStore(tmp_path) as store:
        fill(store, "notes", 12)

        def generate(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
            if request.strategy == "concat" and next(composed) == 11:
                fill(store, "notes", 12)
            return answer(request)

        monkeypatch.setattr(engine, "generate", generate)
        assert tuned(settings, None, 30, engine)["verdicts"] == []


def test_what_failed_most_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedder, "Embedder", Vectors)
    settings = Settings(data_dir=tmp_path, model=str(MODEL), top_k=2)
    with IndexStore(tmp_path) as store:
        fill(store, "notes", 5)
    engine = IdleEngine()
    answer = engine.generate

    def generate(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if request.strategy == "concat":
            raise EngineError("There is no room.")
        return answer(request)

    monkeypatch.setattr(engine, "generate", generate)
    result = tuned(settings, None, 30, engine)
    assert result["failures"] == {"engine_error: There is no room.": 5}
    _print(result, "notes", 10, 30)
    said = " ".join(capsys.readouterr().out.split())
    assert "failures of questions and strategies: 5, most often (5) engine_error: There is no room." in said
    assert "when what failed has passed" in said


def test_a_short_run_takes_away_nothing_but_what_use_has_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedder, "Embedder", Vectors)
    settings = Settings(data_dir=tmp_path, model=str(MODEL), top_k=2, verify_margin=30.0)
    with IndexStore(tmp_path) as store:
        fill(store, "notes", 30)
    questions = tmp_path / "questions.txt"
    questions.write_text("".join(f"What is tower {number} made of?\n" for number in range(10)))
    engine = IdleEngine()
    here = gate.Gate.of(settings, **engine.info.gate_identity)
    in_use = InUseRecord.of(settings, **engine.info.gate_identity)
    assert tuned(settings, None, 30, engine)["kept"] == []
    short = tuned(settings, questions, 30, IdleEngine(wrong=["concat"]))
    assert ([one["decision"] for one in short["verdicts"]], short["kept"]) == (["refused"], ["concat"])
    assert here.verified("notes") == ["concat"]
    _print(short, "notes", 10, 30)
    assert "an earlier verdict by more questions stays" in capsys.readouterr().out
    while not in_use.taken_out("notes"):
        in_use.add("notes", "concat", True, made_at={"notes": 1.0})
    again = tuned(settings, questions, 30, IdleEngine(wrong=["concat"]))
    assert again["kept"] == []
    assert here.verified("notes") == []


def test_samkvs_profile_has_a_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def for_ever(*_: Any) -> None:
        await asyncio.sleep(3600)

    async def at_once(*_: Any) -> None:
        return None

    now, said = time.monotonic(), list[str]()
    job = TuneJob("notes", ["samkv"], str(tmp_path), str(tmp_path), now, now, 6, at_once=1)
    settings = Settings(data_dir=tmp_path, model=str(MODEL))
    given: Any = (job, settings, IdleEngine(), said.append)
    monkeypatch.setattr(samkv, "find_and_save", for_ever)
    assert not asyncio.run(_profile(*given))
    assert "samkv is left out" in said[-1]
    monkeypatch.setattr(samkv, "find_and_save", at_once)
    assert asyncio.run(_profile(*given))
