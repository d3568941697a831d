"""A model writes questions about passages, and what it cannot answer again is dropped.

    python -m benchmarks.written_questions.write PASSAGES OUT MODEL [--workers 6] [--questions 5]
        [--batch 256] [--device cuda] [--seconds S] [--limit N]

PASSAGES: the folder that `benchmarks.written_questions.passages` has made. MODEL: an instruction-tuned
model's folder. Each of the workers, processes on one device, reads every so-manieth passage and writes
OUT/pairs-N.jsonl, lines {passage, question, answer}, and OUT/pairs-N.json, what was dropped and why; the same
command goes on where it stopped, and one with other options is refused. A pair is kept where

* the answer stands in the passage, and not in the question;
* the question names something, and no "passage" or "text", and no evaluation set has it;
* the same answer comes again when the question is asked anew with the passage alone,
* and does not come without it.

The beginning of each question is given (When, Who, How many, ...), as the passage allows."""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.model_recipe.overlap import words
from benchmarks.written_questions.passages import SEED, Passage, read_passages
from benchmarks.written_questions.reader import Read, Reader
from ragserve.files import write_json
from ragserve.verification.metrics import contains_answer, normalise, token_f1

SYSTEM = "You are given documents. Do exactly what you are asked to do with them, and nothing else."
WRITE = (
    "Write one short question that the document answers, and the answer. The answer is one to five words "
    "that stand in the document. The question is about what the document says, not about the document, and "
    "must be clear to somebody who does not see it: it names {name}, or another person, place or thing. "
    "Write two lines:\nQ: the question\nA: the answer"
)
ANSWER = "Answer in as few words as possible, without a sentence around it."
WRITTEN, ANSWERED = 40, 12  # most tokens
SAME = 0.6  # least F1 of an answer that has come again
MOST_WORDS = 6  # of an answer
_STARTS = (  # how a question may begin, and what the passage must have for it
    ("When", r"\b1\d{3}\b|\b20\d\d\b"),
    ("In which year", r"\b1\d{3}\b|\b20\d\d\b"),
    ("How many", r"\b\d+ [a-z]"),
    ("Who", r"[A-Z][a-z]+ [A-Z][a-z]+"),
    ("Where", r"\b(?:in|at|from) [A-Z]"),
    ("Which", r""),
    ("What", r""),
    ("What is the name of the", r"[A-Z]"),
)
_KINDS = (("In which year", r"\b\d{3,4}\b"), ("When", r"\d"), ("How many", r"\d|^[a-z]+(?:-[a-z]+)?$"))
"""What the answer to a question that begins so must have."""
_POINTS = re.compile(r"\b(?:document|passage|text|article|paragraph|mentioned|described|above|following)s?\b")
_NAME = re.compile(r"(?<!^)\b(?:[A-Z]|\d)")
_SORTED = 8  # batches whose passages are sorted by length together


class Pair(NamedTuple):
    """A question about a passage, and its answer."""

    passage: str
    question: str
    answer: str


def starts(passage: Passage, n: int) -> list[str]:
    """How ``n`` questions about a passage begin."""
    draw = random.Random(f"{SEED} {passage.id}")
    fit = [start for start, needed in _STARTS if re.search(needed, passage.text)]
    draw.shuffle(fit)
    return [fit[number % len(fit)] for number in range(n)]


def parsed(begin: str, written: str) -> tuple[str, str] | None:
    """The question and the answer of what the model has written behind ``begin``."""
    lines = [
        line.strip() for line in (begin + written).removeprefix("Q:").strip().split("\n") if line.strip()
    ]
    if len(lines) < 2 or not lines[1].startswith("A:"):
        return None
    question, answer = lines[0], lines[1].removeprefix("A:").strip().rstrip(".").strip('"')
    if not question.endswith("?") or not 4 <= len(question.split()) <= 30:
        return None
    return (question, answer) if 1 <= len(answer.split()) <= MOST_WORDS else None


def objection(passage: Passage, question: str, answer: str) -> str | None:
    """What is wrong with a pair, by its words."""
    if not contains_answer(passage.text, [answer]):
        return "answer is not in the passage"
    if contains_answer(question, [answer]):
        return "answer is in the question"
    if _POINTS.search(question.lower()) or not _NAME.search(question):
        return "question is not clear alone"
    if not all(re.search(needed, answer) for start, needed in _KINDS if question.startswith(start)):
        return "answer is of another kind"
    return None


def is_same(said: str, answer: str) -> bool:
    """Whether what is said is the answer, or has it in a sentence."""
    line = said.strip().partition("\n")[0]
    return contains_answer(line, [answer]) or token_f1(line, [answer]) >= SAME


