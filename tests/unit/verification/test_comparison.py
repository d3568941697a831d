"""Comparing strategies on a namespace, with an engine and a search that answer from tables."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.base import EngineInfo, EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.errors import EngineError, NotFound, RagserveError
from ragserve.retrieval.passage_search import FoundPassage, FoundPassages
from ragserve.retrieval.search_options import SearchOptions
from ragserve.strategy_spec import parse
from ragserve.verification.comparison import ALONE, Comparison, compare_all
from ragserve.verification.course import Course
from ragserve.verification.question_probes import BOTH, SHOTS, TRIED, scored
from ragserve.verification.questions import DrawnQuestion
from ragserve.verification.rows import Key, Row
from ragserve.verification.tuned_queries import TunedQueries
from ragserve.verification.verdicts import verdict
from ragserve_index.types import Chunk
from sglang_ext.wire.protocol import ContextReport
from tests.conftest import MODEL

QUERIES = TunedQueries("notes", SearchOptions(2), max_new_tokens=8)
SAME, OTHER = (0.6, 0.2, 0.2), (0.2, 0.6, 0.2)


def sent(probabilities: tuple[float, ...]) -> str:
    return base64.b64encode(np.log(np.asarray(probabilities)).astype("<f4").tobytes()).decode()


def chunk(number: int, text: str) -> Chunk:
    return Chunk(number, f"d{number}", 0, text, 0, len(text), None, 9, f"{number}.txt", "", {})


CHUNKS = [
    chunk(n, f"The lighthouse number {n} of the long coast was built by Ida{n} Marsh.") for n in range(60)
]


class Searched:
    """Finds the first chunks that the question names, or one, and one more."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []

    async def search(
        self, namespace: str, question: str, options: SearchOptions, *, sentences: bool = False
    ) -> FoundPassages:
        self.asked.append((namespace, question, options.k))
        named = [CHUNKS[int(number)] for number in re.findall(r"number (\d+) ", question)]
        pair = ([*named, CHUNKS[1]] if named else [CHUNKS[0], CHUNKS[1]])[:2]
        both = [FoundPassage(c, 1.0, cosine) for c, cosine in zip(pair, (0.75, 0.5), strict=True)]
        return FoundPassages(both, [[], []], 1, None, None, 0.0, None)


