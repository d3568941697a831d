"""Leading strategies along dialogues, with an engine that answers from a table."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.base import EngineInfo, EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.errors import EngineError
from ragserve.eval.data import GivenPassage, Question
from ragserve.eval.multiturn import DOCUMENTS_FIRST, dialogues_of
from ragserve.eval.multiturn_engine import by_turn, led_along
from ragserve.strategy_spec import parse
from sglang_ext.wire.protocol import ContextReport, DecodeReport
from tests.conftest import MODEL

SPECS = parse("full,prefix,concat:recompute=all")
TURNS = 3


def sent(probabilities: Sequence[float]) -> str:
    return base64.b64encode(np.log(np.asarray(probabilities)).astype("<f4").tobytes()).decode()


class Engine:
    """Says "red"; a composed answer's distributions are off by more in each turn."""

    def __init__(self, builder: PromptBuilder) -> None:
        self.asked: list[GenerateRequest] = []
        self.warmed: list[GenerateRequest] = []
        self.fails_at = 10**9
        self.broken: Callable[[GenerateRequest], bool] = lambda request: False
        self.differs = False  # a composed answer would be another one
        self.info = EngineInfo("local", str(MODEL), str(MODEL), "0", "cpu", "", 8192, 8192, ("full",))
        self._ids = builder.question_ids(" red")

    async def warm(self, request: GenerateRequest) -> None:
        self.warmed.append(request)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.asked.append(request)
        if len(self.asked) > self.fails_at or self.broken(request):
            raise EngineError("no memory")
        composed, held = request.strategy == "concat", request.session.held if request.session else 0
        report = None
        if composed:
            report = ContextReport("concat", 9, 9, 9, {"device": 9}, 0.0, 0.0, 0.0, session_held=held)
        likely = 0.9 if held else 0.7
        odds = (0.5 + 1e-6, 0.5 - 1e-6) if not (composed or request.decode) else (likely, 1 - likely)
        reads = DecodeReport("hierarchical", 3, 3, 2.0, 8.0, 0.25, None) if request.decode else None
        if self.differs and composed:
            odds = (1 - likely, likely)
        yield GenerateChunk(
            " blue" if self.differs and composed and not request.forced else " red",
            EngineUsage(len(request.input_ids), held, len(self._ids)),
            EngineTimings(),
            "stop",
            report,
            distributions=[sent(odds)] * (len(self._ids) if request.distributions else 0),
            output_ids=tuple(self._ids),
            decode=reads,
        )


def questions(count: int) -> list[Question]:
    documents = [GivenPassage(f"Title {number}", f"Text {number}.") for number in range(count)]
    return [
        Question(str(n), f"Which is {n}?", ("red",), (document,), (document,), "")
        for n, document in enumerate(documents)
    ]


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    return PromptBuilder.load(str(MODEL))


def led(
    engine: Any,
    builder: PromptBuilder,
    budget: int | None = None,
    session_budgets: Sequence[int] = (),
    refresh_turns: Sequence[int] = (),
) -> list[dict[str, Any]]:
    dialogues = dialogues_of(questions(2 * TURNS), TURNS)
    return asyncio.run(
        led_along(
            engine,
            builder,
            dialogues,
            SPECS,
            8,
            budget=budget,
            session_budgets=session_budgets,
            refresh_turns=refresh_turns,
            progress=lambda: None,
        )
    )


def test_every_strategy_goes_on_from_the_answers_of_full_in_a_session_of_its_own(
    builder: PromptBuilder,
) -> None:
    engine = Engine(builder)
    lines = led(engine, builder)
    assert len(lines) == 2 * TURNS * 4
    assert not any(line["error"] for line in lines)
    full = [request for request in engine.asked if request.strategy == "full"]
    composed = [request for request in engine.asked if request.strategy == "concat"]
    assert [r.input_ids for r in composed] == [r.input_ids for r in full]
    assert all(list(r.forced) == engine._ids for r in composed)
    first, second, third = composed[:TURNS]
    assert second.input_ids[: len(first.input_ids)] == first.input_ids
    assert third.input_ids[: len(second.input_ids)] == second.input_ids
    parts = [request.session for request in (first, second, third)]
    assert [part.held for part in parts if part] == [0, first.spans[-1].end, second.spans[-1].end]
    keys = {request.session.key for request in engine.asked if request.session}
    assert len(keys) == 4, "one for each dialogue and strategy"
    assert third.earlier is not None
    again = third.earlier()
    assert (again.input_ids, again.sampling.max_new_tokens) == (second.input_ids, 1)
    assert engine.warmed[1].spans == second.spans[1:], "the dialogue itself is no document"
    rival = next(r for r in engine.asked if r.session is None and r.strategy == "prefix")
    assert rival.forced == ()