class Writer:
    """Writes and checks questions. ``asked``: normalised questions of evaluation sets; ``counts``: what
    became of all that were written."""

    def __init__(self, reader: Reader, asked: frozenset[str], questions: int) -> None:
        self._reader, self._asked, self._n = reader, asked, questions
        self.counts: Counter[str] = Counter()

    def pairs(self, passages: Sequence[Passage]) -> list[Pair]:
        """The pairs kept of a batch of passages."""
        reader = self._reader
        read = reader.read([reader.head([(each.title, each.text)]) for each in passages])
        kept: list[Pair] = []
        seen: set[tuple[str, str]] = set()
        begins = [starts(each, self._n) for each in passages]
        for number in range(self._n):
            own = [each[number] for each in begins]
            tasks = [
                reader.task(WRITE.format(name=passage.name), f"Q: {start}")
                for passage, start in zip(passages, own, strict=True)
            ]
            written = reader.write(read, tasks, WRITTEN)
            found = [
                self._possible(passage, start, text, seen)
                for passage, start, text in zip(passages, own, written, strict=True)
            ]
            kept += self._checked(read, found)
        return kept

    def _possible(self, passage: Passage, start: str, text: str, seen: set[tuple[str, str]]) -> Pair | None:
        """What was written, if it is a pair that may be kept."""
        self.counts["written"] += 1
        found = parsed(f"Q: {start}", text)
        why = objection(passage, *found) if found else "no question and answer"
        if found and not why:
            key = (passage.id, normalise(found[1]))
            if " ".join(words(found[0])) in self._asked:
                why = "an evaluation set has the question"
            elif key in seen:
                why = "answer is asked for already"
            seen.add(key)
        if why or not found:
            self.counts[why or ""] += 1
            return None
        return Pair(passage.id, *found)

    def _checked(self, read: Read, found: Sequence[Pair | None]) -> list[Pair]:
        """The pairs whose answer comes again with the passage, and not without it."""
        if not any(found):
            return []
        reader = self._reader
        tasks = [reader.task(f"{pair.question}\n{ANSWER}" if pair else "?") for pair in found]
        again = reader.write(read, tasks, ANSWERED)
        held = []
        for pair, said in zip(found, again, strict=True):
            if pair and is_same(said, pair.answer):
                held.append(pair)
            elif pair:
                self.counts["another answer comes"] += 1
        kept = []
        for pair, said in zip(held, self.without(held), strict=True):
            if is_same(said, pair.answer):
                self.counts["answer comes without the passage"] += 1
            else:
                kept.append(pair)
        self.counts["kept"] += len(kept)
        return kept

    def without(self, pairs: Sequence[Pair]) -> list[str]:
        """What is answered without any document."""
        if not pairs:
            return []
        reader = self._reader
        read = reader.read([reader.head([])] * len(pairs))
        tasks = [reader.task(f"{each.question}\n{ANSWER}", has_documents=False) for each in pairs]
        return reader.write(read, tasks, ANSWERED)


def asked_questions(folder: Path) -> frozenset[str]:
    with gzip.open(folder / "asked.txt.gz", "rt", encoding="utf-8") as lines:
        return frozenset(line.rstrip("\n") for line in lines)


def batches(passages: Sequence[Passage], size: int) -> list[list[Passage]]:
    """Batches of passages of like length, in order but for that."""
    found = []
    for start in range(0, len(passages), size * _SORTED):
        some = sorted(passages[start : start + size * _SORTED], key=lambda each: len(each.text))
        found += [some[at : at + size] for at in range(0, len(some), size)]
    return found


def options_of(given: argparse.Namespace) -> dict[str, Any]:
    """What decides which passage is in which batch, and what is written about it."""
    about = json.loads((given.passages / "passages.json").read_text(encoding="utf-8"))
    names = ("workers", "questions", "batch", "limit")
    return {name: getattr(given, name) for name in names} | {
        "model": given.model.name,
        "passages": about["sha256"],
    }


def begun(state: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a process has done before. Exits where that was with other options."""
    if not state.exists():
        return {"batches": 0, "counts": {}}
    done: dict[str, Any] = json.loads(state.read_text(encoding="utf-8"))
    known = done.get("options", {})
    if other := sorted(name for name in options if known.get(name) != options[name]):
        sys.exit(f"{state} has been begun with another {', '.join(other)}; give another OUT.")
    return done


def work(given: argparse.Namespace, number: int) -> None:
    """What one of the processes does."""
    ends = time.monotonic() + given.seconds
    passages = read_passages(given.passages / "passages.jsonl.gz")[: given.limit][number :: given.workers]
    path, state = given.out / f"pairs-{number}.jsonl", given.out / f"pairs-{number}.json"
    options = options_of(given)
    done = begun(state, options)
    started = time.monotonic()
    writer = Writer(
        Reader(given.model, given.device, SYSTEM), asked_questions(given.passages), given.questions
    )
    writer.counts.update(done["counts"])
    spent = done.get("seconds", 0.0)
    for place, batch in enumerate(batches(passages, given.batch)):
        if place < done["batches"]:
            continue
        if time.monotonic() > ends:
            break
        pairs = writer.pairs(batch)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(each._asdict(), ensure_ascii=False) + "\n" for each in pairs)
        figures = {"options": options, "batches": place + 1, "counts": dict(writer.counts)}
        write_json(state, figures | {"seconds": round(spent + time.monotonic() - started, 1)})
        print(f"{number}: batch {place + 1}, {writer.counts['kept']} pairs", flush=True)


def in_processes(
    module: str, parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace, int], None]
) -> int:
    """Run ``work`` for the numbers of --workers, each in a process of its own if there are several. Returns
    the worst exit code. Adds what such commands have in common to ``parser``."""
    parser.add_argument("passages", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no batch after that time")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.workers == 1 or given.worker is not None:
        work(given, given.worker or 0)
        return 0
    command = [sys.executable, "-m", module, *sys.argv[1:], "--worker"]
    processes = [subprocess.Popen([*command, str(number)]) for number in range(given.workers)]
    return max(abs(process.wait()) for process in processes)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=5, help="written about each passage")
    parser.add_argument("--batch", type=int, default=256, help="passages")
    parser.add_argument("--limit", type=int, help="read the first N passages only")
    return in_processes("benchmarks.written_questions.write", parser, work)


if __name__ == "__main__":
    sys.exit(main())
