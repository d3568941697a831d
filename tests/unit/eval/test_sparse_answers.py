"""Asking questions densely and sparsely, with an engine that answers by what its budget reads; figures worked
out by hand; the record that `--sparse-attention auto` reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import load
from ragserve.engine.base import EngineInfo, EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.errors import EngineError, InvalidRequest
from ragserve.eval.data import GivenPassage, Question
from ragserve.eval.sparse_answers import DENSE, SparseSetting, SparseTask, ask_all, figures
from ragserve.eval.sparse_calibration import find_and_record
from ragserve.profiles.sparse_attention import FILE_NAME, SPARSE
from ragserve.strategy_spec import parse
from ragserve.verification.rows import Row, key
from sglang_ext.wire.protocol import DecodeReport, PrefillReport
from tests.conftest import MODEL

BUILDER = PromptBuilder.load(str(MODEL))
SMALL = {"mode": "hierarchical", "budget": 512, "dense_below": 0}


class Reader:
    """Answers `Paris`; with a budget below ``enough``, every other question with `Rome`."""

    def __init__(self, enough: int = 1024) -> None:
        self.enough = enough
        self.asked: list[GenerateRequest] = []
        self.warmed: list[GenerateRequest] = []
        self.course: list[tuple[str, str]] = []
        self.running: list[str] = []
        self.most = (0, 0)
        self.info = EngineInfo(
            "local", str(MODEL), str(MODEL), "0", "cpu", "", 8192, 8192, (), "f", dtype="float32"
        )

    async def warm(self, request: GenerateRequest) -> None:
        self.warmed.append(request)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.asked.append(request)
        kind = f"{request.strategy} {dict(request.prefill)}"
        self.course.append(("begins", kind))
        self.running.append(request.rid)
        self.most = max(self.most[0], len({*self.running})), max(self.most[1], len(self.running))
        await asyncio.sleep(0)
        self.running.remove(request.rid)
        self.course.append(("ends", kind))
        if request.rid.endswith("broken"):
            raise EngineError("it broke")
        budget = request.decode.get("budget", self.enough)
        wrong = budget < self.enough and int(request.rid.rpartition("-")[2]) % 2
        read = prefill = None
        if request.decode["mode"] != DENSE:
            read = DecodeReport("hierarchical", 2, 2, 8.0, 64.0, budget / 8192, None)
        if request.prefill:
            prefill = PrefillReport("vertical_slash", request.prefill["alpha"], 4096, 0.5)
        usage = EngineUsage(len(request.input_ids), 0, 2)
        yield GenerateChunk(
            "Rome" if wrong else "Paris", usage, EngineTimings(), "stop", decode=read, prefill=prefill
        )


def tasks(count: int, *ids: str) -> list[SparseTask]:
    passage = GivenPassage("France", "The capital of France is Paris.")
    return [
        SparseTask("capitals", Question(name, "The capital?", ("Paris",), (passage,), (passage,), ""))
        for name in (*map(str, range(count)), *ids)
    ]


def asked(
    engine: Any, wanted: Sequence[SparseTask], settings: Sequence[SparseSetting], finished: Any = ()
) -> list[Row]:
    rows: list[Row] = []
    asyncio.run(ask_all(engine, BUILDER, wanted, settings, in_flight=3, finished=finished, write=rows.append))
    return rows


def test_every_setting_is_asked_once_and_failures_are_rows() -> None:
    engine, settings = Reader(), [SparseSetting(DENSE), SparseSetting("few", SMALL)]
    rows = asked(engine, tasks(4, "broken"), settings)
    assert sorted((row["id"], row["strategy"]) for row in rows) == sorted(
        (task.question.id, each.label) for task in tasks(4, "broken") for each in settings
    )
    broken = [row for row in rows if row["id"] == "broken"]
    assert all("it broke" in row["error"] for row in broken)
    finished = {key(row) for row in rows if not row["error"]}
    assert [row["id"] for row in asked(engine, tasks(4, "broken"), settings, finished)] == ["broken"] * 2


def test_a_prompt_is_prefilled_before_settings_read_its_kv_together() -> None:
    engine = Reader()
    lines = {"mode": "vertical_slash", "alpha": 0.9}
    settings = [
        SparseSetting("few", SMALL),
        SparseSetting(DENSE),
        SparseSetting("some", {**SMALL, "budget": 2048}),
        SparseSetting("lines", prefill=lines),
        SparseSetting("composed", strategy=parse("concat")[0]),
    ]
    asked(engine, tasks(1), settings)
    exact = [(at, what) for at, (what, kind) in enumerate(engine.course) if kind == "prefix {}"]
    assert [what for _, what in exact] == ["begins", "ends", "begins", "begins", "ends", "ends"]
    assert [each.strategy for each in engine.warmed] == ["concat"]
    assert all(each.spans for each in engine.warmed)


def test_settings_of_as_many_prompts_as_wanted_are_asked_at_once() -> None:
    settings = [
        SparseSetting(DENSE),
        *(SparseSetting(f"{n}", {**SMALL, "budget": n}) for n in (64, 128, 256)),
    ]
    for prompts in (1, 2):
        engine, rows = Reader(), list[Row]()
        asyncio.run(
            ask_all(
                engine,
                BUILDER,
                tasks(6),
                settings,
                in_flight=8,
                prompts=prompts,
                finished=(),
                write=rows.append,
            )
        )
        assert len(rows) == 24
        assert engine.most == (prompts, 3 * prompts), "prompts and requests at once"


def test_figures_are_paired_and_leave_failures_out() -> None:
    rows = asked(Reader(), tasks(10, "broken"), [SparseSetting(DENSE), SparseSetting("few", SMALL)])
    dense = [row for row in rows if row["strategy"] == DENSE]
    (few,) = figures([row for row in rows if row["strategy"] == "few"], dense).values()
    assert (few.n, few.dense, few.score, few.read) == (10, 100.0, 50.0, 0.0625)
    assert 50 < few.loss_bound < 100
    assert few.failed == 0, "dense attention does not answer it either"
    assert figures([], dense) == {}


def test_questions_that_fail_under_a_setting_alone_speak_against_it() -> None:
    dense = asked(Reader(), tasks(4), [SparseSetting(DENSE)])
    failed = [row | {"strategy": "few", "error": "it broke"} for row in dense]
    (some,) = figures([*failed[:1], *dense[1:]], dense).values()
    assert (some.n, some.failed) == (3, 1)
    (none,) = figures(failed, dense).values()
    assert (none.n, none.failed) == (0, 4)
    assert str(none.shortfall()).startswith("4 questions failed")


def test_bounds_of_candidates_hold_together() -> None:
    dense = asked(Reader(), tasks(100), [SparseSetting(DENSE)])
    (alone,) = figures(dense, dense).values()
    (chosen,) = figures(dense, dense, among=7).values()
    assert (alone.loss_bound, chosen.loss_bound) == pytest.approx((2.63, 3.47), abs=0.02)


@pytest.mark.parametrize(
    ("setting", "server"),
    [
        (SparseSetting(DENSE), {}),
        (SparseSetting("", SMALL), {"decode_mode": "hierarchical", "decode_budget": 512}),
        (SparseSetting("", {**SMALL, "lag": 2}), None),
        (SparseSetting("", prefill={"mode": "vertical_slash", "share": 0.1}), None),
        (SparseSetting("", SMALL, strategy=parse("concat")[0]), None),
    ],
)
def test_settings_that_a_server_can_have(setting: SparseSetting, server: dict[str, Any] | None) -> None:
    assert setting.server == server


def recorded(folder: Path, engine: Any, count: int = 120) -> None:
    settings = load(data_dir=folder, model=str(MODEL))
    asyncio.run(find_and_record(settings, engine, tasks(count), in_flight=8, report=lambda line: None))


def test_the_cheapest_settings_that_hold_are_tried_together_and_recorded(tmp_path: Path) -> None:
    recorded(tmp_path, Reader(enough=1024))
    record = SPARSE.load(tmp_path / FILE_NAME, "f")
    assert record is not None
    assert (tmp_path / FILE_NAME).exists()
    best = record.best()
    assert best is not None
    assert best.settings == {
        "decode_mode": "hierarchical",
        "decode_budget": 1024,
        "decode_scores": "exact",
        "prefill_mode": "vertical_slash",
        "prefill_alpha": 0.9,
    }
    small = next(entry for entry in record.entries if entry.settings.get("decode_budget") == 512)
    assert small.shortfalls()[0].startswith("capitals: 50 points below dense")
    assert SPARSE.load(tmp_path / FILE_NAME, "another model") is None


def test_a_record_without_a_question_is_refused(tmp_path: Path) -> None:
    settings = load(data_dir=tmp_path, model=str(MODEL))
    engine: Any = Reader()
    with pytest.raises(InvalidRequest, match="it broke"):
        asyncio.run(
            find_and_record(settings, engine, tasks(0, "broken"), in_flight=1, report=lambda line: None)
        )
    assert not (tmp_path / FILE_NAME).exists()
