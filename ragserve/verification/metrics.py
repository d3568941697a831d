"""Exact match and token F1 as SQuAD defines them, on normalised text."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_REFUSAL = re.compile(  # of normalised text
    r"^(?:unknown|unanswerable|unclear|none|na|no answer|not enough information)$"
    r"|\b(?:i (?:dont|do not) know|(?:no|insufficient) information|no answer is given"
    r"|not (?:\w+ )?(?:mentioned|provided|specified|stated|contain|include|available|answer|found|given)"
    r"|(?:cannot|can not|cant|could not|couldnt|unable to) (?:be )?(?:\w+ )?"
    r"(?:answer|determine|find|found|provide|say|tell)"
    r"|(?:dont|do not|doesnt|does not) (?:\w+ )?(?:answer|contain|include|mention|provide|say|specify|state))"
)


def normalise(text: str) -> str:
    """Convert to lower case without ASCII punctuation and articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


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
