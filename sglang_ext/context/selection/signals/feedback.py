"""Signal `feedback`: what the best sentences of other documents lead to, by their words or by naming a title.

Pseudo-relevance feedback within a context: what answers the second step of a question shares words with the
sentence that answers the first, or stands in the document that this sentence names, and need not have a word
of the question."""

from __future__ import annotations

import math
import re
from collections import defaultdict

import torch

from sglang_ext.context.selection.signals.base import Evidence, scaled
from sglang_ext.context.selection.signals.words import Term, held_terms, terms_of

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
    [question] = evidence.texts.read([evidence.question.tolist()])
    asked = set(terms_of(question))
    places = _places(evidence)
    document = evidence.spread(torch.arange(len(evidence.first)))
    order = score.argsort(descending=True, stable=True).tolist()
    weight = (score / score.max().clamp(min=1e-9)).tolist()
    words = torch.zeros(evidence.sentences)
    for best in order[:_BEST]:
        shared = torch.zeros(evidence.sentences)
        for term, where in places.items():
            if best in where and term not in asked:
                shared[where] += math.log(evidence.sentences / len(where))
        shared[document == document[best]] = 0
        words = words.maximum(weight[best] * shared)
    named = torch.zeros(len(evidence.first))
    for number, title in enumerate(_titles(evidence)):
        naming = [
            weight[best]
            for best in order[:_BEST_NAMING]
            if document[best] != number and title - asked and all(best in places[term] for term in title)
        ]
        named[number] = max(naming, default=0.0)
    return scaled(words) + evidence.spread(named)


def _places(evidence: Evidence) -> dict[Term, list[int]]:
    """The numbers of the sentences by the terms they hold."""
    places: dict[Term, list[int]] = defaultdict(list)
    numbers = evidence.sentence[evidence.first].tolist()
    for first, held in zip(numbers, held_terms(evidence), strict=True):
        for term, own in held.items():
            places[term].extend(first + sentence for sentence in own)
    return places


def _titles(evidence: Evidence) -> list[set[Term]]:
    """The terms of each document's title."""
    ends = torch.searchsorted(evidence.sentence, evidence.sentence[evidence.first] + 1).tolist()
    runs = [evidence.ids[a:b].tolist() for a, b in zip(evidence.first.tolist(), ends, strict=True)]
    return [set(terms_of(_ASIDE.sub("", text))) for text in evidence.texts.read(runs)]
