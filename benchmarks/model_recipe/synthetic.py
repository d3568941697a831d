"""Synthetic documents with questions: one fact, chains of two, aliases, continued documents, updates, lists.

Every task returns a `Sample`. In ``hop`` and ``alias`` all look-alikes carry the same relations, so that the
relation alone never tells the answer. Try ``python -m benchmarks.model_recipe.synthetic 3``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.model_recipe.names import Document, Fact, Names, capital
from benchmarks.model_recipe.relations import BY_SUBJECT, CHAINS, Relation

NOT_STATED = "The documents do not say."
BRIDGE = "\x01"
"""Encloses a part of a question that is trained like an answer: the thing in the middle of a two-hop
question."""

Pools = dict[str, list[tuple[str, str]]]


@dataclass
class Sample:
    """Documents with (question, answer) pairs."""

    docs: list[Document]
    qas: list[tuple[str, str]] = field(default_factory=list)


class Synthetic(Names):
    """The tasks. ``filler_words`` is the length of the other text in each document."""

    def pick(self, pools: Pools, n: int, weights: dict[str, float]) -> list[tuple[str, str]]:
        """Return up to ``n`` different questions, their kinds drawn by weight."""
        chosen: dict[str, str] = {}
        for _ in range(n * 4):
            kinds = [kind for kind in weights if pools.get(kind)]
            if not kinds or len(chosen) >= n:
                break
            kind = self.random.choices(kinds, [weights[k] for k in kinds])[0]
            question, answer = self.random.choice(pools[kind])
            chosen.setdefault(question, answer)
        return list(chosen.items())

    def chains(self, k: int, filler_words: int, n: int, weights: dict[str, float]) -> Sample:
        """Documents linked in pairs: questions about one fact, two facts, a comparison, nothing stated."""
        r = self.random
        self.used = set()
        docs: list[Document] = []
        pools: Pools = {"1hop": [], "2hop": [], "compare": [], "unknown": []}
        pairs = max(1, k // 2)
        schemas = [r.choice(CHAINS[r.choice(list(CHAINS))]) for _ in range(1 if pairs < 4 else 2)]
        dated: dict[str, list[tuple[int, str]]] = {}
        for i in range(pairs):
            first, second = schemas[i % len(schemas)]
            a, b, value = self.name(first.subject), self.name(first.object), self.value(second.object)
            about_a = [(first, b), *self.facts(first.subject, {first.name}, r.randint(0, 3))]
            about_b = [(second, value), *self.facts(second.subject, {second.name}, r.randint(0, 3))]
            for name, facts in ((a, about_a), (b, about_b)):
                docs.append(self.document(name, facts, filler_words))
                self._single(pools, name, facts, dated)
            question = self.fill(r.choice(second.questions), self.phrase(first, a))
            pools["2hop"].append((question, value))
            pools["unknown"].append((self.ask(first, self.name(first.subject)), NOT_STATED))
        pools["compare"] = self._comparisons(dated)
        if k == 1:
            title = docs[0][0]
            pools = {"1hop": [q for q in pools["1hop"] if title.lower() in q[0].lower()]}
        docs = docs[:1] if k == 1 else r.sample(docs, len(docs))
        while len(docs) < k:
            docs.insert(r.randint(0, len(docs)), self.stranger(filler_words))
        return Sample(docs, self.pick(pools, n, weights))

    def _single(
        self, pools: Pools, name: str, facts: Sequence[Fact], dated: dict[str, list[tuple[int, str]]]
    ) -> None:
        for relation, value in facts:
            pools["1hop"].append((self.ask(relation, name), value))
            if relation.object in ("year", "date"):
                dated.setdefault(relation.name, []).append((int(re.findall(r"\d{4}", value)[0]), name))
        stated = {relation.name for relation, _ in facts}
        missing = [r for r in BY_SUBJECT[facts[0][0].subject] if r.name not in stated]
        if missing:
            pools["unknown"].append((self.ask(self.random.choice(missing), name), NOT_STATED))

    def _comparisons(self, dated: dict[str, list[tuple[int, str]]]) -> list[tuple[str, str]]:
        out = []
        for relation, entries in dated.items():
            if len(entries) < 2:
                continue
            (year, name), (other_year, other) = self.random.sample(entries, 2)
            if year == other_year:
                continue
            early = self.random.random() < 0.5
            words = (
                ("was born earlier", "was born later") if "birth" in relation else ("is older", "is newer")
            )
            start = "Who" if "birth" in relation else "Which"
            answer = name if (year < other_year) == early else other
            out.append((f"{start} {words[0 if early else 1]}, {name} or {other}?", answer))
        return out

    def hop(
        self, pairs: int, filler_words: int, n: int, k: int = 0, hint: float = 0.0, forward: float = 0.75
    ) -> Sample:
        """``pairs`` chains a -> b -> value over the same two relations.

        ``forward`` is the share of chains whose first document comes first. ``hint`` is the share of
        questions that name b and, in part, of second documents that repeat the first fact."""
        r = self.random
        self.used = set()
        first, second = r.choice(CHAINS[r.choice(list(CHAINS))])
        extra = self._others(first)
        seconds = [second, *self._others(second)]
        docs: list[Document] = []
        linked: list[tuple[Document, Document]] = []
        pools: Pools = {"2hop": [], "1hop": []}
        for _ in range(pairs):
            a, b = self.name(first.subject), self.name(first.object)
            about_a = [(first, b)] + [(x, self.value(x.object)) for x in extra]
            about_b = [(x, self.value(x.object)) for x in seconds]
            doc_a, doc_b = self.document(a, about_a, filler_words), self.document(b, about_b, filler_words)
            if r.random() < hint * 0.6:
                doc_b = (doc_b[0], f"{capital(b)} is {self.phrase(first, a)}. {doc_b[1]}")
            linked.append((doc_a, doc_b))
            docs += [doc_a, doc_b]
            pools["1hop"] += [(self.ask(x, a), value) for x, value in about_a]
            for x, value in about_b:
                pools["1hop"].append((self.ask(x, b), value))
                pools["2hop"].append((self._through(x, self.phrase(first, a), b, hint), value))
        while len(docs) < k:
            docs.append(self.stranger(filler_words))
        r.shuffle(docs)
        for doc_a, doc_b in linked:
            i, j = docs.index(doc_a), docs.index(doc_b)
            if (i < j) != (r.random() < forward):
                docs[i], docs[j] = docs[j], docs[i]
        return Sample(docs, self.pick(pools, n, {"2hop": 0.8, "1hop": 0.2}))

    def _others(self, relation: Relation) -> list[Relation]:
        others = [r for r in BY_SUBJECT[relation.subject] if r is not relation]
        return self.random.sample(others, self.random.randint(0, min(2, len(others))))

    def _through(self, relation: Relation, phrase: str, bridge: str, hint: float) -> str:
        """Return a question about a thing that is only described; with ``hint`` the question names it."""
        if self.random.random() < hint:
            template = self.random.choice([t for t in relation.questions if "{s}" in t] or ["Which {s}?"])
            question = self.fill(template, f"{phrase},{BRIDGE} {bridge}{BRIDGE},")
            return question.replace(f"{BRIDGE},?", f"{BRIDGE}?")
        return self.fill(self.random.choice(relation.questions), phrase)

    def alias(self, k: int, filler_words: int, n: int, hint: float = 0.0) -> Sample:
        """One document defines an alias; other documents speak of the alias only."""
        r = self.random
        self.used = set()
        named = max(1, min(k // 2, r.randint(2, 4)))
        kind = r.choice(("person", "person", "org", "place"))
        shared = r.sample(BY_SUBJECT[kind], r.randint(1, 3))
        glossary = named <= k - 1 and r.random() < 0.3
        definitions, reports, lines = [], [], []
        pools: Pools = {"alias": [], "1hop": []}
        for _ in range(named):
            name, alias = self.name(kind), self.name("alias")
            facts = [(x, self.value(x.object)) for x in shared]
            line = r.choice(_DEFINITIONS).replace("{e}", name).replace("{a}", alias)
            lines.append(capital(line))
            title = r.choice(("Report", "Notes", "Entry", "File", capital(alias)))
            title += f" {r.randint(1, 99)}" if r.random() < 0.5 else ""
            report = self.document(alias, facts, filler_words, title)
            if r.random() < hint * 0.5:
                report = (title, f"{capital(alias)} stands for {name}. {report[1]}")
            reports.append(report)
            if not glossary:
                own = self.facts(kind, {x.name for x in shared}, r.randint(1, 2))
                said = [lines[-1], *(self.state(x, name, value) for x, value in own)]
                definitions.append((name, self.body(said, filler_words)))
                pools["1hop"] += [(self.ask(x, name), value) for x, value in own]
            for x, value in facts:
                pools["alias"].append((self.ask(x, name), value))
                pools["1hop"].append((self.ask(x, alias), value))
            pools["1hop"] += [(f"Who or what is {alias}?", name), (f"What is {name} also called?", alias)]
        if glossary:
            title = r.choice(("Glossary", "List of names", "Names used", "Key"))
            definitions = [(title, self.body(lines, filler_words))]
        r.shuffle(definitions)
        r.shuffle(reports)
        docs = definitions + reports
        if r.random() < 0.25:
            r.shuffle(docs)
        while len(docs) < k:
            docs.insert(r.randint(0, len(docs)), self.stranger(filler_words))
        return Sample(docs, self.pick(pools, n, {"alias": 0.75, "1hop": 0.25}))

    def continued(self, k: int, filler_words: int, n: int, near: float = 0.25) -> Sample:
        """A document introduces something; the next one speaks only of "he", "it" or "this town". ``near`` is
        the share of questions about the first."""
        r = self.random
        self.used = set()
        groups: list[list[Document]] = []
        pools: Pools = {"next": [], "1hop": []}
        kinds = ("person", "person", "org", "place", "film")
        usual = r.choice(kinds)
        relation = r.choice(BY_SUBJECT[usual])
        for _ in range(max(1, min(k // 2, r.randint(2, 4)))):
            kind = usual if r.random() < 0.8 else r.choice(kinds[1:])
            base = relation if relation.subject == kind else r.choice(BY_SUBJECT[kind])
            name = self.name(kind)
            facts = [(base, self.value(base.object)), *self.facts(kind, {base.name}, r.randint(0, 2))]
            own = self.facts(kind, {x.name for x, _ in facts}, r.randint(1, 2))
            groups.append(self._group(kind, name, own, facts, filler_words))
            pools["next"] += [(self.ask(x, name), value) for x, value in facts]
            pools["1hop"] += [(self.ask(x, name), value) for x, value in own]
        total = sum(map(len, groups))
        groups += [[self.stranger(filler_words)] for _ in range(k - total)]
        r.shuffle(groups)
        docs = [doc for group in groups for doc in group]
        return Sample(docs, self.pick(pools, n, {"next": 1 - near, "1hop": near} if near else {"next": 1.0}))

    def _group(
        self, kind: str, name: str, own: Sequence[Fact], facts: list[Fact], filler_words: int
    ) -> list[Document]:
        """Return the introducing document and one or two that continue it."""
        r = self.random
        said = [self.state(x, name, value) for x, value in own]
        if r.random() < 0.3:
            said.append(f"The next document is also about {name}.")
        number = r.choice((f"Record {r.randint(1, 999)}", f"Chapter {r.randint(1, 30)}", name, name))
        docs = [(capital(number), self.body(said, filler_words))]
        parts = [facts[:1], facts[1:]] if len(facts) > 1 and r.random() < 0.3 else [facts]
        word = {"person": "person", "org": "organisation", "place": "town"}.get(kind, "film")
        he = r.choice((("He", "His"), ("She", "Her"))) if kind == "person" else ("It", "Its")
        previous = (f"The {word} from the previous document", f"The {word} from the previous document's")
        this = (f"This {word}", f"This {word}'s")
        for part in parts:
            pronoun = r.choices((he, this, previous), (0.5, 0.3, 0.2))[0]
            sentences = []
            for x, value in part:
                sentence = self.about_pronoun(x, name, value, pronoun)
                if pronoun is previous and "document's" in sentence:
                    sentence = self.about_pronoun(x, name, value, this)
                sentences.append(sentence)
            docs.append((r.choice(_CONTINUED), self.body(sentences, filler_words)))
        return docs

    def update(self, k: int, filler_words: int, n: int) -> Sample:
        """A later document corrects an earlier one."""
        r = self.random
        self.used = set()
        docs: list[Document] = []
        pools: Pools = {"update": [], "1hop": []}
        for _ in range(max(1, min(3, k // 3))):
            kind = r.choice(("person", "org", "place"))
            usable = [
                x for x in BY_SUBJECT[kind] if x.object in ("code", "num", "place", "job", "person", "org")
            ]
            relation, name = r.choice(usable), self.name(kind)
            values = [self.value(relation.object) for _ in range(r.choice((2, 2, 3)))]
            at = r.randint(0, len(docs))
            for j, value in enumerate(values):
                title = r.choice(("Update", "Correction", name)) if j else name
                sentence = (r.choice(_CORRECTIONS) if j else "") + self.state(relation, name, value)
                docs.insert(at, (title, self.body([sentence], filler_words)))
                at = r.randint(at + 1, len(docs))
            question = self.ask(relation, name)
            pools["update"].append((f"After all updates: {question}", values[-1]))
            pools["1hop"].append((f"Before any update: {question}", values[0]))
        while len(docs) < k:
            docs.insert(r.randint(0, len(docs)), self.stranger(filler_words))
        return Sample(docs, self.pick(pools, n, {"update": 0.7, "1hop": 0.3}))

    def key_value(self, k: int, lines: int, n: int) -> Sample:
        """Plain lists of keys and values."""
        r = self.random
        self.used = set()
        key = {"code": self.code, "word": self.word, "person": lambda: self.name("person")}[
            r.choice(("code", "word", "person"))
        ]
        separator = r.choice((": ", " = ", " is ", " -> "))
        docs, pairs = [], []
        for i in range(k):
            entries = [(key(), self.code() if r.random() < 0.6 else self.word()) for _ in range(lines)]
            ends = ["." if r.random() < 0.3 else "" for _ in entries]
            text = "\n".join(a + separator + b + end for (a, b), end in zip(entries, ends, strict=True))
            docs.append((f"{r.choice(('List', 'Table', 'Register', 'Index'))} {i + 1}", text))
            pairs += [(r.choice(_LOOKUPS).format(a), b) for a, b in entries]
        return Sample(docs, r.sample(pairs, min(n, len(pairs))))

    def pointers(self, k: int, lines: int, n: int, words: Sequence[str]) -> Sample:
        """Lists in which values are keys of other lines: follow one step or two, forwards or backwards.

        It is the two-hop question without language, which a small model learns sooner."""
        r = self.random
        self.used = set()
        pool = r.sample(words, 3 * lines) if words and 3 * lines <= len(words) else []
        names = pool or list(dict.fromkeys(self.word(2) for _ in range(9 * lines)))[: 3 * lines]
        lines = len(names) // 3
        chains = [names[3 * i : 3 * i + 3] for i in range(lines)]
        entries = [pair for a, b, c in chains for pair in ((a, b), (b, c))]
        r.shuffle(entries)
        separator = r.choice((": ", " = ", " -> ", " leads to ", " follows "))
        docs = []
        for i in range(k):
            part = entries[i::k]
            docs.append((f"List {i + 1}", "\n".join(a + separator + b for a, b in part)))
        questions = [(f"What comes two steps after {a}?", c) for a, _, c in chains]
        questions += [(f"What comes after {a}?", b) for a, b in r.sample(entries, max(1, lines // 3))]
        return Sample(docs, r.sample(questions, min(n, len(questions))))

    def needle(self) -> tuple[str, str, str]:
        """Return a sentence to hide in a long text, with its question and answer."""
        r = self.random
        if r.random() < 0.5:
            name = self.name(r.choice(("person", "place")))
            what, value = r.choice(_SECRETS), self.code()
            sentence = r.choice(("The {w} of {e} is {v}.", "Remember that the {w} of {e} is {v}."))
            question = r.choice(("What is the {w} of {e}?", "Which {w} belongs to {e}?"))
            return sentence.format(w=what, e=name, v=value), question.format(w=what, e=name), value
        relation = r.choice(BY_SUBJECT[r.choice(("person", "org", "place", "film"))])
        name, value = self.name(relation.subject), self.value(relation.object)
        return self.state(relation, name, value), self.ask(relation, name), value


_DEFINITIONS = (
    "{e} is known as {a}.",
    "In these papers {e} is called {a}.",
    "The name {a} stands for {e}.",
    "{a} is the code name of {e}.",
    "By {a} we mean {e}.",
    "{e}, also called {a}, is mentioned often.",
)
_CONTINUED = ("Continued", "Continuation", "Part 2", "More", "Further notes", "(continued)")
_CORRECTIONS = ("Correction: ", "Update: ", "Now changed: ", "New information: ")
_LOOKUPS = ("What is the value of {}?", "What is listed for {}?", "{}?", "Which entry belongs to {}?")
_SECRETS = ("secret code", "access code", "magic number", "key number", "locker number")


def main() -> None:
    tasks = Synthetic(int(sys.argv[1]) if len(sys.argv) > 1 else 0, {"first": [], "last": [], "place": []})
    samples = {
        "chains": tasks.chains(4, 20, 5, {"1hop": 1, "2hop": 1, "unknown": 1, "compare": 1}),
        "hop": tasks.hop(3, 0, 5, hint=0.5),
        "alias": tasks.alias(5, 0, 5),
        "continued": tasks.continued(6, 0, 5),
        "update": tasks.update(4, 0, 4),
        "key_value": tasks.key_value(2, 4, 3),
        "pointers": tasks.pointers(2, 4, 3, ()),
    }
    for name, sample in samples.items():
        print(f"== {name}")
        for title, text in sample.docs:
            print(f"  {title} | {text}")
        for question, answer in sample.qas:
            print(f"  ? {question} | {answer}")


if __name__ == "__main__":
    main()
