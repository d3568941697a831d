"""Questions that a model writes: its batches, what is kept, and the rows that are made of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.written_questions import passages, rows, write
from benchmarks.written_questions.join import Joiner, Names, joined
from benchmarks.written_questions.passages import Excluded, Passage
from benchmarks.written_questions.reader import Reader
from benchmarks.written_questions.rows import Asked
from benchmarks.written_questions.write import Pair
from ragserve.files import write_json
from ragserve.verification.metrics import is_refusal
from tests.conftest import MODEL

BRIDGE = Passage(
    "wiki:1:0", "Mill Bridge", "The Mill Bridge in Arlen was built in 1909 by Ada Holm from steel."
)
TOWER = Passage("wiki:2:0", "Salt Tower (Arlen)", "The Salt Tower is 31 metres high. Ada Holm lived there.")


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(MODEL, "cpu")


def alone(reader: Reader, ids: list[int], n: int) -> list[int]:
    """Greedy, without a batch, a cache of its own or padding."""
    found: list[int] = []
    with torch.inference_mode():
        while len(found) < n:
            logits = reader._model(input_ids=torch.tensor([[*ids, *found]])).logits[0, -1]
            found.append(int(logits.argmax()))
    return found


def test_rows_of_a_batch_are_read_as_if_alone(reader: Reader) -> None:
    heads = [reader.head([(each.title, each.text)]) for each in (BRIDGE, TOWER)]
    assert len(heads[0]) != len(heads[1]), "padding is needed"
    read = reader.read(heads)
    for questions in (
        ("When was the Mill Bridge built?", "How high?"),
        ("Who?", "Who lived in the Salt Tower?"),
    ):
        tasks = [reader.task(each) for each in questions]
        texts = reader.write(read, tasks, 6)
        for head, task, text in zip(heads, tasks, texts, strict=True):
            ids = alone(reader, [*head, *task], 6)
            stop = reader.tokenizer.eos_token_id
            wanted = ids[: ids.index(stop)] if stop in ids else ids
            assert text == reader.tokenizer.decode(wanted, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("written", "pair"),
    [
        (" was the bridge built?\nA: 1909.", ("When was the bridge built?", "1909")),
        ("\n", None),
        (" was the bridge built?", None),
        (" was the bridge built.\nA: 1909", None),
        (" was the bridge built?\nA: in the year 1909 by Ada Holm of Arlen", None),
    ],
    ids=["pair", "nothing", "no answer", "no question", "long answer"],
)
def test_what_is_written_is_parsed(written: str, pair: tuple[str, str] | None) -> None:
    assert write.parsed("Q: When", written) == pair


@pytest.mark.parametrize(
    ("question", "answer", "why"),
    [
        ("When was the Mill Bridge built?", "1909", None),
        ("When was the Mill Bridge built?", "1910", "not in the passage"),
        ("Who built the bridge of Ada Holm?", "Ada Holm", "in the question"),
        ("When was it built?", "1909", "not clear"),
        ("In which year was the Mill Bridge built?", "steel", "another kind"),
        ("How many people built the Mill Bridge?", "Ada Holm", "another kind"),
        ("What does the passage say of Arlen?", "steel", "not clear"),
    ],
)
def test_pairs_are_judged_by_their_words(question: str, answer: str, why: str | None) -> None:
    found = write.objection(BRIDGE, question, answer)
    assert (found is None) if why is None else (found is not None and why in found)


class Scripted:
    """A reader whose answers are given; it says what it was asked."""

    def __init__(self, texts: list[list[str]]) -> None:
        self._texts = iter(texts)

    def head(self, documents: Any) -> list[int]:
        return [len(documents)]

    def task(self, text: str, begin: str = "", *, has_documents: bool = True) -> list[int]:
        return [0]

    def read(self, rows: Any) -> int:
        return len(rows)

    def write(self, read: int, rows: Any, new_tokens: int) -> list[str]:
        texts = next(self._texts)
        assert len(texts) == len(rows) == read
        return texts


def test_a_pair_is_kept_that_needs_its_passage(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Scripted(
        [
            ["Mill Bridge was built?\nA: 1909", "the Salt Tower stands where?\nA: Oslo"],  # not in the text
            ["In 1909.", "x"],  # again, with the passage
            ["1911"],  # without it
            [
                "Mill Bridge came up?\nA: 1909",
                "Salt Tower is so high?\nA: 31 metres",
            ],  # the first is there already
            ["x", "31 metres"],
            ["31 metres"],  # known without the passage
        ]
    )
    writer = write.Writer(reader, frozenset(), 2)  # type: ignore[arg-type]
    monkeypatch.setattr(write, "starts", lambda passage, n: [""] * n)
    pairs = writer.pairs([BRIDGE, TOWER])
    assert [(each.passage, each.answer) for each in pairs] == [("wiki:1:0", "1909")]
    assert writer.counts == {
        "written": 4,
        "answer is not in the passage": 1,
        "answer is asked for already": 1,
        "answer comes without the passage": 1,
        "kept": 1,
    }


def test_evaluation_sets_and_the_corpus_are_left_out() -> None:
    long = " ".join(f"word{number}" for number in range(40))
    sets = [("squad", [{"question": "Who?", "ctxs": [{"title": "Mill Bridge", "text": long}]}])]
    excluded = Excluded(sets)
    assert excluded.why(Passage("a", "Mill Bridge (Arlen)", "other " * 30)) == "title of an evaluation set"
    assert excluded.why(Passage("a", "Economy of Norway", "other " * 30)) == "country of the example corpus"
    part = "before " * 20 + " ".join(long.split()[5:20])
    assert excluded.why(Passage("a", "Free", part)) == "13 words of an evaluation set"
    assert excluded.why(Passage("a", "Free", "short")) == "too short or too long"
    assert excluded.why(Passage("a", "Free", "other " * 30)) is None


def test_passages_are_whole_sentences() -> None:
    paragraphs = ["One two three. " * 30, "Four five six. " * 60]
    found = list(passages.packed(paragraphs))
    assert all(len(each.split()) <= passages.MOST_WORDS and each.strip().endswith(".") for each in found)
    assert " ".join(found).split() == " ".join(paragraphs).split()


def test_the_same_passages_have_the_same_bytes(tmp_path: Path) -> None:
    lines = [json.dumps({"id": "a"})]
    digests = {passages.write_lines(tmp_path / name, lines) for name in ("one", "two")}
    assert len(digests) == 1
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_question_is_joined_by_what_another_passage_says() -> None:
    about = Passage(
        "wiki:3:0", "Ada Holm", "Ada Holm was an engineer. In 1911 she painted the Mill Bridge red."
    )
    far = Passage("wiki:4:0", "Sea", "The sea is wide, and full of salt and fish.")
    names = Names([BRIDGE, about, far])
    pair = Pair(BRIDGE.id, "When was the Mill Bridge built?", "1909")
    [link] = names.links([pair, Pair(far.id, "How wide is the Sea?", "wide")])
    assert (link.a, link.b) == (about, BRIDGE)
    assert joined(link, " bridge that Ada Holm painted red in 1911.") == (
        "When was the bridge that Ada Holm painted red in 1911 built?"
    )
    assert joined(link, " Mill Bridge that Ada Holm painted") is None, "the name is there"
    assert joined(link, " bridge of 1909 that Ada Holm painted") is None, "the answer is there"
    assert joined(link, " bridge that somebody painted") is None, "nothing is named"


def test_a_joined_question_needs_both_passages() -> None:
    about = Passage(
        "wiki:3:0", "Ada Holm", "Ada Holm was an engineer. In 1911 she painted the Mill Bridge red."
    )
    names = Names([BRIDGE, about])
    pairs = [Pair(BRIDGE.id, "When was the Mill Bridge built?", "1909")]
    links = [*names.links(pairs)] * 3
    phrase = " bridge that Ada Holm painted red"
    reader = Scripted(
        [[phrase] * 3, ["1909", "1909", "no"], ["1911", "1909"], ["unknown"], ["I cannot tell"]]
    )
    joiner = Joiner(reader, names)  # type: ignore[arg-type]
    kept = joiner.joined(links)
    assert [question for _, question in kept] == ["When was the bridge that Ada Holm painted red built?"]
    counts = {"linked": 3, "another answer comes": 1, "one passage is enough": 1, "kept": 1}
    assert {name: n for name, n in joiner.counts.items() if n} == counts


def test_follow_ups_and_comparisons_are_made_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    by_id = {each.id: each for each in (BRIDGE, TOWER)}
    assert rows.with_pronoun("Who built the Mill Bridge?", BRIDGE) == "Who built it?"
    assert rows.with_pronoun("What is the Salt Tower's height?", TOWER) == "What is its height?"
    pairs = [
        Pair(BRIDGE.id, "When was the Mill Bridge built?", "1909"),
        Pair(TOWER.id, "When was the Salt Tower built?", "in 1850"),
        Pair(TOWER.id, "Who lived in the Salt Tower?", "Ada Holm"),
    ]
    compared = list(rows.comparisons(pairs))
    assert compared
    for each in compared:
        assert each.answer == "Salt Tower"
        assert {*each.gold} == set(by_id)
        assert "Mill Bridge" in each.question
    monkeypatch.setattr(rows, "_FOLLOW_UP", 1.0)
    [second] = rows.follow_ups(pairs, by_id)
    asked = {pair.question: pair.answer for pair in pairs[1:]}
    [(first, said)] = second.history
    assert asked.pop(first) == said
    assert asked == {second.question.replace(" it", " the Salt Tower"): second.answer}
    assert second.gold == (TOWER.id,)


def test_gold_passages_stay_among_the_nearest() -> None:
    """The tenth is one; the other has to take a place that is not its."""
    some = [Passage(f"x:{n}", f"Hill {n}", f"Hill {n} stands here.") for n in range(40)]
    asked = [Asked("Which is older?", "Arlen", ("x:9", "x:39"), "joined")]
    scores = np.linspace(1, 0, len(some), dtype=np.float32)[None]
    [found] = rows.nearest(asked, some, np.eye(len(some), dtype=np.float32), scores)
    assert found == [*range(8), 9, 39]
    assert next(rows.rows(asked, [found], some))["gold"] == [8, 9]


def test_pairs_that_were_begun_with_other_options_are_not_gone_on_with(tmp_path: Path) -> None:
    write_json(tmp_path / "passages.json", {"sha256": "ab"})
    given = argparse.Namespace(
        passages=tmp_path, model=Path("models/a"), workers=2, questions=5, batch=8, limit=None
    )
    state, options = tmp_path / "pairs-0.json", write.options_of(given)
    assert write.begun(state, options) == {"batches": 0, "counts": {}}
    write_json(state, {"options": options, "batches": 3, "counts": {}})
    assert write.begun(state, write.options_of(given))["batches"] == 3
    given.workers = 3
    with pytest.raises(SystemExit, match="another workers"):
        write.begun(state, write.options_of(given))
    write_json(tmp_path / "passages.json", {"sha256": "cd"})
    with pytest.raises(SystemExit, match="another passages, workers"):
        write.begun(state, write.options_of(given))


def test_rows_have_forms_and_no_false_passages() -> None:
    other = Passage("wiki:9:0", "Arch", "Another bridge was finished in 1909 as well.")
    some = [BRIDGE, TOWER, other, *(Passage(f"x:{n}", f"Hill {n}", "A hill stands here.") for n in range(20))]
    asked = [Asked(f"When was bridge {n} built?", "1909", (BRIDGE.id,), "one passage") for n in range(400)]
    vectors = np.eye(len(some), dtype=np.float32)
    questions = np.tile(np.linspace(1, 0, len(some), dtype=np.float32), (len(asked), 1))
    questions[::2, 0] = -1  # not found by the search
    near = list(rows.nearest(asked, some, vectors, questions))
    assert all(0 in each and 2 not in each and len(each) == rows.NEAREST for each in near)
    made = list(rows.rows(asked, near, some))
    assert made == list(rows.rows(asked, near, some)), "seeded"
    answered = [row for row in made if row["answer"]]
    refused = [row for row in made if not row["answer"]]
    assert len(answered) == 400
    assert refused
    assert all(row["passages"][row["gold"][0]] == BRIDGE.id for row in answered)
    assert all(BRIDGE.id not in row["passages"] and not row["gold"] for row in refused)
    by_id = {each.id: each for each in some}
    for row in made:
        out = rows.laid_out(row, by_id)
        assert len(out["passages"]) == row["k"]
        shown = [each["title"] for each in out["passages"]]
        if row["answer"] is None:
            assert is_refusal(out["target"], ["1909"])
        else:
            cited = f" [{shown.index('Mill Bridge') + 1}]" if row["system"] == "cited" else ""
            assert out["target"] == f"1909{cited}"
        adapted = rows.whole(row, by_id)
        assert {*adapted} == {"question", "answer", "passages", "gold"}


def test_questions_of_other_rows_stand_beside_a_row_over_its_passages() -> None:
    hills = [Passage(f"x:{n}", f"Hill {n}", f"Hill {n} is {n + 30} metres high.") for n in range(12)]
    by_id = {each.id: each for each in hills}
    ids = list(by_id)

    def of(n: int, passages: list[str]) -> dict[str, Any]:
        about = {"question": f"How high is hill {n}?", "answer": f"{n + 30} metres", "passages": passages}
        return about | {"gold": [passages.index(ids[n])], "kind": "one passage", "system": "cited", "k": 4}

    every = [of(n, ids[:10]) for n in range(6)] + [of(11, [*ids[:9], ids[11]])]
    beside, refused = rows.Beside(every, by_id), 0
    for row in every:
        out = rows.laid_out(row, by_id, beside)
        shown = [each["text"] for each in out["passages"]]
        asked = [out["question"], *(each["question"] for each in out["more"])]
        assert len({*asked}) == len(asked) > 1
        for each in out["more"]:
            if each["answer"] is None:
                refused += 1
                assert each["target"] == rows.REFUSAL
                number = int(each["question"].rstrip("?").split()[-1])
                assert hills[number].text not in shown
            else:
                place = next(at for at, text in enumerate(shown, 1) if each["answer"] in text)
                assert each["target"] == f"{each['answer']} [{place}]"
    assert refused
