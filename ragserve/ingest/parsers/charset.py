"""Bytes to text: byte order mark, UTF-8, declared charset, then a guess that must look like text."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.parsers.base import one_line, unreadable
from ragserve.ingest.parsers.charset_labels import charset_of
from ragserve.ingest.parsers.charset_languages import (
    COMMON_CHARACTERS,
    DAILY_USE,
    FINAL_LETTERS,
    LANGUAGE_TABLE,
    VOWELS,
)

_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it starts with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_DOUBLE_BYTE = frozenset(["cp932", "cp949", "gb18030", "big5hkscs", "euc_jp", "johab"])
_SURE = 4  # so many characters of valid UTF-8 are no chance, even in text of a double-byte charset
_GOOD_PER_BAD = 10  # characters outside of ASCII that damaged UTF-8 has at least for each one that is none
_MOSTLY = 0.5
_ESCAPES = {b"\x1b$B": "iso2022_jp_ext", b"\x1b$@": "iso2022_jp_ext", b"\x1b$)C": "iso2022_kr"}
_CONTROLS = re.compile("[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")  # that texts do not have
_MAX_CONTROLS = 0.01  # share of control characters above which decodable bytes are not text
_GUESS_BYTES = 16 * 1024  # used for the guess; all bytes are then decoded strictly

# 8-bit charsets, the most common first: of several that read the same text, the first is named
_WINDOWS = ("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1257", "cp1255", "cp1256")
_UNIX = ("iso8859-15", "iso8859-2", "koi8-u", "iso8859-5", "iso8859-7", "iso8859-6")
_OLD = ("mac-roman", "mac-latin2", "cp850", "cp852", "cp866", "cp857")  # of old Macs and of DOS
_HANDICAP = (
    {"gb18030": 0.01, "euc_jp": 0.02, "big5": 0.005}
    | dict.fromkeys(_WINDOWS, 0.005)
    | {"cp1252": 0.0, "cp1257": 0.02}
    | dict.fromkeys(_UNIX, 0.01)
    | {"iso8859-7": 0.03}  # has a quote where cp1253 has a letter
    | dict.fromkeys(_OLD, 0.1)
)
_WORD = re.compile(r"[^\W\d_]+")
_INSIDE_WORDS = frozenset("’ʼ‘·\xad‐‑–—")  # beside letters
_APART = frozenset("±¶¯¥·¬¦¸")  # not before or behind a word
_MIN_COMMON = 0.02  # share of common words, or characters, from which a language is recognised
_LETTERS = 0.25  # what letters add to the score of a script that has an alphabet of its own, at most
_MORE = 0.5  # of what letters say beyond that
_LATIN_LETTERS = 0.03  # and of languages that have few letters outside of ASCII
_CAPITALS = 0.02  # taken off where all letters are capitals: Hebrew in koi8 would be
_MUTE = 0.2  # share of words that may be abbreviations, without a vowel
_MAX_ODD = 0.1  # share of letters that do not belong, above which letters say nothing
_SHARE_DAILY = 0.7  # of characters of a multi-byte charset in daily use, above which they say something
_DOUBT = 0.1  # a reading whose score is that close is as likely


class Decoded(NamedTuple):
    """A text, and how its charset was guessed; ``note`` is empty if it was not."""

    text: str
    note: str = ""


def decode(data: bytes, declared: str | None = None) -> Decoded:
    """Decode text. The charset that the label ``declared`` (HTTP header, HTML meta) stands for is used if it
    decodes strictly and the text is not valid UTF-8, which text of other charsets hardly ever is.

    Raises ``UnsupportedDocument`` (code ``undecodable``) for binary data and for text in an unknown charset.
    """
    for mark, charset in _BOMS:
        if data.startswith(mark):
            try:
                return Decoded(_checked(data.decode(charset), charset))
            except UnicodeDecodeError as error:
                why = f"starts with a {charset} mark but is not {charset} at byte {error.start}"
                raise _undecodable(why) from error
    named = charset_of(declared) if declared else None
    if named is None and (found := _unmarked(data)):
        with suppress(ValueError, UnsupportedDocument):
            return Decoded(_checked(data.decode(found), found), f"read as {found}, guessed")
    wide = named is not None and named.startswith(("utf-16", "utf-32"))
    if b"\x00" in data and not wide:
        raise _undecodable("contains NUL bytes; is it binary?")
    if b"\x00" not in data:
        text = None if named and _is_escaped(data, named) else _utf_8(data)
        if text is not None and (wide or not named or _is_sure(text, named)):
            labelled = named not in (None, "utf-8") and not text.isascii()
            note = f"read as utf-8, though labelled {one_line(declared or '')[:40]}" if labelled else ""
            return Decoded(_checked(text, "utf-8"), note)
        if wide:  # a page that said so in ASCII is no such text
            named = None
    if named:
        with suppress(ValueError, UnsupportedDocument):  # not of that charset, or controls instead of text
            return Decoded(_checked(data.decode(named), named))
    return _damaged_utf_8(data) or _guessed(data)


def _unmarked(data: bytes) -> str | None:
    """A charset that shows itself: by its escapes, or by the zeros of Latin text in two bytes a character."""
    head = data[:_GUESS_BYTES]
    if b"\x00" in head:
        for zeros, others, charset in (
            (head[1::2], head[::2], "utf-16-le"),
            (head[::2], head[1::2], "utf-16-be"),
        ):
            if zeros.count(0) > _MOSTLY * len(zeros) and 0 not in others:
                return charset
    elif b"\x1b$" in data and data.isascii():
        return next((charset for escape, charset in _ESCAPES.items() if escape in data), None)
    return None


def _damaged_utf_8(data: bytes) -> Decoded | None:
    """Text that is UTF-8 but for a few bytes, which no text of another charset is."""
    text = data.decode("utf-8", "replace")
    n_bad = text.count("\ufffd")
    n_good = len(text) - len(text.encode("ascii", "ignore")) - n_bad
    if n_good < _SURE or n_bad * _GOOD_PER_BAD > n_good:
        return None
    return Decoded(_checked(text, "utf-8"), f"read as utf-8, with {n_bad:,} damaged characters")


def _utf_8(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _is_escaped(data: bytes, charset: str) -> bool:
    """Return whether a charset writes other characters as ASCII that is made to mean them."""
    return data.isascii() and charset.startswith(("iso2022", "hz"))


def _is_sure(utf_8: str, named: str) -> bool:
    return named not in _DOUBLE_BYTE or utf_8.isascii() or sum(c > "\x7f" for c in utf_8[:4096]) >= _SURE


class _Reading(NamedTuple):
    score: float
    charset: str
    text: str


def _guessed(data: bytes) -> Decoded:
    """The reading in which the text is most like one language, else charset-normalizer's."""
    # the lines that tell charsets apart
    sample = b"\n".join(line for line in data.splitlines() if not line.isascii())[:_GUESS_BYTES]
    readings = _in_a_language(sample) or _by_statistics(sample)
    failure = _undecodable("neither UTF-8 nor text in another charset that could be recognised")
    for place, reading in enumerate(readings):
        note = f"read as {reading.charset}, guessed"
        following = readings[place + 1 : place + 2]
        if following and reading.score - following[0].score < _DOUBT:
            note += f"; it may be {following[0].charset}"
        try:
            return Decoded(_checked(data.decode(reading.charset), reading.charset), note)
        except UnicodeDecodeError as error:
            failure = _undecodable(f"starts as {reading.charset} but is not at byte {error.start}")
        except UnsupportedDocument as error:
            failure = error
    raise failure


