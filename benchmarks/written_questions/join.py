"""Questions that need two passages: one names the subject of the other.

    python -m benchmarks.written_questions.join PASSAGES OUT MODEL [--workers 6] [--batch 128]
        [--device cuda] [--seconds S] [--limit N]

Reads the pairs that `benchmarks.written_questions.write` has left in OUT. Where a question about passage B
names B's subject, and passage A, of another title, names it, too, the model describes the subject by what A
says of it; the description takes the name's place: "When was the Mill Bridge built?" becomes "When was the
bridge that Ada Holm crossed built?". Kept in OUT/joined-N.jsonl, lines {passages: [A, B], question, answer},
where the answer comes again with both passages, and neither with A alone, nor without any, nor with B among
the passages that name A's subject or B's, without A. OUT/joined-N.json has the counts."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.model_recipe.overlap import words
from benchmarks.written_questions.passages import SEED, Passage, read_passages
from benchmarks.written_questions.reader import Reader
from benchmarks.written_questions.write import ANSWER, ANSWERED, SYSTEM, Pair, in_processes, is_same
from ragserve.files import write_json
from ragserve.json_lines import json_lines
from ragserve.verification.metrics import contains_answer

DESCRIBED = 24  # most tokens
_LONGEST_NAME = 5  # words; a name has at least two
_OTHERS = 2  # passages beside B that may mislead
_EACH = 3  # most passages A for a question
_NAMED = re.compile(r"[A-Z]|\d")


class Linked(NamedTuple):
    """A pair about passage B, B, and passage A, which names it."""

    pair: Pair
    b: Passage
    a: Passage


def read_pairs(folder: Path) -> list[Pair]:
    """The pairs of all processes, each question of a passage once."""
    found: dict[tuple[str, str], Pair] = {}
    for path in sorted(folder.glob("pairs-*.jsonl")):
        for _, row in json_lines(path):
            pair = Pair(**row)
            found.setdefault((pair.passage, pair.question), pair)
    return list(found.values())


class Names:
    """Which passages name which subjects: by name, passages of that title, and others that have it."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        self.by_id = {each.id: each for each in passages}
        self.titled: dict[tuple[str, ...], list[Passage]] = defaultdict(list)
        for each in self.by_id.values():
            name = tuple(words(each.name))
            if 2 <= len(name) <= _LONGEST_NAME:
                self.titled[name].append(each)
        self.naming: dict[tuple[str, ...], list[Passage]] = defaultdict(list)
        for each in self.by_id.values():
            own = tuple(words(each.name))
            for name in self._names(each.text) - {own}:
                self.naming[name].append(each)

    def _names(self, text: str) -> set[tuple[str, ...]]:
        found = words(text)
        sizes = range(2, _LONGEST_NAME + 1)
        spans = (tuple(found[at : at + size]) for size in sizes for at in range(len(found) - size + 1))
        return {span for span in spans if span in self.titled}

    def links(self, pairs: Sequence[Pair]) -> Iterator[Linked]:
        """All questions that name their passage's subject, with passages that name it; those that the subject
        names in turn first."""
        for pair in pairs:
            b = self.by_id.get(pair.passage)
            if b is None or not re.search(rf"\b{re.escape(b.name)}\b", pair.question):
                continue
            name = tuple(words(b.name))
            others = [each for each in self.naming.get(name, ()) if tuple(words(each.name)) != name]
            random.Random(f"{SEED} {pair.question}").shuffle(others)
            others.sort(key=lambda a: not contains_answer(b.text, [a.name]))
            fit = [a for a in others if not contains_answer(a.text, [pair.answer])]
            yield from (Linked(pair, b, a) for a in fit[:_EACH])

    def misleading(self, link: Linked) -> list[Passage]:
        """Passages beside B for a question whose A is not shown."""
        about = (
            *self.titled.get(tuple(words(link.a.name)), ()),
            *self.naming.get(tuple(words(link.b.name)), ()),
        )
        fit = [each for each in about if each.id not in (link.a.id, link.b.id)]
        random.Random(f"{SEED} {link.pair.question}").shuffle(fit)
        return fit[:_OTHERS]


def task_for(name: str) -> str:
    """What the model is asked about passage A."""
    return (
        f"Describe {name} in four to twelve words by what the document says of it, without the words {name}. "
        f"Begin with: the. Write nothing but the description."
    )


