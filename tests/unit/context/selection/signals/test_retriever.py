"""Signals `document` and `sentence`, and the sum of all signals."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.context.selection.signals import SIGNALS, Evidence, fused
from sglang_ext.context.selection.signals.base import TEMPERATURE
from sglang_ext.wire.protocol import RetrievalScores
from tests.unit.context.selection.signals.evidence import evidence_of

DOCUMENTS = [["Title\n", "abcde. "], ["fghij. ", "klmno. "], ["pqrst. "]]


def weight(cosine: float, best: float) -> float:
    return math.exp((cosine - best) / TEMPERATURE)


def evidence(documents: tuple[float | None, ...], sentences: Any, **options: Any) -> Evidence:
    return evidence_of(DOCUMENTS, "xyz klmno", RetrievalScores(documents, sentences), **options)


def test_a_sentence_has_the_weight_of_its_passage() -> None:
    found = SIGNALS["document"](evidence((0.2, 0.5, None), ((), (), ())))
    low = weight(0.2, 0.5)
    assert found is not None
    assert found.tolist() == pytest.approx([low, low, 1.0, 1.0, low]), "unknown: as the lowest known"


@pytest.mark.parametrize("weight_of_continued", [0.0, 0.5, 1.0])
def test_a_passage_without_a_subject_has_part_of_the_weight_of_what_it_continues(
    weight_of_continued: float,
) -> None:
    documents = [
        ["The Mill\n", "The mill burnt. "],
        ["(continued)\n", "It stands in Ely. "],
        ["Further notes\n", "It dates from 1930. "],
        ["Ely\n", "Ely is a town. "],
        ["Part 2\n", "It has a mill. "],
    ]
    cosines = (0.5, 0.1, 0.0, 0.2, 0.45)
    given = RetrievalScores(cosines, ((),) * 5)
    options = {"experimental": {"continuation_weight": weight_of_continued}}
    found = SIGNALS["document"](evidence_of(documents, "When was the mill built?", given, **options))
    own = [weight(cosine, 0.5) for cosine in cosines]
    w = weight_of_continued
    wanted = [1.0, max(own[1], w), max(own[2], w * max(own[1], w)), own[3], max(own[4], w * own[3])]
    assert found is not None
    assert found[::2].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("pairs", "cosines"),
    [
        # the engine's sentences are 6 and 7 tokens, 7 and 7, 7
        (((6, 0.1),), [-0.2, 0.1, 0.4, -0.2, 0.3]),
        (((0, 0.6),), [0.6, 0.6, 0.4, -0.2, 0.3]),
        (((4, 0.0), (12, 0.5)), [0.0, 0.5, 0.4, -0.2, 0.3]),
        ((), [-0.2, -0.2, 0.4, -0.2, 0.3]),
    ],
)
def test_a_sentence_has_the_highest_cosine_of_its_tokens(
    pairs: tuple[tuple[int, float], ...], cosines: list[float]
) -> None:
    given = (pairs, ((0, 0.4), (7, -0.2)), ((0, 0.3),))
    found = SIGNALS["sentence"](evidence((None, None, None), given))
    assert found is not None
    assert found.tolist() == pytest.approx([weight(c, max(cosines)) for c in cosines], rel=1e-4)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 9), min_size=1, max_size=4),  # lengths of the engine's sentences
            st.dictionaries(st.integers(0, 30), st.floats(-1, 1, width=32)),  # scores by first token
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_sentences_of_ingestion_and_of_the_engine_meet_at_their_tokens(
    documents: list[tuple[list[int], dict[int, float]]],
) -> None:
    pairs = [sorted((t, c) for t, c in own.items() if t < sum(lengths)) for lengths, own in documents]
    texts = [["x" * length for length in lengths] for lengths, _ in documents]
    found = SIGNALS["sentence"](
        evidence_of(texts, "?", RetrievalScores((None,) * len(documents), tuple(map(tuple, pairs))))
    )
    known = [cosine for own in pairs for _, cosine in own]
    if not known:
        assert found is None
        return
    highest = []
    for (lengths, _), own in zip(documents, pairs, strict=True):
        token = [min(known)] * sum(lengths)
        for start, cosine in own:
            token[start:] = [cosine] * (sum(lengths) - start)
        ends = list(accumulate(lengths))
        highest += [max(token[end - n : end]) for n, end in zip(lengths, ends, strict=True)]
    assert found is not None
    assert found.tolist() == pytest.approx([weight(c, max(highest)) for c in highest], rel=1e-4, abs=1e-30)


def test_what_a_request_lacks_takes_no_part() -> None:
    none = evidence((None,) * 3, ((),) * 3)
    assert all(SIGNALS[name](none) is None for name in ("attention", "document", "sentence"))
    words = SIGNALS["words"](none)
    assert words is not None
    assert fused(none).tolist() == pytest.approx(words.tolist())
    silent = evidence_of(DOCUMENTS, "xyz", None, experimental={"lexical_weight": 0.0})
    assert fused(silent).tolist() == [0.0] * 5


@pytest.mark.parametrize("weights", [(0.5, 1.0, 0.5), (0.3, 0.4, 0.9), (1.0, 0.5, 0.0), (0.0, 0.3, 0.5)])
def test_signals_are_added_by_their_weights(weights: tuple[float, float, float]) -> None:
    retriever, lexical, passages = weights
    both = evidence(
        (0.2, 0.5, 0.1),
        (((0, 0.1),), ((0, 0.4), (7, -0.2)), ((0, 0.3),)),
        experimental={
            "retrieval_weight": retriever,
            "lexical_weight": lexical,
            "document_weight": passages,
        },
    )
    parts = {name: SIGNALS[name](both) for name in ("document", "sentence", "words")}
    by_name = {
        "document": retriever * passages,
        "sentence": retriever * (1 - passages),
        "words": (1 - retriever) * lexical,
    }
    total = sum(by_name.values())
    wanted = [
        sum(by_name[name] * float(part[i]) for name, part in parts.items() if part is not None) / total
        for i in range(5)
    ]
    assert fused(both).tolist() == pytest.approx(wanted, abs=1e-5)
