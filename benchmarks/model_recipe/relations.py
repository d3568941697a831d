"""The vocabulary of the synthetic questions: relations between named things, with statements and questions.

In a template ``{s}`` is the subject, ``{p}`` its possessive, ``{pl}`` a possessive pronoun and ``{o}`` the
object. The words are in ``relations.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TABLE: dict[str, Any] = json.loads((Path(__file__).parent / "relations.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Relation:
    """A fact about a subject, as sentences, as a noun phrase and as questions."""

    name: str
    subject: str
    object: str
    statements: tuple[str, ...]
    phrases: tuple[str, ...]
    questions: tuple[str, ...]


def _relations() -> list[Relation]:
    rows = [_relation(row) for row in _TABLE["relations"]]
    for kind, verbs in _TABLE["works"].items():
        rows += [_relation(row, {"kind": kind, **verbs}) for row in _TABLE["work_relations"]]
    return rows


def _relation(row: dict[str, Any], work: dict[str, str] | None = None) -> Relation:
    def texts(key: str) -> tuple[str, ...]:
        return tuple(_put(text, work or {}) for text in row[key])

    name, subject = (f"{row['name']}_{work['kind']}", work["kind"]) if work else (row["name"], row["subject"])
    return Relation(name, subject, row["object"], texts("statements"), texts("phrases"), texts("questions"))


def _put(text: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", value)
    return text


WORDS: dict[str, list[str]] = _TABLE["words"]
FILLER: list[str] = _TABLE["filler"]
WORKS: tuple[str, ...] = tuple(_TABLE["works"])
RELATIONS = _relations()
ENTITIES = {"person", "place", "org", *WORKS}
BY_SUBJECT = {kind: [r for r in RELATIONS if r.subject == kind] for kind in ENTITIES}
CHAINS = {
    kind: [(a, b) for a in BY_SUBJECT[kind] if a.object in ENTITIES for b in BY_SUBJECT[a.object]]
    for kind in ENTITIES
    if any(a.object in ENTITIES for a in BY_SUBJECT[kind])
}
"""Pairs of relations that make a two-hop question, by the kind of the first subject."""

MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
