"""Correct typing errors in questions.

A word is replaced if neither the namespace nor the embedder knows it, nor an inflection of it, and one error
(a letter too many, too few or wrong, or two exchanged; the first letter only exchanged) parts it from a word
of the namespace. Of several such words, those whose letters are only exchanged, or doubled, come first, then
those that go on as the word begins, which may be inflections, then the most frequent. Where two are alike,
nothing is replaced. A word of the embedder is chosen if it is the only one near, and the namespace has none,
or if letters were only exchanged or doubled, and the namespace has no such word.

Nothing is replaced in a text that does not look like a question with an error: if more words are unknown than
one, and one more for every eight, or if the embedder knows less than two thirds of the others, because they
are of another language. What is not a word stays as it is: numbers, identifiers, addresses, code, acronyms,
and scripts other than Latin; and so does what stands in quotation marks."""

from __future__ import annotations

import asyncio
import logging
import re
import string
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ragserve.errors import NotFound, RagserveError
from ragserve.retrieval.namespace_words import (
    LATIN,
    MAX_LETTERS,
    MIN_LETTERS,
    JointTable,
    NamespaceWords,
    folded,
)
from ragserve.retrieval.word_counts import word_counts
from ragserve_index.viewers import EVERYTHING, Viewer
from sglang_ext.wire.joint_names import names_of

if TYPE_CHECKING:
    from ragserve_index import IndexStore

log = logging.getLogger(__name__)

_LOOKED_AT = 256  # words of a text
_READ_CHARS = 8192  # that have them
_FOR_EACH = 8  # known words, one more unknown one is corrected
_IN_LANGUAGE = 2 / 3  # share of the known words that the embedder knows
_VERIFIED = 3  # of the best replacements, by the lexical index
_ENDINGS = ("s", "es", "ed", "d", "ing", "ly")  # of English, as the lexical index's stemmer

# English contractions as they are typed in a hurry, for which other words are near
_CONTRACTIONS = frozenset(
    re.findall(
        r"\w+",
        "arent cant couldnt didnt doesnt dont hadnt hasnt havent isnt shouldnt theyre theyve wasnt werent "
        "wont wouldnt youre youve",
    )
)
_TOKEN = re.compile(r"`[^`]*`|\S+")
_INSIDE = re.compile(r"[^\W\d_]+")
_PLAIN = re.compile(r"\A[(\[{\"'“”‘’„«»‚¿¡]*+([^\W\d_]++(?:['’-][^\W\d_]++)*+)['’]?[)\]}\"'“”‘’»«.,;:!?…]*+")
# within 200 characters: each quote without its other one is looked for that far
_QUOTED = re.compile(
    r"""(?<!\w)"[^"\n]{0,200}"|“[^”\n]{0,200}”|„[^“”\n]{0,200}[“”]|«[^»\n]{0,200}»|»[^«\n]{0,200}«"""
    r"""|(?<!\w)'[^\n]{0,200}?'(?!\w)|‘[^\n]{0,200}?’(?!\w)"""
)
_REPEATED = re.compile(r"(.)\1+")
_LATIN = re.compile(f"[{LATIN}]+")


class Replacement(NamedTuple):
    """A word for the characters from ``start`` to ``end`` of a text."""

    start: int
    end: int
    word: str


@dataclass(frozen=True, slots=True)
class Corrected:
    """Texts as they were typed, and what is replaced in each."""

    typed: Sequence[str]
    replacements: Sequence[Sequence[Replacement]]

    @classmethod
    def nothing(cls, typed: Sequence[str]) -> Corrected:
        """Texts in which nothing is replaced."""
        return cls(typed, [()] * len(typed))

    @property
    def texts(self) -> list[str]:
        """The corrected texts."""
        return [_replaced(*each) for each in zip(self.typed, self.replacements, strict=True)]

    @property
    def corrections(self) -> list[tuple[str, str]]:
        """What was replaced, (original, replacement), each once."""
        found = {
            text[start:end]: word
            for text, replacements in zip(self.typed, self.replacements, strict=True)
            for start, end, word in replacements
        }
        return list(found.items())

    def found_in(self, passages: Iterable[str], *, first_only: bool = False) -> Corrected:
        """The replacements alone whose words are in the passages, of all texts or of the first.

        They are what the user meant. Another word of the namespace may not be, if what was typed is a name
        or a term that the namespace does not have; a model that reads it answers another question."""
        words = {word for text in passages for word in _INSIDE.findall(folded(text))}
        kept = [
            [each for each in some if folded(each.word) in words and not (place and first_only)]
            for place, some in enumerate(self.replacements)
        ]
        return Corrected(self.typed, kept)


def _replaced(text: str, replacements: Sequence[Replacement]) -> str:
    pieces, behind = [], 0
    for start, end, word in replacements:
        pieces += [text[behind:start], word]
        behind = end
    return "".join([*pieces, text[behind:]])


