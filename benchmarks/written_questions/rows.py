"""Rows to train on, of the pairs that are kept: forms, passages beside, dialogues, comparisons.

    python -m benchmarks.written_questions.rows make PASSAGES PAIRS ROWS.jsonl.gz [--limit N]
    python -m benchmarks.written_questions.rows expand PASSAGES ROWS.jsonl.gz OUT.jsonl [--laid-out]

`make` writes a line a question, with its passages by id: {question, answer, passages, gold, kind, system, k,
history}. ``passages`` are the nearest to the question by the embedder (RAGSERVE_EMBEDDER), best first, the
gold ones among them; none but these has the answer. ``answer`` is null where the gold passages are left out.
Beside ROWS come ROWS.json, with counts and digest. All draws are seeded: the same pairs give the same bytes.

`expand` writes {question, answer, passages: [{title, text}], gold} with all passages, as `ragserve adapt`
reads them; with ``--laid-out`` what the model is to read and to say: ``k`` passages in an order of their own,
the ``system`` text, ``history``, ``target``, with citations where the system text asks for them, and
``more``: other rows' questions over the same passages, so that a model reads these once for several."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from benchmarks.model_recipe.question_forms import as_typed
from benchmarks.written_questions.join import read_pairs
from benchmarks.written_questions.passages import SEED, Passage, read_passages, write_lines
from benchmarks.written_questions.write import Pair
from ragserve.answering.chat_template import DEFAULT_SYSTEM
from ragserve.files import write_json
from ragserve.json_lines import json_lines
from ragserve.verification.metrics import contains_answer, words_contain, words_of
from ragserve.verification.question_probes import SHORT

NEAREST = 10
REFUSAL = "The documents do not say."
SYSTEMS = {"short": (SHORT, 0.5), "cited": (DEFAULT_SYSTEM, 0.5)}
"""System texts that ragserve sends, by name, and their shares. The second asks for citations."""
_UNANSWERABLE = 0.12  # share of the questions, asked once more without their passages
_FOLLOW_UP = 0.12  # of questions about a passage with two
_ONE = 0.15  # with the gold passages alone
_COMPARED = {  # verbs of a question "When was X ...?", and how two of them are compared
    "born": ("Who was born first", "Who is older"),
    "founded": ("Which was founded first", "Which is older"),
    "established": ("Which was established first",),
    "built": ("Which was built first", "Which was built earlier"),
    "released": ("Which was released first", "Which came out first"),
    "published": ("Which was published first",),
    "opened": ("Which was opened first",),
}
_WHEN = re.compile(rf"^(?:When|In which year|In what year) was (?:the )?(.+?) ({'|'.join(_COMPARED)})\?$")
_YEAR = re.compile(r"\b(1\d{3}|20\d\d)\b")
_OFTEN = 2  # comparisons of one pair
_MORE = 7  # questions beside a row's own, at most


class Asked(NamedTuple):
    """A question before its forms. ``history``: a turn before it, question and answer."""

    question: str
    answer: str
    gold: tuple[str, ...]
    kind: str
    history: tuple[tuple[str, str], ...] = ()


def every(
    pairs: Sequence[Pair], joined: Iterable[Mapping[str, Any]], by_id: Mapping[str, Passage]
) -> list[Asked]:
    """All questions: of one passage, follow-ups, joined and compared ones."""
    found = [Asked(each.question, each.answer, (each.passage,), "one passage") for each in pairs]
    found += follow_ups(pairs, by_id)
    found += [Asked(e["question"], e["answer"], tuple(e["passages"]), "joined") for e in joined]
    return [*found, *comparisons(pairs)]


def follow_ups(pairs: Sequence[Pair], by_id: Mapping[str, Passage]) -> Iterator[Asked]:
    """Second turns about a passage, with a pronoun for its subject where the question names it."""
    about: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        about[pair.passage].append(pair)
    for number, some in about.items():
        draw = random.Random(f"{SEED} follow-up {number}")
        if len(some) < 2 or draw.random() > _FOLLOW_UP * len(some):
            continue
        first, second = draw.sample(some, 2)
        question = with_pronoun(second.question, by_id[number])
        if question != second.question and contains_answer(first.question, [by_id[number].name]):
            yield Asked(question, second.answer, (number,), "follow-up", ((first.question, first.answer),))


def with_pronoun(question: str, passage: Passage) -> str:
    """The question with it, he or she for the passage's subject."""
    text = f" {passage.text.lower()} "
    he, she = (sum(text.count(f" {word} ") for word in some) for some in (("he", "his"), ("she", "her")))
    person = max(he, she) > 1
    subject = ("he" if he > she else "she") if person else "it"
    own = ("his" if he > she else "her") if person else "its"
    name = rf"(?:\b[Tt]he )?\b{re.escape(passage.name)}"
    question = re.sub(rf"{name}['’]s\b", own, question)
    return re.sub(rf"{name}\b(?!\w)", subject, question)


