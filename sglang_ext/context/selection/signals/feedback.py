"""Signal `feedback`: what the best sentences of other documents lead to, by their words or by naming a title.

Pseudo-relevance feedback within a context: what answers the second step of a question shares words with the
sentence that answers the first, or stands in the document that this sentence names, and need not have a word
of the question."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch

from sglang_ext.context.selection.signals.base import Evidence, scaled
from sglang_ext.context.selection.signals.words import rarity

# sentences to follow, chosen on questions of SQuAD and MuSiQue
_BEST, _BEST_NAMING = 5, 8


def feedback(evidence: Evidence, score: torch.Tensor) -> torch.Tensor:
    """f32 [S], from 0 to 2, by the fused ``score`` f32 [S] of the other signals: the sum of

        max over the `_BEST` sentences B of other documents of
            score(B) / max score * sum of log(sentences / sentences with t) over B's words t in the sentence
        max over the `_BEST_NAMING` sentences B of other documents with all words of the document's title of
            score(B) / max score

    the first without the question's words and over its largest value, the second where a title has others.
    A document's title is its first sentence."""
    sentences, terms, asked = evidence.sentences, evidence.terms, frozenset(evidence.asked)
    order: list[int] = score.argsort(descending=True, stable=True)[:_BEST_NAMING].tolist()
    best = list(zip(scaled(score)[order].tolist(), sentences.document[order].tolist(), strict=True))
    theirs = [terms.of(sentence) for sentence in order]
    wanted = [term for term in dict.fromkeys(chain.from_iterable(theirs[:_BEST])) if term not in asked]
    new = {term: number for number, term in enumerate(wanted)}
    held, counts = terms.holding(wanted)
    which, idf = np.repeat(np.arange(len(new)), counts), rarity(evidence, counts)
    words = np.zeros(len(sentences))
    for (weight, document), own in zip(best[:_BEST], theirs, strict=False):
        value = np.zeros(len(new))
        mine = [new[term] for term in own if term in new]
        value[mine] = idf[mine]
        shared = np.bincount(held, value[which], len(sentences))
        shared[sentences.document == document] = 0
        words = np.maximum(words, weight * shared)
    named = np.zeros(len(terms.titles), dtype=np.float32)
    held_by = [frozenset(own) for own in theirs]
    for number, title in enumerate(terms.titles):
        if not title <= asked:
            named[number] = max(
                (
                    weight
                    for (weight, document), own in zip(best, held_by, strict=True)
                    if document != number and title <= own
                ),
                default=0.0,
            )
    return scaled(torch.from_numpy(words).float()) + evidence.spread(torch.from_numpy(named))