def _in_a_language(sample: bytes) -> list[_Reading]:
    """Readings in which a language is recognised, the best first, each text once."""
    readings: dict[str, _Reading] = {}
    for charset in dict.fromkeys((*_WINDOWS, *_UNIX, *_OLD, *COMMON_CHARACTERS)):
        try:
            # the sample may end within a character
            text = codecs.getincrementaldecoder(charset)().decode(sample)
        except UnicodeDecodeError:
            continue
        score = _characters(text, charset) if charset in COMMON_CHARACTERS else _likeness(text)
        if score is not None:
            readings.setdefault(text, _Reading(score - _HANDICAP.get(charset, 0.0), charset, text))
    return sorted(readings.values(), key=lambda reading: -reading.score)


def _likeness(text: str) -> float | None:
    """Rate how much a text is like its likeliest language, at most 2. None if it is like none: too few of its
    words are common, and its letters fit no alphabet.

    The share of common words, by letters, or how common the letters are; and the share of the characters
    outside of ASCII that belong where they are.
    """
    words = Counter(_WORD.findall(text.lower()))
    total = sum(len(word) * n for word, n in words.items())
    strange, letters = _foreign_characters(text)
    n_foreign = strange + letters.total()
    latin = all(letter < "\u0250" for letter in letters)
    misplaced = 0 if latin else _misplaced(text)
    best: float | None = None
    for language in LANGUAGE_TABLE.values():
        common = sum(len(word) * words[word] for word in language.words) / max(total, 1)
        belonging = sum(n for letter, n in letters.items() if letter in language.letters)
        usual = sum(n * language.letters.get(letter, 0.0) for letter, n in letters.items()) / max(
            belonging, 1
        )
        odd = strange + letters.total() - belonging
        score = common + 1 - odd / max(n_foreign, 1)
        if language.latin:
            if common < _MIN_COMMON and (odd or not latin):
                continue
            score += _LATIN_LETTERS * usual
        else:
            by_letters = _by_letters(usual) if odd + misplaced <= _MAX_ODD * n_foreign else 0.0
            if common < _MIN_COMMON and by_letters < _MIN_COMMON:
                continue
            score += max(0.0, by_letters - common) - misplaced / max(n_foreign, 1)
            score -= _CAPITALS if text.isupper() else 0.0
        best = score if best is None else max(best, score)
    return best


