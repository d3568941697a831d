"""Token samples and packed batches.

A sample is the prompt of the product, ``<|bos|> system | documents | question | answer``, with further turns.
Each token has a class, which says how it counts as a target, and a segment, which says what it may attend to
(`attention.opens`). In a sample with hidden documents the system text and every document are segments, as if
their KV had been computed apart and reused. Several questions over the same documents can be branches: each
has the position and sees what it would alone, so that one prefill serves many first questions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.model_recipe.attention import BRANCH, SEEN
from benchmarks.model_recipe.corpus import ANSWER, BOS, DOCUMENT, EOS, QUESTION, Corpus
from benchmarks.model_recipe.synthetic import BRIDGE

PROMPT, TEXT, REPLY, NEVER = range(4)
WEIGHTS = np.array([0.1, 1.0, 5.0, 0.0], dtype=np.float32)
"""Loss weights by class."""
_ORDER = np.array([0.5, 1.0, 2.0, -1.0])

Doc = np.ndarray | tuple[str, str]
"""Token ids of "title, line break, text", or the two texts."""


@dataclass
class Tokens:
    """A sample: ids, classes, segments and positions of equal length, and whether a teacher knows better."""

    ids: np.ndarray
    classes: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    taught: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, start: int, end: int) -> Tokens:
        rows = slice(start, end)
        return Tokens(
            self.ids[rows], self.classes[rows], self.segments[rows], self.positions[rows], self.taught
        )


def text_sample(ids: Sequence[int] | np.ndarray, classes: np.ndarray | int = TEXT) -> Tokens:
    """A sample of plain text, all of it visible."""
    n = len(ids)
    kinds = np.full(n, classes, np.uint8) if isinstance(classes, int) else classes.astype(np.uint8)
    return Tokens(np.asarray(ids, dtype=np.uint16), kinds, np.full(n, SEEN, np.int16), np.arange(n))


def prompt_sample(
    corpus: Corpus,
    rng: random.Random,
    docs: Sequence[Doc],
    turns: Sequence[tuple[str, str]],
    hidden: bool = False,
    branches: bool = False,
) -> Tokens:
    """Lay out a prompt with its turns (question, answer), a dialogue unless they are ``branches``.

    Most samples start with the system text, some with ``<|bos|>`` alone or with a document, so that any first
    token can take the attention that goes nowhere."""
    texts = [f"{doc[0]}\n{doc[1]}\n" for doc in docs if isinstance(doc, tuple)]
    parts = [(question + "\n").split(BRIDGE) for question, _ in turns]
    for question, (_, answer) in zip(parts, turns, strict=True):
        texts += [*question, " " + answer]
    encoded = iter(corpus.encode_all(texts))
    ids: list[int] = []
    classes: list[int] = []
    segments: list[int] = []

    def add(tokens: Sequence[int], kind: int, segment: int) -> None:
        ids.extend(tokens)
        classes.extend([kind] * len(tokens))
        segments.extend([segment] * len(tokens))

    start = rng.random()
    head = corpus.system if start < 0.7 or hidden else [BOS] if start < 0.85 else []
    add(head, NEVER, 0 if hidden else SEEN)
    for i, doc in enumerate(docs):
        segment = i + 1 if hidden else SEEN
        add([DOCUMENT], NEVER, segment)
        add(next(encoded) if isinstance(doc, tuple) else doc, PROMPT, segment)
    prefix = len(ids)
    positions = list(range(prefix))
    for n, question in enumerate(parts):
        before, segment = len(ids), BRANCH + n if branches else SEEN
        add([QUESTION], NEVER, segment)
        for i, _ in enumerate(question):
            add(next(encoded), REPLY if i % 2 else PROMPT, segment)
        add([ANSWER], NEVER, segment)
        add([*next(encoded), EOS], REPLY, segment)
        first = prefix if branches else before
        positions += range(first, first + len(ids) - before)
    return Tokens(
        np.array(ids, dtype=np.uint16),
        np.array(classes, dtype=np.uint8),
        np.array(segments, dtype=np.int16),
        np.array(positions),
    )


@dataclass
class Batch:
    """``tokens`` packed tokens and the positions that go through the output layer.

    ids, position, sample, segment: [tokens]; chosen, target, weight, reply, taught: [tokens / 2]. ``sample``
    numbers the samples of the batch from 0, in order."""

    ids: np.ndarray
    position: np.ndarray
    sample: np.ndarray
    segment: np.ndarray
    chosen: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    reply: np.ndarray
    taught: np.ndarray


def packed(draw: Callable[[int], Tokens], tokens: int, rng: random.Random) -> Batch:
    """Fill a batch with samples; ``draw(room)`` gives the next one, and the last is cut.

    Half of the positions count: answers first, then plain text, then a random part of the prompts."""
    ids = np.zeros(tokens, np.int32)
    classes = np.full(tokens, NEVER, np.uint8)
    position = np.zeros(tokens, np.int32)
    sample = np.zeros(tokens, np.int32)
    segment = np.full(tokens, SEEN, np.int16)
    taught = np.zeros(tokens, bool)
    at = number = 0
    while at < tokens:
        drawn = draw(tokens - at).cut(0, tokens - at)
        end = at + len(drawn)
        ids[at:end], classes[at:end], segment[at:end] = drawn.ids, drawn.classes, drawn.segments
        position[at:end] = drawn.positions
        sample[at:end], taught[at:end] = number, drawn.taught
        at, number = end, number + 1
    target = np.roll(ids, -1)
    kind = np.roll(classes, -1)
    kind[np.append(sample[1:] != sample[:-1], True)] = NEVER
    noise = np.random.RandomState(rng.randrange(2**31)).rand(tokens)
    chosen = np.argpartition(-(_ORDER[kind] + 0.4 * noise), tokens // 2 - 1)[: tokens // 2]
    kinds = kind[chosen]
    return Batch(
        ids,
        position,
        sample,
        segment.astype(np.int32),
        chosen.astype(np.int64),
        target[chosen].astype(np.int64),
        WEIGHTS[kinds],
        kinds == REPLY,
        taught[chosen],
    )
