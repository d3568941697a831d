"""Comparing strategies on a namespace, with an engine and a search that answer from tables."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.base import EngineInfo, EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.errors import EngineError
from ragserve.strategy_spec import parse
from ragserve.verification.comparison import ALONE, TRIED, Comparison, TunedQueries, compare_all
from ragserve.verification.questions import WRITE, DrawnQuestion
from ragserve.verification.rows import Key, Row
from ragserve_index.types import Chunk, Hit
from sglang_ext.wire.protocol import ContextReport
from tests.conftest import MODEL

QUERIES = TunedQueries("notes", k=2, retrieval="dense", max_new_tokens=8)
SAME, OTHER = (0.6, 0.2, 0.2), (0.2, 0.6, 0.2)


def sent(probabilities: tuple[float, ...]) -> str:
    return base64.b64encode(np.log(np.asarray(probabilities)).astype("<f4").tobytes()).decode()


def chunk(number: int, text: str) -> Chunk:
    return Chunk(number, f"d{number}", 0, text, 0, len(text), None, 9, f"{number}.txt", "", {})


CHUNKS = [
    chunk(n, f"The lighthouse number {n} of the long coast was built by Ida{n} Marsh.") for n in range(60)
]


class Search:
    """Finds the chunk that the question names, and one more."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int, str]] = []

    async def retrieve(
        self, namespace: str, question: str, k: int, *, retrieval: str, sentences: bool
    ) -> Any:
        self.asked.append((namespace, question, k, retrieval))
        found = next((c for c in CHUNKS if f"number {c.chunk_id} " in question), CHUNKS[0])
        hits = [Hit(c, 1.0, cosine, None) for c, cosine in ((found, 0.75), (CHUNKS[1], 0.5))]
        return SimpleNamespace(hits=hits, sentences=[[], []] if sentences else [])


