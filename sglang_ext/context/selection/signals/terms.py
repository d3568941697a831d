"""The terms of texts, whole words without case, diacritics and inflections, and sentences that hold them."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.selection.sentences import Sentences
from sglang_ext.tensors.buffers import Ints

# Scripts that write no spaces between words: a character is taken for a word, and so is a pair of them.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_CHARACTER = re.compile(rf"[{_UNSPACED}]")
_STEM = 6  # letters: as good as a stemmer of one language on English text, and works in others
_ASIDE = re.compile(r"\([^()\n]*+\)")  # in a title: "Sing (film)" is called Sing
_BUCKETS = 2**16  # of terms by their last bits: few of a context share one with a term that is looked for


@dataclass(frozen=True, eq=False)
class DocumentTerms:
    """The terms of a document, as hashes of this process, and its sentences that hold them, counted from 0.

    ``terms`` int64 [T], as they first appear. ``counts`` int64 [T]: sentences that hold each. ``held`` int32
    [sum of counts]: these sentences, ascending for each term. ``title``: terms of the first sentence, without
    what it has in brackets. ``names_itself``: another sentence has a word of the title, too, or there is no
    other. Where none has ("Further notes", "(continued)"), the document may speak of what stands before it.
    """

    terms: Ints
    counts: Ints
    held: npt.NDArray[np.int32]
    title: frozenset[int]
    names_itself: bool

    @classmethod
    def of(cls, texts: Sequence[str]) -> DocumentTerms:
        """Those of the texts of a document's sentences."""
        held: dict[int, list[int]] = defaultdict(list)
        for number, text in enumerate(texts):
            for term in dict.fromkeys(terms_of(text)):
                held[term].append(number)
        title = frozenset(terms_of(_ASIDE.sub("", texts[0])))
        return cls(
            np.fromiter(held, np.int64, len(held)),
            np.fromiter(map(len, held.values()), np.int64, len(held)),
            np.fromiter(chain.from_iterable(held.values()), np.int32),
            title,
            len(texts) == 1 or any(len(held[term]) > 1 for term in title),
        )


_known: WeakKeyDictionary[Analysis, DocumentTerms] = WeakKeyDictionary()


def terms_in(analysis: Analysis, ids: torch.Tensor, texts: Texts) -> DocumentTerms:
    """The terms of a document of tokens ``ids`` int64 [n]; read once and kept with its analysis, which counts
    their bytes."""
    if analysis not in _known:
        begins = [0, *(analysis.begins[1:].nonzero()[:, 0] + 1).tolist(), len(ids)]
        tokens = ids.tolist()
        _known[analysis] = DocumentTerms.of(texts.read([tokens[a:b] for a, b in pairwise(begins)]))
    return _known[analysis]


class ContextTerms:
    """The terms of a request's documents, and the numbers of the sentences that hold them."""

    def __init__(self, documents: Sequence[DocumentTerms], sentences: Sentences) -> None:
        self.titles = [document.title for document in documents]
        self.name_themselves = [document.names_itself for document in documents]
        self._document = sentences.document
        self._terms, self._counts = (
            np.concatenate(parts) for parts in zip(*((d.terms, d.counts) for d in documents), strict=True)
        )
        self._places = [0, *accumulate(len(document.terms) for document in documents)]
        held = [document.held for document in documents]
        self._held = np.concatenate(held) + np.repeat(sentences.opening, [len(own) for own in held])
        self._start = np.append(0, self._counts.cumsum())

    def of(self, sentence: int) -> list[int]:
        """The terms of a sentence, in the order in which its document has them first."""
        document = self._document[sentence]
        start, end = self._places[document : document + 2]
        held = self._held[self._start[start] : self._start[end]]
        own: list[int] = np.repeat(self._terms[start:end], self._counts[start:end])[held == sentence].tolist()
        return own

    def holding(self, wanted: Sequence[int]) -> tuple[Ints, Ints]:
        """The sentences that hold each of these different terms, ascending, one term after the other, and
        int64 [wanted]: how many hold each."""
        if not wanted:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        terms = np.array(wanted)
        likely = np.zeros(_BUCKETS, dtype=bool)
        likely[terms & (_BUCKETS - 1)] = True
        at = np.flatnonzero(likely[self._terms & (_BUCKETS - 1)])
        order = terms.argsort()
        which = order[np.searchsorted(terms, self._terms[at], sorter=order).clip(max=len(terms) - 1)]
        found = terms[which] == self._terms[at]
        at, which = at[found], which[found]
        by_term = which.argsort(kind="stable")  # and then by document
        at, which = at[by_term], which[by_term]
        counts = self._counts[at]
        ends = counts.cumsum()
        held = self._held[np.arange(counts.sum()) + np.repeat(self._start[at] - (ends - counts), counts)]
        return held, np.bincount(which, counts, len(terms)).astype(np.int64)


def terms_of(text: str) -> Iterator[int]:
    """The words of a text; in scripts without spaces characters, and pairs of neighbouring ones. Hashed."""
    found = words_of(text)
    yield from map(hash, found)
    if not text.isascii():
        yield from (hash(pair) for pair in pairwise(found) if all(map(_CHARACTER.fullmatch, pair)))


def words_of(text: str) -> list[str]:
    """Whole words in the order of the text, without case and diacritics, cut to their first letters: what
    inflection changes comes behind them."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    if not plain.isascii():
        plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    return [word[:_STEM] for word in _WORD.findall(plain)]
