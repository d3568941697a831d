"""Questions to compare strategies with: those of users in the query log, those given, and those about a
namespace's own chunks, written by the serving model or sentences with a gap."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal

from ragserve.answering.query_log import LoggedQuestions, question_id
from ragserve.errors import InvalidRequest, NotFound
from ragserve.ingest.prune import every_document
from ragserve.json_lines import json_lines
from ragserve.verification.metrics import count_words
from ragserve_index import IndexStore
from ragserve_index.types import Chunk
from ragserve_index.word_cutting import UNSPACED
from sglang_ext.wire.sentence_ends import ends_sentence, sentence_ends

Kind = Literal["asked", "given", "written", "pair", "cloze"]
_DOCUMENTS = 20_000  # that are drawn from
_MIN_WORDS = 12  # of a chunk
_QUESTION_WORDS = range(4, 41)
_CLOZE_WORDS = range(7, 41)
_GAP = "_____"
_LABEL = re.compile(r"^(?:question\s*+(?:\d++\s*+)?[:.]|\d++[.)])\s*+", re.I)  # before a question
_LETTER = rf"[^\W{UNSPACED}]"  # words of scripts that do not separate them cannot be told
_WORD = re.compile(rf"{_LETTER}(?:{_LETTER}|['.,-])*{_LETTER}|{_LETTER}")


@dataclass(frozen=True, slots=True)
class DrawnQuestion:
    """A question; ``references``: what a right answer says, in one of several ways, or of a pair its two
    parts; empty where that is not known."""

    id: str
    kind: Kind
    text: str
    references: tuple[str, ...] = ()


def drawn(store: IndexStore, namespace: str, seed: int = 0) -> Iterator[Chunk]:
    """Draw chunks, each once: one of every document, then another of every document, and so on. The order is
    the same every time while the documents are. Those that are removed meanwhile are left out. Raises
    NotFound for an unknown namespace."""
    draw = random.Random(seed)
    documents = list(islice(every_document(store, namespace), _DOCUMENTS))
    draw.shuffle(documents)
    left = {d.doc_id: draw.sample(range(d.n_chunks), d.n_chunks) for d in documents if d.n_chunks}
    while left:
        for doc_id, places in list(left.items()):
            wanted = places.pop()
            if not places:
                del left[doc_id]
            try:
                chunks = store.document_chunks(namespace, doc_id)
            except NotFound:
                store.namespace(namespace)  # raises where that is gone, too
                left.pop(doc_id, None)
                continue
            for place, chunk in enumerate(chunks):
                if place == wanted and count_words(chunk.text) >= _MIN_WORDS:
                    yield chunk


def written(answer: str, shown: Sequence[str] = ()) -> str | None:
    """The question in what a model wrote; None if there is none, or it is one of those that were
    ``shown``."""
    line = next((line.strip() for line in answer.splitlines() if line.strip()), "")
    line = _LABEL.sub("", line).strip("\"'“”*` ")
    asks = line.endswith(("?", "？", "؟")) and count_words(line) in _QUESTION_WORDS
    return line if asks and line not in shown else None


def cloze(text: str, draw: random.Random, earlier: int = 0) -> tuple[str, tuple[str, ...]] | None:
    """Ask for a word that was left out of one of the text's sentences, a name or number if it has one, else
    the longest word; with the word. ``earlier``: of how many others the same ``draw`` has asked. None if no
    further sentence has a fitting length."""
    cuts = [0, *sentence_ends(text), len(text)]
    sentences = [text[start:end].strip() for start, end in pairwise(cuts)]
    sentences = [s for s in sentences if ends_sentence(s) and count_words(s) in _CLOZE_WORDS]
    if not sentences:
        return None
    sentence = draw.choice(sentences)
    if earlier:
        others = [each for each in dict.fromkeys(sentences) if each != sentence]
        draw.shuffle(others)
        if earlier > len(others):
            return None
        sentence = others[earlier - 1]
    words = list(_WORD.finditer(sentence))
    if words and not count_words(sentence[: words[0].start()]):
        words.pop(0)  # it has a capital in any case
    telling = [word for word in words if word[0][0].isupper() or word[0][0].isdigit()]
    gap = draw.choice(telling) if telling else max(words, key=lambda word: len(word[0]), default=None)
    if gap is None:
        return None
    return f'What is missing in "{sentence[: gap.start()]}{_GAP}{sentence[gap.end() :]}"?', (gap[0],)


def given(path: Path) -> list[DrawnQuestion]:
    """The questions of a file: JSON lines with a ``question`` each and, where they are known, ``answers``, or
    lines of plain text. Raises InvalidRequest if there is none, or the file cannot be read."""
    answers: dict[str, tuple[str, ...]] = {}
    if path.suffix in {".jsonl", ".gz"}:
        texts = []
        for _, row in json_lines(path, "Give JSON lines, or a text file with a question a line."):
            row = row if isinstance(row, dict) else {}
            texts.append(str(row.get("question", "")).strip())
            known = row.get("answers") or ()
            answers[texts[-1]] = tuple(map(str, [known] if isinstance(known, str) else known))
    else:
        try:
            texts = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"{path} cannot be read: {error}.", hint="Give a text file with a question a line."
            ) from error
    questions = list(dict.fromkeys(text.strip() for text in texts if text.strip()))
    if not questions:
        raise InvalidRequest(f"{path} holds no questions.", hint="Give one a line.")
    return [DrawnQuestion(_digest(each), "given", each, answers.get(each, ())) for each in questions]


def asked(logged: LoggedQuestions) -> Iterator[DrawnQuestion]:
    """The questions of users, newest first."""
    while (text := logged.next()) is not None:
        yield DrawnQuestion(question_id(text), "asked", text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
