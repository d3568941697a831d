"""Write 200 plain questions over the example corpus, with accepted answers, from the fields of its source.

    python examples/corpus/make_questions.py factbook.jsonl.xz [questions.jsonl]

The input is that of `make_corpus.py`. Questions, wordings and countries are drawn with a fixed seed, so the
same input gives the same bytes. An answer is right if it contains one of ``answers``, see
`ragserve.verification.metrics`."""

from __future__ import annotations

import json
import lzma
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from make_corpus import FORMATS, profile

SEED = 15
_NAMES = re.compile(r"[A-ZÀ-ÖØ-Þ][A-ZÀ-ÖØ-Þ'-]+(?: [A-ZÀ-ÖØ-Þ][A-ZÀ-ÖØ-Þ'-]+)*")
_DATE = re.compile(r"(?:\d{1,2} )?(?:[A-Z][a-z]+ )?\b(\d{3,4})\b")


@dataclass(frozen=True)
class Field:
    """A field of the source, the questions that ask for it, and what counts as its answer."""

    name: str
    count: int
    start: str
    wordings: tuple[str, ...]
    answers: Callable[[str], list[str]]


def plain(value: str) -> list[str]:
    """The value without notes, and without what is in brackets or another language."""
    value = re.split(r";| - ", value)[0].strip()
    without = re.sub(r"\s*\([^)]*\)", "", value).strip()
    return [without, value, *re.findall(r"\(([^)]+)\)", value)] if without else [value]


def number(value: str) -> list[str]:
    return re.findall(r"\d[\d,.]*\d|\d", value)[:1]


def length(value: str) -> list[str]:
    return [n for n in number(value) if n != "0"]


def domain(value: str) -> list[str]:
    return re.findall(r"\.[a-z]{2}\b", value)[:1]


def population(value: str) -> list[str]:
    exact = number(value)[0]
    millions = int(exact.replace(",", "")) / 1e6
    return [exact, f"{millions:.1f} million", f"{millions:.2f} million"]


def each_of(value: str) -> list[str]:
    """The items of a list, each alone."""
    text = re.sub(r"\s*\([^)]*\)", "", value.split(";")[0])
    return [item.strip() for item in text.split(",") if item.strip()]


def dates(value: str) -> list[str]:
    """All dates of a value that begins with one, and their years."""
    if not _DATE.match(value):
        return []
    found = [(match.group().strip(), match.group(1)) for match in _DATE.finditer(value)]
    return list(dict.fromkeys(text for pair in found for text in pair))


def currency(value: str) -> list[str]:
    name, _, rest = value.partition(" per US dollar")
    name, code = re.sub(r"\s*\([^)]*\)", "", name).strip(), re.findall(r"\(([^)]+)\)", name + rest)
    return list(dict.fromkeys([name, name.removesuffix("s"), *code[:1]]))


def person(value: str) -> list[str]:
    """The family name, which the source has in capitals, or the whole name of a monarch."""
    return _NAMES.findall(value.split("(since")[0].split(";")[0])[:1]


def peak(value: str) -> list[str]:
    name = re.split(r" -?\d", value.split(";")[0])[0].strip()
    return list(dict.fromkeys([name, re.sub(r"\s*\([^)]*\)", "", name).strip(), name.split(" (")[0]]))