def joined(link: Linked, written: str) -> str | None:
    """The question with the description in the name's place; None if it is none, or gives itself away."""
    phrase = re.split(r"[\n.;?]", f"the {written.strip()}")[0].strip().rstrip(",")
    phrase = re.sub(r"^the (?:the|The) ", "the ", phrase)
    own = {word for word in words(link.b.name) if len(word) > 3}
    if not 4 <= len(phrase.split()) <= 16 or _named(phrase, own) or not _NAMED.search(phrase):
        return None
    if contains_answer(phrase, [link.pair.answer]):
        return None
    name = rf"(?:\b[Tt]he )?\b{re.escape(link.b.name)}\b(?:\s*\([^)]*\))?"
    question, n = re.subn(name, lambda _: phrase, link.pair.question)
    return question[0].upper() + question[1:] if n == 1 and not _named(question, own) else None


def _named(text: str, own: set[str]) -> bool:
    """Whether a text has a word of a name, written as a name."""
    return any(word[0].isupper() and word.lower() in own for word in re.findall(r"\w+", text))


class Joiner:
    """Makes and checks joined questions."""

    def __init__(self, reader: Reader, names: Names) -> None:
        self._reader, self._names = reader, names
        self.counts: Counter[str] = Counter()

    def joined(self, links: Sequence[Linked]) -> list[tuple[Linked, str]]:
        """The questions kept of a batch."""
        self.counts["linked"] += len(links)
        described = self._asked([([link.a], task_for(link.b.name)) for link in links], DESCRIBED, "the")
        made = [(link, joined(link, text)) for link, text in zip(links, described, strict=True)]
        held = [(link, question) for link, question in made if question]
        self.counts["no description"] += len(links) - len(held)
        held = self._checked("another answer comes", held, lambda link: [link.a, link.b], wanted=True)
        held = self._checked("one passage is enough", held, lambda link: [link.a], wanted=False)
        held = self._checked("no passage is needed", held, lambda link: [], wanted=False)
        held = self._checked("the other is enough", held, self._without_a, wanted=False)
        self.counts["kept"] += len(held)
        return held

    def _without_a(self, link: Linked) -> list[Passage]:
        return [link.b, *self._names.misleading(link)]

    def _checked(
        self,
        why: str,
        held: list[tuple[Linked, str]],
        shown: Callable[[Linked], list[Passage]],
        *,
        wanted: bool,
    ) -> list[tuple[Linked, str]]:
        """Those whose answer comes, if it is ``wanted``, or does not, with the passages ``shown``."""
        passages = [shown(link) for link, _ in held]
        tasks = [(some, f"{question}\n{ANSWER}") for some, (_, question) in zip(passages, held, strict=True)]
        said = self._asked(tasks, ANSWERED)
        found = [
            one for one, text in zip(held, said, strict=True) if is_same(text, one[0].pair.answer) is wanted
        ]
        self.counts[why] += len(held) - len(found)
        return found

    def _asked(
        self, tasks: Sequence[tuple[Sequence[Passage], str]], new_tokens: int, begin: str = ""
    ) -> list[str]:
        if not tasks:
            return []
        reader = self._reader
        read = reader.read([reader.head([(each.title, each.text) for each in some]) for some, _ in tasks])
        rows = [reader.task(text, begin, has_documents=bool(some)) for some, text in tasks]
        return reader.write(read, rows, new_tokens)


def described(links: Iterable[tuple[Linked, str]]) -> Iterator[Mapping[str, object]]:
    for link, question in links:
        yield {"passages": [link.a.id, link.b.id], "question": question, "answer": link.pair.answer}


def work(given: argparse.Namespace, number: int) -> None:
    """What one of the processes does. A link is tried once, whichever process meets it."""
    started = time.monotonic()
    names = Names(read_passages(given.passages / "passages.jsonl.gz"))
    links = list(names.links(read_pairs(given.out)))
    random.Random(SEED).shuffle(links)
    links = links[: given.limit][number :: given.workers]
    joiner = Joiner(Reader(given.model, given.device, SYSTEM), names)
    with (given.out / f"joined-{number}.jsonl").open("w", encoding="utf-8") as file:
        for at in range(0, len(links), given.batch):
            if time.monotonic() - started > given.seconds:
                break
            for row in described(joiner.joined(links[at : at + given.batch])):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            figures = {"counts": dict(joiner.counts), "seconds": round(time.monotonic() - started, 1)}
            write_json(given.out / f"joined-{number}.json", figures)
            print(f"{number}: {dict(joiner.counts)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--limit", type=int, help="try the first N links only")
    return in_processes("benchmarks.written_questions.join", parser, work)


if __name__ == "__main__":
    sys.exit(main())
