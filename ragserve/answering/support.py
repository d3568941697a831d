"""Attribute an answer's sentences to the passages that support them, by their words.

The claim of a sentence are its words that the question lacks; without any, all of its words. A passage
supports the sentence if it has most of the claim and all of its numbers, and enough of the question's words:
"Paris" alone is in many passages, and the one that supports it is about what was asked. Of several the one
with most of the question is cited, what leads to it by title counted in. "Yes" and "no" claim nothing: the
passages are cited that the question is about. A sentence that joins passages is found in one of them; others
are cited too where a logistic model of the words that they add, and of what links them to it, says so
(`passage_links`).

Names and numbers count twice as much as other words, and a word the more, the fewer of the passages have it.
No model of language is asked, and nothing is embedded (benchmarks/results/support.md). Chosen on the first
halves of four sets, and confirmed on the second (benchmarks/answer_support.py)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise

from ragserve.answering.answer_sentences import sentences
from ragserve.answering.citations import Basis, Marker
from ragserve.answering.passage_links import LinkSignals, PassageLinks
from ragserve.linked_passages import read_words
from ragserve.retrieval.stop_words import STOP_WORDS

_CLAIM = 0.7  # least share of the claim's weight
_LEAST = 0.8  # least sum of the shares of claim and question
_CLAIM_TOGETHER, _MOST = 0.85, 2  # least share of the claim that so many passages have together
_JOINED = 0.3  # least share of the claim that a passage adds to another's
_LED_TO = 0.7  # share of a title's weight in the question with which a passage may lead to another
WEIGHTS = LinkSignals(added=5.5, asked=3.7, titled=3.4, named=2.5, score=1.5)
LEAST_SUM, _MOST_LINKED = 4.6, 3  # least weighted sum of the signals; passages beside the first
_LACKING = 0.05  # share of the question that cited passages must lack for links to others to count
_ASKED_ALONE = 0.5  # least share of the question's weight in the passages of "yes" or "no"
_NO_CLAIM = frozenset({"yes", "no"})
_STOP = frozenset(read_words(" ".join(sorted(STOP_WORDS))).terms)
_PLAIN = 0.5  # weight of a word that is no name or number


@dataclass(frozen=True, slots=True)
class Attributed:
    """A sentence ``answer[start:end]`` and the numbers of its passages, from 1, ascending."""

    start: int
    end: int
    supported: bool
    passages: tuple[int, ...]
    basis: Basis | None


def attribute(
    answer: str, markers: Sequence[Marker], question: str, passages: Sequence[tuple[str, str]]
) -> list[Attributed]:
    """Attribute each sentence to the passages that it names by markers, else to those that support it.

    ``passages``: title and text of each. A sentence that names passages is supported if one of them supports
    it."""
    words = AnswerWords(question, passages)
    found = []
    for start, end in sentences(answer, markers):
        text = answer[start:end]
        named = sorted({marker.index for marker in markers if start <= marker.start < end})
        for marker in reversed([each for each in markers if start <= each.start < end]):
            text = text[: marker.start - start] + text[marker.end - start :]
        basis: Basis | None = "marker"
        if named:
            supported, cited = any(words.supports(text, index - 1) for index in named), named
        else:
            supporting, quoted = words.supporting(text)
            supported, cited = bool(supporting), [number + 1 for number in supporting]
            basis = "quote" if quoted else "words" if supported else None
        found.append(Attributed(start, end, supported, tuple(cited), basis))
    return found


class AnswerWords:
    """The words of a question and of n passages. A passage is cited beside others if its signals, by
    ``weights``, sum up to ``least``."""

    def __init__(
        self,
        question: str,
        passages: Sequence[tuple[str, str]],
        weights: LinkSignals = WEIGHTS,
        least: float = LEAST_SUM,
    ) -> None:
        self._weights, self._least = weights, least
        self._question, self._passages = question, passages
        self._read = [read_words(f"{title}\n{text}") for title, text in passages]
        self._held = [each.counts.keys() for each in self._read]
        self._titles = [self._terms(title) for title, _ in passages]
        self._spread = Counter(term for held in self._held for term in held)
        self._written, self._named = Counter[str](), Counter[str]()
        for each in self._read:
            self._written.update(each.counts)
            self._named.update(each.named)
        self._asked = self._terms(question)
        self._asked_share = [self._share(self._asked, held) for held in self._held]
        self._links: PassageLinks | None = None  # read when first needed

    def supporting(self, sentence: str) -> tuple[list[int], bool]:
        """The passages that support a sentence, counted from 0, and whether one has it word for word."""
        first, scores = self.first(sentence)
        if not first:
            return sorted(self._together(self._claim(sentence))), False
        cited = self._joined(first, sentence, scores)
        if not any(scores):
            held = set[str]().union(*(self._held[number] for number in cited))
            return (sorted(cited) if self._share(self._asked, held) >= _ASKED_ALONE else []), False
        phrase = read_words(sentence).text
        return sorted(cited), any(phrase in self._read[number].text for number in cited)

    def first(self, sentence: str) -> tuple[set[int], list[float]]:
        """The passage that holds a sentence best, or is most about the question that yes or no answers; none
        if no single one holds it. With the scores [n] of all passages."""
        every = range(len(self._read))
        words = read_words(sentence).counts.keys()
        if every and words and words <= _NO_CLAIM:
            asked = self._known_links().asked
            most = max(every, key=lambda number: (self._asked_share[number] + 0.5 * asked[number], -number))
            return {most}, [0.0] * len(every)
        claim = self._claim(sentence)
        scores = [self._score(claim, number) for number in every]
        if max(scores, default=0.0) < _LEAST:
            return set(), scores
        return {max(every, key=lambda number: self._rank(scores, number))}, scores

    def supports(self, sentence: str, number: int) -> bool:
        """Whether one passage supports a sentence, others apart."""
        return self._score(self._claim(sentence), number) >= _LEAST

    def _claim(self, sentence: str) -> list[str]:
        """The terms that a passage must have: of "yes" those of the question."""
        terms = self._terms(sentence)
        return [term for term in terms if term not in self._asked] or terms or self._asked

    def _score(self, claim: Sequence[str], number: int) -> float:
        held = self._held[number]
        share = self._share(claim, held)
        if share < _CLAIM or any(term[0].isdigit() and term not in held for term in claim):
            return 0.0
        return share + self._asked_share[number]

    def _rank(self, scores: Sequence[float], number: int) -> tuple[float, float, int]:
        """What decides which passage is cited first: its score, with what the passages have of the question
        that lead to it; then its share of the question, then its place."""
        score = scores[number]
        if score < _LEAST:
            return 0.0, 0.0, -number
        links, asked = self._known_links(), self._asked_share[number]
        for each, title in enumerate(self._titles):
            led = title and (links.titled({each}, number) or links.titled({number}, each))
            if led and self._rarity_in(title) >= _LED_TO:
                held = self._held[number] | self._held[each]
                asked = max(asked, self._share(self._asked, held))
        return round(score - self._asked_share[number] + asked, 3), self._asked_share[number], -number

    def _together(self, claim: Sequence[str]) -> set[int]:
        """The fewest passages that have the claim together, where each adds to it: of two that are
        compared."""
        found, left = set[int](), set(claim)
        while len(found) < _MOST and self._share(claim, set(claim) - left) < _CLAIM_TOGETHER:
            adds = {n: self._share(claim, held & left) for n, held in enumerate(self._held) if n not in found}
            best = max(adds, key=lambda number: (adds[number], self._asked_share[number]), default=None)
            if best is None or adds[best] < _JOINED:
                return set()
            found.add(best)
            left -= self._held[best]
        is_whole = self._share(claim, set(claim) - left) >= _CLAIM_TOGETHER
        return found if is_whole and not any(term[0].isdigit() for term in left) else set()

    def _joined(self, cited: set[int], sentence: str, scores: Sequence[float]) -> set[int]:
        """The passages that are cited, with those that are cited beside them."""
        found = set(cited)
        while len(found) < len(cited) + _MOST_LINKED:
            signals = self.signals(found, sentence, scores)
            sums = {
                number: sum(weight * value for weight, value in zip(self._weights, each, strict=True))
                for number, each in signals.items()
            }
            best = max(sums, key=lambda number: (sums[number], -number), default=None)
            if best is None or sums[best] < self._least:
                break
            found.add(best)
        return found

    def signals(
        self, cited: AbstractSet[int], sentence: str, scores: Sequence[float]
    ) -> dict[int, LinkSignals]:
        """The signals of all passages but the cited ones; ``scores`` [n] of the sentence's claim."""
        links = self._known_links()
        missing = set(self._asked).difference(*(self._held[number] for number in cited))
        said = set(pairwise(read_words(sentence).terms))
        is_open = self._share(self._asked, missing) > _LACKING
        return {
            number: LinkSignals(
                self._share(self._asked, missing & held),
                float(links.asked[number]),
                links.titled(cited, number) if is_open else 0.0,
                links.named(cited, number, said) if is_open else 0.0,
                scores[number],
            )
            for number, held in enumerate(self._held)
            if number not in cited
        }

    def _known_links(self) -> PassageLinks:
        if self._links is None:
            self._links = PassageLinks(self._question, self._passages, self._read, self._is_name, _STOP)
        return self._links

    def _terms(self, text: str) -> list[str]:
        return [term for term in read_words(text).counts if term not in _STOP]

    def _is_name(self, term: str) -> bool:
        """Whether the passages write a term as a name, mostly, or it is a number."""
        return term[0].isdigit() or 2 * self._named[term] > self._written[term]

    def _rarity_in(self, title: Sequence[str]) -> float:
        """Share of a title's weight that the question has."""
        total = sum(map(self._rarity, title))
        return sum(self._rarity(term) for term in title if term in self._asked) / total

    def _rarity(self, term: str) -> float:
        return math.log1p(len(self._held) / (self._spread[term] or 0.5))

    def _share(self, terms: Sequence[str], held: AbstractSet[str]) -> float:
        """Share of the terms' weight that a passage has."""
        weight = {term: self._rarity(term) * (1 if self._is_name(term) else _PLAIN) for term in terms}
        total = sum(weight.values())
        return sum(weight[term] for term in terms if term in held) / total if total else 0.0
