"""Questions found in encyclopaedic text by fixed patterns: birth, death, place, maker, year, and gaps in
sentences."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_DATE = rf"(?:\d{{1,2}} (?:{_MONTHS}),? \d{{4}}|(?:{_MONTHS}) \d{{1,2}}, \d{{4}}|\d{{4}})"
_NAME = r"[A-Z][\w'’.-]+(?: (?:de|van|von|der|of|the|la|du|and) [A-Z][\w'’-]+| [A-Z][\w'’-]+){0,3}"
_THINGS = (
    "village|town|city|municipality|commune|suburb|district|river|mountain|lake|island|church|school|university|"
    "college|station|neighborhood|township|parish|community|stadium|museum"
)
_MADE = (
    "directed|written|produced|published|designed|founded|composed|developed|recorded|built|created|discovered|"
    "owned|invented"
)
_BEGUN = "founded|established|released|opened|built|created|published|formed|launched|completed|constructed"
_PLACE = rf"{_NAME}(?:, {_NAME})?"
_STOP = r" (?:located|situated|based|known|who|which|that|in|by|from|of|for)\b|[.,;(]"
_WORKS = "album|song|single|novel|book|play|poem|opera|painting|film"
PATTERNS = {
    "born": rf"\((?:[^()]{{0,60}}?\b(?:born|b\.) (?:on )?)({_DATE})|\(({_DATE})[^()–-]{{0,40}} ?[–-] ?",
    "died": rf"\([^()]{{4,60}} ?[–-] ?(?:[^()]{{0,30}}?)({_DATE})\)",
    "birthplace": rf"\bwas born (?:on {_DATE},? )?(?:and raised )?in ({_PLACE})",
    "maker": rf"\b(?P<x>{_MADE}) by (?:the )?({_NAME})",
    "work": rf"\b(?P<x>{_WORKS}) by (?:[a-z][\w-]+ ){{0,4}}({_NAME})",
    "place": (
        rf"\b(?:is|was) an? (?:[\w-]+ ){{0,2}}(?P<x>{_THINGS}) (?:located |situated )?"
        rf"(?:in|of|on) (?:the )?({_PLACE})"
    ),
    "what": rf"\b(?:is|was|are|were) ((?:an?|the) [^.,;()\n]{{6,60}}?)(?={_STOP})",
    "year": rf"\b(?P<x>{_BEGUN}) (?:in|on) ({_DATE})",
    "people": r"\bpopulation (?:was|of|is)(?: about| approximately)? ([\d,]{3,})",
    "school": rf"\b(?:studied at|graduated from|educated at|attended) (?:the )?({_NAME})",
    "spouse": rf"\b(?:[Hh]e|[Ss]he) (?:later )?married ({_NAME})",
}  # fmt: skip
QUESTIONS = {
    "born": (
        "When was {t} born?",
        "What is the date of birth of {t}?",
        "What is {t}'s birthday?",
        "birth date of {t}",
    ),
    "died": ("When did {t} die?", "What is the date of death of {t}?", "On what date did {t} die?"),
    "birthplace": ("Where was {t} born?", "What is the place of birth of {t}?", "What is {t}'s birthplace?"),
    "place": (
        "Where is {t}?",
        "Where is {t} located?",
        "In which place is the {x} {t}?",
        "where is the {x} of {t}",
    ),
    "what": ("What is {t}?", "Who or what is {t}?", "How is {t} described?", "what does {t} mean"),
    "year": ("When was {t} {x}?", "In what year was {t} {x}?", "What year was {t} {x}?"),
    "people": (
        "What is the population of {t}?",
        "How many people live in {t}?",
        "How big is the population of {t}?",
    ),
    "school": ("Where did {t} study?", "Which school did {t} attend?", "Where was {t} educated?"),
    "spouse": ("Who did {t} marry?", "Who is the spouse of {t}?", "To whom was {t} married?"),
    "maker": ("Who {x} {t}?", "By whom was {t} {x}?", "{t} was {x} by whom?"),
    "work": ("Who made the {x} {t}?", "Who is the {x} {t} by?"),
}
_PERSON = ("birthplace", "school", "spouse")
_THING = ("maker", "work", "place", "year")
_RX = {kind: re.compile(pattern) for kind, pattern in PATTERNS.items()}

Found = tuple[int, str, str, str]
"""Paragraph, kind, word of the text for ``{x}``, answer (verbatim)."""


def without_brackets(title: str) -> str:
    return re.sub(r" \([^)]*\)$", "", title)


def found_in(title: str, paragraphs: Sequence[str]) -> list[Found]:
    """Return what the patterns find about the title in the first six paragraphs, each kind once."""
    name = without_brackets(title)
    lead = paragraphs[0] if paragraphs else ""
    if name.split(" ")[-1] not in lead[:200]:
        return []
    out: dict[str, Found] = {}

    def look(kind: str, number: int, text: str) -> None:
        match = _RX[kind].search(text)
        if match is None or kind in out:
            return
        groups = match.groupdict()
        answer = next((g for g in reversed(match.groups()) if g and g != groups.get("x")), "").strip(" .,")
        sentence_end = re.search(r"(?<=[a-z]{3})\. [A-Z]", answer)
        answer = answer[: sentence_end.start()] if sentence_end else answer
        if 1 < len(answer) <= 70 and name not in answer and answer not in ("He", "She", "The", "It", "This"):
            out[kind] = (number, kind, groups.get("x") or "", answer)

    look("born", 0, lead[:200])
    person = "born" in out
    look("what", 0, lead[:400])
    if person:
        look("died", 0, lead[:200])
    for kind in () if person else _THING:
        look(kind, 0, lead[:400])
    for i, paragraph in enumerate(paragraphs[:6]):
        for kind in _PERSON if person else ("people",):
            look(kind, i, paragraph)
    return list(out.values())


def ask(kind: str, title: str, word: str, rng: random.Random) -> str:
    return rng.choice(QUESTIONS[kind]).format(t=without_brackets(title), x=word)


_GAP = re.compile(
    rf"(?P<date>{_DATE})|(?P<number>\d[\d,.]*\d|\d+)(?! (?:{_MONTHS}))"
    r"|(?P<name>[A-Z][\w'-]+(?: [A-Z][\w'-]+)*)"
)
_ASKING = {
    "date": ("When", "In what year", "What year", "On what date"),
    "number": ("How many", "What number", "How much"),
    "name": ("Who", "What", "Which", "Where", "What name"),
}


def gap_question(sentence: str, rng: random.Random) -> tuple[str, str] | None:
    """Return a question for one name, date or number of a sentence, made of a part of its other words.

    The words lose some of their order and number, as if somebody remembered the sentence: a reader must match
    meaning and type instead of copying what follows."""
    gaps = [gap for gap in _GAP.finditer(sentence) if gap.start() > 0]
    if not gaps:
        return None
    gap = rng.choice(gaps)
    kind = gap.lastgroup or "name"
    before = re.split(r"[,;:] ", sentence[: gap.start()])[-1].split()[-12:]
    after = re.split(r"[,;:.] ", sentence[gap.end() :])[0].rstrip(".").split()[:12]
    rest = [*before, *after]
    if len(rest) < 4:
        return None
    drop = rng.choice((0.0, 0.1, 0.25))
    kept = [word.strip(",;()") for word in rest if rng.random() >= drop]
    if rng.random() < 0.4:
        order = sorted(range(len(kept)), key=lambda i: i + rng.uniform(0, 3))
        kept = [kept[i] for i in order]
    return f"{rng.choice(_ASKING[kind])} {' '.join(kept)}?", gap.group()
