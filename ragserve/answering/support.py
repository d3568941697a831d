"""Attribute an answer's sentences to the passages that support them, by their words.

The claim of a sentence are its words that the question lacks; without any, all of its words. A passage
supports the sentence if it has most of the claim and all of its numbers, and enough of the question's words:
"Paris" alone is in many passages, and the one that supports it is about what was asked. Passages that share
the claim only by chance have less of the question, and are not cited beside one that has more. A sentence
that joins two passages is found in one of them: another one is cited too where it has names of the question
that the first lacks, and both name the same.

Names and numbers count twice as much as other words, and a word the more, the fewer of the passages have it.
No model is asked, and nothing is embedded: words alone reach 92 % precision and more where one passage
answers (benchmarks/results/support.md). A term's weight is found once an answer. Chosen on the
first halves of four sets, and confirmed on the second (benchmarks/answer_support.py)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ragserve.answering.answer_sentences import sentences
from ragserve.answering.citations import Basis, Marker
from ragserve.linked_passages import PassageWords, read_words
from ragserve.retrieval.stop_words import STOP_WORDS

_CLAIM = 0.7  # least share of the claim's weight
_LEAST = 0.8  # least sum of the shares of claim and question
_CLAIM_TOGETHER, _MOST = 0.85, 2  # least share of the claim that so many passages have together
_BEHIND = 0.05  # passages that far behind the best one are cited with it
_JOINED = 0.3  # least share of the names that a passage adds to those cited
_LINKED = 0.5  # least share of a passage's names that it has in common with one cited
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
    words = _Words(question, passages)
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


class _Words:
    """The words of a question and of n passages."""

    def __init__(self, question: str, passages: Sequence[tuple[str, str]]) -> None:
        self._question, self._passages = question, passages
        self._read = [read_words(f"{title}\n{text}") for title, text in passages]
        self._held = [each.counts.keys() for each in self._read]
        self._titles = [set(read_words(title).terms) for title, _ in passages]
        self._spread = Counter(term for held in self._held for term in held)
        self._names = dict[str, bool]()  # found when first asked for, of all passages together
        self._asked = self._terms(question)
        self._asked_share = [self._share(self._asked, held) for held in self._held]

    def supporting(self, sentence: str) -> tuple[list[int], bool]:
        """The passages that support a sentence, counted from 0, and whether one has it word for word."""
        claim = self._claim(sentence)
        scores = [self._score(claim, number) for number in range(len(self._held))]
        best = max(scores, default=0.0)
        if best < _LEAST:
            return sorted(self._together(claim)), False
        cited = {number for number, score in enumerate(scores) if score >= max(_LEAST, best - _BEHIND)}
        phrase = read_words(sentence).text
        quoted = any(phrase in self._read[number].text for number in cited)
        return sorted(cited | self._joined(cited, sentence)), quoted

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

    def _joined(self, cited: set[int], sentence: str) -> set[int]:
        """Passages that have names of question and sentence which those cited lack, and are linked to one."""
        every = [
            term for term in dict.fromkeys([*self._asked, *self._terms(sentence)]) if self._is_name(term)
        ]
        total = sum(map(self._rarity, every))
        found, links = set[int](), None
        while True:
            known = set[str]().union(*(self._held[number] for number in cited | found))
            missing = {term for term in every if term not in known}
            if not missing:
                return found
            links = links or PassageWords(self._question, self._passages)
            best, chosen = 0.0, None
            for number in set(range(len(self._held))) - cited - found:
                added = sum(self._rarity(term) for term in missing & self._held[number]) / total
                link = max(
                    max(links.title_links[each, number], links.name_links[each, number])
                    for each in cited | found
                )
                titled = len(missing & self._titles[number]) / max(1, len(self._titles[number]))
                if added >= _JOINED and max(link, titled) >= _LINKED and added + link + titled > best:
                    best, chosen = added + link + titled, number
            if chosen is None:
                return found
            found.add(chosen)

    def _terms(self, text: str) -> list[str]:
        return [term for term in read_words(text).counts if term not in _STOP]

    def _is_name(self, term: str) -> bool:
        """Whether the passages write a term as a name, mostly, or it is a number."""
        if term not in self._names:
            named = sum(each.named.get(term, 0) for each in self._read)
            written = sum(each.counts.get(term, 0) for each in self._read)
            self._names[term] = term[0].isdigit() or 2 * named > written
        return self._names[term]

    def _rarity(self, term: str) -> float:
        return math.log1p(len(self._held) / (self._spread[term] or 0.5))

    def _share(self, terms: Sequence[str], held: AbstractSet[str]) -> float:
        """Share of the terms' weight that a passage has."""
        weight = {term: self._rarity(term) * (1 if self._is_name(term) else _PLAIN) for term in terms}
        total = sum(weight.values())
        return sum(weight[term] for term in terms if term in held) / total if total else 0.0
