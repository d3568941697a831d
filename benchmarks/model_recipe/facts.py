"""Questions about country profiles: which fields are asked for, in which words, and what part of a value
answers.

The table is ``facts.json``. Training uses countries outside examples/corpus and years other than the
corpus's."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

FACTS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "facts.json").read_text(encoding="utf-8")
)

Chunk = str
Fact = tuple[int, str, str]
"""Number of the chunk that states it, key of `FACTS`, answer (verbatim in the chunk)."""

_NUMBER = r"-?\d[\d,.]*\d|-?\d"
_DATE = r"\d{1,2} [A-Z][a-z]+ \d{4}"
_PATTERNS = {
    "first": r"([^;(]+?)(?= ?[;(]|$)",
    "number": rf"({_NUMBER})",
    "measure": rf"((?:{_NUMBER}) (?:sq km|km|m)\b)",
    "item": r"([^;,(%\d]+?)(?= ?[;,(%]| \d|$)",
    "list": r"([^;]+?)(?=;? ?note|\(\d{4}|$)",
    "date": rf"({_DATE}|\d{{4}})",
    "year": r"(?:\d{1,2} [A-Z][a-z]+ )?(\d{4})",
    "currency": r"([A-Za-z][A-Za-z' ]+?)(?= ?\([A-Z]{3}\)| per )",
    "person": r"((?:[A-Z][\w'.-]*|van|der|bin|al|de|da|dos|ibn|el) ?[^;,(]*?)(?= ?\(since|;|,|$)",
    "peak": r"([^;\d]+?)(?= -?\d)",
    "metres": rf"[^;]*? ((?:{_NUMBER}) m\b)",
    "domain": r"(\.[a-z]{2})\b",
    "legislature": r"(?:uni|bi|tri)cameral ([A-Z][^;(]+?)(?= ?\(| or |;| consists)",
    "money": r"(\$?[\d.,]+ (?:billion|million|trillion))",
    "percent": r"([\d.]+%)",
    "whole": r"(.{3,160}?)(?=;? note|\(\d{4} est|$)",
}


def answer_of(kind: str, value: str) -> str | None:
    """Return the part of a field's value that answers, or None if the value has not that form."""
    match = re.match(_PATTERNS[kind], value) or (
        re.search(_PATTERNS[kind], value[:80]) if kind in ("number", "percent", "money", "domain") else None
    )
    answer = match.group(1).strip().rstrip(".") if match else ""
    return answer if answer and answer not in ("NA", "none", "note") and len(answer) <= 160 else None


def facts_of(lines: Iterable[str], chunks: Sequence[Chunk]) -> list[Fact]:
    """Return the facts stated by "Field: value" lines, each with the first chunk that holds field and
    answer."""
    found: list[Fact] = []
    for line in lines:
        name, _, value = line.partition(":")
        for key, fact in FACTS.items():
            names = fact.get("field", key).split("|")
            if not any(name.strip() == n or name.strip() == f"{n}(s)" for n in names):
                continue
            answer = answer_of(fact["answer"], value.strip())
            at = next((i for i, x in enumerate(chunks) if answer and name.strip() in x and answer in x), None)
            if at is not None and answer:
                found.append((at, key, answer))
    return found


_LABEL = re.compile(r"^((?:[-*|] )?)([A-Z][^:\n]{2,70}?) ?: ", re.MULTILINE)


def style(rng: random.Random) -> Callable[[str], str]:
    """Return a function that writes the field names of a profile in another way, and leaves the values."""
    end = rng.choice((": ", " : ", " : ", ":  ", " = ", " | ", " - "))
    joint = rng.choice((" - ", " - ", ", ", ": ", " / ", " > "))
    case = rng.choice((str, str, str.lower, str.upper, str.title))
    return lambda text: _LABEL.sub(lambda m: m[1] + case(m[2].replace(" - ", joint)) + end, text)


def ask(key: str, country: str, rng: random.Random) -> str:
    """Return a question for a field, in one of its wordings or of those for any field."""
    possessive = country + ("'" if country.endswith("s") else "'s")
    wordings = _ANY_FIELD if rng.random() < 0.25 else FACTS[key]["questions"]
    question = str(rng.choice(wordings)).replace("{w}", FACTS[key]["word"])
    return question.replace("{c}", country).replace("{p}", possessive)


_ANY_FIELD = (
    "Tell me {p} {w}.",
    "What's the {w} of {c}?",
    "Can you tell me the {w} of {c}?",
    "I would like to know {p} {w}.",
    "Do you know {p} {w}?",
    "Find the {w} of {c}.",
    "And what about {c}? What is its {w}?",
    "Which {w} does {c} have?",
    "In the case of {c}, what is the {w}?",
    "{c}: {w}?",
    "{c} {w}",
    "{w} in {c}",
)


def follow_up(key: str, rng: random.Random) -> str:
    """Return a question that asks for another field of the country spoken about."""
    word = FACTS[key]["word"]
    return rng.choice(
        (f"And its {word}?", f"What is its {word}?", f"And the {word}?", f"What about the {word}?")
    )


def two_hop(asked: str, known: str, answer: str, rng: random.Random) -> str | None:
    """Return a question for a field of the country that another field's answer describes."""
    described = _DESCRIPTIONS.get(known)
    if described is None or asked == known:
        return None
    country = f"the country {rng.choice(described).replace('{a}', answer)}"
    return ask(asked, country, rng)


_DESCRIPTIONS = {
    "Capital - name": ("whose capital is {a}", "that has {a} as its capital"),
    "Elevation - highest point": ("whose highest point is {a}", "in which {a} is the highest point"),
    "Country name - conventional long form": ("that is officially called {a}",),
    "Internet country code": ("with the internet code {a}",),
    "Executive branch - head of government": ("whose head of government is {a}",),
    "Executive branch - chief of state": ("whose head of state is {a}",),
    "National anthem - name": ("whose anthem is {a}",),
    "Nationality - noun": ("whose people are called {a}",),
}
