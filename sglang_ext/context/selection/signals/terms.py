"""The terms of texts: whole words without case, diacritics and inflections."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from weakref import WeakKeyDictionary

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.analysis.texts import Texts

Term = str | tuple[str, str]
# Scripts that write no spaces between words: a character is taken for a word, and so is a pair of them.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_CHARACTER = re.compile(rf"[{_UNSPACED}]")
_STEM = 6  # letters: as good as a stemmer of one language on English text, and works in others
_index_of: WeakKeyDictionary[Analysis, Mapping[Term, Sequence[int]]] = WeakKeyDictionary()


def index_of(analysis: Analysis, ids: Sequence[int], texts: Texts) -> Mapping[Term, Sequence[int]]:
    """The numbers of a document's sentences by the terms they hold; made once and kept with the analysis."""
    if analysis not in _index_of:
        begins = [0, *(analysis.begins[1:].nonzero()[:, 0] + 1).tolist(), len(ids)]
        held: dict[Term, list[int]] = defaultdict(list)
        for number, text in enumerate(texts.read([ids[a:b] for a, b in pairwise(begins)])):
            for term in dict.fromkeys(terms_of(text)):
                held[term].append(number)
        _index_of[analysis] = dict(held)
    return _index_of[analysis]


def terms_of(text: str) -> Iterator[Term]:
    """The words of a text; in scripts without spaces characters, and pairs of neighbouring ones."""
    found = words_of(text)
    yield from found
    for pair in pairwise(found):
        if all(map(_CHARACTER.fullmatch, pair)):
            yield pair


def words_of(text: str) -> list[str]:
    """Whole words in the order of the text, without case and diacritics, cut to their first letters: what
    inflection changes comes behind them."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    bare = "".join(letter for letter in plain if not unicodedata.combining(letter))
    return [word[:_STEM] for word in _WORD.findall(bare)]