def comparisons(pairs: Sequence[Pair]) -> Iterator[Asked]:
    """Two questions for years of the same kind, as one for the earlier one."""
    kinds: dict[str, list[tuple[str, int, Pair]]] = defaultdict(list)
    for pair in pairs:
        match, year = _WHEN.match(pair.question), _YEAR.search(pair.answer)
        if match and year:
            kinds[match[2]].append((match[1], int(year[1]), pair))
    for verb, some in sorted(kinds.items()):
        draw = random.Random(f"{SEED} {verb}")
        for _ in range(_OFTEN):
            draw.shuffle(some)
            for (one, early, first), (two, late, second) in zip(some[::2], some[1::2], strict=False):
                if early == late or first.passage == second.passage:
                    continue
                question = f"{draw.choice(_COMPARED[verb])}, {one} or {two}?"
                gold = (first.passage, second.passage)
                yield Asked(question, one if early < late else two, gold, "compared")


def nearest(
    asked: Sequence[Asked], passages: Sequence[Passage], vectors: np.ndarray, questions: np.ndarray
) -> Iterator[list[int]]:
    """The numbers of the `NEAREST` passages for each question, and of its gold ones, which have no other with
    the answer beside them."""
    place = {each.id: number for number, each in enumerate(passages)}
    words = [words_of(each.text) for each in passages]
    for start in range(0, len(asked), 1024):
        scores = questions[start : start + 1024] @ vectors.T
        found = _best(scores, 3 * NEAREST)
        for one, row in zip(asked[start : start + 1024], found, strict=True):
            gold = [place[each] for each in one.gold]
            free = [
                int(number)
                for number in row
                if number in gold or not words_contain(words[number], [one.answer])
            ]
            others = [number for number in free if number not in gold][: NEAREST - len(gold)]
            missing = [number for number in gold if number not in free]
            yield [number for number in free if number in gold or number in others] + missing


def _best(scores: np.ndarray, n: int) -> np.ndarray:
    """The columns of the ``n`` greatest scores of each row, best first."""
    if n < scores.shape[1]:
        some = np.sort(np.argpartition(-scores, n, axis=1)[:, :n], axis=1)
    else:
        some = np.tile(np.arange(scores.shape[1]), (len(scores), 1))
    order = np.argsort(-np.take_along_axis(scores, some, 1), axis=1, kind="stable")
    return np.take_along_axis(some, order, 1)


def rows(
    asked: Sequence[Asked], near: Iterable[list[int]], passages: Sequence[Passage]
) -> Iterator[dict[str, Any]]:
    """The rows, each with a form, a system text and a number of passages drawn for it."""
    for one, found in zip(asked, near, strict=True):
        draw = random.Random(f"{SEED} {one.question} {one.gold}")
        ids = [passages[number].id for number in found]
        row = {
            "question": as_typed(one.question, draw),
            "answer": one.answer,
            "passages": ids,
            "gold": [ids.index(each) for each in one.gold],
            "kind": one.kind,
            "system": draw.choices(list(SYSTEMS), [share for _, share in SYSTEMS.values()])[0],
            "k": len(one.gold) if draw.random() < _ONE else draw.randint(len(one.gold) + 1, NEAREST),
        }
        if one.history:
            row["history"] = [list(turn) for turn in one.history]
        yield row
        without = [each for each in ids if each not in one.gold]
        if draw.random() < _UNANSWERABLE and one.kind != "compared" and without:
            kind, k = "no answer", draw.randint(1, len(without))
            form = as_typed(one.question, draw)
            yield row | {
                "question": form,
                "answer": None,
                "passages": without,
                "gold": [],
                "kind": kind,
                "k": k,
            }


