"""Questions about one's own documents, good and bad ones, and how answers to them are judged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ragserve.answering.results import Answer, RetrievedPassage
from ragserve.errors import InvalidRequest
from ragserve.eval.judging import METRICS, cause_of, holds, judged, missed
from ragserve.eval.own_questions import OwnQuestion, load_own
from ragserve.eval.scoreboard import lines, recall_curve, worst
from tests.unit.eval.answers import answered


def passage(index: int, source: str, text: str) -> RetrievedPassage:
    return RetrievedPassage(index=index, source=source, doc_id=f"id-{source}", title=source, text=text)


FOUND = [
    passage(1, "/data/maps/sweden.pdf", "The capital of Sweden is Stockholm."),
    passage(2, "/data/a/norway.html", "Norway has many fjords and few people."),
    passage(3, "/data/a/norway.html", "The capital and largest city of Norway is Oslo, by the sea."),
    passage(4, "/data/b/norway.html", "Oslo was once called Christiania."),
]


def answer(text: str, *cited: int) -> Answer:
    citations = [FOUND[n - 1].model_dump() | {"basis": "marker"} for n in cited]
    return Answer.model_validate(answered(text).model_dump() | {"citations": citations})


def metrics(row: dict[str, Any], *names: str) -> list[float | None]:
    return [row[name] for name in names]


def test_rows_take_texts_for_lists_and_ignore_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    rows: list[dict[str, Any]] = [
        {"question": " Who? ", "answers": "Ann", "country": "Norway"},
        {"id": 7, "question": "What?", "documents": ["a.pdf"], "namespace": "maps"},
    ]
    path.write_text("\n" + "\n".join(map(json.dumps, rows)))
    one, two = load_own(path)
    assert (one.id, one.question, one.answers, one.documents) == ("2", "Who?", ("Ann",), ())
    assert (two.id, two.documents, two.namespace) == ("7", ("a.pdf",), "maps")
    assert [question.id for question in load_own(path, 1)] == ["2"]


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    bad = [
        '{"answers": ["a"]}',
        '{"question": ""}',
        "[]",
        '{"question": "q", "id": "1"}',
        '{"question": "r", "id": 1}',
    ]
    bad += ['{"question": "q", "namespace": "a b"}', '{"question": "q", "answers": [{}]}']
    path.write_text("\n".join(bad))
    with pytest.raises(InvalidRequest) as raised:
        load_own(path)
    said = raised.value.message
    for part in ("line 1: question: Field required", "line 2: question:", "line 3: ", "not a JSON object"):
        assert part in said
    for part in ("line 5: id '1' is there twice", "line 6: namespace:", "line 7: answers.0:"):
        assert part in said
    assert "line 4" not in said
    assert "docs/evaluation.md" in raised.value.hint
    path.write_text("\n")
    with pytest.raises(InvalidRequest, match="no questions"):
        load_own(path)


def test_documents_are_judged_by_source_and_answer() -> None:
    question = OwnQuestion(id="1", question="q", answers=("Oslo",), documents=("a/norway.html", "iceland.md"))
    row = judged(question, FOUND, answer("The answer is Oslo.", 1, 2, 3), 5)
    assert row["gold_ranks"] == [2, None]  # after the other document: its two passages count once
    assert metrics(row, "recall", "mrr", "answer_found") == [0.5, 0.5, 1.0]
    assert row["ndcg"] == pytest.approx((1 / math.log2(3)) / (1 + 1 / math.log2(3)))
    assert metrics(row, "em", "contains") == [0.0, 1.0]
    assert row["f1"] == pytest.approx(0.5)
    assert row["citation_precision"] == pytest.approx(1 / 3)  # of the document, the second holds no answer
    assert row["citation_recall"] == 0.5


def test_ndcg_is_of_the_passages_asked_for_not_of_the_documents_found() -> None:
    def ndcg(documents: tuple[str, ...], found: list[RetrievedPassage], k: int) -> float:
        question = OwnQuestion(id="1", question="q", documents=documents)
        return float(judged(question, found, answer("Oslo"), k)["ndcg"])

    norway = [FOUND[1], FOUND[2]]  # of one document
    one_of_two = 1 / (1 + 1 / math.log2(3))
    assert ndcg(("a/norway.html", "iceland.md"), norway, 2) == pytest.approx(one_of_two)
    assert ndcg(("a/norway.html", "iceland.md"), norway[:1], 5) == pytest.approx(one_of_two)
    assert ndcg(("a/norway.html", "iceland.md"), norway[:1], 1) == 1.0, "one passage cannot be of both"
    assert ndcg(("a/norway.html",), norway, 5) == 1.0


def test_an_answer_that_no_text_holds_is_judged_by_its_document() -> None:
    question = OwnQuestion(id="1", question="Is it?", answers=("yes",), documents=("id-/data/b/norway.html",))
    row = judged(question, FOUND, answer("Yes", 4, 1), 5)
    assert metrics(row, "em", "citation_precision", "citation_recall") == [1.0, 0.5, 1.0]


def test_passages_are_judged_by_their_words() -> None:
    gold = "Preface. The capital and largest city of Norway is Oslo"
    assert holds(FOUND[2].text, gold)
    assert not holds(FOUND[3].text, gold)
    assert holds("It is in Oslo.", "Oslo")
    question = OwnQuestion(id="1", question="q", passages=(gold, "nowhere to be found at all"))
    row = judged(question, FOUND, answer("Oslo", 3), 5)
    assert row["gold_ranks"] == [3, None]
    assert metrics(row, "recall", "citation_precision", "citation_recall") == [0.5, 1.0, 0.5]
    assert metrics(row, "f1", "em", "contains", "answer_found") == [None] * 4


def test_answers_alone_judge_citations_and_no_ranking() -> None:
    row = judged(OwnQuestion(id="1", question="q", answers=("Oslo",)), FOUND, answer("Oslo", 1, 4), 5)
    assert metrics(row, "recall", "ndcg", "mrr") == [None] * 3
    assert metrics(row, "citation_precision", "citation_recall", "answer_found") == [0.5, 1.0, 1.0]
    uncited = judged(OwnQuestion(id="1", question="q", answers=("Oslo",)), FOUND, answer("Oslo"), 5)
    assert metrics(uncited, "citation_precision", "citation_recall") == [None, 0.0]


def test_without_labels_nothing_is_judged() -> None:
    question = OwnQuestion(id="1", question="q")
    assert set(metrics(judged(question, FOUND, answer("Oslo", 1), 5), *METRICS)) == {None}
    assert set(metrics(missed(question), *METRICS)) == {None}


def row(id_: str, strategy: str, f1: float, *, error: str | None = None) -> dict[str, Any]:
    question = OwnQuestion(id=id_, question="q", answers=("Oslo",), documents=("norway.html",))
    own = missed(question) if error else judged(question, FOUND, answer("Oslo" if f1 else "Bergen", 3), 5)
    own |= {} if error else {"ttft_ms": 10.0, "total_ms": 30.0}
    passages = [] if error else FOUND
    return {"set": "s", "id": id_, "strategy": strategy, "error": error, "passages": passages} | own


def test_lines_average_and_compare() -> None:
    rows = [row(str(n), "full", 1.0) for n in range(4)]
    rows += [row(str(n), "concat", float(n > 0)) for n in range(3)] + [row("3", "concat", 0.0, error="busy")]
    full, concat = lines(rows)
    assert (full["f1"], full["f1_95"][1], full["f1_n"], full["failed"]) == (100.0, 100.0, 4, 0)
    assert full["f1_95"][0] < 60, "four questions are few"
    assert (concat["f1"], concat["failed"], concat["f1_vs_first"]) == (50.0, 1, -50.0)
    assert concat["f1_vs_first_95"][0] < -50 < concat["f1_vs_first_95"][1]
    assert concat["causes"] == {"right": 2, "read wrongly": 1, "not retrieved": 0, "failed": 1}
    assert full["ttft_ms"]["p50"] == 10.0
    assert "f1_vs_first" not in full
    assert (full["citation_precision"], full["citation_precision_n"]) == (100.0, 4)
    assert (concat["citation_precision"], concat["citation_precision_n"]) == (75.0, 4), "0 where it failed"
    assert [group[0]["id"] for group in worst(rows, 2)] == ["3", "0"]
    faultless = rows[0] | dict.fromkeys(METRICS, 1.0)
    assert worst([faultless], 2) == []
    assert [point[0] for point in recall_curve(rows[:4])] == [0.0, 100.0, 100.0, 100.0]
    assert recall_curve([rows[-1]]) == []
    assert cause_of({"error": None, "contains": 0.0, "answer_found": 0.0}) == "not retrieved"
