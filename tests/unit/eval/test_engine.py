"""Asking an engine under several strategies, with one that answers from a table; keeping rows; averages
worked out by hand.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.base import EngineInfo, EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.engine.document_cache import ControlledCache
from ragserve.errors import EngineError, InvalidRequest
from ragserve.eval import engine_worker
from ragserve.eval.data import GivenPassage, Question, find, interleaved
from ragserve.eval.engine import Ask, evaluate
from ragserve.eval.summary import pooled, summarise
from ragserve.strategy_spec import parse
from ragserve.verification import rows
from sglang_ext.wire.protocol import ContextReport
from tests.conftest import MODEL


def sent(probabilities: Sequence[float]) -> str:
    return base64.b64encode(np.log(np.asarray(probabilities)).astype("<f4").tobytes()).decode()


class Table(ControlledCache):
    """Answers by strategy; composed ones want their documents warmed first. ``did``: operations of the cache
    and strategies asked, in order."""

    def __init__(self, answers: dict[str, str], distributions: dict[str, Sequence[float]]) -> None:
        self.answers, self.distributions = answers, distributions
        self.did: list[str] = []
        self.asked: list[GenerateRequest] = []
        self.warmed: list[GenerateRequest] = []
        self.info = EngineInfo("local", str(MODEL), str(MODEL), "0", "cpu", "", 8192, 8192, tuple(answers))

    async def ready(self) -> bool:
        return True

    async def warm(self, request: GenerateRequest) -> None:
        self.warmed.append(request)

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        self.did.append(f"{operation} {','.join(arguments['tiers'])}" if "tiers" in arguments else operation)
        return {"fingerprint": "f"}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.asked.append(request)
        self.did.append(request.strategy)
        if request.strategy == "broken":
            raise EngineError("it broke")
        documents = request.spans[-1].end - request.spans[0].end
        composed = request.strategy == "epic"
        report = (
            ContextReport("epic", documents, documents // 2, 3, {"device": documents // 2}, 1.0, 0.0, 1.0)
            if composed
            else None
        )
        distributions = [sent(self.distributions[request.strategy])] * bool(request.distributions)
        for text, reason in ((self.answers[request.strategy], None), ("", "stop")):
            usage = EngineUsage(len(request.input_ids), 0, 2)
            fallback = "no room" if request.strategy == "random" else None
            yield GenerateChunk(
                text,
                usage,
                EngineTimings(),
                reason,
                report,
                fallback=fallback,
                distributions=distributions,
                output_ids=request.forced or [7],
            )


QUESTION = Question(
    "q1",
    "What colour is a?",
    ("red",),
    (GivenPassage("a", "a is red."), GivenPassage("b", "b is blue.")),
    (),
    "k",
)
ANSWERS = {"full": " red", "epic": " dark red", "random": " blue", "broken": ""}
DISTRIBUTIONS = {
    "full": (0.5, 0.25, 0.25),
    "epic": (0.25, 0.5, 0.25),
    "random": (0.5, 0.25, 0.25),
    "prefix": (0.5, 0.25, 0.25),
}


def asked(
    table: Table, strategies: str, *, finished: frozenset[rows.Key] = frozenset(), ask: Ask | None = None
) -> list[rows.Row]:
    written: list[rows.Row] = []
    builder = PromptBuilder.load(str(MODEL))
    work = evaluate(
        table,  # type: ignore[arg-type]
        builder,
        [("s", QUESTION)],
        parse(strategies),
        ask or Ask(),
        finished=finished,
        write=written.append,
    )
    asyncio.run(work)
    return written


def test_each_strategy_is_scored_on_the_same_prompt_and_compared_with_full() -> None:
    table = Table(ANSWERS, DISTRIBUTIONS)
    full, epic, random = asked(table, "full,epic:first=2,random")
    assert [row["strategy"] for row in (full, epic, random)] == ["full", "epic:first=2", "random"]
    assert len({tuple(request.input_ids) for request in table.asked}) == 1
    assert len(table.warmed) == 1
    assert (full["em"], full["f1"], full["kl"], full["agrees"]) == (1.0, 1.0, 0.0, True)
    assert epic["answer"] == "dark red"
    assert (epic["em"], epic["f1"], epic["agrees"]) == (0.0, pytest.approx(2 / 3, abs=1e-4), False)
    assert epic["kl"] == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5), rel=1e-3)
    assert (epic["answer_kl"], epic["answer_agrees"], epic["answer_tokens"]) == (epic["kl"], 0.0, 1)
    assert epic["answer_regret"] == pytest.approx(0.25)
    assert full["recomputed"] == full["kept"] == full["document_tokens"] > 0
    assert (epic["kept"], epic["recomputed"]) == (epic["document_tokens"] // 2, 3)
    assert (epic["fallback"], random["fallback"]) == (None, "no room")


def test_full_is_asked_for_its_distribution_even_where_it_is_not_wanted_or_done() -> None:
    table = Table(ANSWERS, DISTRIBUTIONS)
    [row] = asked(table, "full,epic", finished=frozenset({("s", "q1", "full")}))
    assert row["strategy"] == "epic"
    assert row["kl"] > 0
    asked_for = [(request.strategy, list(request.forced)) for request in table.asked]
    assert asked_for == [("full", []), ("epic", [7]), ("epic", [])], "led, and then for its own answer"


def test_a_strategy_that_agrees_at_every_token_is_not_asked_twice() -> None:
    table = Table({**ANSWERS, "random": " not asked for"}, DISTRIBUTIONS)
    full, random = asked(table, "full,random")
    assert [(request.strategy, list(request.forced)) for request in table.asked] == [
        ("full", []),
        ("random", [7]),
    ]
    assert (random["answer"], random["answer_agrees"], random["answer_regret"]) == (full["answer"], 1.0, 0.0)


def test_a_failure_is_a_row_and_the_others_go_on() -> None:
    table = Table(ANSWERS, DISTRIBUTIONS)
    broken, epic = asked(table, "broken,epic")
    assert (broken["em"], broken["error"]) == (0.0, "engine_error: it broke")
    assert epic["error"] is None


def test_without_a_comparison_each_strategy_is_asked_once() -> None:
    table = Table(ANSWERS, DISTRIBUTIONS)
    epic, random = asked(table, "epic,random", ask=Ask(compare=False))
    assert [(request.strategy, request.distributions) for request in table.asked] == [
        ("epic", 0),
        ("random", 0),
    ]
    assert (epic["answer"], epic["kl"], epic["answer_kl"]) == ("dark red", None, None)
    assert (epic["contains"], random["contains"]) == (True, False)


def test_first_tokens_with_copies_have_their_documents_on_the_host() -> None:
    table = Table(ANSWERS, DISTRIBUTIONS)
    full, epic = asked(table, "full,epic", ask=Ask(compare=False, tier="host"))
    assert table.did == ["full", "flush", "info", "evict device", "epic"]
    assert full["error"] is epic["error"] is None


def test_refusals_are_told_from_answers() -> None:
    refusing = "It is not mentioned in the documents."
    table = Table({**ANSWERS, "full": refusing, "epic": "Not provided: red"}, DISTRIBUTIONS)
    full, epic, random = asked(table, "full,epic,random", ask=Ask(compare=False))
    assert [row["refused"] for row in (full, epic, random)] == [True, False, False]


def test_the_best_passages_are_asked_for_with_nothing_cached() -> None:
    table = Table(ANSWERS, DISTRIBUTIONS)
    full, best, _ = asked(table, "full,passages:tokens=1,epic", ask=Ask(compare=False))
    assert [request.strategy for request in table.asked] == ["full", "full", "epic"]
    whole, part, _ = table.asked
    assert len(part.input_ids) < len(whole.input_ids)
    assert best["strategy"] == "passages:tokens=1"
    assert 0 < best["kept"] == best["recomputed"] < best["document_tokens"] == full["document_tokens"]
    assert best["documents_dropped"] == 0, "left out, not without room"
    assert table.warmed[0].strategy == "epic"


class SecondBest:
    """An embedder that finds the second passage nearer to every question."""

    dim = 2

    def encode(self, texts: Sequence[str]) -> Any:
        return np.array([[1.0, 0.0] if number == 0 else [0.0, 1.0] for number, _ in enumerate(texts)])

    def encode_queries(self, texts: Sequence[str]) -> Any:
        return np.array([[0.0, 1.0]] * len(texts))


def test_the_best_passages_are_those_of_the_embedder() -> None:
    table, written, builder = Table(ANSWERS, DISTRIBUTIONS), list[rows.Row](), PromptBuilder.load(str(MODEL))
    work = evaluate(
        table,  # type: ignore[arg-type]
        builder,
        [("s", QUESTION)],
        parse("passages:tokens=1"),
        Ask(compare=False),
        finished=(),
        write=written.append,
        embedder=SecondBest(),  # type: ignore[arg-type]
    )
    asyncio.run(work)
    read = builder.words(table.asked[0].input_ids)
    assert "b is blue." in read
    assert "a is red." not in read


def test_a_composed_strategy_is_asked_with_the_best_passages_alone() -> None:
    table = Table(ANSWERS, DISTRIBUTIONS)
    full, best = asked(table, "full,epic:first=16,passages.tokens=1", ask=Ask(compare=False))
    whole, part = table.asked
    assert (part.strategy, dict(part.options)) == ("epic", {"first": 16})
    assert len(part.spans) == 2 < len(whole.spans)
    assert best["strategy"] == "epic:first=16,passages.tokens=1"
    assert best["document_tokens"] == full["document_tokens"]
    assert len(table.warmed[0].spans) == len(whole.spans), "all documents are cached for the others"


def test_nothing_is_asked_twice() -> None:
    table = Table(ANSWERS, DISTRIBUTIONS)
    assert asked(table, "full,epic", finished=frozenset({("s", "q1", "full"), ("s", "q1", "epic")})) == []
    assert table.asked == []


def row(name: str, strategy: str, f1: float, **more: Any) -> rows.Row:
    tokens = {"document_tokens": 10, "kept": 5, "recomputed": 2, "prompt_tokens": 20, "documents_dropped": 0}
    rest = {"em": float(f1 == 1), "kl": 0.5, "agrees": True, "ttft_ms": 4.0, "fallback": None, "error": None}
    return {"set": "s", "id": name, "strategy": strategy, "f1": f1, **tokens, **rest, **more}


def test_averages_by_hand() -> None:
    failed = {"set": "s", "id": "3", "strategy": "epic", "em": 0.0, "f1": 0.0, "error": "engine_error: x"}
    group = [row("1", "full", 1.0), row("2", "full", 0.5), row("3", "full", 1.0)]
    group += [row("1", "epic", 0.5, kl=1.5, ttft_ms=8.0, fallback="x"), row("2", "epic", 0.5), failed]
    full, epic = summarise(group)
    assert (full["n"], full["em"], full["f1_vs_full"], full["f1_vs_full_se"]) == (3, 66.67, 0.0, 0.0)
    assert (epic["n"], epic["failed"], epic["fallbacks"]) == (3, 1, 1)
    assert epic["f1"] == pytest.approx(100 / 3, abs=0.01)
    # differences -50, 0, -100: mean -50, variance 2500
    assert epic["f1_vs_full"] == -50.0
    assert epic["f1_vs_full_se"] == pytest.approx(50 / math.sqrt(3), abs=0.01)
    assert (epic["kl"], epic["kl_p50"], epic["ttft_ms"]) == (1.0, 1.0, 6.0)
    assert (epic["kept"], epic["recomputed"], epic["agrees"]) == (50.0, 20.0, 100.0)
    assert epic["from_host"] is None
    [read] = summarise([row("1", "epic", 1.0, tiers={"host": 3}), row("2", "epic", 1.0, tiers={"device": 1})])
    assert read["from_host"] == 75.0
    assert epic["answer_kl"] is epic["answer_kl_bound"] is None, "rows of an earlier version"
    assert epic["contains"] is epic["refused"] is None
    low, high = epic["f1_vs_full_95"]
    assert low == -100.0 < -50 < high, "three questions show little"
    assert epic["f1_loss_bound"] > 100.0, "three questions show nothing"
    [led] = summarise([row("1", "epic", 1.0, answer_kl=0.5, answer_agrees=0.75)] * 400)
    assert (led["answer_kl"], led["answer_agrees"]) == (0.5, 75.0)
    assert 0.5 <= led["answer_kl_bound"] < 0.51
    assert led["answer_regret"] == 25.0
    assert 25.0 < led["answer_regret_bound"] < 26.0


def test_what_full_misses_is_shown_apart() -> None:
    answers = [("1", 0.0, 0.5), ("2", 0.0, 0.0), ("3", 1.0, 1.0), ("4", 0.5, 1.0)]
    group = [row(name, "full", f1, contains=f1 == 1, refused=f1 == 0) for name, f1, _ in answers]
    group += [row(name, "epic", f1, contains=f1 == 1, refused=f1 == 0) for name, _, f1 in answers]
    full, epic = summarise(group)
    assert (full["full_misses"], full["of_these"], full["contains"], full["refused"]) == (50, 0, 25, 50)
    assert (epic["full_misses"], epic["of_these"], epic["contains"], epic["refused"]) == (50, 50, 50, 25)


def test_sets_are_pooled_by_question() -> None:
    group = [row("1", "full", 1.0), row("1", "concat", 0.0), row("1", "epic", 0.5)]
    group += [{**row(str(n), "epic", 0.0), "set": "other"} for n in range(3)]
    lines = {line["strategy"]: line for line in pooled(group)}
    assert (lines["epic"]["sets"], lines["epic"]["n"], lines["epic"]["f1"]) == (2, 4, 12.5)
    assert (lines["full"]["margin"], lines["epic"]["margin"], lines["concat"]["margin"]) == (100, 50, 0)
    assert "margin" not in summarise(group)[0]


def test_rows_survive_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    with rows.appending(tmp_path / "rows-0.jsonl") as write:
        write(row("1", "full", 1.0))
        write(row("1", "epic", 0.0, error="engine_error: x"))
    path = tmp_path / "rows-0.jsonl"
    path.write_bytes(path.read_bytes() + b'{"set": "s", "id": "2", "str')
    assert set(rows.read(tmp_path)) == {("s", "1", "full"), ("s", "1", "epic")}
    with rows.appending(path) as write:
        write(row("1", "epic", 0.5))
        write(row("1", "full", 0.0, error="engine_error: later failure"))
    found = rows.read(tmp_path)
    assert found["s", "1", "epic"]["f1"] == 0.5
    assert found["s", "1", "full"]["f1"] == 1.0, "an answer is worth more than a later failure"
    assert rows.count(tmp_path) == 4
    assert [json.loads(line)["strategy"] for line in path.read_text().splitlines()] == [
        "full",
        "epic",
        "epic",
        "full",
    ]


def test_a_folder_holds_one_kind_of_rows(tmp_path: Path) -> None:
    rows.claim(tmp_path, {"model": "a", "sets": {"x": "1"}})
    rows.claim(tmp_path, {"model": "a", "sets": {"y": "2"}})
    rows.claim(tmp_path, {"model": "a", "sets": {"x": "1", "y": "2"}})
    with pytest.raises(InvalidRequest, match="model"):
        rows.claim(tmp_path, {"model": "b", "sets": {"x": "1"}})
    with pytest.raises(InvalidRequest, match="set y"):
        rows.claim(tmp_path, {"model": "a", "sets": {"y": "3"}})


def test_sets_by_name(tmp_path: Path) -> None:
    for place in (
        "synthetic/one.jsonl.gz",
        "two/two_200.jsonl",
        "two/two_200.uniform.jsonl.gz",
        "three.jsonl",
    ):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text("")
    assert find("one", tmp_path) == tmp_path / "synthetic" / "one.jsonl.gz"
    assert find("two", tmp_path).name == "two_200.uniform.jsonl.gz"
    assert find("three", tmp_path) == tmp_path / "three.jsonl"
    assert find("some/where.jsonl", None) == Path("some/where.jsonl")
    with pytest.raises(InvalidRequest, match="No set 'four'"):
        find("four", tmp_path)
    with pytest.raises(InvalidRequest, match="--sets"):
        find("one", None)


def test_any_part_of_a_run_covers_every_set_alike() -> None:
    sets = {
        name: [Question(str(i), "?", ("a",), (), (), "") for i in range(n)]
        for name, n in (("long", 8), ("short", 2))
    }
    order = [(name, question.id) for name, question in interleaved(sets)]
    assert len(order) == 10
    assert sum(name == "short" for name, _ in order[:5]) == 1
    assert [i for name, i in order if name == "long"] == [str(i) for i in range(8)]


def test_a_worker_asks_all_questions_under_the_first_strategies_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run that is cut off has those of all questions."""
    table = Table(ANSWERS, DISTRIBUTIONS)
    monkeypatch.setattr("ragserve.engine.offline.run_once", lambda _, work: asyncio.run(work(table)))
    data = tmp_path / "s.jsonl"
    documents = [[each.title, each.text] for each in QUESTION.documents]
    questions = [{"id": f"q{i}", "question": "?", "answers": ["red"], "docs": documents} for i in range(2)]
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    engine_worker.run(
        {
            "folder": str(tmp_path),
            "index": 0,
            "of": 1,
            "sets": [str(data)],
            "limit": None,
            "strategies": ["full", "epic", "random"],
            "first": 2,
            "half": None,
            "compare": True,
            "tier": "device",
            "max_new_tokens": 4,
            "in_flight": 1,
            "settings": {"system_prompt": "Say little."},
        }
    )
    read = PromptBuilder.load(str(MODEL)).words(table.asked[0].input_ids)
    assert "Say little." in read, "the setting is asked with"
    lines = (tmp_path / "rows-0.jsonl").read_text().splitlines()
    asked = [(row["id"], row["strategy"]) for row in map(json.loads, lines)]
    first = [(question, strategy) for question in ("q0", "q1") for strategy in ("full", "epic")]
    assert asked == [*first, ("q0", "random"), ("q1", "random")]
