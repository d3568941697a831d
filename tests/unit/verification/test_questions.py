"""Questions about chunks: which chunks are drawn, and what becomes a question."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.errors import InvalidRequest, NotFound
from ragserve.verification.question_probes import standing, without_sentence
from ragserve.verification.questions import cloze, drawn, given, written
from ragserve_index import IndexStore
from tests.unit.verification.idle_engine import fill

LONG = "one two three four five six seven eight nine ten eleven twelve"


class Store:
    """Documents by id, with the texts of their chunks."""

    def __init__(self, **documents: list[str]) -> None:
        self._texts = documents

    def documents(self, namespace: str, *, after: str | None, **_: Any) -> list[Any]:
        return [
            SimpleNamespace(doc_id=name, n_chunks=len(texts))
            for name, texts in sorted(self._texts.items())
            if after is None or name > after
        ]

    def document_chunks(self, namespace: str, doc_id: str) -> list[Any]:
        return [SimpleNamespace(ordinal=i, text=text) for i, text in enumerate(self._texts[doc_id])]


def test_every_document_has_its_turn_before_any_has_a_second() -> None:
    store: Any = Store(
        a=[f"a {LONG}", f"aa {LONG}", f"aaa {LONG}"], b=[f"b {LONG}"], c=[f"c {LONG}", "short"]
    )
    texts = [chunk.text.split()[0] for chunk in drawn(store, "n")]
    assert {text[0] for text in texts[:2]} <= {"a", "b", "c"}
    assert len({text[0] for text in texts[:3]}) >= 2
    assert sorted(texts[:5]) == ["a", "aa", "aaa", "b", "c"], "all but the short one, once"
    assert len(texts) == 5, "and each of them once"
    assert [chunk.text.split()[0] for chunk in drawn(store, "n")] == texts, "the same every time"
    assert len(list(islice(drawn(store, "n"), 2))) == 2


def test_a_document_that_is_removed_meanwhile_ends_no_draw_and_its_namespace_does(store: IndexStore) -> None:
    fill(store, "notes", 6)
    order = [chunk.doc_id for chunk in drawn(store, "notes")]
    left = drawn(store, "notes")
    next(left)
    for doc_id in order[1:4]:
        store.remove_document("notes", doc_id)
    assert [chunk.doc_id for chunk in left] == order[4:]
    left = drawn(store, "notes")
    next(left)
    store.drop_namespace("notes")
    with pytest.raises(NotFound):
        next(left)


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        ("Who built the bridge of Oslo?", "Who built the bridge of Oslo?"),
        ('\n Question: "When was Ada Berg born?"\nAnswer: 1810', "When was Ada Berg born?"),
        ("1. What is the capital of Norway?", "What is the capital of Norway?"),
        ("挪威的首都是哪里？", "挪威的首都是哪里？"),
        ("The bridge was built by Ada.", None),
        ("Who?", None),
        ("", None),
        ("Who leads the Kolstad observatory?", None),
    ],
)
def test_what_a_model_wrote_is_a_question_or_none(answer: str, question: str | None) -> None:
    assert written(answer, ["Who leads the Kolstad observatory?"]) == question, "an example is no answer"


def test_a_gap_is_a_name_or_a_number_but_not_the_first_word() -> None:
    text = "The old lighthouse of the harbour was built by Marsh. Short one."
    assert cloze(text, random.Random(0)) == (
        'What is missing in "The old lighthouse of the harbour was built by _____."?',
        ("Marsh",),
    )
    numbers = cloze("It has been there since the year 1810 and is made of granite.", random.Random(0))
    assert numbers is not None
    assert "1810" not in numbers[0]
    assert numbers[1] == ("1810",)
    plain = cloze("there is nothing in this sentence that has capitals or figures.", random.Random(0))
    assert plain is not None
    assert "sentence" not in plain[0]
    assert cloze("Too short. And so is this.", random.Random(0)) is None
    assert cloze("", random.Random(0)) is None


def test_a_gap_in_a_script_that_does_not_separate_words_is_a_number_or_a_name_of_another() -> None:
    asked = cloze("斯克里沃尔灯塔由艾伦·史蒂文森建造，于1844年首次点亮。", random.Random(0))
    assert asked == (
        'What is missing in "斯克里沃尔灯塔由艾伦·史蒂文森建造，于_____年首次点亮。"?',
        ("1844",),
    )
    assert cloze("斯克里沃尔灯塔由艾伦·史蒂文森建造，由石头砌成。", random.Random(0)) is None


def test_chunks_of_a_script_that_does_not_separate_words_are_drawn() -> None:
    text = "斯克里沃尔灯塔由艾伦·史蒂文森建造，高48米，于1844年首次点亮。"
    store: Any = Store(a=[text, "首次点亮。"])
    assert [chunk.text for chunk in drawn(store, "n")] == [text]


def test_a_text_is_asked_about_by_another_sentence_each_time() -> None:
    sentences = [f"The {kind} lighthouse was built by Marsh long ago." for kind in ("old", "new", "tall")]
    text = " ".join([*sentences, sentences[0], "Short one."])
    asked = [cloze(text, random.Random(7), earlier) for earlier in range(4)]
    assert asked[0] == cloze(text, random.Random(7))
    assert asked[3] is None, "no sentence is left"
    for sentence in sentences:
        begin = sentence.split("light")[0]
        assert sum(begin in question[0] for question in asked if question) == 1, "each once"


def test_given_questions_are_lines_or_json_lines(tmp_path: Path) -> None:
    text, lines = tmp_path / "q.txt", tmp_path / "q.jsonl"
    text.write_text("Who built it?\n\nWhen?\nWho built it?\n")
    lines.write_text('{"question": "Who built it?", "answers": ["Ada"]}\n{"question": "When?"}\n')
    assert [q.text for q in given(text)] == [q.text for q in given(lines)] == ["Who built it?", "When?"]
    assert [q.references for q in given(lines)] == [("Ada",), ()]
    assert given(text)[0].id == given(lines)[0].id, "rows are found again by it"
    text.write_text("\n")
    with pytest.raises(InvalidRequest, match="no questions"):
        given(text)
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        given(text)


@pytest.mark.parametrize(
    ("answer", "question", "kept"),
    [
        ("The Presiding Officer is Tricia Marwick.", "Who is the Presiding Officer?", "Tricia Marwick"),
        (" It was opened in 1890", "When was the bridge opened?", "1890"),
        ("the Forth Bridge", "Which is older, the Forth Bridge or the Kylesku Bridge?", "the Forth Bridge"),
        ("", "Who?", ""),
    ],
)
def test_the_sentence_around_an_answer_is_no_part_of_it(answer: str, question: str, kept: str) -> None:
    assert without_sentence(answer, question) == kept


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("Ada Marsh", "Ada Marsh"),
        ("The officer is Ada Marsh.", "Ada Marsh"),
        ("Ada Marsh was then the officer.", "Ada Marsh"),  # "then" is no part of it
        ("Ada Marsh, whom the fleet had sent from Kolstad", None),  # most of it stands nowhere
        ("John Doe", None),
        ("", None),
    ],
)
def test_a_reference_is_what_of_an_answer_stands_in_the_text(answer: str, reference: str | None) -> None:
    texts = ["The officer of the harbour, Ada Marsh, signs the books."]
    assert standing(answer, "Who is the officer of the harbour?", texts) == reference