def test_figures_by_turn(builder: PromptBuilder) -> None:
    lines = by_turn(led(Engine(builder), builder))
    assert list(dict.fromkeys(line["strategy"] for line in lines)) == [
        *(spec.label for spec in SPECS),
        DOCUMENTS_FIRST,
    ]
    found = {(line["strategy"], line["turn"]): line for line in lines}
    assert all(line["n"] == 2 for line in lines)
    label = SPECS[2].label
    kls = [found[label, turn]["answer_kl"] for turn in (1, 2, 3)]
    wanted = [0.5 * np.log(0.25 / (likely * (1 - likely))) for likely in (0.7, 0.9, 0.9)]
    assert kls == pytest.approx(wanted, rel=0.01)
    assert found["full", 2]["answer_kl"] == found["prefix", 2]["answer_kl"] == 0
    assert found[DOCUMENTS_FIRST, 2]["answer_kl"] is None
    assert found[label, 2]["held"] > 0
    assert found[label, 2]["computed"] > 0
    assert (found["full", 2]["held"], found[label, 1]["held"]) == (0, 0)


def test_pages_chosen_once_or_by_nobody_are_rivals_in_sessions_of_their_own(builder: PromptBuilder) -> None:
    engine = Engine(builder)
    lines = by_turn(led(engine, builder, 512))
    sparse = [request for request in engine.asked if request.decode]
    assert len(sparse) == 4 * 2 * TURNS
    assert [r.decode["observe"] for r in sparse[:4]] == ["window", "last", "prompt", "recent"]
    assert all(r.strategy == "prefix" and r.decode["budget"] == 512 for r in sparse)
    assert len({r.session.key for r in sparse if r.session}) == 4 * 2
    found = {(line["strategy"], line["turn"]): line for line in lines}
    fixed = found["prefix, 512 by prompt's end", 3]
    assert fixed["read"] == 25
    assert fixed["answer_kl"] > 0
    assert (found["prefix", 3]["read"], found["prefix", 3]["answer_kl"]) == (100, 0)


def test_strategies_over_shortened_dialogues_stand_beside_those_over_whole_ones(
    builder: PromptBuilder,
) -> None:
    engine = Engine(builder)
    lines = by_turn(led(engine, builder, session_budgets=[12]))
    found = {(line["strategy"], line["turn"]): line for line in lines}
    composed = SPECS[2].label
    for label in ("prefix", composed):
        short = f"{label}, earlier in 12"
        sizes = [(found[short, n]["prompt_tokens"], found[label, n]["prompt_tokens"]) for n in (1, 2, 3)]
        assert sizes[0][0] == sizes[0][1]
        assert sizes[1][0] == sizes[1][1], "the only turn before is the last one"
        assert sizes[2][0] < sizes[2][1]
        assert found[short, 3]["f1"] == found[short, 3]["in_prompt"] == 100, "said in the last turn"
        assert found[short, 3]["ttft_ms"] >= 0
    asked = [r for r in engine.asked if r.session and r.session.key.endswith(f"{composed}, earlier in 12")]
    assert {r.session.key for r in asked if r.session} != {r.session.key for r in engine.asked if r.session}
    last = asked[TURNS - 1]
    assert last.earlier is not None
    assert last.earlier().spans[0].start == 0
    assert len(last.earlier().input_ids) < len(last.input_ids)


