"""Scoring and laying losses to their cause, with a client that answers from a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.answering.results import Answer, RetrievedPassage
from ragserve.errors import NotFound, RagserveError
from ragserve.eval.data import GivenPassage, Question
from ragserve.eval.run import Options, ask_given, ask_retrieved, ingested, losses, summary
from tests.unit.eval.answers import answered


def question(name: str, answer: str = "red") -> Question:
    gold = GivenPassage(name, f"{name} is {answer}.")
    return Question(
        name,
        f"What colour is {name}?",
        (answer,),
        (GivenPassage("other", f"{name} is loud."), gold),
        (gold,),
        "",
    )


class Table:
    """``retrieved``: question -> passages found; ``answers``: (question, number of documents given or None)
    -> answer.
    """

    def __init__(
        self,
        answers: dict[tuple[str, int | None], str],
        retrieved: dict[str, Sequence[GivenPassage]] | None = None,
    ) -> None:
        self.answers, self.retrieved = answers, retrieved or {}
        self.asked: list[dict[str, Any]] = []

    def query(self, text: str, **fields: Any) -> Answer:
        self.asked.append({"query": text, **fields})
        documents = fields.get("documents")
        said = self.answers.get((text, None if documents is None else len(documents)))
        if said is None:
            raise NotFound("no such thing")
        return answered(said)

    def retrieve(self, text: str, **_: Any) -> Any:
        if text not in self.retrieved:
            raise NotFound("no such thing")
        found = enumerate(self.retrieved[text], 1)
        return SimpleNamespace(
            results=[RetrievedPassage(index=i, source=p.key, title=p.title, text=p.text) for i, p in found]
        )


def test_given_sends_the_documents_in_order_and_scores_the_answer() -> None:
    a, b = question("a"), question("b")
    table = Table({(a.question, 2): "Red.", (b.question, 2): "dark red"})
    outcomes = ask_given(table, [a, b], Options("full", max_new_tokens=7), progress=lambda: None)  # type: ignore[arg-type]
    sent = next(asked for asked in table.asked if asked["query"] == a.question)
    assert [d["title"] for d in sent["documents"]] == ["other", "a"]
    assert (sent["strategy"], sent["max_new_tokens"], sent["temperature"], sent["seed"]) == (
        "full",
        7,
        0.0,
        0,
    )
    total = summary(outcomes)
    assert (total["n"], total["em"], total["failed"]) == (2, 50.0, 0)
    assert total["f1"] == pytest.approx(100 * (1 + 2 / 3) / 2, abs=0.01)
    assert (total["contains"], total["refused"]) == (100.0, 0.0)
    assert sent["system"] is None
    assert (total["ttft_ms_mean"], total["prompt_tokens"], total["cached_tokens"]) == (5.0, 10.0, 4.0)
    assert total["computed_tokens"] == outcomes[0].record()["computed_tokens"] == 6


def test_failures_count_as_wrong_and_say_why() -> None:
    a, b = question("a"), question("b")
    outcomes = ask_given(Table({(a.question, 2): "red"}), [a, b], Options(), progress=lambda: None)  # type: ignore[arg-type]
    assert [o.error for o in outcomes] == ["", "not_found: no such thing"]
    assert (summary(outcomes)["em"], summary(outcomes)["failed"]) == (50.0, 1)


def test_each_lost_answer_has_one_cause() -> None:
    names = ("right", "chance", "unfound", "distracted", "unreadable")
    questions = {name: question(name) for name in names}
    other = GivenPassage("x", "nothing to see")
    found = {
        q.question: [other, q.gold[0]] if name in ("right", "distracted", "unreadable") else [other]
        for name, q in questions.items()
    }
    said = {"right": "red", "chance": "red", "unfound": "blue", "distracted": "blue", "unreadable": "blue"}
    answers: dict[tuple[str, int | None], str] = {
        (q.question, None): said[name] for name, q in questions.items()
    }
    answers |= {(q.question, 1): "blue" if name == "unreadable" else "red" for name, q in questions.items()}
    table = Table(answers, found)
    rows = list(questions.values())
    retrieved = ask_retrieved(table, "n", rows, Options(), progress=lambda: None)  # type: ignore[arg-type]
    ceiling = ask_given(table, rows, Options(), gold=True, progress=lambda: None)  # type: ignore[arg-type]
    lost = losses(retrieved, ceiling)
    assert lost["found"] == lost["gold_recall"] == 60.0
    assert lost["em_where_found"] == pytest.approx(33.33)
    causes = ("right", "right_by_chance", "lost_retrieval", "lost_reading_context", "lost_reading")
    assert [lost[cause] for cause in causes] == [20.0] * 5
    assert [o.record()["found"] for o in retrieved] == [True, False, False, True, True]


def test_a_request_that_fails_is_lost_by_neither_search_nor_reading() -> None:
    rows = [question(name) for name in ("right", "unsearched", "unanswered", "unread")]
    right, unsearched, unanswered, unread = rows
    answers: dict[tuple[str, int | None], str] = {(right.question, None): "red"}
    answers[unread.question, None] = "blue"
    answers |= {(one.question, 1): "red" for one in (right, unsearched, unanswered)}
    table = Table(answers, {one.question: one.gold for one in (right, unanswered, unread)})
    retrieved = ask_retrieved(table, "n", rows, Options(), progress=lambda: None)  # type: ignore[arg-type]
    ceiling = ask_given(table, rows, Options(), gold=True, progress=lambda: None)  # type: ignore[arg-type]
    lost = losses(retrieved, ceiling)
    causes = ("right", "right_by_chance", "lost_retrieval", "lost_reading_context", "lost_reading", "failed")
    assert [lost[cause] for cause in causes] == [25.0, 0.0, 0.0, 0.0, 0.0, 75.0]
    assert lost["found"] == lost["gold_recall"] == 100.0, "of the questions whose search did not fail"
    assert lost["em_where_found"] == 50.0
    assert [(o.found, len(o.passages)) for o in retrieved] == [(True, 1), (None, 0), (True, 1), (True, 1)]
    nothing = losses(retrieved[1:2], ceiling[1:2])
    assert (nothing["found"], nothing["gold_recall"], nothing["failed"]) == (None, None, 100.0)


def test_a_chunk_of_the_gold_document_without_the_answer_is_not_found() -> None:
    q = question("a")
    cut = GivenPassage("a", "a is")
    table = Table({(q.question, None): "red"}, {q.question: [cut]})
    passage = RetrievedPassage(index=1, source=q.gold[0].key, title="a", text=cut.text)
    table.retrieve = lambda *_, **__: SimpleNamespace(results=[passage])  # type: ignore[method-assign]
    [outcome] = ask_retrieved(table, "n", [q], Options(), progress=lambda: None)  # type: ignore[arg-type]
    assert outcome.found is False
    assert outcome.gold_recall == 1.0


class Shelf:
    """Takes documents in; ``failed`` of each batch do not make it."""

    def __init__(self, failed: int = 0) -> None:
        self.failed, self.texts, self.dropped = failed, [], []  # type: tuple[int, list[Any], list[str]]

    def ingest_texts(self, texts: list[dict[str, str]], *, namespace: str) -> str:
        self.texts += texts
        return "job"

    def wait(self, job: str, *, timeout_s: float) -> Any:
        assert timeout_s == math.inf, "a large set takes longer than an hour"
        return SimpleNamespace(job_id=job, counts={"indexed": 1, "failed": self.failed})

    def drop_namespace(self, name: str) -> None:
        self.dropped.append(name)


def test_ingested_takes_every_document_once_and_cleans_up() -> None:
    a, b = question("a"), question("b")
    shelf = Shelf()
    places: list[tuple[int, int]] = []
    with ingested(shelf, [a, b, a], on_progress=lambda *place: places.append(place)) as (namespace, took):  # type: ignore[arg-type]
        assert sorted(t["name"] for t in shelf.texts) == sorted(p.key for q in (a, b) for p in q.documents)
        assert took["documents"] == 4
    assert shelf.dropped == [namespace]
    assert places == [(4, 4)]


def test_a_set_that_is_not_wholly_indexed_is_not_measured() -> None:
    shelf = Shelf(failed=1)
    with (
        pytest.raises(RagserveError, match="not indexed"),
        ingested(shelf, [question("a")], on_progress=lambda *_: None),
    ):  # type: ignore[arg-type]
        pytest.fail("must not get here")
    assert shelf.dropped  # nothing is left behind
