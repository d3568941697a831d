"""The training mixture: which tasks, in which shares, when, and what each is made of.

`REAL` tasks ask about real text and `INVENTED` tasks about synthetic documents. Documents are hidden from
each other in a share of the samples of `HIDEABLE` tasks only: those whose answer is in one document. A task
that needs attention between documents is never trained with hidden ones, or the model would learn to do
without."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.model_recipe.corpus import BOS, CONTEXT, EOS, Corpus
from benchmarks.model_recipe.question_forms import as_typed
from benchmarks.model_recipe.real_tasks import RealTasks, Task
from benchmarks.model_recipe.samples import (
    REPLY,
    TEXT,
    Batch,
    Doc,
    Tokens,
    packed,
    prompt_sample,
    text_sample,
)
from benchmarks.model_recipe.synthetic import BRIDGE, NOT_STATED, Sample, Synthetic

HIDEABLE = {"facts", "reading", "gaps", "patterns", "single", "key_value", "needle"}
TAUGHT = {"reading", "gaps", "patterns", "multi", "text"}
"""Where the start weights, which have read more than what is at hand, teach."""
HIDDEN_SHARE = 0.3
BRANCHED_SHARE = 0.8
ASKED_TWICE = {"reading", "single", "key_value", "needle", "alias"}
"""Where branches ask each question again, in another form: the documents are most of the cost. *facts* are
asked three times, in other words."""

REAL = {"facts": 14, "reading": 18, "gaps": 13, "patterns": 6, "multi": 2, "text": 11}
INVENTED = {
    "single": 7, "chains": 6, "hop": 8, "pointers": 3, "alias": 3, "continued": 6,
    "update": 1, "key_value": 1, "needle": 4,
}  # fmt: skip
PHASES: list[tuple[float, dict[str, float]]] = [
    (0.0, {**REAL, **INVENTED, "hop": 10, "pointers": 4, "reading": 16}),
    (0.3, {**REAL, **INVENTED}),
    (0.75, {**REAL, **INVENTED, "facts": 16, "reading": 20, "text": 9, "pointers": 2}),
]
"""Shares of tokens by task, from a point of the schedule (0 to 1) on."""


class Mixture:
    """A stream of batches from one seed; ``hide`` says whether documents may be hidden."""

    def __init__(self, corpus: Corpus, seed: int, tokens: int) -> None:
        self.corpus = corpus
        self.tokens = tokens
        self.random = random.Random(seed)
        self.real = RealTasks(corpus, self.random)
        self.invented = Synthetic(seed * 7919 + 13, corpus.names, corpus.sentences)
        self.lengths: dict[str, float] = {}
        self.hide = True
        self.hidden_share, self.branched_share = HIDDEN_SHARE, BRANCHED_SHARE
        self.progress = 0.0
        self.tasks: dict[str, Callable[[], Task | Tokens]] = {
            "facts": self.real.facts,
            "reading": self.real.reading,
            "gaps": self.real.gaps,
            "patterns": self.real.patterns,
            "multi": self.real.multi,
            "needle": lambda: self.real.needle(self.invented),
            "text": self.text,
            **{name: self._invented(name) for name in INVENTED if name != "needle"},
        }

    def batch(self, progress: float) -> Batch:
        self.progress = progress
        return packed(self.draw, self.tokens, self.random)

    def draw(self, room: int) -> Tokens:
        """Draw a sample. Weights are shares of tokens, so they are divided by the task's mean length."""
        shares = next(shares for start, shares in reversed(PHASES) if self.progress >= start)
        names = list(shares)
        weights = [shares[name] / self.lengths.get(name, 1200.0) for name in names]
        return self.fitting(lambda: self.random.choices(names, weights)[0], room)

    def fitting(self, pick: Callable[[], str], room: int) -> Tokens:
        """A sample of a picked task, or plain text where none fits: one that is cut has no answer."""
        for _ in range(8):
            name = pick()
            tokens = self.sample(name)
            tokens.taught = name in TAUGHT
            self.lengths[name] = 0.98 * self.lengths.get(name, 1200.0) + 0.02 * len(tokens)
            if 8 < len(tokens) <= min(CONTEXT, room):
                return tokens
        return self.text(room)

    def sample(self, name: str) -> Tokens:
        made = self.tasks[name]()
        if isinstance(made, Tokens):
            return made
        hidden = self.hide and name in HIDEABLE and self.random.random() < self.hidden_share
        branches = self.hide and not made.dialogue and self.random.random() < self.branched_share
        turns = [*made.turns, *(made.again if branches else ())]
        if branches and name in ASKED_TWICE:
            turns += [turn for turn in turns if turn[1] != NOT_STATED]
        share = 0.4 if name in INVENTED else 1.0
        turns = [(self._typed(question, share), answer) for question, answer in turns]
        return prompt_sample(self.corpus, self.random, made.docs, turns, hidden, branches)

    def _typed(self, question: str, share: float) -> str:
        plain = BRIDGE in question or self.random.random() >= share
        return question if plain else as_typed(question, self.random)

    def text(self, room: int = 0) -> Tokens:
        """Plain text of an article, from its beginning or from anywhere."""
        title, body = self.random.choice(self.corpus.articles)
        n = min(room or CONTEXT, 4096)
        ids = np.concatenate([title, body])
        start = self.random.randrange(len(ids) - n + 1) if len(ids) > n and self.random.random() < 0.5 else 0
        ids = np.concatenate([[BOS], ids[start : start + n - 2], [EOS]])
        return text_sample(ids[1:] if self.random.random() < 0.3 else ids, TEXT)

    def _invented(self, name: str) -> Callable[[], Task]:
        def make() -> Task:
            k = self._documents()
            made: Sample = getattr(self, f"_{name}")(k)
            while not made.qas:
                made = getattr(self, f"_{name}")(k)
            docs: list[Doc] = list(made.docs)
            if name != "continued" and self.random.random() < 0.2:
                # real paragraphs around the invented documents
                for _ in range(self.random.randint(1, 3)):
                    docs.insert(self.random.choice((0, len(docs))), self.real.paragraphs(40, 250))
            return Task(docs, made.qas)

        return make

    def _documents(self, lowest: int = 2) -> int:
        return (
            self.random.randint(lowest, 8) if self.random.random() < 0.6 else self.random.randint(lowest, 12)
        )

    def _filler(self, k: int) -> int:
        """Words of other text in each of ``k`` documents; sometimes the prompt fills the context."""
        r, x = self.random, self.random.random()
        ranges = ((0.35, 0, 0), (0.55, 10, 80), (0.75, 80, 250), (1.0, 250, 1100))
        low, high = next((low, high) for limit, low, high in ranges if x < limit)
        room = (4000 if r.random() < 0.6 else 7900) / 1.55 / k - 45
        return int(max(0, min(r.randint(low, high), room)))

    def _single(self, k: int) -> Sample:
        weights = {"1hop": 0.88, "unknown": 0.05, "compare": 0.07}
        k = 5 if self.random.random() < 0.3 else k
        return self.invented.chains(k, self._filler(k), self.random.randint(3, 12), weights)

    def _chains(self, k: int) -> Sample:
        weights = {"1hop": 0.25, "2hop": 0.6, "compare": 0.1, "unknown": 0.05}
        return self.invented.chains(k, self._filler(k), self.random.randint(3, 12), weights)

    def _hop(self, k: int) -> Sample:
        """Two-hop questions; short names and hints fade out until the middle of the training."""
        hint = max(0.0, 1 - self.progress / 0.5)
        r = self.random
        easy = r.random() < 0.6
        self.invented.short = self.corpus.words if r.random() < 0.6 * hint else ()
        filler = (0 if r.random() < 0.7 else r.randint(5, 60)) if easy else self._filler(max(k, 4))
        pairs = r.randint(2, 6) if easy else max(2, min(k // 2, r.randint(2, 4)))
        made = self.invented.hop(pairs, filler, r.randint(4, 16), 0 if easy else max(k, 4), 0.4 * hint)
        self.invented.short = ()
        return made

    def _pointers(self, k: int) -> Sample:
        r = self.random
        words = self.corpus.words if r.random() < 0.5 else ()
        return self.invented.pointers(min(k, 5), r.randint(2, 12), r.randint(4, 10), words)

    def _alias(self, k: int) -> Sample:
        return self.invented.alias(k, self._filler(k), self.random.randint(3, 12))

    def _continued(self, k: int) -> Sample:
        return self.invented.continued(k, self._filler(k), self.random.randint(3, 12))

    def _update(self, k: int) -> Sample:
        return self.invented.update(max(3, k), self._filler(max(3, k)), self.random.randint(1, 4))

    def _key_value(self, k: int) -> Sample:
        return self.invented.key_value(min(k, 8), self.random.randint(3, 30), self.random.randint(4, 12))


def main() -> None:
    """Print a sample of each task: python -m benchmarks.model_recipe.mixture PACKED"""
    corpus = Corpus(Path(sys.argv[1]), sentences=2000)
    mixture = Mixture(corpus, 1, 16384)
    for name in mixture.tasks:
        tokens = mixture.sample(name)
        text = corpus.tokenizer.decode(list(tokens.ids), skip_special_tokens=False)
        answers = corpus.decode(tokens.ids[tokens.classes == REPLY])
        hidden = "hidden" if tokens.segments.max() >= 0 else "visible"
        print(
            f"== {name}: {len(tokens)} tokens, {hidden}, replies {answers!r}\n{text[:500]} ... {text[-500:]}"
        )


if __name__ == "__main__":
    main()
