"""The order in which passages are chosen for a question: each by itself, and by what those before it name.

The second passage of a two-hop question shares few words with it and is not near to it: it is found by what
the first one names (Asai et al., ICLR 2020, and Qi et al., EMNLP 2019, train models for it). Here a passage
that is taken lends the others a bonus: where one has the other's title, and where they share names that the
question lacks. No model is asked, and nothing is embedded: 250 passages of 100 words take 40 ms, 20 take
4."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from ragserve.retrieval.namespace_words import folded

Floats = npt.NDArray[np.float64]

UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Characters of scripts that do not separate words, for a character class: each is a term of its own."""
_WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
_CHARACTER = re.compile(f"[{UNSPACED}]")
_ASIDE = re.compile(r"\([^()]*\)")  # in a title: "Sing (film)" is called Sing
_REMEMBERED_CHARS = 8192  # longer texts are given by clients, and seldom twice
_LONGEST_WORD = 64
_STEM = 6  # letters: what inflection changes comes behind them
_SHORTEST = 3  # characters of a name: of, at, II
_K1, _B = 1.2, 0.75  # BM25's usual constants
# Chosen together on the first halves of four sets (benchmarks/passage_choice.py).
_MATCHES, _MATCHES_BY_PLACE = 0.5, 1.0  # BM25's weight beside scores, and beside places only
_TITLE_ASKED = 0.5
_TITLES, _NAMES = 2.0, 2.0  # bonus, as a multiple of the weight of the scores before it
_PLAIN = 0.25  # weight of a word that is no name


@dataclass(frozen=True, slots=True)
class Ranking:
    """The numbers of passages, the best first, and the score with which each was taken: in standard
    deviations of the search's score above the mean, with what BM25 and the bonus add."""

    order: list[int]
    scores: list[float]


def linked(
    question: str,
    passages: Sequence[tuple[str, str]],
    scores: Sequence[float | None] | None = None,
    *,
    titles: float = _TITLES,
    names: float = _NAMES,
) -> Ranking:
    """Rank all passages. ``passages``: title and text of each, in the order of a search, the best first.
    ``scores``: the search's cosines or a reranker's scores; where one lacks it, the places stand for them.

    A passage's own score is the standard score of the search's, BM25's times `_MATCHES`, and `_TITLE_ASKED`
    times the share of its title that the question has. The greedy choice adds, for passage j, the largest of

        (1 + `_MATCHES`) * share(i) * (``titles`` * [i or j has the other's title, which the question lacks]
                                      + ``names`` * BM25(j; names of i) / max over j of the same)

    over the passages i that are taken, with share(i) the own score of i, from 0 for the lowest to 1 for the
    highest. With both 0 the own scores decide."""
    n = len(passages)
    if not n:
        return Ranking([], [])
    words = PassageWords(question, passages)
    known = [score for score in scores or () if score is not None]
    by_score = len(known) == n
    prior = np.array(known) if by_score else -np.log1p(np.arange(n))
    matches = _MATCHES if by_score else _MATCHES_BY_PLACE
    own = _standard(prior) + matches * _standard(words.matches) + _TITLE_ASKED * words.titles_asked
    share = (own - own.min()) / (np.ptp(own) or 1.0)
    bonus = (1 + matches) * share[:, None] * (titles * words.title_links + names * words.name_links)
    lent, order, taken_at = np.zeros(n), list[int](), list[float]()
    for _ in range(n):
        score = own + lent
        score[order] = -np.inf
        best = int(score.argmax())
        order.append(best)
        taken_at.append(float(score[best]))
        lent = np.maximum(lent, bonus[best])
    return Ranking(order, taken_at)


