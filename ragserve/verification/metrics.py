"""Exact match and token F1 as SQuAD defines them, on normalised text of any script.

As MLQA (Lewis et al., ACL 2020) has it for other languages, punctuation is what Unicode calls so, and each
character of Chinese, and here of all scripts that do not separate words, is a word."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

from ragserve_index.word_cutting import UNSPACED

_UNSPACED = re.compile(f"[{UNSPACED}]")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_REFUSAL = re.compile(  # of normalised text
    r"^(?:unknown|unanswerable|unclear|none|na|no answer|not enough information)$"
    r"|\b(?:i (?:dont|do not) know|(?:no|insufficient) information|no answer is given"
    r"|not (?:\w+ )?(?:mentioned|provided|specified|stated|contain|include|available|answer|found|given)"
    r"|(?:cannot|can not|cant|could not|couldnt|unable to) (?:be )?(?:\w+ )?"
    r"(?:answer|determine|find|found|provide|say|tell)"
    r"|(?:dont|do not|doesnt|does not) (?:\w+ )?(?:answer|contain|include|mention|provide|say|specify|state))"
)


class _Normalised(dict[int, str]):
    """What `str.translate` puts in the place of each character."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        width = unicodedata.east_asian_width(character)
        if width == "F":
            character = unicodedata.normalize("NFKC", character)
        if character in string.punctuation or unicodedata.category(character).startswith("P"):
            own = " " if width in "FW" else ""  # no blank follows a wide one
        else:
            own = f" {character} " if _UNSPACED.match(character) else character
        if code < 0x10000:  # the other characters would take 100 MB
            self[code] = own
        return own


_NORMALISED = _Normalised()


def normalise(text: str) -> str:
    """Convert to lower case without punctuation and English articles, with single spaces between words and
    around each character of a script that does not separate words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NORMALISED)).split())


def count_words(text: str) -> int:
    """Count the words that blanks separate; two characters of scripts that do not are about one."""
    spaced = _UNSPACED.sub(" ", text).split()
    words = sum(any(map(str.isalnum, each)) for each in spaced)
    return words + (len(_UNSPACED.findall(text)) + 1) // 2


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the prediction equals one of the answers after normalisation, else 0.0. ``answers`` must not be
    empty."""
    return max(float(normalise(prediction) == normalise(answer)) for answer in answers)


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Harmonic mean of word precision and recall, best over the answers. ``answers`` must not be empty."""
    return max(_f1(normalise(prediction).split(), normalise(answer).split()) for answer in answers)


def contains_answer(text: str, answers: Sequence[str]) -> bool:
    """Tell whether the text contains one of the answers, as whole words after normalisation."""
    return words_contain(words_of(text), answers)


def words_of(text: str) -> str:
    """A text for `words_contain`, to be made once where many answers are looked for in it."""
    return f" {normalise(text)} "


def words_contain(words: str, answers: Sequence[str]) -> bool:
    """`contains_answer` of a text's `words_of`."""
    return any(f" {wanted} " in words for answer in answers if (wanted := normalise(answer)))


def is_refusal(text: str, answers: Sequence[str]) -> bool:
    """Tell whether an answer is empty, or says in English that there is none ("not mentioned in the
    documents"), and contains none of ``answers``."""
    said = normalise(text)
    return not contains_answer(text, answers) and (not said or bool(_REFUSAL.search(said)))


def _f1(predicted: list[str], wanted: list[str]) -> float:
    if not predicted or not wanted:
        return float(predicted == wanted)
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    return 2 * shared / (len(predicted) + len(wanted)) if shared else 0.0
