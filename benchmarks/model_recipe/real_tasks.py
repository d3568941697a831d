"""Tasks over real text: country profiles, passages with questions, articles."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.model_recipe import facts as profiles
from benchmarks.model_recipe import patterns
from benchmarks.model_recipe.corpus import CONTEXT, Corpus, sentences_of
from benchmarks.model_recipe.names import Names
from benchmarks.model_recipe.samples import Doc
from benchmarks.model_recipe.statements import question_about
from benchmarks.model_recipe.synthetic import NOT_STATED, Synthetic

LIKED = {"policyqa": 0.3, "squad_sentences": 0.7, "nq": 4.0}
"""Factors, where not 1, of the share that a source has by its number of questions."""
GAP_SHARE = 0.2
"""Of the sentences without a rule: how many get a question of their own words."""
CHANGED = 0.4
"""Share of the passages whose answers are replaced by others."""
OWN_ONLY = 0.4
"""Share of the profiles whose passages are all of the same country, as they mostly are when retrieved."""
RESTYLED = 0.5
"""Share of the profiles whose field names are written in another way."""


@dataclass
class Task:
    """Documents with (question, answer) turns; in a ``dialogue`` a turn may need the ones before it.
    ``again`` asks for the same in other words."""

    docs: Sequence[Doc]
    turns: list[tuple[str, str]]
    dialogue: bool = False
    again: list[tuple[str, str]] = field(default_factory=list)


_MONTH = re.compile(r"January|February|March|April|May|June|July|August|September|October|November|December")


def kind_of(answer: str) -> str:
    """What may stand in an answer's place: years, numbers with the same words, names of as many words."""
    if re.fullmatch(r"1\d{3}|20[0-2]\d", answer):
        return "year"
    if re.fullmatch(r"[\d,.]*\d(?: ?%| percent| million| billion)?", answer):
        return "number " + re.sub(r"[\d,.]+", "", answer)
    words = answer.split(" ")
    if (
        len(words) <= 3
        and not _MONTH.search(answer)
        and all(re.fullmatch(r"[A-Z][a-z'-]{2,}", w) for w in words)
    ):
        return f"name {len(words)}"
    return ""


def changed(text: str, swap: dict[str, str]) -> str:
    """Return the text with whole words replaced, the longest first."""
    if not swap:
        return text
    ordered = sorted(swap, key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, ordered))})(?!\w)")
    return pattern.sub(lambda match: swap[match.group()], text)