class Speaker:
    """Answers with what it reads: the builder of the first lighthouse that the prompt has, where it is
    ``able``; the question that is to be written, where it ``writes``. Led along an answer, `epic` disagrees
    at the second token and then says something else by itself; `random` fails. ``knows``: without texts."""

    def __init__(
        self, builder: PromptBuilder, *, writes: bool, able: bool = True, knows: bool = False
    ) -> None:
        self._builder, self._writes, self._able, self._knows = builder, writes, able, knows
        self.joins = True  # both answers of a pair
        self.info = EngineInfo(
            "local", str(MODEL), str(MODEL), "0", "cpu", "", 8192, 8192, ("full", "epic", "concat")
        )
        self.asked: list[GenerateRequest] = []
        self.warmed: list[GenerateRequest] = []

    async def warm(self, request: GenerateRequest) -> None:
        self.warmed.append(request)

    def texts(self, request: GenerateRequest) -> str:
        return self._builder.words(request.input_ids)

    def said(self, request: GenerateRequest) -> str:
        prompt = self.texts(request)
        if SHOTS[0][1] in prompt:
            number = int(re.findall(r"number (\d+) of", prompt)[0])
            return f"Who built lighthouse number {number} here?" if self._writes else "no idea"
        if request.strategy == "epic":
            return "Somebody Else"
        if not self._able:
            return "nobody knows"
        found = re.findall(r"Ida(\d+)", prompt)
        if BOTH[:20] in prompt:
            asked = [each for each in re.findall(r"number (\d+) here", prompt) if each in found]
            return " and ".join(f"Ida{each} Marsh" for each in asked[: 2 if self.joins else 1])
        if found:
            asked = [each for each in found if f"number {each} here" in prompt]
            return f"Ida{(asked or found)[0]} Marsh"
        known = re.findall(r"number (\d+) here", prompt) if self._knows else []
        return f"Ida{known[0]} Marsh" if known else "who knows"

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.asked.append(request)
        if request.strategy == "random":
            raise EngineError("it broke")
        report = None
        if request.strategy != "full" and request.spans:
            documents = request.spans[-1].end - request.spans[0].end
            report = ContextReport(request.strategy, documents, documents // 2, 3, {}, 1.0, 0.0, 1.0)
        rows = [SAME, OTHER if request.strategy == "epic" else SAME][: request.distributions]
        yield GenerateChunk(
            f" {self.said(request)}",
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
    chunks: Iterable[Chunk],
    strategies: str = "concat,epic,random",
    known: dict[Key, Row] | None = None,
    questions: tuple[DrawnQuestion, ...] = (),
    every: list[Row] | None = None,
    out_at: dict[str, float | None] | None = None,
    **limits: Any,
) -> tuple[list[Row], bool]:
    """The new rows, and whether all was asked. ``every`` gets those that count, old and new."""
    written: list[Row] = []
    comparison = Comparison(
        speaker,  # type: ignore[arg-type]
        Searched(),
        builder,
        QUERIES,
        parse(strategies),
        known=known or {},
        write=written.append,
        out_at=out_at,
    )
    options = {"time_left": lambda: True, "most": 100} | limits
    finished = asyncio.run(compare_all(comparison, chunks, questions, **options))
    if every is not None:
        every[:] = comparison.rows
    return written, finished


def by_key(rows: list[Row]) -> dict[Key, Row]:
    return {(row["set"], row["id"], row["strategy"]): row for row in rows}


def test_answers_are_scored_against_what_the_model_says_over_the_chunk_alone(builder: PromptBuilder) -> None:
    speaker = Speaker(builder, writes=True)
    rows, finished = compared(builder, speaker, CHUNKS[3:4])
    assert finished
    full, concat, epic, random = rows
    assert {row["set"] for row in rows} == {"namespace notes"}
    assert (full["kind"], full["question"]) == ("written", "Who built lighthouse number 3 here?")
    assert (full["references"], full["answer"], full["score"]) == (["Ida3 Marsh"], "Ida3 Marsh", 1.0)
    assert (full["usable"], full["part"]) == (True, "pick")
    assert (concat["answer_kl"], concat["answer_agrees"], concat["answer_tokens"]) == (0.0, 1.0, 2)
    assert (concat["score"], concat["full_score"], concat["different"]) == (1.0, 1.0, False)
    assert (epic["answer_agrees"], epic["kl"]) == (0.5, 0.0)
    assert epic["answer_kl"] > 0.1
    assert (epic["score"], epic["full_score"], epic["different"]) == (0.0, 1.0, True)
    assert epic["kept"] == epic["document_tokens"] // 2 > 0
    assert random["error"] == "engine_error: it broke"
    whole = [request for request in speaker.asked if len(request.spans) == 3]
    assert len({tuple(request.input_ids) for request in whole}) == 1, "on one prompt"
    scores = [request.scores and request.scores.documents for request in whole if request.strategy == "epic"]
    assert set(scores) == {(0.75, 0.5)}, "with the scores of the search"


def test_fewer_passages_are_a_strategy(builder: PromptBuilder) -> None:
    speaker = Speaker(builder, writes=True)
    rows, _ = compared(builder, speaker, CHUNKS[3:4], "passages:count=1,concat:passages.count=1")
    _, fewer, composed = rows
    assert (fewer["documents"], composed["documents"]) == (1, 1)
    assert fewer["kept"] == fewer["recomputed"] < fewer["document_tokens"]
    asked = speaker.asked[-2:]
    assert [(each.strategy, len(each.spans), dict(each.options)) for each in asked] == [
        ("full", 2, {}),
        ("concat", 2, {}),
    ]
    assert [each.strategy for each in speaker.warmed] == ["concat"], "exact ones read no stored KV"
    assert (fewer["score"], "answer_kl" in fewer) == (1.0, False)


def test_exact_candidates_with_one_prompt_are_asked_once(builder: PromptBuilder) -> None:
    speaker = Speaker(builder, writes=True)
    strategies = "passages:by=score,count=1,passages:count=1,passages:count=2"
    rows, _ = compared(builder, speaker, CHUNKS[3:4], strategies)
    full, *fewer = rows
    assert [row["documents"] for row in fewer] == [1, 1, 2]
    assert {row["answer"] for row in rows} == {"Ida3 Marsh"}
    assert fewer[2]["ttft_ms"] == full["ttft_ms"], "all passages are what full has read"
    whole = [tuple(each.input_ids) for each in speaker.asked if each.spans]
    assert len([ids for ids in whole if ids in (whole[-1], whole[-2])]) == 2


def test_a_model_that_cannot_write_gets_sentences_with_a_gap(builder: PromptBuilder) -> None:
    rows, _ = compared(builder, Speaker(builder, writes=False), CHUNKS[: TRIED + 2], "concat")
    fulls = [row for row in rows if row["strategy"] == "full"]
    assert {row["kind"] for row in fulls} == {"cloze"}
    assert all("_____" in row["question"] for row in fulls if row["usable"])
    assert sum(row["usable"] for row in fulls) >= 4, "the gap is in what the model says"


@pytest.mark.parametrize("how", [{"able": False}, {"knows": True}], ids=["not read", "known before"])
def test_what_cannot_be_a_probe_asks_no_whole_context(builder: PromptBuilder, how: dict[str, bool]) -> None:
    speaker = Speaker(builder, writes=True, **how)
    rows, _ = compared(builder, speaker, CHUNKS[3:5], "concat")
    usable = [row for row in rows if row.get("usable") and row["kind"] == "written"]
    assert not usable
    if "able" in how:
        assert [(row["strategy"], row["usable"]) for row in rows] == [("full", False)] * 2
        assert not [request for request in speaker.asked if request.distributions]


def test_a_pair_asks_two_questions_in_one_and_wants_both_answers(builder: PromptBuilder) -> None:
    rows, _ = compared(builder, Speaker(builder, writes=True), CHUNKS[3:8], "passages:count=1,concat")
    [pair] = [row for row in rows if row.get("kind") == "pair"]
    assert pair["references"] == ["Ida6 Marsh", "Ida1 Marsh"], "of the fourth chunk and the nearest to it"
    assert (pair["answer"], pair["usable"], pair["score"]) == ("Ida6 Marsh and Ida1 Marsh", True, 17 / 18)
    fewer, concat = (row for row in rows if row["id"] == pair["id"] and row is not pair)
    assert (fewer["answer"], concat["score"]) == ("Ida6 Marsh", 17 / 18)
    assert fewer["score"] == pytest.approx((2 / 3 + 1 / 2) / 2), "one passage has one of them"

    unable = Speaker(builder, writes=True)
    unable.joins = False
    rows, _ = compared(builder, unable, CHUNKS[3:8], "concat")
    kinds = [row["kind"] for row in rows if row["strategy"] == "full"]
    assert kinds == ["written"] * 5, "its first question stays"


def test_a_reference_may_be_said_in_several_ways() -> None:
    question = DrawnQuestion("g", "given", "Who built it?", ("Ida Marsh", "the engineer"))
    assert [scored(answer, question) for answer in ("Ida Marsh", "the engineer", "Bo")] == [1.0, 1.0, 0.0]


def test_labels_are_references_and_users_questions_get_theirs_from_the_best_passages(
    builder: PromptBuilder,
) -> None:
    given = DrawnQuestion("g", "given", "Who built lighthouse number 3 here?", ("Ida3 Marsh",))
    rows, _ = compared(builder, Speaker(builder, writes=True), [], "epic", questions=(given,))
    assert [row["score"] for row in rows] == [1.0, 0.0]
    user = replace(given, kind="asked", references=())
    rows, _ = compared(builder, Speaker(builder, writes=True), [], "epic", questions=(user,))
    assert rows[0]["score"] is None, "two passages alone say two things"
    assert rows[1]["unsupported"], "what epic says is in no passage"
    assert (rows[1]["score"], rows[1]["different"]) == (None, True), "but the answers differ in any case"


def test_what_users_asked_comes_first_and_is_kept_without_texts(builder: PromptBuilder) -> None:
    users = (DrawnQuestion("u", "asked", "Who built number 3 of them?"),)
    speaker = Speaker(builder, writes=True)
    rows, _ = compared(builder, speaker, CHUNKS[3:5], "concat", questions=users)
    assert [row["kind"] for row in rows if row["strategy"] == "full"] == ["asked", "written", "written"]
    assert rows[0]["usable"], "without words of a chunk"
    assert not {"question", "answer"} & {*rows[0], *rows[1]}
    assert rows[2]["question"]
    speaker = Speaker(builder, writes=True)
    assert compared(builder, speaker, CHUNKS[3:5], "concat", known=by_key(rows), questions=users) == (
        [],
        True,
    )
    assert speaker.asked == []


def test_a_run_goes_on_where_the_last_one_stopped(builder: PromptBuilder) -> None:
    rows, finished = compared(builder, Speaker(builder, writes=True), CHUNKS[3:6], "concat", most=2)
    assert not finished
    assert len(rows) == 4
    known = by_key(rows)
    speaker = Speaker(builder, writes=True)
    more, finished = compared(builder, speaker, CHUNKS[3:6], "concat,epic", known=known)
    assert finished
    labels = [(row["id"], row["strategy"]) for row in more if row["strategy"] != "full"]
    assert labels == [("3", "epic"), ("4", "epic"), ("5", "concat"), ("5", "epic")]
    assert compared(builder, speaker, CHUNKS[3:5], "concat", known=known)[0] == []
    assert compared(builder, speaker, CHUNKS[3:5], time_left=lambda: False) == ([], False)


def test_what_is_settled_asks_the_engine_nothing_again(builder: PromptBuilder) -> None:
    rows, _ = compared(builder, Speaker(builder, writes=True), CHUNKS[3:6], "concat")
    # as an idle server keeps them
    kept = [{n: value for n, value in row.items() if n not in ("question", "answer")} for row in rows]
    speaker = Speaker(builder, writes=True)
    assert compared(builder, speaker, CHUNKS[3:6], "concat", known=by_key(kept)) == ([], True)
    assert speaker.asked == []


def test_rows_of_samkv_count_for_its_profile_and_others_for_any(builder: PromptBuilder) -> None:
    speaker = Speaker(builder, writes=True)
    labels = ("concat", "samkv:keep=0.2")
    rows, _ = compared(builder, speaker, CHUNKS[3:4], ",".join(labels))
    other = Speaker(builder, writes=True)
    other.info = replace(other.info, samkv="new")
    every: list[Row] = []
    more, _ = compared(builder, other, CHUNKS[3:4], ",".join(labels), known=by_key(rows), every=every)
    assert [row["strategy"] for row in more] == ["full", labels[1]]
    assert sorted(row["strategy"] for row in every) == [labels[0], "full", labels[1]]
    known = by_key(rows)
    compared(builder, other, [], ",".join(labels), known=known, every=every)
    assert [verdict(label, every) is None for label in labels] == [False, True], "nothing to judge it by"


def test_what_failed_in_an_earlier_run_counts_no_more_and_is_asked_again(builder: PromptBuilder) -> None:
    speaker, every = Speaker(builder, writes=True), list[Row]()
    rows, _ = compared(builder, speaker, CHUNKS[3:4], "concat,random")
    known = by_key(rows)
    compared(builder, speaker, [], "concat,random", known=known, every=every)
    assert [row["strategy"] for row in every] == ["full", "concat"]
    more, _ = compared(builder, speaker, CHUNKS[3:4], "concat,random", known=known)
    assert [(row["strategy"], row["error"] is None) for row in more] == [("full", True), ("random", False)]


@pytest.mark.parametrize(
    ("at", "out_at", "counts"),
    [(5.0, 4.0, True), (5.0, 6.0, False), (None, 6.0, False), (5.0, None, True), (None, None, False)],
)
def test_rows_from_before_a_strategy_was_taken_out_do_not_count(
    builder: PromptBuilder, at: float | None, out_at: float | None, counts: bool
) -> None:
    """An earlier version gave rows no time, and did not say when it took a strategy out."""
    speaker, every = Speaker(builder, writes=True), list[Row]()
    rows, _ = compared(builder, speaker, CHUNKS[3:4], "concat")
    for row in rows:
        del row["at"]
        row |= {} if at is None else {"at": at}
    known = by_key(rows)
    compared(builder, speaker, [], "concat", known=known, every=every, out_at={"concat": out_at})
    assert [row["strategy"] for row in every] == ["full", "concat"][: 1 + counts]


def test_questions_of_the_second_part_are_asked_under_what_was_picked(builder: PromptBuilder) -> None:
    def course() -> Course:
        asked = len({row["id"] for row in seen})
        return Course("pick", ["concat", "epic"]) if asked < 3 else Course("verify", ["concat"])

    seen: list[Row] = []
    comparison = Comparison(
        Speaker(builder, writes=True),  # type: ignore[arg-type]
        Searched(),
        builder,
        QUERIES,
        parse("concat,epic"),
        known={},
        write=seen.append,
    )
    limits: dict[str, Any] = {"time_left": lambda: True, "most": 100, "course": course}
    assert asyncio.run(compare_all(comparison, CHUNKS[3:8], (), **limits))
    parts = {row["id"]: row["part"] for row in seen}
    assert list(parts.values()) == ["pick"] * 3 + ["verify"] * 2
    assert sum(row["strategy"] == "epic" for row in seen) == 3
    assert comparison.compared == 5, "nothing is left to ask of any"


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
    assert set(busy.at_once[: 4 * ALONE]) == {1}
    assert max(busy.at_once) == 4
    assert len(rows) == 80
    exact = [each.strategy for each in busy.asked if len(each.spans) == 3 and each.strategy != "concat"]
    assert exact.count("full") == ALONE, "with nothing cached where times are kept"
    assert set(exact) == {"full", "prefix"}
    timed = [row for row in rows if row["ttft_ms"] is not None]
    assert len(timed) == 2 * ALONE, "only those that were asked alone have times"


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("error", [NotFound("Namespace notes does not exist."), OSError(28, "No space left")])
def test_what_ends_a_run_is_raised_as_it_is(
    builder: PromptBuilder, at_once: int, error: RagserveError | OSError
) -> None:
    """The command shows it without the log, however many questions are in flight."""

    def draw() -> Iterator[Chunk]:
        yield from CHUNKS[3 : ALONE + 8]
        raise error

    with pytest.raises(type(error)) as raised:
        compared(builder, Busy(builder), draw(), "concat", at_once=at_once)
    assert raised.value is error