class Speaker:
    """`full` answers with a name of the right chunk where it is ``able``; `epic` disagrees at the second
    token, `random` fails."""

    def __init__(self, builder: PromptBuilder, *, writes: bool, able: bool = True) -> None:
        self._builder, self._writes, self._able = builder, writes, able
        self._wanted = builder.build(WRITE, [], max_prompt_tokens=4000).input_ids[-24:]
        self.info = EngineInfo("local", str(MODEL), str(MODEL), "0", "cpu", "", 8192, 8192, ("full", "epic"))
        self.asked: list[GenerateRequest] = []
        self.warmed: list[GenerateRequest] = []
        self.number = 0

    async def warm(self, request: GenerateRequest) -> None:
        self.warmed.append(request)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.asked.append(request)
        if request.strategy == "random":
            raise EngineError("it broke")
        if request.input_ids[-24:] == self._wanted:
            text = f"Who built lighthouse number {self.number} here?" if self._writes else "no idea"
        else:
            text = f" Ida{self.number} Marsh" if self._able else " nobody knows"
        documents = request.spans[-1].end - request.spans[0].end
        report = None
        if request.strategy != "full":
            report = ContextReport(request.strategy, documents, documents // 2, 3, {}, 1.0, 0.0, 1.0)
        rows = [SAME, OTHER if request.strategy == "epic" else SAME][: request.distributions]
        yield GenerateChunk(
            text,
            EngineUsage(len(request.input_ids), 0, 2),
            EngineTimings(),
            "stop",
            report,
            distributions=[sent(row) for row in rows],
            output_ids=(0, 0),
        )


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    return PromptBuilder.load(str(MODEL))


def compared(
    builder: PromptBuilder,
    speaker: Speaker,
    chunks: list[Chunk],
    strategies: str = "concat,epic,random",
    known: dict[Key, Row] | None = None,
    questions: tuple[DrawnQuestion, ...] = (),
    **limits: Any,
) -> tuple[list[Row], bool]:
    """The new rows, and whether all was asked."""
    written: list[Row] = []
    comparison = Comparison(
        speaker,  # type: ignore[arg-type]
        Search(),  # type: ignore[arg-type]
        builder,
        QUERIES,
        parse(strategies),
        known=known or {},
        write=written.append,
    )

    def numbered() -> Any:
        for each in chunks:
            speaker.number = each.chunk_id
            yield each

    options = {"time_left": lambda: True, "most": 100} | limits
    finished = asyncio.run(compare_all(comparison, numbered(), questions, **options))
    return written, finished


def test_strategies_are_led_along_the_answer_to_a_question_that_the_model_wrote(
    builder: PromptBuilder,
) -> None:
    speaker = Speaker(builder, writes=True)
    rows, finished = compared(builder, speaker, CHUNKS[3:4])
    assert finished
    full, concat, epic, random = rows
    assert {row["set"] for row in rows} == {"namespace notes"}
    assert (full["kind"], full["question"]) == ("written", "Who built lighthouse number 3 here?")
    assert (full["answer"], full["usable"]) == ("Ida3 Marsh", True)
    assert (concat["answer_kl"], concat["answer_agrees"], concat["answer_tokens"]) == (0.0, 1.0, 2)
    assert (epic["answer_agrees"], epic["kl"]) == (0.5, 0.0)
    assert epic["answer_kl"] > 0.1
    assert epic["kept"] == epic["document_tokens"] // 2 > 0
    assert random["error"] == "engine_error: it broke"
    assert len(speaker.warmed) == 1
    prompts = {tuple(request.input_ids) for request in speaker.asked[1:]}
    assert len(prompts) == 1, "all on the prompt that a query would have"
    scores = [request.scores and request.scores.documents for request in speaker.asked[1:]]
    assert scores == [None, (0.75, 0.5), (0.75, 0.5), (0.75, 0.5)], "and with the scores of the search"


def test_a_model_that_cannot_write_gets_sentences_with_a_gap(builder: PromptBuilder) -> None:
    rows, _ = compared(builder, Speaker(builder, writes=False), CHUNKS[: TRIED + 2], "concat")
    fulls = [row for row in rows if row["strategy"] == "full"]
    assert [row["kind"] for row in fulls] == ["written"] * TRIED + ["cloze"] * 2
    assert not any(row["usable"] for row in fulls[:TRIED])
    assert all("_____" in row["question"] for row in fulls[TRIED:])


def test_what_full_does_not_answer_from_the_chunk_is_not_compared(builder: PromptBuilder) -> None:
    rows, _ = compared(builder, Speaker(builder, writes=True, able=False), CHUNKS[3:5], "concat")
    assert [(row["strategy"], row["usable"]) for row in rows] == [("full", False)] * 2
    asked = (DrawnQuestion("g", "given", "Who built number 3 of them?"),)
    rows, _ = compared(builder, Speaker(builder, writes=True, able=False), [], "concat", questions=asked)
    assert [row["strategy"] for row in rows] == ["full", "concat"], "what a user asks counts in any case"


def test_what_users_asked_comes_first_and_is_kept_without_texts(builder: PromptBuilder) -> None:
    users = (DrawnQuestion("u", "asked", "Who built number 3 of them?"),)
    speaker = Speaker(builder, writes=True)
    rows, _ = compared(builder, speaker, CHUNKS[3:5], "concat", questions=users)
    assert [row["kind"] for row in rows if row["strategy"] == "full"] == ["asked", "written", "written"]
    assert rows[0]["usable"], "without words of a chunk"
    assert not {"question", "answer"} & set(rows[0])
    assert rows[2]["question"]
    known = {(row["set"], row["id"], row["strategy"]): row for row in rows}
    speaker = Speaker(builder, writes=True)
    assert compared(builder, speaker, CHUNKS[3:5], "concat", known=known, questions=users) == ([], True)
    assert speaker.asked == []


def test_a_run_goes_on_where_the_last_one_stopped(builder: PromptBuilder) -> None:
    rows, finished = compared(builder, Speaker(builder, writes=True), CHUNKS[3:9], "concat", most=2)
    assert not finished
    assert len(rows) == 4
    known = {(row["set"], row["id"], row["strategy"]): row for row in rows}
    speaker = Speaker(builder, writes=True)
    more, finished = compared(builder, speaker, CHUNKS[3:6], "concat,epic", known=known)
    assert finished
    labels = [(row["id"], row["strategy"]) for row in more if row["strategy"] != "full"]
    assert labels == [
        ("3-written", "epic"),
        ("4-written", "epic"),
        ("5-written", "concat"),
        ("5-written", "epic"),
    ]
    assert compared(builder, speaker, CHUNKS[3:5], "concat", known=known)[0] == []
    assert compared(builder, speaker, CHUNKS[3:5], time_left=lambda: False) == ([], False)


def test_what_is_settled_asks_the_engine_nothing_again(builder: PromptBuilder) -> None:
    rows, _ = compared(builder, Speaker(builder, writes=True), CHUNKS[3:6], "concat")
    # as an idle server keeps them
    kept = [{n: value for n, value in row.items() if n not in ("question", "answer")} for row in rows]
    known = {(row["set"], row["id"], row["strategy"]): row for row in kept}
    speaker = Speaker(builder, writes=True)
    assert compared(builder, speaker, CHUNKS[3:6], "concat", known=known) == ([], True)
    assert speaker.asked == []


class Busy(Speaker):
    """Counts the questions that it is asked at once: requests under `full` and the strategies."""

    def __init__(self, builder: PromptBuilder) -> None:
        super().__init__(builder, writes=True)
        self.running = 0
        self.at_once: list[int] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.running += 1
        self.at_once.append(self.running)
        await asyncio.sleep(0)
        async for chunk in super().generate(request):
            yield chunk
        self.running -= 1


def test_several_questions_are_asked_at_once_after_a_few_alone(builder: PromptBuilder) -> None:
    busy = Busy(builder)
    questions = tuple(DrawnQuestion(f"g{n}", "given", f"Who built number {n} of them?") for n in range(40))
    rows, finished = compared(builder, busy, [], "concat", questions=questions, at_once=4)
    assert finished
    assert set(busy.at_once[: 2 * ALONE]) == {1}
    assert max(busy.at_once) == 4
    assert len(rows) == 80
    timed = [row for row in rows if row["ttft_ms"] is not None]
    assert len(timed) == 2 * ALONE, "only those that were asked alone have times"


def test_what_is_decided_is_compared_no_further(builder: PromptBuilder) -> None:
    questions = tuple(DrawnQuestion(f"g{n}", "given", f"Who built number {n} of them?") for n in range(40))
    asked = 0

    def decided() -> set[str]:
        nonlocal asked
        asked += 1
        return {"epic"} if asked < 10 else {"epic", "concat"} if asked > 20 else set()

    limits: dict[str, Any] = {"questions": questions, "decided": decided}
    rows, finished = compared(builder, Speaker(builder, writes=True), [], "concat,epic", **limits)
    assert not finished
    assert [row["strategy"] for row in rows] == ["full", "concat"] * 20
