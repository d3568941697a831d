"""Signal `feedback`: what the best sentences of other documents lead to, by their words or by naming a title.

Pseudo-relevance feedback within a context: what answers the second step of a question shares words with the
sentence that answers the first, or stands in the document that this sentence names, and need not have a word
of the question."""

from __future__ import annotations

import math
import re

import torch

from sglang_ext.context.selection.signals.base import Evidence, scaled
from sglang_ext.context.selection.signals.terms import Term, terms_of

# sentences to follow, chosen on questions of SQuAD and MuSiQue
_BEST, _BEST_NAMING = 5, 8
_ASIDE = re.compile(r"\(.*?\)")  # in a title: "Sing (film)" is called Sing


def feedback(evidence: Evidence, score: torch.Tensor) -> torch.Tensor:
    """f32 [sentences], from 0 to 2, by the fused ``score`` f32 [sentences] of the other signals: the sum of

        max over the `_BEST` sentences B of other documents of
            score(B) / max score * sum of log(sentences / sentences with t) over B's words t in the sentence
        max over the `_BEST_NAMING` sentences B of other documents with all words of the document's title of
            score(B) / max score

    the first without the question's words and over its largest value, the second where a title has others.
    A document's title is its first sentence."""
    asked = evidence.asked
    document: list[int] = evidence.spread(torch.arange(len(evidence.first))).tolist()
    own = torch.tensor(document)
    order: list[int] = score.argsort(descending=True, stable=True).tolist()
    weight = (score / score.max().clamp(min=1e-9)).tolist()
    best = {sentence: _terms_in(evidence, sentence, document[sentence]) for sentence in order[:_BEST_NAMING]}
    words = torch.zeros(evidence.sentences)
    for sentence in order[:_BEST]:
        shared = torch.zeros(evidence.sentences)
        for term in best[sentence]:
            if term not in asked:
                where = evidence.holding(term)
                shared[where] += math.log(evidence.sentences / len(where))
        shared[own == document[sentence]] = 0
        words = words.maximum(weight[sentence] * shared)
    named = torch.zeros(len(evidence.first))
    for number, title in enumerate(_titles(evidence)):
        naming = [
            weight[sentence]
            for sentence, terms in best.items()
            if document[sentence] != number and title - asked.keys() and title <= terms.keys()
        ]
        named[number] = max(naming, default=0.0)
    return scaled(words) + evidence.spread(named)


def _terms_in(evidence: Evidence, sentence: int, document: int) -> dict[Term, None]:
    """The terms of a sentence, in the order of its document's index."""
    number = sentence - evidence.openings[document]
    return {term: None for term, held in evidence.held[document].items() if number in held}


def _titles(evidence: Evidence) -> list[set[Term]]:
    """The terms of each document's title."""
    ends = torch.searchsorted(evidence.sentence, evidence.sentence[evidence.first] + 1).tolist()
    runs = [evidence.ids[a:b].tolist() for a, b in zip(evidence.first.tolist(), ends, strict=True)]
    return [set(terms_of(_ASIDE.sub("", text))) for text in evidence.texts.read(runs)]