def laid_out(
    row: Mapping[str, Any], by_id: Mapping[str, Passage], beside: Beside | None = None
) -> dict[str, Any]:
    """What a model is to read, and to say. ``beside``: where ``more`` questions come from."""
    draw = random.Random(f"{SEED} {row['question']} {row['passages']}")
    gold = [row["passages"][number] for number in row["gold"]]
    others = [each for each in row["passages"] if each not in gold]
    shown = [*gold, *others[: max(0, row["k"] - len(gold))]]
    draw.shuffle(shown)
    more = beside.of(row, shown, draw) if beside else []
    return {
        "passages": [_shown(by_id[each]) for each in shown],
        "gold": [shown.index(each) for each in gold],
        "kind": row["kind"],
        "system": SYSTEMS[row["system"]][0],
        **_said(row, row["answer"], shown, row["system"]),
        "more": [_said(other, answer, shown, row["system"]) for other, answer in more],
    }


def _said(row: Mapping[str, Any], answer: str | None, shown: Sequence[str], system: str) -> dict[str, Any]:
    """A row's question over the passages ``shown``, and what is to be said."""
    gold = [row["passages"][number] for number in row["gold"]]
    cited = "".join(f"[{shown.index(each) + 1}]" for each in gold) if answer and system == "cited" else ""
    return {
        "question": row["question"],
        "answer": answer,
        "history": row.get("history", []),
        "target": REFUSAL if answer is None else f"{answer} {cited}".strip(),
    }


class Beside:
    """Finds questions of other rows for the passages that a row shows."""

    def __init__(self, every: Sequence[Mapping[str, Any]], by_id: Mapping[str, Passage]) -> None:
        self._words = {number: words_of(each.text) for number, each in by_id.items()}
        self._about: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        self._near: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for row in every:
            gold = self._gold(row)
            for number in row["passages"] if gold else ():
                (self._about if number in gold else self._near)[number].append(row)

    @staticmethod
    def _gold(row: Mapping[str, Any]) -> set[str]:
        return {row["passages"][number] for number in row["gold"]}

    def of(
        self, row: Mapping[str, Any], shown: Sequence[str], draw: random.Random
    ) -> list[tuple[Mapping[str, Any], str | None]]:
        """At most `_MORE` rows and their answers over the passages ``shown``; None where none of these
        has it. Only gold passages have an answer, and no question comes twice."""
        seen = {row["question"].lower()}
        found: list[tuple[Mapping[str, Any], str | None]] = []
        refused = sum(draw.random() < _UNANSWERABLE for _ in range(_MORE))
        for lists, most in ((self._near, refused), (self._about, _MORE)):
            some = [other for number in shown for other in lists[number]]
            draw.shuffle(some)
            for other in some:
                if len(found) >= most:
                    break
                gold = self._gold(other)
                fit = gold.isdisjoint(shown) if lists is self._near else gold.issubset(shown)
                if not fit or other["question"].lower() in seen:
                    continue
                distractors = (self._words[each] for each in shown if each not in gold)
                if any(words_contain(words, [other["answer"]]) for words in distractors):
                    continue
                seen.add(other["question"].lower())
                found.append((other, None if lists is self._near else other["answer"]))
        draw.shuffle(found)
        return found


def whole(row: Mapping[str, Any], by_id: Mapping[str, Passage]) -> dict[str, Any]:
    """The row with all its passages, as `ragserve adapt` reads it; a follow-up stands behind its turn."""
    before = "".join(f"{question} {answer}\n" for question, answer in row.get("history", []))
    passages = [_shown(by_id[each]) for each in row["passages"]]
    return {
        "question": before + row["question"],
        "answer": row["answer"],
        "passages": passages,
        "gold": row["gold"],
    }