class PassageWords:
    """What `linked` reads off the words of n passages. ``matches`` [n]: BM25 for the question.
    ``titles_asked`` [n]: share of a title's weight that the question has. ``title_links`` and ``name_links``
    [n, n]: what passage i (row) says about passage j, from 0 to 1; 0 between passages of one title."""

    def __init__(self, question: str, passages: Sequence[tuple[str, str]]) -> None:
        read = [read_words(f"{title}\n{text}") for title, text in passages]
        own_titles = [read_words(_ASIDE.sub("", title)).terms for title, _ in passages]
        asked = set(read_words(question).terms)
        spread = Counter(chain.from_iterable(each.counts for each in read))
        linking = (term for term, held in spread.items() if held > 1 or term in asked)
        column = {term: number for number, term in enumerate(linking)}
        n = len(passages)
        frequency = np.zeros((n, len(column)), dtype=np.float32)
        wanted = np.zeros_like(frequency)
        for row, own in enumerate(read):
            at = np.array([column.get(term, -1) for term in own.counts], dtype=np.int64)
            is_linking = at >= 0
            frequency[row, at[is_linking]] = own.frequency[is_linking]
            wanted[row, at[is_linking]] = own.links[is_linking]
        wanted[:, [column[term] for term in asked if term in column]] = 0.0
        rare = [0.0, *(math.log1p((n - held + 0.5) / (held + 0.5)) for held in range(1, n + 1))]
        rarity = {term: rare[held] for term, held in spread.items()}
        lengths = np.array([max(1, len(each.terms)) for each in read], dtype=np.float32)
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
            phrase = f" {' '.join(title)} "
            for row in np.flatnonzero(holding):
                if phrase in read[row].text:
                    self.title_links[row, number] = self.title_links[number, row] = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class TextWords:
    """A text's words. ``terms``: in order, with those of scripts without spaces; ``counts``: how often each
    stands there, and ``named``, how often with a capital or as a number; in the order of ``counts``
    ``frequency`` f32, the same, and ``links`` f32, a term's weight where it links to other passages;
    ``text``: all terms, between spaces."""

    terms: tuple[str, ...]
    counts: Mapping[str, int]
    named: Mapping[str, int]
    frequency: npt.NDArray[np.float32]
    links: npt.NDArray[np.float32]
    text: str


def read_words(text: str) -> TextWords:
    """The words of a text. Passages are found again and again, and reading them is half of the time: those of
    usual length are remembered."""
    return _remembered(text) if len(text) <= _REMEMBERED_CHARS else _read(text)


def _read(text: str) -> TextWords:
    words = _WORD.findall(text)
    if not text.isascii():
        words = [word for word in words if _term(word)]  # a mark alone, as a tone of Thai, folds to nothing
        words += [a + b for a, b in pairwise(words) if _is_unspaced(a) and _is_unspaced(b)]
    terms = tuple([_term(word) for word in words])
    counts = Counter(terms)
    named = Counter(
        term for term, word in zip(terms, words, strict=True) if word[0].isupper() or word[0].isdigit()
    )
    links = [
        (1.0 if term in named else _PLAIN) if len(term) >= _SHORTEST or _is_unspaced(term) else 0.0
        for term in counts
    ]
    frequency = np.array(list(counts.values()), dtype=np.float32)
    return TextWords(
        terms, counts, named, frequency, np.array(links, dtype=np.float32), f" {' '.join(terms)} "
    )


_remembered = lru_cache(maxsize=1024)(_read)  # 22 KiB for a text of 2,000 characters


def _term(word: str) -> str:
    """What stands for a word: folded, without what inflection changes."""
    return _known_term(word) if len(word) <= _LONGEST_WORD else _folded_term(word)


def _folded_term(word: str) -> str:
    return folded(word)[:_STEM]


_known_term = lru_cache(maxsize=2**15)(_folded_term)


def _is_unspaced(word: str) -> bool:
    return _CHARACTER.match(word) is not None


def _share(title: Sequence[str], asked: set[str], rarity: dict[str, float]) -> float:
    """Share of the weight of a title's terms that the question has."""
    total = sum(rarity[term] for term in set(title))
    return sum(rarity[term] for term in asked.intersection(title)) / total if total else 0.0


def _standard(values: Floats) -> Floats:
    """Distances from the mean in standard deviations; zeros where all are equal."""
    deviation = values.std()
    return (values - values.mean()) / deviation if deviation > 1e-9 else np.zeros_like(values)