def _by_letters(usual: float) -> float:
    """What letters say of a script that has an alphabet of its own; ``usual`` tells how common they are."""
    rise = 1.3 * (usual - 0.5)
    return min(rise, _LETTERS + _MORE * (rise - _LETTERS))


def _misplaced(text: str) -> int:
    """Letters of words of another script than Latin that nobody writes so: capitals within a word, final
    letters before its end, and many words of one letter or without a vowel."""
    wrong = single = n_words = 0
    mute: list[str] = []
    for word in _WORD.findall(text):
        if word.isascii():
            continue
        n_words += 1
        single += len(word) == 1
        cased = word.islower() or word.isupper() or word[1:].islower() or word.lower() == word.upper()
        if not cased or any(letter in FINAL_LETTERS for letter in word[:-1]):
            wrong += len(word)
        elif VOWELS.isdisjoint(word.lower()) and word.lower() != word.upper():  # of a script that has vowels
            mute.append(word)
    if len(mute) > max(1, _MUTE * n_words):
        wrong += sum(map(len, mute))
    return wrong + (single if 2 * single > n_words else 0)


def _characters(text: str, charset: str) -> float | None:
    """`_likeness` for the languages of a multi-byte charset, whose words are not separated."""
    strange, letters = _foreign_characters(text)
    n_foreign = strange + letters.total()
    common = sum(letters[character] for character in COMMON_CHARACTERS[charset]) / max(n_foreign, 1)
    daily = sum(n for letter, n in letters.items() if _is_daily(letter, charset)) / max(n_foreign, 1)
    by_letters = _LETTERS * (daily - _SHARE_DAILY) / (1 - _SHARE_DAILY)
    if max(common, by_letters) < _MIN_COMMON:
        return None
    return max(common, by_letters) + 1 - strange / n_foreign


def _is_daily(letter: str, charset: str) -> bool:
    standard, first, last = DAILY_USE[charset]
    try:
        data = letter.encode(standard)
    except UnicodeEncodeError:
        return False
    if "\u3040" <= letter < "\u3100":  # kana, which the other standards have too
        return charset in ("cp932", "euc_jp")
    return len(data) == 2 and first <= data[0] <= last


def _foreign_characters(text: str) -> tuple[int, Counter[str]]:
    """Characters outside of ASCII: the number of those that no text has where they are (a symbol or a letter
    of another script within a word, a capital behind a small letter, a control character), and the other
    letters.
    """
    letters: Counter[str] = Counter()
    strange = 0
    for found in re.finditer(r"[^\x00-\x7f]", text):
        at, character = found.start(), found.group()
        before, after = text[at - 1 : at], text[at + 1 : at + 2]
        if character.isalpha():
            mixed = character > "\u024f" and (_is_ascii_letter(before) or _is_ascii_letter(after))
            capital_within = (
                character.isupper() and before.isalpha() and (before.islower() or after.islower())
            )
            if mixed or capital_within:
                strange += 1
            else:
                letters[character.lower()] += 1
        elif (
            (before.isalpha() and after.isalpha() and character not in _INSIDE_WORDS)
            or character in "\x80¤"
            or (character in _APART and before.isalpha() != after.isalpha())
            or (character in "¹²³" and text[max(0, at - 3) : at].isalpha() and at > 2)  # units are shorter
            or (character == "¿" and "?" not in text)
            or ("\u2500" <= character < "\u2600" and (before.isalpha() or after.isalpha()))
            or "\x80" <= character < "\xa0"
        ):
            strange += 1
    return strange, letters


def _is_ascii_letter(character: str) -> bool:
    return character.isascii() and character.isalpha()


def _by_statistics(sample: bytes) -> list[_Reading]:
    from charset_normalizer import from_bytes

    best = from_bytes(sample).best()
    return [] if best is None else [_Reading(0.0, best.encoding, str(best))]


def _checked(text: str, charset: str) -> str:
    if "\x00" in text:
        raise _undecodable(f"contains NUL characters as {charset}; is it binary?")
    controls = len(_CONTROLS.findall(text, 0, 65536))
    if controls > _MAX_CONTROLS * min(len(text), 65536):
        raise _undecodable("too many control characters for text; is it binary?")
    return text


def _undecodable(why: str) -> UnsupportedDocument:
    return unreadable("undecodable", f"{why} (convert it to UTF-8)")
