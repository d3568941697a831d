"""The packed training data in memory: articles as token ids, passages with questions, country profiles."""

from __future__ import annotations

import json
import lzma
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are forked
from tokenizers import Tokenizer

from benchmarks.lib.places import REPO
from benchmarks.model_recipe.patterns import without_brackets

MODEL = REPO / "examples" / "models" / "ragserve-tiny"
PAD, BOS, EOS, SYSTEM, DOCUMENT, QUESTION, ANSWER = range(7)
SYSTEM_TEXT = "\nAnswer the question from the documents.\n"
CONTEXT = 8192

Ids = np.ndarray
TEXTS: dict[str, Any] = {
    "articles": lambda row: ([], [row[1]]),
    "reading": lambda row: ([q for q, _ in row[3]], [row[2]]),
    "facts": lambda row: ([], row[3]),
    "multi": lambda row: ([row[0]], [text for _, text, _ in row[2]]),
}
"""Questions and texts of a row of each file, for the check of overlaps."""


def read_rows(path: Path) -> Iterator[Any]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def rows_of_all(folder: Path, name: str) -> Iterator[Any]:
    """Rows of ``NAME.jsonl.xz``, or of ``NAME-1.jsonl.xz`` and those after it."""
    for path in sorted(folder.glob(f"{name}*.jsonl.xz")):
        yield from read_rows(path)


class Corpus:
    """Everything that samples are made of. Load it once and fork the workers.

    The ``part`` of the packed data that training leaves out is "heldout"."""

    def __init__(
        self, packed: Path, sentences: int = 60_000, seed: int = 0, tokenizer: Path = MODEL, part: str = "."
    ) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self.newline = self.encode("\n")[0]
        self.dot = self.encode(".")[0]
        self.system = [BOS, SYSTEM, *self.encode(SYSTEM_TEXT)]
        self.names: dict[str, list[str]] = json.loads((packed / "names.json").read_text(encoding="utf-8"))
        rows = list(rows_of_all(packed / part, "articles"))
        self.titles = [without_brackets(title) for title, _ in rows]
        self.articles = self._encoded(rows)
        self.reading = list(read_rows(packed / part / "reading.jsonl.xz"))
        self.facts = [row for row in read_rows(packed / part / "facts.jsonl.xz") if row[4]]
        self.multi = list(read_rows(packed / "multi.jsonl.xz"))
        self.patterns: dict[int, list[tuple[int, str, str, str]]] = {}
        for article, *found in read_rows(packed / part / "patterns.jsonl.xz"):
            self.patterns.setdefault(article, []).append(tuple(found))
        self.with_patterns = list(self.patterns)
        self.words = [w[1:] for w in self.tokenizer.get_vocab() if re.fullmatch("Ġ[A-Z][a-z]{2,9}", w)]
        self.sentences = self._sentences(rows, sentences, random.Random(seed))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        return [each.ids for each in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Ids) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def _encoded(self, rows: list[tuple[str, str]]) -> list[tuple[Ids, Ids]]:
        """(title ids, text ids) of each article, both ending with a line break."""
        os.environ["TOKENIZERS_PARALLELISM"] = "true"  # before the workers are forked
        titles = self.encode_all([title + "\n" for title, _ in rows])
        texts = self.encode_all([text + "\n" for _, text in rows])
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        pairs = zip(titles, texts, strict=True)
        return [(np.array(a, dtype=np.uint16), np.array(b, dtype=np.uint16)) for a, b in pairs]

    def _sentences(self, rows: list[tuple[str, str]], n: int, rng: random.Random) -> list[str]:
        out: list[str] = []
        for _, text in rng.sample(rows, len(rows)):
            out += [s for s in sentences_of(text[:6000]) if s.endswith(".")]
            if len(out) >= n:
                break
        return out[:n]


def sentences_of(text: str) -> list[str]:
    """Sentences of 40 to 260 characters."""
    found = re.split(r"(?<=[a-z0-9)]{2}\.) (?=[A-Z])|\n", text)
    return [sentence for sentence in found if 40 < len(sentence) < 260]