def test_a_dialogue_is_prefilled_anew_every_so_many_turns(builder: PromptBuilder) -> None:
    engine = Engine(builder)
    lines = by_turn(led(engine, builder, refresh_turns=[2]))
    label = f"{SPECS[2].label}, anew every 2"
    assert [line["turn"] for line in lines if line["strategy"] == label] == [1, 2, 3]
    assert not any("anew" in line["strategy"] and "prefix" in line["strategy"] for line in lines)
    asked = [r for r in engine.asked if r.session and label in r.session.key][:TURNS]
    first, second, third = [r.session for r in asked if r.session]
    assert first.key == second.key != third.key, "exact KV is found by later turns, and by no earlier one"
    assert second.held < len(asked[1].input_ids) < third.held <= asked[2].spans[0].end
    assert asked[2].earlier is not None
    text = asked[2].earlier()
    assert text.earlier is None, "nothing of the dialogue is composed"
    assert (text.input_ids, text.spans) == (asked[2].input_ids[: third.held], asked[0].spans[:1])


def test_another_answer_has_its_own_f1_and_the_dialogue_goes_on_from_that_of_full(
    builder: PromptBuilder,
) -> None:
    engine = Engine(builder)
    engine.differs = True
    lines = by_turn(led(engine, builder))
    found = {(line["strategy"], line["turn"]): line for line in lines}
    assert [found[SPECS[2].label, turn]["f1"] for turn in (1, 2, 3)] == [0, 0, 0]
    assert found[SPECS[2].label, 1]["as_full"] == 0
    assert {found[label, 2]["f1"] for label in ("full", "prefix", DOCUMENTS_FIRST)} == {100}
    forced, own = (request for request in engine.asked[:5] if request.strategy == "concat")
    assert (own.forced, own.session, own.input_ids) == ((), forced.session, forced.input_ids)


def test_a_turn_that_full_fails_has_failed_for_all_and_ends_its_dialogue(builder: PromptBuilder) -> None:
    engine = Engine(builder)
    engine.fails_at = 4  # the first turn is asked four times
    lines = led(engine, builder)
    failed = [line for line in lines if line["error"]]
    assert [line["turn"] for line in failed] == [2] * 4 + [1] * 4
    assert all("no memory" in line["error"] for line in failed)
    found = by_turn(lines)
    labels = [*(spec.label for spec in SPECS), DOCUMENTS_FIRST]
    assert [(line["strategy"], line["turn"], line["n"], line["failed"], line["f1"]) for line in found] == [
        (label, *figures) for label in labels for figures in ((1, 2, 1, 50.0), (2, 1, 1, 0.0))
    ]
    assert found[1]["ttft_ms"] is None


def label_of(request: GenerateRequest) -> str:
    if request.session is not None:
        return request.session.key.partition("-")[2]
    return DOCUMENTS_FIRST if request.strategy == "prefix" else request.strategy


@pytest.mark.parametrize("fails", [SPECS[2].label, "prefix, earlier in 12", DOCUMENTS_FIRST])
def test_a_strategy_that_fails_counts_as_wrong_and_the_others_go_on(
    builder: PromptBuilder, fails: str
) -> None:
    engine = Engine(builder)
    engine.broken = lambda request: fails == label_of(request)
    lines = led(engine, builder, session_budgets=[12])
    whole = led(Engine(builder), builder, session_budgets=[12])
    assert [(line["id"], line["strategy"]) for line in lines] == [
        (line["id"], line["strategy"]) for line in whole
    ]
    failed = [line for line in lines if line["error"]]
    assert {line["strategy"] for line in failed} == {fails}
    assert all("no memory" in line["error"] for line in failed)
    figures = {(line["strategy"], line["turn"]): line for line in by_turn(lines)}
    for line in by_turn(whole):
        own = figures[line["strategy"], line["turn"]]
        if line["strategy"] != fails:
            assert own | {"ttft_ms": line["ttft_ms"]} == line, "nothing of the others is lost"
    last = figures[fails, TURNS]
    assert (last["n"], last["failed"], last["f1"]) == (2, 2, 0.0)
    assert last["as_full"] == (None if fails == DOCUMENTS_FIRST else 0.0)
    assert last["prompt_tokens"] is None
