"""Prompts of tens of thousands of tokens: invented documents behind each other, and questions about them.

    python -m benchmarks.model_recipe.long_prompts PACKED OUT [--tokens 32000,128000] [--rows 60]

writes question sets: OUT/onehop-32k.jsonl.gz asks for a fact that one document states, crossdoc for one whose
document speaks of "he" or "this town" of the document before it. Their names are in no training, and their
sentences of articles that training leaves out. `LongMixture` trains a model to read such prompts
(``train.py --longest``)."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.model_recipe.corpus import Corpus
from benchmarks.model_recipe.mixture import Mixture
from benchmarks.model_recipe.names import Document
from benchmarks.model_recipe.samples import Tokens, prompt_sample
from benchmarks.model_recipe.synthetic import Sample, Synthetic

SHORTEST = 8192
USUAL = 32_768
ASKED = 0.06  # share of a sample's tokens that its questions get
WORDS = ((0, 80), (80, 250), (250, 1100), (250, 1100))
"""Words of other text in each document of a run, one of these ranges."""
TOKENS_PER_WORD, TOKENS_OF_FACTS, LEAST = 1.55, 45, 600


class LongDocuments(NamedTuple):
    """Documents, their token ids as a prompt has them, and (question, answer) pairs by kind."""

    docs: list[Document]
    ids: list[np.ndarray]
    asked: dict[str, list[tuple[str, str]]]


def long_documents(corpus: Corpus, invented: Synthetic, tokens: int) -> LongDocuments:
    """Documents of up to ``tokens`` tokens in all."""
    r = invented.random
    found = LongDocuments([], [], {"onehop": [], "crossdoc": []})
    taken: set[str] = set()
    while tokens > LEAST:
        k, words = r.randint(2, 8), r.randint(*r.choice(WORDS))
        words = min(words, int(tokens / TOKENS_PER_WORD / k) - TOKENS_OF_FACTS)
        kind = r.choice(("onehop", "crossdoc"))
        made = _run(invented, kind, k, max(0, words))
        ids = corpus.encode_all([f"{title}\n{text}\n" for title, text in made.docs])
        cost = sum(map(len, ids))
        if cost > tokens or taken & invented.used:
            tokens -= 50  # another run may fit, or has other names; this ends
            continue
        taken |= invented.used
        tokens -= cost + len(made.docs)
        found.docs.extend(made.docs)
        found.ids.extend(np.array(each, dtype=np.uint16) for each in ids)
        found.asked[kind] += made.qas
    return found


def _run(invented: Synthetic, kind: str, k: int, words: int) -> Sample:
    if kind == "onehop":
        return invented.chains(k, words, 3, {"1hop": 1.0})
    return invented.continued(k, words, 3, near=0.0)


class LongMixture(Mixture):
    """The mixture with samples of up to ``longest`` tokens, and the usual ones where these do not fit.

    From the point ``lengthened`` of the schedule on most batches have one sample of the largest length."""

    def __init__(self, corpus: Corpus, seed: int, tokens: int, longest: int, lengthened: float = 0.5) -> None:
        super().__init__(corpus, seed, tokens)
        self.longest, self.lengthened = longest, lengthened

    def draw(self, room: int) -> Tokens:
        if room < SHORTEST:
            return super().draw(room)
        length = int(math.exp(self.random.uniform(math.log(SHORTEST), math.log(USUAL))))
        if self.progress >= self.lengthened and self.random.random() < 0.7:
            length = self.longest
        return self.long(min(length, room, self.longest))

    def long(self, length: int) -> Tokens:
        """A sample of at most ``length`` tokens whose questions are branches."""
        made = long_documents(self.corpus, self.invented, int(length * (1 - ASKED)) - 64)
        turns = [(self._typed(q, 0.4), answer) for pairs in made.asked.values() for q, answer in pairs]
        self.random.shuffle(turns)
        while True:
            tokens = prompt_sample(self.corpus, self.random, made.ids, turns, branches=True)
            if len(tokens) <= length:
                return tokens
            turns = turns[: len(turns) // 2]


def question_set(corpus: Corpus, kind: str, tokens: int, rows: int, seed: int) -> list[dict[str, object]]:
    """Rows of a question set, with prompts of about ``tokens`` tokens."""
    invented = Synthetic(seed, corpus.names, corpus.sentences, evaluated=True)
    out: list[dict[str, object]] = []
    while len(out) < rows:
        made = long_documents(corpus, invented, tokens - 200)
        if made.asked[kind]:
            question, answer = invented.random.choice(made.asked[kind])
            row = {"id": f"{kind}-{tokens}-{len(out)}", "docs": made.docs, "kind": kind}
            out.append(row | {"question": question, "answers": [answer]})
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packed", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", default="32000,128000")
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--seed", type=int, default=71)
    given = parser.parse_args()
    corpus = Corpus(given.packed, sentences=60_000, part="heldout")
    given.out.mkdir(parents=True, exist_ok=True)
    for size in map(int, given.tokens.split(",")):
        for i, kind in enumerate(("onehop", "crossdoc")):
            rows = question_set(corpus, kind, size, given.rows, given.seed + size + i)
            path = given.out / f"{kind}-{size // 1000}k.jsonl.gz"
            with gzip.open(path, "wt", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            print(f"{path.name}: {len(rows)} rows", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