def _shown(passage: Passage) -> dict[str, str]:
    return {"title": passage.title, "text": passage.text}


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in json_lines(path)]


def make(folder: Path, pairs_folder: Path, out: Path, limit: int | None) -> dict[str, Any]:
    """Write the rows, and return what ROWS.json says of them."""
    from ragserve.config import load
    from ragserve.ingest.chunk_embedding import embedding_text
    from ragserve.retrieval.embedder import Embedder

    passages = read_passages(folder / "passages.jsonl.gz")[:limit]
    by_id = {each.id: each for each in passages}
    pairs = [each for each in read_pairs(pairs_folder) if each.passage in by_id]
    written = (row for path in sorted(pairs_folder.glob("joined-*.jsonl")) for _, row in json_lines(path))
    joined = {row["question"]: row for row in written if by_id.keys() >= set(row["passages"])}
    asked = every(pairs, joined.values(), by_id)
    random.Random(SEED).shuffle(asked)
    embedder = Embedder.of(load())
    vectors = embedder.encode([embedding_text(each.title, each.text) for each in passages])
    questions = embedder.encode_queries([each.question for each in asked])
    made = list(rows(asked, nearest(asked, passages, vectors, questions), passages))
    digest = write_lines(out, (json.dumps(row, ensure_ascii=False) for row in made))
    about = {
        "rows": len(made),
        "sha256": digest,
        "passages sha256": json.loads((folder / "passages.json").read_text(encoding="utf-8"))["sha256"],
        "embedder": embedder.name,
        "seed": SEED,
        "kinds": dict(Counter(row["kind"] for row in made).most_common()),
        "written": _summed(pairs_folder.glob("pairs-*.json")),
        "joined": _summed(pairs_folder.glob("joined-*.json")),
    }
    write_json(out.with_name(out.name.removesuffix(".jsonl.gz") + ".json"), about)
    return about


def _summed(paths: Iterable[Path]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for path in paths:
        found.update(json.loads(path.read_text(encoding="utf-8"))["counts"])
    return dict(found.most_common())


def expand(folder: Path, path: Path, out: Path, *, is_laid_out: bool) -> None:
    """Write the rows with the passages' texts."""
    by_id = {each.id: each for each in read_passages(folder / "passages.jsonl.gz")}
    every = read_rows(path)
    part = out.with_name(out.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        if not is_laid_out:
            file.writelines(f"{json.dumps(whole(row, by_id), ensure_ascii=False)}\n" for row in every)
        else:
            _Line.made_of = every, by_id, Beside(every, by_id)  # what forked processes share
            with multiprocessing.get_context("fork").Pool(min(8, os.cpu_count() or 1)) as pool:
                file.writelines(pool.imap(_Line.of, range(len(every)), chunksize=64))
    part.replace(out)


class _Line:
    """A laid-out row as a line, in a process of its own."""

    made_of: ClassVar[tuple[Sequence[Mapping[str, Any]], Mapping[str, Passage], Beside]]

    @classmethod
    def of(cls, number: int) -> str:
        every, by_id, beside = cls.made_of
        return json.dumps(laid_out(every[number], by_id, beside), ensure_ascii=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    first = verbs.add_parser("make")
    first.add_argument("passages", type=Path)
    first.add_argument("pairs", type=Path)
    first.add_argument("rows", type=Path)
    first.add_argument("--limit", type=int, help="use the first N passages only")
    second = verbs.add_parser("expand")
    second.add_argument("passages", type=Path)
    second.add_argument("rows", type=Path)
    second.add_argument("out", type=Path)
    second.add_argument("--laid-out", action="store_true")
    given = parser.parse_args()
    if given.verb == "make":
        print(json.dumps(make(given.passages, given.pairs, given.rows, given.limit), indent=1))
    else:
        expand(given.passages, given.rows, given.out, is_laid_out=given.laid_out)


if __name__ == "__main__":
    main()
