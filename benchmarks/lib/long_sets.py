"""Questions over long contexts, cut or filled to a length, out of sets that are not question sets.

A set is named NAME@TOKENS: `lines` (LongEval's line retrieval), `kv` (key-value retrieval), `qmsum` (what was
said in a meeting around the lines that a question is about) and `mtrag_un` (the last question of a
conversation, its passages among others of the same domain). Any other NAME is a question set, as it is. The
same arguments make the same tasks."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragserve.answering.messages import Message
from ragserve.errors import InvalidRequest
from ragserve.eval.data import GivenPassage, Half, Question, find, halved, load, set_name, spread
from ragserve.eval.sparse_answers import SparseTask
from ragserve.json_lines import json_lines

Count = Callable[[str], int]
SHORT, LONG = 24, 300  # tokens of an answer
_KEY_TOKENS = 96  # a UUID takes up to 40, and the key may be said again
_LINE = re.compile(r"^line ([\w-]+): REGISTER_CONTENT is <\d+>$", re.MULTILINE)
_ANSWERABLE = "ANSWERABLE"
_SYSTEM = "Answer the question from the documents, in a few sentences."  # of long answers


def tasks_of(
    name: str, folder: Path, count: Count, limit: int | None = None, half: Half | None = None
) -> list[SparseTask]:
    """The tasks of a set in ``folder``, at most ``limit``, spread evenly over ``half`` of it. ``count``:
    tokens of a text. Raises InvalidRequest for a set that is not there."""
    kind, _, length = name.partition("@")
    if kind not in _MAKERS:
        path = find(name, folder)
        return [SparseTask(set_name(path), each, SHORT) for each in load(path, limit, half)]
    if not length.isdigit():
        raise InvalidRequest(f"How long are the contexts of {name!r}?", hint=f"Write {kind}@8000, say.")
    files, make = _MAKERS[kind]
    if not (paths := sorted(folder.glob(files))):
        raise InvalidRequest(f"No {files} in {folder}.", hint="Name the folder of the sets with --data.")
    rows = [row for path in paths for _, row in json_lines(path)]
    room = _Room(int(length), functools.cache(count))
    # Drawn by the place in the whole set: a question has the same context under any limit.
    chosen = spread(halved(list(enumerate(make(rows))), half), limit)
    made = (each(room, random.Random(f"{name} {number}")) for number, each in chosen)
    return [replace(task, set=name, system=_SYSTEM if task.max_new_tokens == LONG else None) for task in made]


@dataclass(frozen=True, slots=True)
class _Room:
    """Tokens of a context, and how they are counted."""

    tokens: int
    count: Count

    def filled(self, needed: Sequence[str], others: Iterable[str], draw: random.Random) -> list[str]:
        """The needed texts among others, as many as fit, in a random order."""
        found = list(needed)
        free = self.tokens - sum(map(self.count, found))
        for text in others:
            free -= self.count(text)
            if free < 0:
                break
            found.append(text)
        draw.shuffle(found)
        return found


_Maker = Callable[[_Room, random.Random], SparseTask]


def _question(name: str, asked: str, answer: str, passages: Sequence[GivenPassage]) -> Question:
    return Question(name, asked, (answer,), tuple(passages), (), "")


def _lines(rows: Sequence[Any]) -> list[_Maker]:
    pool = {found[1]: found[0] for row in rows for found in _LINE.finditer(row["prompt"])}
    names = list(pool)

    def make(number: int, row: Any, room: _Room, draw: random.Random) -> SparseTask:
        name = row["random_idx"][0]
        others = (pool[each] for each in draw.sample(names, len(names)) if each != name)
        text = "\n".join(room.filled([row["correct_line"].strip()], others, draw))
        asked = f"What is the REGISTER_CONTENT in line {name}? Write the number."
        passage = GivenPassage("Lines", text)
        question = _question(str(number), asked, str(row["expected_number"]), [passage])
        return SparseTask("", question, SHORT, "contains")

    return [functools.partial(make, number, row) for number, row in enumerate(rows)]


def _kv(rows: Sequence[Any]) -> list[_Maker]:
    pool = [pair for row in rows for pair in row["ordered_kv_records"]]

    def make(number: int, row: Any, room: _Room, draw: random.Random) -> SparseTask:
        start = draw.randrange(len(pool))  # as good as any order: few of many are taken
        pairs = (pool[(start + step) % len(pool)] for step in range(len(pool)))
        others = (f'"{key}": "{value}"' for key, value in pairs if key != row["key"])
        text = "\n".join(room.filled([f'"{row["key"]}": "{row["value"]}"'], others, draw))
        asked = f'What is the value of the key "{row["key"]}"?'
        question = _question(str(number), asked, row["value"], [GivenPassage("Records", text)])
        return SparseTask("", question, _KEY_TOKENS, "contains")

    return [functools.partial(make, number, row) for number, row in enumerate(rows)]


def _qmsum(rows: Sequence[Any]) -> list[_Maker]:
    def make(name: str, row: Any, query: Any, room: _Room, draw: random.Random) -> SparseTask:
        said = [f"{line['speaker']}: {line['content']}" for line in row["meeting_transcripts"]]
        sizes = [room.count(line) + 1 for line in said]
        spans = [(int(first), int(last)) for first, last in query["relevant_text_span"]]
        first, end = _around(spans[0][0], spans[-1][1] + 1, sizes, room.tokens)
        passage = GivenPassage(f"Meeting, from line {first}", "\n".join(said[first:end]))
        return SparseTask("", _question(name, query["query"], query["answer"], [passage]), LONG)

    return [
        functools.partial(make, f"{number} {place}", row, query)
        for number, row in enumerate(rows)
        for place, query in enumerate(row["specific_query_list"])
    ]


def _mtrag(rows: Sequence[Any]) -> list[_Maker]:
    pool: dict[str, dict[str, None]] = {}
    for row in rows:
        pool.setdefault(row["Collection"], {}).update({c["text"].strip(): None for c in row["contexts"]})

    def make(row: Any, room: _Room, draw: random.Random) -> SparseTask:
        own = list(dict.fromkeys(each["text"].strip() for each in row["contexts"]))
        domain = list(pool[row["Collection"]])
        others = (text for text in draw.sample(domain, len(domain)) if text not in own)
        passages = [GivenPassage("", text) for text in room.filled(own, others, draw)]
        said = [
            Message("user" if one["speaker"] == "user" else "assistant", one["text"]) for one in row["input"]
        ]
        answer = row["targets"][0]["text"]
        question = _question(row["task_id"], said[-1].content, answer, passages)
        return SparseTask("", question, LONG, history=tuple(said[:-1]))

    fine = (row for row in rows if row["contexts"] and _ANSWERABLE in row["answerability"])
    return [functools.partial(make, row) for row in fine]


def _around(first: int, end: int, sizes: Sequence[int], room: int) -> tuple[int, int]:
    """Lines around ``first`` to ``end`` that fit into ``room`` tokens; the first ones of them if these do
    not."""
    first, end = max(0, first), min(end, len(sizes))
    while end - first > 1 and sum(sizes[first:end]) > room:
        end -= 1
    free = room - sum(sizes[first:end])
    while True:
        before = first > 0 and sizes[first - 1] <= free
        behind = end < len(sizes) and sizes[end] <= free - (sizes[first - 1] if before else 0)
        if before:
            first -= 1
            free -= sizes[first]
        if behind:
            free -= sizes[end]
            end += 1
        if not before and not behind:
            return first, end


_MAKERS: dict[str, tuple[str, Callable[[Sequence[Any]], list[_Maker]]]] = {
    "lines": ("longeval/lines_*.jsonl*", _lines),
    "kv": ("kv_retrieval/kv-retrieval*.jsonl*", _kv),
    "qmsum": ("qmsum/test.jsonl*", _qmsum),
    "mtrag_un": ("mtrag_un/*.jsonl*", _mtrag),
}
