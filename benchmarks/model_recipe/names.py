"""Invented names, values and sentences: the words that synthetic documents are made of.

Names whose CRC is 0 modulo 16 occur in the evaluation sets only, so that no evaluated name is trained on."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence

from benchmarks.model_recipe.relations import BY_SUBJECT, ENTITIES, FILLER, MONTHS, WORDS, WORKS, Relation

Fact = tuple[Relation, str]
Document = tuple[str, str]
"""Title and text."""


class Names:
    """A stream of names and sentences from one seed.

    ``pools`` holds real first, last and place names; ``sentences`` are real sentences to put between facts;
    ``short`` replaces names by words of one token, which makes a task easier at the beginning. ``evaluated``:
    the names that are kept from training."""

    def __init__(
        self,
        seed: int,
        pools: dict[str, list[str]],
        sentences: Sequence[str] = (),
        *,
        evaluated: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.pools = pools
        self.sentences = sentences or FILLER
        self.used: set[str] = set()
        self.short: Sequence[str] = ()
        self.evaluated = evaluated

    def word(self, syllables: int = 0) -> str:
        r = self.random
        n = syllables or r.choice((1, 2, 2, 2, 3))
        word = "".join(r.choice(WORDS["onsets"]) + r.choice(WORDS["vowels"]) for _ in range(n))
        return (word + (r.choice(WORDS["codas"]) if r.random() < 0.7 else "")).capitalize()

    def name(self, kind: str) -> str:
        """Return a name that this sample has not used, open to training or, where so asked, kept from it."""
        for _ in range(200):
            name = self._draw(kind)
            if name not in self.used and (kind == "alias" or self._kept(name) == self.evaluated):
                break
        self.used.add(name)
        return name

    @staticmethod
    def _kept(name: str) -> bool:
        return zlib.crc32(name.encode()) % 16 == 0

    def _draw(self, kind: str) -> str:
        r = self.random
        if self.short and (kind in ENTITIES or kind == "alias"):
            return r.choice(self.short)
        if kind in WORKS:
            x = r.random()
            if x < 0.4:
                other = r.choice(WORDS["nouns"]) if r.random() < 0.5 else self.word()
                return f"The {r.choice(WORDS['adjectives'])} {other}"
            noun = r.choice(WORDS["nouns"])
            return f"{self.word()} {noun}" if x < 0.7 else f"{noun} of {self.word()}"
        makers = {
            "person": self._person,
            "place": self._place,
            "org": lambda: f"{self._last(0.4)} {r.choice(WORDS['org_endings'])}",
            "alias": self._alias,
            "region": lambda: self.word(2) + r.choice(("ia", "land", " Province", " County", "shire")),
            "award": lambda: f"{self.word()} {r.choice(('Prize', 'Medal', 'Award', 'Cup'))}",
        }
        return makers.get(kind, self.word)()

    def _person(self) -> str:
        r = self.random
        if r.random() < 0.5 and self.pools["first"]:
            first = r.choice(self.pools["first"]) if r.random() < 0.8 else self.word(2)
            return f"{first} {self._last(0.7)}"
        return f"{self.word(2)} {self.word()}"

    def _last(self, share: float) -> str:
        """A family name, real ones with the given share."""
        real = self.pools["last"] and self.random.random() < share
        return self.random.choice(self.pools["last"]) if real else self.word()

    def _place(self) -> str:
        r = self.random
        if self.pools["place"] and r.random() < 0.25:
            return r.choice(self.pools["place"])
        return self.word(r.choice((1, 1, 2))) + (r.choice(WORDS["place_endings"]) if r.random() < 0.7 else "")

    def _alias(self) -> str:
        r, x = self.random, self.random.random()
        if x < 0.5:
            return f"the {r.choice(WORDS['adjectives'])} {r.choice(WORDS['nouns'])}"
        if x < 0.75:
            return f"{r.choice(WORDS['nouns'])} {r.randint(2, 99)}"
        return "".join(r.choice("ABCDEFGHKLMNPRSTVWXZ") for _ in range(3))

    def code(self) -> str:
        r, x = self.random, self.random.random()
        letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
        if x < 0.4:
            return str(r.randint(1000, 99999))
        if x < 0.8:
            return f"{r.choice(letters)}{r.choice(letters)}-{r.randint(100, 9999)}"
        return f"{r.choice(letters)}{r.randint(10, 99)}{r.choice(letters)}{r.randint(10, 99)}"

    def value(self, kind: str) -> str:
        """Return a value of a relation's object kind."""
        r = self.random
        if kind in ENTITIES or kind in ("region", "award", "alias"):
            return self.name(kind)
        if kind == "date":
            day, month, year = r.randint(1, 28), r.choice(MONTHS), r.randint(1700, 2020)
            return f"{day} {month} {year}" if r.random() < 0.5 else f"{month} {day}, {year}"
        if kind == "year":
            return str(r.randint(1500, 2020))
        if kind == "num":
            n = r.choice((r.randint(100, 999), r.randint(1000, 99999), r.randint(100000, 999999)))
            return f"{n:,}" if r.random() < 0.6 else str(n)
        if kind == "code":
            return self.code()
        return r.choice(WORDS[kind]) if kind in WORDS else self.word()

    def fill(self, template: str, subject: str, obj: str = "", pronoun: tuple[str, str] | None = None) -> str:
        """Fill a template; ``pronoun`` (subject and possessive form) stands for the subject."""
        name, possessive = pronoun or (subject, subject + ("'" if subject.endswith("s") else "'s"))
        text = template.replace("{s}", name).replace("{p}", possessive)
        text = text.replace("{pl}", possessive.lower() if pronoun else "their").replace("{o}", obj)
        if pronoun and not text.startswith((name, possessive)):
            for word in (name, possessive):
                lower = {"He": "him", "She": "her"}.get(word, word.lower())
                text = re.sub(rf"(?<=\s){re.escape(word)}(?=[\s.,'])", lower, text)
        return text[0].upper() + text[1:]

    def phrase(self, relation: Relation, subject: str) -> str:
        """Return the relation as a noun phrase, such as "the mayor of X"."""
        text = self.random.choice(relation.phrases).replace("{s}", subject)
        return text.replace("{p}", subject + ("'" if subject.endswith("s") else "'s"))

    def ask(self, relation: Relation, subject: str) -> str:
        return self.fill(self.random.choice(relation.questions), subject)

    def state(self, relation: Relation, subject: str, obj: str) -> str:
        return self.fill(self.random.choice(relation.statements), subject, obj)

    def body(self, statements: Sequence[str], filler_words: int) -> str:
        """Join statements, in order, with about ``filler_words`` words of other sentences between them."""
        r = self.random
        filler: list[str] = []
        words = 0
        while words < filler_words:
            filler.append(r.choice(self.sentences if r.random() < 0.7 else FILLER))
            words += len(filler[-1].split())
        cuts = sorted(r.randint(0, len(filler)) for _ in statements)
        parts, previous = [], 0
        for statement, cut in zip(statements, cuts, strict=True):
            parts += [*filler[previous:cut], statement]
            previous = cut
        return (" " if r.random() < 0.85 else "\n").join(parts + filler[previous:])

    def document(
        self, name: str, facts: Sequence[Fact], filler_words: int = 0, title: str | None = None
    ) -> Document:
        """Return a document about a named thing, which later sentences may call by a pronoun."""
        r = self.random
        person = bool(facts) and facts[0][0].subject == "person"
        pronoun = r.choice((("He", "His"), ("She", "Her"))) if person else ("It", "Its")
        sentences = []
        for i, (relation, obj) in enumerate(r.sample(facts, len(facts))):
            if i and r.random() < 0.4 and filler_words < 60:
                sentences.append(self.about_pronoun(relation, name, obj, pronoun))
            else:
                sentences.append(self.state(relation, name, obj))
        return title or capital(name), self.body(sentences, filler_words)

    def about_pronoun(self, relation: Relation, name: str, obj: str, pronoun: tuple[str, str]) -> str:
        """Return a sentence with a pronoun for the subject."""
        starting = [t for t in relation.statements if t.startswith(("{s}", "{p}"))]
        return self.fill(self.random.choice(starting or relation.statements), name, obj, pronoun)

    def facts(self, kind: str, known: set[str], n: int) -> list[Fact]:
        """Return ``n`` facts about a thing, of relations other than those named in ``known``."""
        relations = [r for r in BY_SUBJECT[kind] if r.name not in known]
        return [
            (r, self.value(r.object)) for r in self.random.sample(relations, min(max(n, 0), len(relations)))
        ]

    def stranger(self, filler_words: int) -> Document:
        """Return a document that no question is about."""
        kind = self.random.choice(("person", "place", "org", "film"))
        return self.document(self.name(kind), self.facts(kind, set(), 3), filler_words)


def capital(text: str) -> str:
    return text[0].upper() + text[1:]