FIELDS = (
    Field(
        "capital",
        22,
        "Capital - name",
        (
            "What is the capital of {c}?",
            "Name {p} capital city.",
            "Which city is the capital of {c}?",
            "What city does the government of {c} sit in?",
            "What's {p} capital?",
            "Capital of {c}?",
        ),
        plain,
    ),
    Field(
        "population",
        22,
        "Population - total",
        (
            "How many people live in {c}?",
            "What is the population of {c}?",
            "How big is {p} population?",
            "What's the number of inhabitants of {c}?",
            "How many inhabitants does {c} have?",
        ),
        population,
    ),
    Field(
        "area",
        20,
        "Area - total",
        (
            "How large is {c}?",
            "What is the total area of {c}?",
            "How many square kilometres does {c} cover?",
            "What is {p} area in square km?",
            "What area does {c} have?",
        ),
        number,
    ),
    Field(
        "symbol",
        18,
        "National symbol(s)",
        (
            "What is the national symbol of {c}?",
            "Which symbol stands for {c}?",
            "What are {p} national symbols?",
            "Which plant, animal or sign is the symbol of {c}?",
        ),
        each_of,
    ),
    Field(
        "independence",
        18,
        "Independence",
        (
            "When did {c} become independent?",
            "When did {c} gain independence?",
            "In what year was {p} independence?",
            "What is the date of independence of {c}?",
            "Since when is {c} independent?",
        ),
        dates,
    ),
    Field(
        "currency",
        16,
        "Exchange rates - Currency",
        (
            "What is the currency of {c}?",
            "Which money do people pay with in {c}?",
            "What currency does {c} use?",
            "What's {p} currency called?",
        ),
        currency,
    ),
    Field(
        "state",
        12,
        "Executive branch - chief of state",
        (
            "Who is the head of state of {c}?",
            "Who is {p} chief of state?",
            "Name the head of state of {c}.",
        ),
        person,
    ),
    Field(
        "government",
        12,
        "Executive branch - head of government",
        (
            "Who is the head of government of {c}?",
            "Who leads the government of {c}?",
            "Who heads {p} government?",
        ),
        person,
    ),
    Field(
        "highest",
        14,
        "Elevation - highest point",
        (
            "What is the highest point in {c}?",
            "Which mountain is the highest of {c}?",
            "Where is {p} highest elevation?",
        ),
        peak,
    ),
    Field(
        "internet",
        10,
        "Internet country code",
        (
            "What is the internet country code of {c}?",
            "Which domain ending does {c} have?",
            "What is {p} top-level domain?",
        ),
        domain,
    ),
    Field(
        "coast",
        8,
        "Coastline",
        ("How long is {p} coastline?", "What is the length of the coast of {c}?"),
        length,
    ),
    Field(
        "age",
        8,
        "Median age - total",
        ("What is the median age in {c}?", "How old is the median person in {c}?"),
        number,
    ),
    Field(
        "parliament",
        10,
        "Legislative branch - legislature name",
        (
            "What is the parliament of {c} called?",
            "What is the name of {p} legislature?",
            "Which body makes the laws in {c}?",
        ),
        plain,
    ),
    Field(
        "airports",
        10,
        "Airports",
        ("How many airports are there in {c}?", "How many airports does {c} have?"),
        number,
    ),
)


def ask(wording: str, country: str) -> str:
    possessive = country + ("'" if country.endswith("s") else "'s")
    return wording.replace("{c}", country).replace("{p}", possessive)


def file_of(country: str) -> str:
    """The name of a country's file in the corpus."""
    ending = next(ending for ending, titles in FORMATS.items() if country in titles)
    return f"{country.lower().replace(' ', '-')}.{ending}"


def value_of(text: str, start: str) -> str | None:
    """Return the value of the first field of a profile that starts with ``start``."""
    for lines in profile(text).values():
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip().startswith(start) and value.strip():
                return value.strip()
    return None


def questions(texts: dict[str, str]) -> list[dict[str, object]]:
    rng = random.Random(SEED)
    countries = [title for titles in FORMATS.values() for title in titles]
    rows: list[dict[str, object]] = []
    for field in FIELDS:
        chosen = []
        for country in rng.sample(countries, len(countries)):
            value = value_of(texts[country], field.start)
            answers = field.answers(value) if value else []
            if answers and len(chosen) < field.count:
                chosen.append((country, list(dict.fromkeys(answers))))
        for i, (country, answers) in enumerate(chosen):
            question = ask(field.wordings[i % len(field.wordings)], country)
            row = {
                "id": f"{field.name}-{i}",
                "question": question,
                "answers": answers,
                "country": country,
                "documents": [file_of(country)],
            }
            rows.append(row)
    return rows


def main(source: str, out: str) -> None:
    with lzma.open(source, "rt", encoding="utf-8") as file:
        texts = {entry["title"]: entry["text"] for entry in map(json.loads, file)}
    lines = [json.dumps(row, ensure_ascii=False) for row in questions(texts)]
    Path(out).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) not in {2, 3}:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else str(Path(__file__).parent / "questions.jsonl"))
