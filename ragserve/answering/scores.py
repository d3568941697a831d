"""The retriever's scores of a prompt's passages, as they travel to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragserve.answering.prompt import Prompt, PromptBuilder
from ragserve.answering.results import RetrievedPassage
from sglang_ext.wire.protocol import RetrievalScores

if TYPE_CHECKING:
    from ragserve.retrieval.retriever import SentenceScores


SCORED = "samkv"  # the strategy that reads them


def retrieval_scores(
    builder: PromptBuilder,
    prompt: Prompt,
    passages: Sequence[RetrievedPassage],
    sentences: Sequence[SentenceScores],
) -> RetrievalScores | None:
    """Cosines of the passages that the prompt has, and of their ``sentences``; None where there are none.

    A passage that was cut has the scores of what is left of it."""
    shown = passages[: prompt.documents_kept]
    documents = tuple(passage.cosine for passage in shown)
    if all(cosine is None for cosine in documents) and not any(sentences):
        return None
    by_token = []
    for passage, pairs in zip(shown, sentences, strict=False):
        own = [(start, cosine) for start, cosine in pairs if start < len(passage.text)]
        tokens = builder.token_starts(passage.title, passage.text, [start for start, _ in own])
        # of several sentences that begin in one token the best counts
        best: dict[int, float] = {}
        for token, (_, cosine) in zip(tokens, own, strict=bool(tokens)):
            best[token] = max(cosine, best.get(token, cosine))
        by_token.append(tuple(sorted(best.items())))
    return RetrievalScores(documents, tuple(by_token))
