"""The sentences of a chunk that are embedded: they cover the text, within a budget."""

from __future__ import annotations

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from ragserve.ingest.sentence_plan import SentencePlan, sentence_starts

TEXT = (
    "The film had begun principal photography in Cincinnati. Scenes in the school were shot at Roger Bacon! "
    'He said: "It was cold there, colder than ever." They left.\nNext, they went to Ohio to see the river.'
)


def pieces(text: str, most: int) -> list[str]:
    starts = sentence_starts(text, most)
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


def test_sentences_end_at_their_ends_and_short_ones_join_the_next() -> None:
    assert pieces(TEXT, 99) == [
        "The film had begun principal photography in Cincinnati. ",
        "Scenes in the school were shot at Roger Bacon! ",
        'He said: "It was cold there, colder than ever." ',
        "They left.\nNext, they went to Ohio to see the river.",
    ]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_than_the_budget(most: int) -> None:
    assert 1 <= len(pieces(TEXT, most)) <= most


@given(st.text(alphabet="ab .!?\n\u3002\"'", max_size=3000), st.integers(1, 60))
def test_they_cover_the_text(text: str, most: int) -> None:
    starts = sentence_starts(text, most)
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert len(starts) <= most
    assert not text or starts[-1] < len(text)


def test_text_without_ends_is_cut_at_spaces() -> None:
    found = pieces("word " * 500, 99)
    assert all(len(piece) <= 320 for piece in found)
    assert all(piece.endswith(" ") for piece in found)
    assert max(map(len, pieces("x" * 2000, 99))) <= 320


def test_vectors_go_to_their_chunks_and_nothing_is_embedded_without_a_budget() -> None:
    chunks = [(TEXT, 60), ("Short.", 2)]
    plan = SentencePlan(chunks, 16, bytes_per_token=22)
    assert plan.texts == [*pieces(TEXT, 60), "Short."]
    vectors = np.eye(16, dtype=np.float32)[: len(plan.texts)]
    first, second = plan.vectors(vectors)
    assert first is not None
    assert second is not None
    assert first.starts.tolist() == sentence_starts(TEXT, 60)
    assert np.abs(first.scores(vectors[1]) - np.eye(4)[1]).max() < 0.01
    assert second.scores(vectors[len(plan.texts) - 1]).tolist() == pytest.approx([1.0], abs=0.01)
    nothing = SentencePlan(chunks, 16, bytes_per_token=0)
    assert nothing.texts == []
    assert nothing.vectors(np.empty((0, 16), dtype=np.float32)) == [None, None]


def test_the_budget_is_bytes_a_token() -> None:
    plan = SentencePlan([(TEXT, 60)], 384, bytes_per_token=16)
    [stored] = plan.vectors(np.zeros((len(plan.texts), 384), dtype=np.float32))
    assert stored is not None
    assert len(stored.encode()) <= 60 * 16
    assert len(plan.texts) == 2


def test_sentences_of_scripts_without_spaces() -> None:
    chinese = (
        "灯塔由艾伦史蒂文森建造完成于一八四四年，它在苏格兰西岸的一块礁石上，高四十八米，至今仍在使用中。"
    )
    assert pieces(chinese * 3, 99) == [chinese] * 3
    long = ("很长的一句话，" * 80) + "完。"
    assert all(piece.endswith("，") for piece in pieces(long, 99)[:-1])
    thai = "ประภาคารแห่งนี้สร้างขึ้นโดยอลันสตีเวนสันในสกอตแลนด์ "
    assert pieces(thai * 3, 99)[0] == thai


@given(st.text(alphabet="ก\u0e34\u0e48👩\u200d🇳🇱\ufe0fé\u0301", max_size=900))
def test_no_grapheme_is_cut(text: str) -> None:
    whole = {0} | {found.start() for found in regex.finditer(r"\X", text)}
    assert set(sentence_starts(text, 99)) <= whole
