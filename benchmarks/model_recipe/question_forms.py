"""Questions as people type them: in lower case, in capitals, without the question mark, with a typing
error."""

from __future__ import annotations

import random
import re

_BESIDE = {
    "a": "sqz", "b": "vn", "c": "xv", "d": "sf", "e": "wr", "f": "dg", "g": "fh", "h": "gj", "i": "uo",
    "j": "hk", "k": "jl", "l": "k", "m": "n", "n": "bm", "o": "ip", "p": "o", "q": "wa", "r": "et",
    "s": "ad", "t": "ry", "u": "yi", "v": "cb", "w": "qe", "x": "zc", "y": "tu", "z": "xa",
}  # fmt: skip

FORMS = {
    "plain": 0.34,
    "lower": 0.11,
    "lower, no mark": 0.12,
    "no mark": 0.03,
    "capitals": 0.12,
    "typo": 0.22,
    "lower, typo": 0.06,
}
"""The shares of training questions."""


def lower(question: str) -> str:
    return question.lower()


def capitals(question: str) -> str:
    return question.upper()


def no_mark(question: str) -> str:
    return question.rstrip("?. ")


def typo(question: str, rng: random.Random) -> str:
    """Return the question with one error in one word of four letters or more: two letters exchanged, one
    dropped, doubled, or replaced by a neighbour on the keyboard. Words with digits stay."""
    words = list(re.finditer(r"[A-Za-z]{4,}", question))
    if not words:
        return question
    word = rng.choice(words)
    text = word.group()
    at = rng.randrange(1, len(text) - 1)
    beside = rng.choice(_BESIDE[text[at].lower()])
    changed = rng.choice(
        (
            text[:at] + text[at + 1] + text[at] + text[at + 2 :],
            text[:at] + text[at + 1 :],
            text[:at] + text[at] + text[at:],
            text[:at] + beside + text[at + 1 :],
        )
    )
    return question[: word.start()] + changed + question[word.end() :]


def as_typed(question: str, rng: random.Random) -> str:
    """Return the question in a form drawn by the shares of `FORMS`."""
    form = rng.choices(list(FORMS), list(FORMS.values()))[0]
    if form == "capitals":
        return capitals(question)
    if form.endswith("typo"):
        question = typo(question, rng)
    if form.startswith("lower"):
        question = lower(question)
    return no_mark(question) if form.endswith("no mark") else question
