"""Signals for citing a passage beside those that hold an answer: what it adds, and what links it to them.

The answer of a question in two steps is in one passage, and what leads there in another: that one has the
question's other words, its title is in the question or in the passage that is cited, or both write a name of
two words that the question lacks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import NamedTuple

from ragserve.linked_passages import TextWords, read_words

_ASIDE = re.compile(r"\([^()]*\)")  # in a title: "Sing (film)" is called Sing
_SHORTEST = 3  # characters of a title that a text may name

Pair = tuple[str, str]


class LinkSignals(NamedTuple):
    """Of a passage beside cited ones, each from 0 to 1, and ``score`` from 0 to 2."""

    added: float  # share of the question's weight that the cited ones lack and it has
    asked: float  # 1 if the question has its title
    titled: float  # 1 / n if a cited passage has its title, and n passages have it
    named: float  # 1 / n of the rarest pair of names that it shares with a cited one, and with n in all
    score: float  # shares of the claim and the question, as `support` has them; 0 without the claim


class PassageLinks:
    """What n passages say about each other. ``plain``: terms that are no names of their own."""

    def __init__(
        self,
        question: str,
        passages: Sequence[tuple[str, str]],
        read: Sequence[TextWords],
        is_name: Callable[[str], bool],
        plain: frozenset[str],
    ) -> None:
        titles = [read_words(_ASIDE.sub("", title)).terms for title, _ in passages]
        asked = read_words(question)
        bodies = [read_words(text).text for _, text in passages]
        self._titles = [title for title, _ in passages]
        self.asked = [False] * len(passages)
        self._titled: list[dict[int, float]] = [{} for _ in passages]  # by passage: those whose title it has
        for number, title in enumerate(titles):
            phrase = f" {' '.join(title)} "
            if titles.count(title) > 1 or len(phrase) < _SHORTEST + 2 or plain.issuperset(title):
                continue
            self.asked[number] = phrase in asked.text
            having = [n for n, body in enumerate(bodies) if n != number and phrase in body]
            for other in having:
                self._titled[other][number] = 1 / len(having)
        known = set(pairwise(asked.terms))
        self._pairs: list[set[Pair]] = []
        self._having = defaultdict[Pair, list[int]](list)
        for number, each in enumerate(read):
            pairs = {
                (one, two)
                for one, two in pairwise(each.terms)
                if is_name(one) and is_name(two) and not plain & {one, two}
                if not (one[0].isdigit() and two[0].isdigit())
                if (one, two) not in known and not asked.counts.keys() >= {one, two}
            }
            self._pairs.append(pairs)
            for pair in pairs:
                self._having[pair].append(number)

    def titled(self, cited: AbstractSet[int], number: int) -> float:
        """The signal of this name."""
        return max(self._titled[each].get(number, 0.0) for each in cited)

    def named(self, cited: AbstractSet[int], number: int, said: AbstractSet[Pair]) -> float:
        """The signal of this name, without the pairs that the answer says."""
        shared = (
            pair
            for pair in self._pairs[number] - said
            if any(
                each in cited and self._titles[each] != self._titles[number] for each in self._having[pair]
            )
        )
        return max((1 / (len(self._having[pair]) - 1) for pair in shared), default=0.0)
