"""The order in which passages are chosen for a question: each by itself, and by what those before it name.

The second passage of a two-hop question shares few words with it and is not near to it: it is found by what
the first one names (Asai et al., ICLR 2020, and Qi et al., EMNLP 2019, train models for it). Here each passage
that is taken lends the others a bonus: where it has their title, and where they have names that the question
lacks. No model is asked: 250 passages of 100 words take about 25 ms."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from ragserve.retrieval.namespace_words import folded

Floats = npt.NDArray[np.float64]

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]{{1,2}}|[^\W_{_UNSPACED}]+")
_ASIDE = re.compile(r"\(.*?\)")  # in a title: "Sing (film)" is called Sing
_STEM = 6  # letters: what inflection changes comes behind them
_K1, _B = 1.2, 0.75  # BM25's usual constants
# In standard deviations of a passage's own score. Chosen on first halves: benchmarks/passage_choice.py.
TITLES, NAMES = 3.0, 3.0
_PLAIN = 0.25  # weight of a word that is no name


def linked_order(
    question: str,
    passages: Sequence[tuple[str, str]],
    *,
    titles: float = TITLES,
    names: float = NAMES,
) -> list[int]:
    """The numbers of all passages, the best first. ``passages``: title and text of each, in the order of a
    search, the best first.

    A passage's own score is the sum of the standard scores of its place in the search and of BM25, and of the
    share of its title's weight that the question has. The greedy choice adds, for every passage j, the largest
    bonus of a passage i that is taken,

        share(i) * (titles * [i has j's title, and the question has not]
                    + names * BM25(j; names of i) / max over j of the same)

    with share(i) the own score of i, scaled from 0 for the lowest to 1 for the highest. ``titles`` and
    ``names`` 0: by the own scores."""
    if len(passages) < 2:
        return list(range(len(passages)))
    words = _Words(question, passages)
    own = _standard(-np.log1p(np.arange(len(passages)))) + _standard(words.matches) + words.titles_asked
    share = (own - own.min()) / (np.ptp(own) or 1.0)
    bonus = share[:, None] * (titles * words.title_links + names * words.name_links)
    score, order = own.copy(), list[int]()
    best = np.zeros(len(passages))
    for _ in passages:
        number = int(score.argmax())
        order.append(number)
        best = np.maximum(best, bonus[number])
        score = own + best
        score[order] = -np.inf
    return order


class _Words:
    """What ``linked_order`` reads off the words of n passages. ``matches`` [n]: BM25 for the question.
    ``titles_asked`` [n]: share of a title's weight that the question has. ``title_links`` and ``name_links``
    [n, n]: what passage i (row) says about passage j; 0 between passages of one title."""

    def __init__(self, question: str, passages: Sequence[tuple[str, str]]) -> None:
        forms = _Forms()
        read = [forms.of(f"{title}\n{text}") for title, text in passages]
        own_titles = [[term for term, _ in forms.of(_ASIDE.sub("", title))] for title, _ in passages]
        asked = {term for term, _ in forms.of(question)}
        counts = [Counter([term for term, _ in terms]) for terms in read]
        spread = Counter(chain.from_iterable(counts))
        linking = (term for term, held in spread.items() if held > 1 or term in asked)
        column = {term: number for number, term in enumerate(linking)}
        n = len(passages)
        frequency = np.zeros((n, len(column)), dtype=np.float32)
        wanted = np.zeros_like(frequency)
        for row, own in enumerate(counts):
            known = [term for term in own if term in column]
            frequency[row, [column[term] for term in known]] = [own[term] for term in known]
            named = {term for term, is_name in set(read[row]) if is_name}
            for term in known:
                if term not in asked and len(term) > 2:
                    wanted[row, column[term]] = 1.0 if term in named else _PLAIN
        rarity = {term: np.log1p((n - held + 0.5) / (held + 0.5)) for term, held in spread.items()}
        lengths = np.array([max(1, len(terms)) for terms in read], dtype=np.float32)
        norm = _K1 * (1 - _B + _B * lengths / lengths.mean())[:, None]
        weight = frequency * (_K1 + 1) / (frequency + norm)
        weight *= np.array([rarity[term] for term in column], dtype=np.float32)
        self.matches: Floats = weight[:, [column[term] for term in asked if term in column]].sum(1)
        self.titles_asked = np.array([_share(title, asked, rarity) for title in own_titles])
        title_of = {title: number for number, (title, _) in enumerate(passages) if title}
        same = np.array([title_of.get(title, -1 - number) for number, (title, _) in enumerate(passages)])
        others = same[:, None] != same
        shared = np.where(others, wanted @ weight.T, 0.0)
        self.name_links: Floats = shared / np.maximum(shared.max(1, keepdims=True), 1e-9)
        self.title_links = np.zeros((n, n))
        for number, title in enumerate(own_titles):
            if not title or asked.issuperset(title) or not column.keys() >= set(title):
                continue
            holding = (frequency[:, [column[term] for term in title]] > 0).all(1) & others[:, number]
            for row in np.flatnonzero(holding):
                self.title_links[row, number] = _has_phrase(read[row], title)


class _Forms(dict[str, tuple[str, bool]]):
    """The term of a word, and whether the word is written as a name or a number is; found when first asked
    for."""

    def __missing__(self, word: str) -> tuple[str, bool]:
        found = self[word] = folded(word)[:_STEM], word[0].isupper() or word[0].isdigit()
        return found

    def of(self, text: str) -> list[tuple[str, bool]]:
        """Those of a text, in order."""
        return [self[word] for word in _WORD.findall(text)]


def _has_phrase(terms: Sequence[tuple[str, bool]], phrase: Sequence[str]) -> bool:
    text = " ".join(term for term, _ in terms)
    return f" {' '.join(phrase)} " in f" {text} "


def _share(title: Sequence[str], asked: set[str], rarity: dict[str, float]) -> float:
    """Share of the weight of a title's terms that the question has."""
    total = sum(rarity[term] for term in set(title))
    return sum(rarity[term] for term in asked.intersection(title)) / total if total else 0.0


def _standard(values: Floats) -> Floats:
    """Distances from the mean in standard deviations; zeros where all are equal."""
    deviation = values.std()
    return (values - values.mean()) / deviation if deviation > 1e-9 else np.zeros_like(values)