class RealTasks:
    """The tasks, with the mixture's random stream."""

    def __init__(self, corpus: Corpus, rng: random.Random) -> None:
        self.corpus = corpus
        self.random = rng
        self.names = Names(rng.randrange(2**31), corpus.names)
        self.by_source: dict[str, list[int]] = {}
        self.by_title: dict[str, list[int]] = {}
        for i, (source, title, _, _) in enumerate(corpus.reading):
            self.by_source.setdefault(source, []).append(i)
            self.by_title.setdefault(title, []).append(i)
        sizes = {s: sum(len(corpus.reading[i][3]) for i in rows) for s, rows in self.by_source.items()}
        self.shares = {source: n * LIKED.get(source, 1.0) for source, n in sizes.items()}
        self.answers: dict[str, list[str]] = {}
        for row in corpus.reading:
            for _, answer in row[3]:
                self.answers.setdefault(kind_of(answer), []).append(answer)

    def paragraphs(self, low: int = 60, high: int = 220, article: int | None = None, start: int = -1) -> Doc:
        """Title and consecutive paragraphs of an article, of about ``low`` to ``high`` tokens; ``start``
        names the first paragraph, -1 draws it."""
        r, newline = self.random, self.corpus.newline
        number = r.randrange(len(self.corpus.articles)) if article is None else article
        title, body = self.corpus.articles[number]
        ends = np.nonzero(body == newline)[0] + 1
        starts = np.concatenate([[0], ends[:-1]])
        first = int(starts[r.randrange(len(starts)) if start < 0 else min(start, len(starts) - 1)])
        target = r.randint(low, high)
        last = int(ends[min(int(np.searchsorted(ends, first + target * 0.7)), len(ends) - 1)])
        text = body[first : min(last, first + target * 3 // 2)]
        text = text if len(text) and text[-1] == newline else np.append(text, newline)
        return np.concatenate([title, text]).astype(np.uint16)

    def _k(self) -> int:
        """Documents of a prompt: mostly five, as the product retrieves."""
        return self.random.choices((5, 10, self.random.randint(1, 12)), (0.4, 0.15, 0.45))[0]

    # country profiles

    def facts(self) -> Task:
        """Questions about one country, over chunks of its profile and of others'."""
        r = self.random
        _, country, title, chunks, found = r.choice(self.corpus.facts)
        others = [row for row in r.sample(self.corpus.facts, 5) if row[1] != country]
        dialogue = r.random() < 0.25
        stating = sorted({at for at, _, _ in found})
        places = r.sample(stating, min(len(stating), r.choice((1, 2))))
        stated = [fact for fact in found if fact[0] in places]
        chosen = r.sample(stated, min(len(stated), r.randint(2, 3) if dialogue else r.randint(2, 12)))
        turns = self._turns(country, chosen, dialogue)
        again = [turn for _ in range(2) for turn in self._turns(country, chosen, False)]
        if r.random() < 0.04:
            return self._not_stated(title, chunks, chosen[0], turns, others)
        if r.random() < 0.15:
            linked = r.sample(found, 2)
            question = profiles.two_hop(linked[1][1], linked[0][1], linked[0][2], r)
            if question and country not in question:
                chosen, turns, again = linked, [(question, linked[1][2])], []
        wanted = {at for at, _, _ in chosen}
        docs = [(title, chunks[at]) for at in wanted]
        own = [(title, chunk) for i, chunk in enumerate(chunks) if chunk and i not in wanted]
        rivals = [(t, cs[at]) for _, _, t, cs, fs in others for at, key, _ in fs if key == chosen[0][1]]
        rest = r.sample(own, min(len(own), 4)) + rivals
        rest += [(t, r.choice([c for c in cs if c] or [""])) for _, _, t, cs, _ in others]
        if len(own) > 3 and r.random() < OWN_ONLY:
            rest = own
        docs += r.sample(rest, min(len(rest), max(0, self._k() - len(docs))))
        r.shuffle(docs)
        if r.random() < RESTYLED:
            restyled = profiles.style(r)
            docs = [(title, restyled(text)) for title, text in docs]
        made = Task(docs, turns, dialogue, again)
        return self._renamed(country, made) if r.random() < 0.35 else made

    def _turns(
        self, country: str, chosen: list[tuple[int, str, str]], dialogue: bool
    ) -> list[tuple[str, str]]:
        turns = []
        for i, (_, key, answer) in enumerate(chosen):
            follow = dialogue and i > 0 and self.random.random() < 0.7
            question = (
                profiles.follow_up(key, self.random) if follow else profiles.ask(key, country, self.random)
            )
            turns.append((question, answer))
        return turns

    def _not_stated(
        self,
        title: str,
        chunks: Sequence[str],
        fact: tuple[int, str, str],
        turns: list[tuple[str, str]],
        others: Sequence[tuple[str, str, str, list[str], list[tuple[int, str, str]]]],
    ) -> Task:
        docs = [(title, chunk) for chunk in chunks if chunk and fact[2] not in chunk]
        docs = self.random.sample(docs, min(3, len(docs)))
        docs += [(t, cs[at]) for _, _, t, cs, fs in others for at, key, _ in fs if key == fact[1]][:2]
        self.random.shuffle(docs)
        return Task(docs, [(turns[0][0], NOT_STATED)])

    def _renamed(self, country: str, task: Task) -> Task:
        """The same about an invented country, with other digits in a numeric answer: nothing to remember."""
        name = self.names.word(2) + self.random.choice(("", "ia", "land", "stan", " Islands"))
        swap = {country: name, country.lower(): name.lower(), country.upper(): name.upper()}
        swap |= {re.sub(r"[^a-z]+", "-", country.lower()).strip("-"): name.lower().replace(" ", "-")}
        for _, answer in task.turns:
            if re.fullmatch(r"[\d,.]{3,}(?: .*)?", answer):
                digits = re.sub(r"[1-9]", lambda _: str(self.random.randint(1, 9)), answer)
                swap[answer] = digits
        docs = [(changed(doc[0], swap), changed(doc[1], swap)) for doc in task.docs if isinstance(doc, tuple)]
        turns, again = (
            [(changed(question, swap), changed(answer, swap)) for question, answer in asked]
            for asked in (task.turns, task.again)
        )
        return Task(docs, turns, task.dialogue, again)

    # passages with questions

    def reading(self) -> Task:
        """Real questions about one to three passages among others of the same source or article."""
        r, corpus = self.random, self.corpus
        source = r.choices(list(self.shares), list(self.shares.values()))[0]
        first = r.choice(self.by_source[source])
        title = corpus.reading[first][1]
        pool = self.by_title[title] if title and r.random() < 0.5 else self.by_source[source]
        asked = [first, *r.sample(pool, min(len(pool), r.choices((0, 1, 2, 3), (0.4, 0.2, 0.2, 0.2))[0]))]
        docs, turns = [], []
        for i in dict.fromkeys(asked):
            qas = corpus.reading[i][3]
            asked_here = r.sample(qas, min(len(qas), r.randint(2, 5)))
            swap = self._other_answers(asked_here) if r.random() < CHANGED else {}
            name, text = self._passage(i)
            docs.append((name, changed(text, swap)))
            turns += [(changed(question, swap), changed(answer, swap)) for question, answer in asked_here]
        rest = [self._passage(i) for i in r.sample(pool, min(len(pool), 12)) if i not in asked]
        if len(asked) == 1 and len(rest) > 1 and title and r.random() < 0.05:
            answer = turns[0][1]
            without = [doc for doc in rest if answer not in doc[1]][: self._k()]
            return Task(without, [(turns[0][0], NOT_STATED)]) if without else self.reading()
        extra: list[Doc] = list(rest[: r.randint(0, len(rest))])
        while len(extra) < 9:
            extra.append(self.paragraphs())
        mixed: list[Doc] = [*docs, *extra[: max(0, self._k() - len(docs))]]
        r.shuffle(mixed)
        r.shuffle(turns)
        return Task(mixed, turns)

    def _other_answers(self, qas: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Other answers of the same kind for up to two: who remembers the passage is wrong."""
        swap: dict[str, str] = {}
        for _, answer in qas[:2]:
            kind = kind_of(answer)
            other = self.random.choice(self.answers[kind]) if kind else ""
            if other and not any(answer in old or old in answer for old in swap):
                swap[answer] = other
        return swap

    def _passage(self, i: int) -> tuple[str, str]:
        """A passage with its title, or with a plain word for one; sentences get company."""
        _, title, text, _ = self.corpus.reading[i]
        if not title:
            title = self.random.choice(("News", "Passage", "Text", "Report", " ".join(text.split()[:3])))
        if len(text) < 400 and self.random.random() < 0.5:
            before, after = (
                self.random.sample(self.corpus.sentences, self.random.randint(0, 3)) for _ in range(2)
            )
            text = " ".join([*before, text, *after])
        return title, text[:5000]

    # articles

    def gaps(self) -> Task:
        """Questions made of a sentence by rule, or of its own words where no rule fits."""
        r = self.random
        docs: list[Doc] = [self.paragraphs(60, 260) for _ in range(self._k())]
        turns: list[tuple[str, str]] = []
        for doc in r.sample(docs, min(len(docs), 6)):
            title, text = self.corpus.decode(np.asarray(doc)).split("\n", 1)
            sentences = sentences_of(text)
            for sentence in r.sample(sentences, min(len(sentences), 4)):
                made = question_about(sentence, patterns.without_brackets(title), r)
                if made or r.random() < GAP_SHARE:
                    made = made or patterns.gap_question(sentence, r)
                    turns += [made] if made else []
                    break
        return Task(docs, turns) if turns else self.reading()

    def patterns(self) -> Task:
        """Questions that patterns find in articles, and comparisons of two articles."""
        r, corpus = self.random, self.corpus
        if r.random() < 0.3:
            return self._comparison() or self.patterns()
        docs: list[Doc] = []
        turns = []
        for article in r.sample(corpus.with_patterns, r.randint(1, 4)):
            paragraph, kind, word, answer = r.choice(corpus.patterns[article])
            doc = self.paragraphs(150, 300, article, paragraph)
            docs.append(doc)
            if answer in corpus.decode(np.asarray(doc)):  # a long paragraph is cut
                turns.append((patterns.ask(kind, corpus.titles[article], word, r), answer))
        while len(docs) < self._k():
            docs.append(self.paragraphs(60, 220, r.choice(corpus.with_patterns), 0))
        r.shuffle(docs)
        return Task(docs, turns) if turns else self.patterns()

    def _comparison(self) -> Task | None:
        r, corpus = self.random, self.corpus
        kind = r.choice(("born", "born", "died", "year"))
        found = []
        for article in r.sample(corpus.with_patterns, 200):
            years = [re.findall(r"\d{4}", a) for _, k, _, a in corpus.patterns[article] if k == kind]
            if years and years[0]:
                found.append((int(years[0][0]), article))
        if len(found) < 2 or found[0][0] == found[1][0]:
            return None
        (year, a), (other, b) = found[:2]
        early = r.random() < 0.5
        words = _COMPARED[kind][0 if early else 1]
        one, two = corpus.titles[a], corpus.titles[b]
        question = f"{'Which' if kind == 'year' else 'Who'} {r.choice(words)}, {one} or {two}?"
        docs = [self.paragraphs(120, 200, a, 0), self.paragraphs(120, 200, b, 0)]
        docs += [self.paragraphs(60, 200, r.choice(corpus.with_patterns), 0) for _ in range(self._k() - 2)]
        r.shuffle(docs)
        return Task(docs, [(question, one if (year < other) == early else two)])

    def multi(self) -> Task:
        """Questions over several passages, of 2WikiMultihopQA's training part."""
        r = self.random
        question, answer, found = r.choice(self.corpus.multi)
        needed = [(title, text) for title, text, needs in found if needs]
        rest = [(title, text) for title, text, needs in found if not needs]
        docs = needed + r.sample(rest, r.randint(0, len(rest)))
        r.shuffle(docs)
        return Task(docs, [(question, answer)])

    def needle(self, invented: Synthetic) -> Task:
        """Invented facts hidden in articles, up to the whole context."""
        r = self.random
        length = int(2 ** r.uniform(8, 12 if r.random() < 0.8 else 12.9))
        k = r.randint(1, 12)
        docs = [np.asarray(self.paragraphs(max(40, length // k), max(41, length // k + 1))) for _ in range(k)]
        while sum(map(len, docs)) < length * 0.9 and len(docs) < 40:
            docs.append(np.asarray(self.paragraphs(200, 1500)))
        while sum(map(len, docs)) > CONTEXT - 400:
            docs.pop()
        invented.used = set()
        turns = []
        for _ in range(r.randint(1, 6)):
            sentence, question, answer = invented.needle()
            i = r.randrange(len(docs))
            docs[i] = self._with(docs[i], sentence)
            turns.append((question, answer))
        return Task(docs, turns)

    def _with(self, doc: np.ndarray, sentence: str) -> np.ndarray:
        """A document with a sentence put behind one of its own."""
        ids = self.corpus.encode(" " + sentence)
        body = int(np.argmax(doc == self.corpus.newline)) + 1
        stops = [i + 1 for i in np.nonzero(doc[body:-1] == self.corpus.dot)[0] + body]
        at = self.random.choice(stops) if stops else len(doc) - 1
        return np.concatenate([doc[:at], np.array(ids, dtype=np.uint16), doc[at:]])


_COMPARED = {
    "born": (("was born first", "was born earlier", "is older"), ("was born later", "is younger")),
    "died": (("died first", "died earlier"), ("died later",)),
    "year": (("came first", "came out earlier", "is older"), ("came later", "is newer")),
}
