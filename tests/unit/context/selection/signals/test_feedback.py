"""Signal `feedback`: the second step of a question, against its sums written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.context.selection.signals import fused
from sglang_ext.context.selection.signals.feedback import feedback
from tests.unit.context.selection.signals.evidence import evidence_of

WORDS = ["alba", "brom", "cedar", "delta", "ember"]
sentence_of_words = st.lists(st.integers(0, 4), min_size=1, max_size=4)


@given(
    st.lists(st.lists(sentence_of_words, min_size=1, max_size=4), min_size=1, max_size=5),
    st.lists(st.integers(0, 4), max_size=2),
    st.integers(0, 2**31),
)
def test_what_the_best_sentences_share_and_name(
    documents: list[list[list[int]]], question: list[int], seed: int
) -> None:
    texts = [set(text) for document in documents for text in document]
    owner = [i for i, document in enumerate(documents) for _ in document]
    score = torch.rand(len(texts), generator=torch.Generator().manual_seed(seed)) + 0.01
    evidence = evidence_of(
        [[" ".join(WORDS[n] for n in text) + ". " for text in document] for document in documents],
        " ".join(WORDS[n] for n in question) + "?",
    )
    idf = [math.log(len(texts) / max(1, sum(n in text for text in texts))) for n in range(5)]
    best = sorted(range(len(texts)), key=lambda i: -score[i])
    weight = (score / score.max()).tolist()
    shared = [
        max(
            weight[b] * (owner[b] != owner[s]) * sum(idf[n] for n in texts[b] & texts[s] - set(question))
            for b in best[:5]
        )
        for s in range(len(texts))
    ]
    titles = [set(document[0]) for document in documents]
    named = [
        max(
            (
                weight[b]
                for b in best[:8]
                if owner[b] != d and titles[d] <= texts[b] and titles[d] - set(question)
            ),
            default=0.0,
        )
        for d in range(len(documents))
    ]
    top = max(*shared, 1e-9)
    expected = [one / top + named[d] for one, d in zip(shared, owner, strict=True)]
    assert feedback(evidence, score).tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("film", ["Sea Road", "Sea Road (film)"])
def test_the_second_step_is_found_without_a_word_of_the_question(film: str) -> None:
    documents = [
        [f"{film}\n", "Its director was Ines Kallio. ", "Sea Road cost a million. "],
        ["Ines Kallio\n", "She was born in Turku. "],
        *[["Rain\n", "It fell on Oslo. "]] * 3,
    ]
    options = {"lexical_weight": 1.0, "feedback_weight": 0.3}
    evidence = evidence_of(documents, "Where was the director of Sea Road from?", experimental=options)
    score = fused(evidence)
    assert score[4] > score[5:].max() + 0.1  # "She was born in Turku."


def test_without_feedback_the_score_is_the_sum_of_the_signals() -> None:
    documents = [["Ines Kallio\n", "She sings. "], ["Rain\n", "It fell on Ines Kallio. "]]
    alone, followed = (
        fused(evidence_of(documents, "Rain?", experimental={"lexical_weight": 1.0, "feedback_weight": w}))
        for w in (0.0, 0.5)
    )
    assert torch.allclose(alone, torch.tensor([0.0, 0.0, 1.0, 0.0]))
    assert followed.tolist() == pytest.approx([0.0, 0.0, 1.0, 0.0], abs=1e-6)
