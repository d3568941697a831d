"""How texts and questions are cut into words, in one way for every lexical index. They all index what `words`
returns, joined by blanks, so their own tokenizers only part it there.

* Compatibility forms (ligatures, full-width letters), case, soft hyphens and other invisible characters are
  folded away, and so are accents, points and tone marks of all scripts. Vowel signs, as Hindi's, stay.
* English endings are cut off.
* A name with signs in it (``c++``, ``.net``, ``#682``, ``gb/s``, ``ab-4410``) is a word beside its parts, and
  so is a number beside the groups of its digits (``10 000`` or ``10,000``: ``10000``).
* What is written together is also cut apart: a name before a version (``c++17``: ``c++``), and a number
  before its unit (``1.5gb/s``: ``gb/s``; ``16gb``: ``16``, ``gb``).
* Scripts that do not separate words are cut into overlapping grams: Chinese and Japanese into characters and
  pairs, Thai, Lao, Khmer and Burmese into pairs and triples. They find as much as dictionaries do
  (benchmarks/unspaced_search.py), and names that no dictionary has."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

VERSION = f"3 {unicodedata.unidata_version}"
"""Of the way in which words are cut. An index with words that were cut in another way is built again."""

_SIGNS = "+#./&@_:^-"  # of names
SIGNS = f"{_SIGNS}$%"
"""What words have of ASCII beside letters and digits."""
_LONGEST = 64  # characters; of a longer word the first ones, and no name
_WORDS_OF_THEIR_OWN = "$%§"  # and the other currencies
# letters that Unicode does not decompose
_LETTERS = dict(
    zip("łŁøØđĐðÐħĦŧŧıŋŊ♯", "lLoOdDdDhHttinN#", strict=True),
    æ="ae", Æ="AE", œ="oe", Œ="OE", þ="th", Þ="TH", ĸ="k", ƒ="f",
)  # fmt: skip
_HYPHENS = "\u2010\u2011\u2212\ufe63\uff0d"
_VOICED = 8  # combining class of Japanese marks that make another syllable
_SUPERSCRIPT = re.compile("[\u00b2\u00b3\u00b9\u2070\u2074-\u2079]+")
_PART = re.compile(f"[^{re.escape(_SIGNS)}]+")
_JOINED = re.compile("[/:-]")
_IDEOGRAPHS = (
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_LETTERS_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\uaa60-\uaa7f"
UNSPACED = f"{_IDEOGRAPHS}{_LETTERS_UNSPACED}"
"""Characters of scripts that do not separate words, for a character class."""
_UNSPACED = re.compile(f"([{_IDEOGRAPHS}]+)|[{_LETTERS_UNSPACED}]+")
# groups of three digits, with the same sign between them
_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}([ ,.])\d{3}(?:\1\d{3})*+(?![.,]?\d)")

_BEFORE_UNIT = re.compile(r"\A\d[\d.:-]*+(?<=\d)(?=[^\W\d_])")
_ORDINALS = ("st", "nd", "rd", "th")
_BEFORE_VERSION = re.compile(r"(?<=[^\W\d_])(?:\+\++|#)(?=\d)|(?<=^[.@])[^\W\d_]++(?=[\d.]++$)")


class _Characters(dict[int, str]):
    """What `str.translate` puts in the place of each character: letters, digits and signs stay, marks go, and
    a newline stands for what parts words."""

    def __missing__(self, code: int) -> str:
        own = _plain(chr(code))
        if code < 0x10000:  # the other characters would take 100 MB
            self[code] = own
        return own


def _plain(character: str) -> str:
    if character in _LETTERS:
        return _LETTERS[character]
    if character in _SIGNS:
        return character
    if character in ",'’":
        return ","  # they group digits, and part words
    if character in _HYPHENS:
        return "-"
    category = unicodedata.category(character)
    combining = unicodedata.combining(character)
    if combining not in (0, _VOICED) or category in ("Cf", "Me") or character == "\u0640":
        return ""  # U+0640 stretches Arabic words
    if category in ("Mn", "Mc"):
        return "" if 0xFE00 <= ord(character) <= 0xFE0F or ord(character) >= 0xE0100 else character
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if character.isalnum():
        return character
    if category == "Sc" or character in _WORDS_OF_THEIR_OWN:
        return f"\n{character}\n"
    return " " if category == "Zs" else "\n"


_CHARACTERS = _Characters()


class _Apart(dict[int, str]):
    """Characters whose compatibility form would run into the word before it: fractions, circled and squared
    ones, and marks of trade."""

    def __missing__(self, code: int) -> str:
        tag = unicodedata.decomposition(chr(code)).partition(" ")[0]
        apart = tag in ("<fraction>", "<circle>", "<square>") or code in (0x2122, 0x2120)
        own = f"\n{chr(code)}\n" if apart else chr(code)
        if code < 0x10000:
            self[code] = own
        return own


_APART = _Apart()


def words(text: str) -> list[str]:
    """The words of a text, folded; names and numbers come after the plain words. None is empty or
    has a blank or a quote."""
    folded = _folded(text)
    plain: list[str] = []
    if not folded.isascii() and _UNSPACED.search(folded):
        for run in _UNSPACED.finditer(folded):
            plain += _grams(run.group(), (1, 2) if run.group(1) else (2, 3))
        folded = _UNSPACED.sub("\n", folded)
    names = [re.sub(r"\D", "", found.group()) for found in _GROUPS.finditer(folded)]
    for piece in folded.replace(",", "\n").split():
        own, named = _known(piece) if len(piece) <= _LONGEST else _cut(piece)
        plain += own
        names += named
    return [*_stemmer().analyze(" ".join(plain)), *names]


def _cut(piece: str) -> tuple[Sequence[str], Sequence[str]]:
    """The plain words of a piece without blanks, and the names in it."""
    if piece.isalnum():
        return [piece[:_LONGEST], *_measured(piece)], ()
    plain, names = [part[:_LONGEST] for part in _PART.findall(piece)], list[str]()
    if len(piece) <= 2 * _LONGEST:  # c#/.net and c++-based have names in them
        for own in dict.fromkeys((piece, *_JOINED.split(piece))):
            names += _names(own)
            measured = _measured(own)
            plain += [one for one in measured if one.isalnum()]
            names += [name for one in measured for name in _names(one)]
    return plain, names


_known = lru_cache(maxsize=2**15)(_cut)  # most pieces of a text are frequent ones


def distinct_words(text: str, limit: int) -> list[str]:
    """The first ``limit`` different words of a text, to search for."""
    return list(dict.fromkeys(words(text)))[:limit]


def _grams(run: str, lengths: Sequence[int]) -> Iterator[str]:
    """The grams of these lengths of a run without blanks; one that is shorter than all is its own."""
    yield from (run[at : at + n] for n in lengths for at in range(len(run) - n + 1))
    if len(run) < lengths[0]:
        yield run


def _measured(piece: str) -> list[str]:
    """The number and the unit of a piece such as 16gb or 1.5gb/s; of one letter only if it has signs."""
    found = _BEFORE_UNIT.match(piece) if len(piece) <= _LONGEST else None
    if found is None:
        return []
    unit = piece[found.end() :]
    if unit.isalnum() and (len(unit) < 2 or not unit.isalpha() or unit in _ORDINALS):
        return []
    return [found.group(), unit]


def _names(piece: str) -> list[str]:
    """The name that a piece with signs is, without the punctuation around it."""
    parts = _PART.findall(piece)
    if not parts:
        return []
    start = piece.index(parts[0])
    end = piece.rindex(parts[-1]) + len(parts[-1])
    before = piece[start - 1] if start and piece[start - 1] in ".#@" else ""
    after = piece[end:]
    after = after[: len(after) - len(after.lstrip("+#"))] if len(after) < _LONGEST else ""
    name = f"{before}{piece[start:end]}{after}"
    if len(name) > _LONGEST or name == parts[0]:
        return []
    names = [name, *(name[: found.end()] for found in _BEFORE_VERSION.finditer(name))]
    # m² is also written m2; 10² is not 102
    return [*names, name.replace("^", "")] if "^" in name and name[0].isalpha() else names


def _folded(text: str) -> str:
    if text.isascii():
        return text.lower().translate(_CHARACTERS)
    text = _SUPERSCRIPT.sub(r"^\g<0>", text.translate(_APART))
    text = unicodedata.normalize("NFKD", text).translate(_CHARACTERS).casefold()
    return unicodedata.normalize("NFC", text)


@cache
def _stemmer() -> Any:
    from tantivy import Filter, TextAnalyzerBuilder, Tokenizer

    return TextAnalyzerBuilder(Tokenizer.whitespace()).filter(Filter.stemmer("english")).build()