class SpellingCorrector:
    """Corrects questions about the namespaces of a store. Belongs to one event loop; ``close`` ends its
    threads."""

    def __init__(self, store: IndexStore, known: AbstractSet[str]) -> None:
        """``known``: words that the embedder knows, folded."""
        self._store = store
        self._known = known
        self._words = NamespaceWords(store)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spelling")

    async def correct(self, namespace: str, texts: Sequence[str], viewer: Viewer = EVERYTHING) -> Corrected:
        """Correct a question and its variants by the words that the viewer sees in a namespace or, by their
        joint name, in several; nothing while those are read for the first time, or if they cannot be read.
        Raises NotFound for an unknown namespace."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._correct, namespace, texts, viewer
        )

    async def read(self, namespace: str) -> None:
        """Wait until the namespace's words have been read."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._words.wait, namespace)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._words.close)

    def _correct(self, namespace: str, texts: Sequence[str], viewer: Viewer) -> Corrected:
        store = self._store.seen_by(viewer)

        def counts(words: Sequence[str]) -> dict[str, int]:
            return word_counts(store, names, words)

        names = names_of(namespace)
        try:
            tables = [table for name in names if (table := self._words.of(name)) is not None]
            if len(tables) == len(names):
                every, hides = JointTable(tables), any(map(store.hides, names))
                found = [_corrected(text, self._known, every, counts, hides) for text in texts]
                return Corrected(texts, found)
        except NotFound:
            raise
        except RagserveError as error:  # a dense search needs no lexical index
            log.warning("spelling was not corrected: %s", error)
        return Corrected.nothing(texts)


def _corrected(
    text: str,
    known: AbstractSet[str],
    table: JointTable,
    counts: Callable[[Sequence[str]], dict[str, int]],
    hides: bool,
) -> list[Replacement]:
    """What is replaced in one text, in its order. ``hides``: the table has words that the reader must not
    learn of."""
    places = list(_words(text[:_READ_CHARS]))[:_LOOKED_AT]
    words = {place: unicodedata.normalize("NFC", text[slice(*place)]).lower() for place in places}
    distinct = dict.fromkeys(words.values())
    strange = [word for word in distinct if not _is_known(folded(word), known)]
    if not strange:
        return []
    found = counts(strange)
    unknown = [word for word in strange if not found[word]]
    others = len(distinct) - len(unknown)
    if len(unknown) > 1 + others // _FOR_EACH or len(distinct) - len(strange) < _IN_LANGUAGE * others:
        return []
    better = {word: _replacement(word, known, table, counts, hides) for word in unknown}
    return [
        Replacement(start, end, _in_case_of(text[start:end], replacement))
        for (start, end), word in words.items()
        if (replacement := better.get(word)) is not None
    ]


def _replacement(
    word: str,
    known: AbstractSet[str],
    table: JointTable,
    counts: Callable[[Sequence[str]], dict[str, int]],
    hides: bool,
) -> str | None:
    """The best word one error away from an unknown one; None if there is none, or no best one. With ``hides``
    they are counted and compared by ``counts`` alone."""
    edits = [
        edit
        for edit in dict.fromkeys(one_error(word))
        if len(edit) >= MIN_LETTERS and edit.isascii() == word.isascii()  # a diacritic is meant
    ]
    start = word[: max(MIN_LETTERS, len(word) - 1)]
    tabled = {edit: n for edit, n in zip(edits, table.counts(edits), strict=True) if n}
    there = counts(list(tabled)) if hides else tabled
    near = {edit: (_is_slip(word, edit), edit.startswith(start), n) for edit, n in there.items() if n}
    best = sorted(near, key=near.__getitem__, reverse=True)[:_VERIFIED]
    have = there if hides else counts(best)
    best = [edit for edit in best if have[edit]]
    own = [edit for edit in edits if edit in known]
    slips = [edit for edit in own if _is_slip(word, edit)]
    if len(slips) == 1 and not (best and near[best[0]][0]):
        return slips[0]
    if not best:
        return own[0] if len(own) == 1 else None
    alike = [edit for edit in best if near[edit] == near[best[0]]]
    shortest = min(alike, key=len)
    return shortest if all(edit.startswith(shortest) for edit in alike) else None


def _is_slip(word: str, edit: str) -> bool:
    """Whether letters are only exchanged, or doubled, or not doubled."""
    return sorted(word) == sorted(edit) or _REPEATED.sub(r"\1", word) == _REPEATED.sub(r"\1", edit)


def one_error(word: str) -> Iterator[str]:
    """Words of at least three letters from which one typing error, not in the first letter, makes ``word``:
    words with one letter more, less or different, or with two exchanged."""
    letters = dict.fromkeys(string.ascii_lowercase + word)
    for at in range(1, len(word) + 1):
        head, tail = word[:at], word[at:]
        for letter in letters:
            yield head + letter + tail
            if tail and letter != tail[0]:
                yield head + letter + tail[1:]
        if tail:
            yield head + tail[1:]
        if tail[1:] and tail[0] != tail[1]:
            yield head + tail[1] + tail[0] + tail[2:]
    if len(word) > 1 and word[0] != word[1]:
        yield word[1] + word[0] + word[2:]


def _words(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of the words that may be corrected."""
    capitals = text.upper() == text
    quoted = [found.span() for found in _QUOTED.finditer(text)]
    ends = [end for _, end in quoted]
    for token in _TOKEN.finditer(text):
        plain = _PLAIN.fullmatch(token.group())
        if plain is None:
            continue
        for found in _INSIDE.finditer(plain.group(1)):
            word = found.group()
            if (
                MIN_LETTERS <= len(word) <= MAX_LETTERS
                and (capitals or word[1:] == word[1:].lower())
                and _LATIN.fullmatch(folded(word))
            ):
                start = token.start() + plain.start(1) + found.start()
                next_quoted = bisect_right(ends, start)
                if next_quoted == len(quoted) or start <= quoted[next_quoted][0]:
                    yield start, start + len(word)


def _is_known(word: str, known: AbstractSet[str]) -> bool:
    return (
        word in known
        or word in _CONTRACTIONS
        or any(
            word.endswith(ending) and len(word) - len(ending) >= MIN_LETTERS and word[: -len(ending)] in known
            for ending in _ENDINGS
        )
    )


def _in_case_of(original: str, word: str) -> str:
    if original.isupper():
        return word.upper()
    return word[0].upper() + word[1:] if original[0].isupper() else word
