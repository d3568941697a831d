"""Comparing strategies on a namespace, with an engine and a search that answer from tables."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.strategy_spec import parse
from ragserve.verification.comparison import ALONE, Comparison, compare_all
from ragserve.verification.course import Course
from ragserve.verification.question_probes import TRIED, scored
from ragserve.verification.questions import DrawnQuestion
from ragserve.verification.rows import Row
from ragserve.verification.verdicts import verdict
from tests.unit.verification.compared import CHUNKS, QUERIES, Busy, Searched, Speaker, by_key, compared


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
