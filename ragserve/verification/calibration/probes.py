"""Probes: documents about made-up lives, and questions whose answers' places in the prompt are known.

There are four kinds of questions, from what words can find to what only attention can find: the fact names
the person and has the question's words (`named`), has other words (`reworded`), says "she" (`pronoun`), or
follows from a fact in another document (`linked`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ragserve.answering.prompt import PromptBuilder, PromptDocument

KINDS = ("named", "reworded", "pronoun", "linked")
DOCUMENT_TOKENS = 480


def _words(text: str) -> list[str]:
    return text.split()


_FIRST = _words(
    "Ada Berta Clara Dora Edith Flora Greta Hanna Ida Judith Klara Laura Mara Nora Olga Paula Rosa Sara "
    "Tilda Ulla Vera Wanda Yvonne Zoe"
)
_LAST = _words(
    "Ahlberg Brandt Corvin Dahl Ehlers Falk Garner Hollis Imhof Jansen Keller Lindt Moreau Norden Oakes "
    "Prager Quill Rowan Sander Thorne Ulrich Vance Weller Yates Zeller Ashby Birk Crane Drost Elgin"
)
_PLACES = _words(
    "Aberdeen Basel Cadiz Dresden Exeter Florence Ghent Haifa Izmir Jena Krakow Lisbon Malmo Nantes Odessa "
    "Porto Quebec Riga Seville Turin"
)
_FACTS: dict[str, tuple[str, str, str, Sequence[str]]] = {
    "birth": (
        "{who} was born in {x}.",
        "The cradle of {whom} stood in {x}.",
        "Where was {person} born?",
        _PLACES,
    ),
    "work": (
        "{who} worked as a {x}.",
        "For a living {whom} was employed as a {x}.",
        "What did {person} work as?",
        _words("weaver baker printer surgeon gardener carpenter librarian teacher miller painter"),
    ),
    "animals": (
        "{who} kept {x} behind the house.",
        "In the yard of {whom} there was always a flock of {x}.",
        "Which animals did {person} keep?",
        _words("geese goats rabbits pigeons ducks hens sheep bees donkeys turkeys"),
    ),
    "music": (
        "{who} played the {x}.",
        "At weddings people danced when {whom} took out the {x}.",
        "Which instrument did {person} play?",
        _words("fiddle flute harp cello trumpet lute drum accordion guitar oboe"),
    ),
    "journey": (
        "{who} travelled to {x} in the year of the flood.",
        "A ship once carried {whom} as far as {x}.",
        "Where did {person} travel to?",
        _words("Alexandria Bombay Canton Havana Jakarta Kyoto Lima Manila Tunis Valparaiso"),
    ),
    "death": (
        "{who} died of {x}.",
        "In the end {x} carried off {whom}.",
        "What did {person} die of?",
        _words("fever pneumonia cholera measles gout malaria smallpox influenza typhus scurvy"),
    ),
}


@dataclass(frozen=True, slots=True)
class ProbeQuestion:
    """``ids``: the prompt after the documents; ``needed``: spans of the facts that answer it."""

    kind: str
    ids: list[int]
    needed: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Probe:
    """``ids``: system text and documents, cut into ``spans``."""

    ids: list[int]
    spans: list[tuple[int, int]]
    questions: list[ProbeQuestion]


@dataclass(frozen=True, slots=True)
class _Fact:
    """``start``: the sentence's first character in the document's text."""

    document: int
    start: int
    sentence: str


def make(builder: PromptBuilder, *, documents: int, questions: int, seed: int) -> Probe:
    """Make a probe with ``questions`` questions of each kind; deterministic for a seed."""
    draw = random.Random(seed)
    names = draw.sample([f"{first} {last}" for first in _FIRST for last in _LAST], len(_FIRST) * len(_LAST))
    texts = [""] * documents
    facts: dict[tuple[str, str, str], _Fact] = {}  # person, fact, wording
    lives: list[tuple[str, int]] = []
    for number in range(documents):
        while builder.count(texts[number]) < DOCUMENT_TOKENS:
            person = names.pop()
            lives.append((person, number))
            texts[number] += f"{person} lived near the old mill of {draw.choice(_PLACES)}. "
            for name in draw.sample(list(_FACTS), 4):
                wording = draw.choice(KINDS[:3])
                plain, other, _, values = _FACTS[name]
                who = "She" if wording == "pronoun" else person
                sentence = (other if wording == "reworded" else plain).format(
                    who=who, whom=person, x=draw.choice(values)
                )
                facts[person, name, wording] = _Fact(number, len(texts[number]), sentence)
                texts[number] += sentence + " "
    asked = [_single(draw, facts, kind) for kind in KINDS[:3] for _ in range(questions)]
    asked += [_linked(draw, facts, lives, texts) for _ in range(questions)]
    parts = [PromptDocument(str(i), f"Lives, part {i + 1}", text.strip()) for i, text in enumerate(texts)]
    found: list[ProbeQuestion] = []
    prompt = builder.build("", parts, max_prompt_tokens=2**31)
    for kind, text, needed in asked:
        prompt = builder.build(text, parts, max_prompt_tokens=2**31)
        spans = [(s.start, s.end) for s in prompt.segments]
        where = [_where(builder, parts[fact.document], fact) for fact in needed]
        starts = [spans[1 + fact.document][0] for fact in needed]
        found.append(
            ProbeQuestion(
                kind,
                prompt.input_ids[spans[-1][0] :],
                [(s + a, s + b) for s, (a, b) in zip(starts, where, strict=True)],
            )
        )
    return Probe(prompt.input_ids[: spans[-1][0]], spans[:-1], found)


def _single(
    draw: random.Random, facts: dict[tuple[str, str, str], _Fact], kind: str
) -> tuple[str, str, list[_Fact]]:
    person, name, wording = draw.choice([key for key in facts if key[2] == kind])
    return kind, _FACTS[name][2].format(person=person), [facts[person, name, wording]]


def _linked(
    draw: random.Random,
    facts: dict[tuple[str, str, str], _Fact],
    lives: list[tuple[str, int]],
    texts: list[str],
) -> tuple[str, str, list[_Fact]]:
    """Ask about a fact by way of another document, which gets the sentence that links them."""
    person, name, wording = draw.choice([key for key in facts if key[2] == "named"])
    fact = facts[person, name, wording]
    other, document = draw.choice([life for life in lives if life[1] != fact.document] or lives)
    link = _Fact(document, len(texts[document]), f"The sister of {other} was {person}.")
    texts[document] += link.sentence + " "
    return "linked", _FACTS[name][2].format(person=f"the sister of {other}"), [link, fact]


def _where(builder: PromptBuilder, document: PromptDocument, fact: _Fact) -> tuple[int, int]:
    """Token span of a fact's sentence: the tokens that change with it, whatever the tokenizer."""
    without = document.text[: fact.start] + "#" + document.text[fact.start + len(fact.sentence) :]
    whole = builder.document_ids(document.title, document.text)
    other = builder.document_ids(document.title, without)
    start = _common(whole, other)
    return start, len(whole) - _common(whole[start:][::-1], other[start:][::-1])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
