"""Weights of the selection signals: probes of passages, what is learned from them, and when it counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

from ragserve.answering.prompt import PromptBuilder, PromptDocument, load_tokenizer
from ragserve.config import DEFAULT_MODEL
from ragserve.errors import InvalidRequest
from ragserve.verification.calibration.passage_probes import PROBE_KINDS, make_probes
from ragserve.verification.calibration.signal_weights import (
    LEAST,
    ProbeContext,
    built_in,
    contexts,
    kept,
    learn,
    options_of,
    searched,
)
from ragserve.verification.given_scores import GivenScores
from sglang_ext.context.selection.signals import weights
from sglang_ext.wire.request_options import SamKvExperiment, SamKvOptions

SYLLABLES = ("ba", "do", "ki", "lu", "mer", "nas", "pol", "rit", "sev", "tur")


def passages_of(count: int) -> list[PromptDocument]:
    """Passages of three sentences of made-up words, no two alike."""
    draw = random.Random(0)

    def word() -> str:
        return "".join(draw.choices(SYLLABLES, k=3))

    def sentence() -> str:
        return f"The {' '.join(word() for _ in range(4))} of {word().title()} was {word()} {word()}. "

    return [PromptDocument("", word().title(), "".join(sentence() for _ in range(3))) for _ in range(count)]


class FakeEmbedder:
    """Vectors by ``vector_of`` a text."""

    name, dim = "fake", 32

    def __init__(self, vector_of: Callable[[str], Any]) -> None:
        self._vector_of = vector_of

    def encode(self, texts: Sequence[str]) -> Any:
        rows = np.stack([self._vector_of(text) for text in texts]).astype(np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    encode_queries = encode


def noise(text: str) -> Any:
    """A vector that says nothing about its text."""
    seed = int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big")
    return np.random.default_rng(seed).normal(size=FakeEmbedder.dim)


def by_words(text: str) -> Any:
    """Texts that share words are near."""
    return sum(noise(word.strip(".").casefold()) for word in text.split())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEFAULT_MODEL)


def probes_of(tokenizer: Any, vector_of: Callable[[str], Any], count: int) -> list[ProbeContext]:
    passages, embedder, builder = passages_of(count), FakeEmbedder(vector_of), PromptBuilder(tokenizer)
    given = GivenScores(builder, embedder, passages, 16)  # type: ignore[arg-type]
    return contexts(passages, builder, embedder, given, count=count, depth=4)  # type: ignore[arg-type]


def test_a_probe_asks_for_a_sentence_without_its_answer(tokenizer: Any) -> None:
    passages, embedder = passages_of(9), FakeEmbedder(by_words)
    probes = make_probes(passages, embedder, 9)  # type: ignore[arg-type]
    assert [probe.kind for probe in probes] == [kind for _ in range(3) for kind in PROBE_KINDS]
    assert {probe.source for probe in probes} == set(range(9)), "one for a passage"
    for probe in probes:
        sentence = passages[probe.source].text[probe.start : probe.end]
        assert (sentence[:4], sentence[-1], sentence.count(".")) == ("The ", ".", 1)
        missing = [word for word in sentence.strip(".").split() if word not in probe.question]
        if probe.kind == "cloze":
            assert probe.question.count("_____") == 1
            assert sentence.split(" of ")[1].split()[0] in missing, "the name is asked for"
        else:
            assert probe.question.startswith(f"{passages[probe.source].title} "), "what it is about"
    assert make_probes(passages, embedder, 9) == probes  # type: ignore[arg-type]
    assert make_probes(passages, embedder, 9, seed=1) != probes  # type: ignore[arg-type]


def test_reworded_questions_take_words_of_like_meaning(tokenizer: Any) -> None:
    """Vectors have the length of the word: a word of another beginning and the same length is its like."""

    def by_length(text: str) -> Any:
        return np.eye(FakeEmbedder.dim)[min(len(text), FakeEmbedder.dim - 1)] + 1e-3

    passages = passages_of(9)
    probes = [p for p in make_probes(passages, FakeEmbedder(by_length), 9) if p.kind == "reworded"]  # type: ignore[arg-type]
    text = " ".join(passage.text for passage in passages).casefold()
    for probe in probes:
        own = passages[probe.source].text[probe.start : probe.end].casefold()
        asked = probe.question.split()[1:]
        assert any(word not in own for word in asked)
        assert all(word in text for word in asked)


def test_needed_positions_hold_the_sentence(tokenizer: Any) -> None:
    for each in probes_of(tokenizer, by_words, 6):
        assert len(each.prompt.spans) == 1 + 4
        text = tokenizer.decode(each.prompt.input_ids[slice(*each.needed)]).strip()
        assert text.startswith("The ")
        assert text.endswith(".")


class Told:
    """Sentences of which more is kept, the nearer the weight of words is to 0.6."""

    def positions(self, options: SamKvOptions, shares: Sequence[float]) -> list[list[int]]:
        off = abs(1 - options.experimental.retrieval_weight - 0.6)
        return [[*range(round(10 - 10 * off))] for _ in shares]


def test_weight_moves_as_long_as_more_is_kept() -> None:
    case: Any = (Told(), (0, 10))
    found = searched([case], built_in(attention=False))
    assert found["words"] == pytest.approx(0.6, abs=0.1)
    assert sum(found.values()) == pytest.approx(1)
    assert min(found.values()) >= 0
    assert kept([case], found) > kept([case], built_in(attention=False))


@pytest.mark.parametrize("attention", [0.0, 0.3])
def test_options_give_the_signals_their_weights(attention: float) -> None:
    wanted = {"attention": attention, "document": 0.2, "sentence": 0.4, "words": 0.4 - attention}
    options = SamKvExperiment(**options_of(wanted))
    assert weights(options, retrieved=True) == pytest.approx(wanted, abs=2e-3)
    assert SamKvExperiment(**options_of(built_in(attention=True))) == SamKvExperiment()


class Choosing:
    """A chooser whose sentences are ``found``."""

    def __init__(self, found: Any) -> None:
        self.sentences = lambda *args: found


class Kept:
    """Sentences of which the same is kept, whatever the weights."""

    def positions(self, options: SamKvOptions, shares: Sequence[float]) -> list[list[int]]:
        return [[*range(5)] for _ in shares]


@pytest.mark.parametrize("found", [Told(), Kept()], ids=["more", "no more"])
def test_learned_weights_are_used_where_they_keep_more(tokenizer: Any, found: Any) -> None:
    probes = [replace(each, needed=(0, 10)) for each in probes_of(tokenizer, by_words, LEAST)]
    learned = learn(Choosing(found), probes)  # type: ignore[arg-type]
    held = learned.figures["held out"]
    more = isinstance(found, Told)
    assert (held["learned"] > held["fixed"]) == learned.figures["used"] == bool(learned.options) == more
    SamKvOptions.model_validate({"experimental": learned.options})


def test_too_few_probes_are_refused(tokenizer: Any) -> None:
    with pytest.raises(InvalidRequest, match="too few to learn"):
        learn(Choosing(Kept()), probes_of(tokenizer, by_words, 5))  # type: ignore[arg-type]
