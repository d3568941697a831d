"""Probes made from a user's own passages: questions whose sentence is known, without labels or a model.

There are three kinds, from the passage's words to other words: a sentence with a gap (`cloze`), a few of a
sentence's words as people type them (`words`), and the same with each word replaced by one of like meaning
(`reworded`). What answers, a name, a number or the rarest word, is in no question."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragserve.ingest.sentence_plan import sentence_starts

if TYPE_CHECKING:
    from ragserve.retrieval.embedder import AnyEmbedder
    from ragserve.verification.given_scores import TitledText

PROBE_KINDS = ("cloze", "words", "reworded")
_WORD = re.compile(r"\w[\w'-]*\w|\w")
_LENGTH = range(7, 61)  # words of a sentence that is asked for
_ASKED = 4  # most words of a question besides its topic
_BESIDE_GAP = 6  # words kept on either side of a gap
_COMMON = 0.1  # share of the passages from which a word says nothing
_LIKE = 0.45  # least cosine of a word of like meaning
_STEM = 4  # letters: words that share them are one word here
_VOCABULARY = 6000  # words among which one of like meaning is looked for


@dataclass(frozen=True, slots=True)
class PassageProbe:
    """A question about characters ``start`` to ``end`` of passage ``source``; ``group``: its document."""

    kind: str
    question: str
    source: int
    start: int
    end: int
    group: str


def make_probes(
    passages: Sequence[TitledText], embedder: AnyEmbedder, count: int, seed: int = 0
) -> list[PassageProbe]:
    """Make up to ``count`` probes, of each kind equally many, one for a passage; deterministic for a seed."""
    draw = random.Random(seed)
    words = [set(map(str.casefold, _WORD.findall(passage.text))) for passage in passages]
    spread = Counter(word for own in words for word in own)
    common = {word for word, n in spread.items() if n > max(2.0, _COMMON * len(passages))}
    found: list[tuple[PassageProbe, list[str]]] = []
    for source in draw.sample(range(len(passages)), len(passages)):
        if len(found) == count:
            break
        passage = passages[source]
        drafted = _draft(passage.text, common, spread, draw)
        if drafted is None:
            continue
        start, end, gapped, asked = drafted
        kind = PROBE_KINDS[len(found) % len(PROBE_KINDS)]
        topic = _topic(passage.title, passage.text[start:end])
        question = gapped if kind == "cloze" else " ".join([*topic, *asked])
        found.append((PassageProbe(kind, question, source, start, end, passage.title or str(source)), topic))
    reworded = [probe for probe, _ in found if probe.kind == "reworded"]
    other = _other_words(reworded, spread, common, embedder)
    return [_reworded(probe, topic, other) if probe in reworded else probe for probe, topic in found]


def _draft(
    text: str, common: set[str], spread: Counter[str], draw: random.Random
) -> tuple[int, int, str, list[str]] | None:
    """A sentence's place, the sentence with a gap, and some of its words; None where none will do."""
    starts = sentence_starts(text, len(text))
    places = [
        (a, b)
        for a, b in zip(starts, [*starts[1:], len(text)], strict=True)
        if len(_WORD.findall(text[a:b])) in _LENGTH
    ]
    draw.shuffle(places)
    for start, end in places:
        every = list(_WORD.finditer(text, start, end))
        telling = [word for word in every if word[0].casefold() not in common and len(word[0]) > 2]
        names = [word for word in telling[1:] if word[0][0].isupper() or word[0][0].isdigit()]
        if len(telling) < 3:
            continue
        answer = min(names or telling, key=lambda word: (spread[word[0].casefold()], word.start()))
        left = {word[0].casefold() for word in telling} - {answer[0].casefold()}
        asked = draw.sample(sorted(left), min(_ASKED, len(left)))
        if len(asked) < 2:
            continue
        at = every.index(answer)
        first, last = every[max(0, at - _BESIDE_GAP)], every[min(len(every) - 1, at + _BESIDE_GAP)]
        gapped = f"{text[first.start() : answer.start()]}_____{text[answer.end() : last.end()]}"
        return start, start + len(text[start:end].rstrip()), " ".join(gapped.split()), asked
    return None


def _topic(title: str, sentence: str) -> list[str]:
    """What a question has to name to be understood alone: the title, unless the sentence says it."""
    said = set(_WORD.findall(sentence.casefold()))
    return [] if set(_WORD.findall(title.casefold())) <= said else [title]


def _reworded(probe: PassageProbe, topic: Sequence[str], other: dict[str, str]) -> PassageProbe:
    """The probe in other words; a word without one of like meaning, as a name is, stays."""
    asked = probe.question[len(" ".join(topic)) :].split()
    question = " ".join([*topic, *(other.get(word, word) for word in asked)])
    return PassageProbe(probe.kind, question, probe.source, probe.start, probe.end, probe.group)


def _other_words(
    probes: Sequence[PassageProbe], spread: Counter[str], common: set[str], embedder: AnyEmbedder
) -> dict[str, str]:
    """For words of the probes another of like meaning, by their embeddings, among those of all passages."""
    wanted = sorted({word for probe in probes for word in probe.question.casefold().split()} & spread.keys())
    wanted = [word for word in wanted if word not in common and not word[0].isdigit()]
    known = [w for w, _ in spread.most_common() if w not in common and len(w) > 2 and w.isalpha()]
    vocabulary = known[:_VOCABULARY]
    if not wanted or not vocabulary:
        return {}
    cosines = embedder.encode(wanted) @ embedder.encode(vocabulary).T
    found = {}
    for word, row in zip(wanted, cosines, strict=True):
        for place in (-row).argsort(kind="stable")[:20]:
            candidate = vocabulary[int(place)]
            if row[place] < _LIKE:
                break
            if candidate[:_STEM] != word[:_STEM]:
                found[word] = candidate
                break
    return found
