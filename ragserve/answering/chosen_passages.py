"""The passages that a strategy chooses among those found, before the prompt is laid out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ragserve.answering.prompt import most_read
from ragserve.answering.results import RetrievedPassage
from ragserve.errors import DocumentsTooLong

if TYPE_CHECKING:
    from ragserve.answering.prompt import PromptBuilder
    from ragserve.best_passages import PassagesOptions

_TIMES = 4  # as many characters as are read for a prompt
_INLINE_CHARS = 20_000  # more of them are read in a thread, so that other streams do not stutter


@dataclass(frozen=True, slots=True)
class ChosenPassages:
    """``order``: the numbers of the passages found, the first ``kept`` those chosen, each part as they were
    found. ``tokens``: of all."""

    order: list[int]
    kept: int
    tokens: int


async def choose(
    builder: PromptBuilder,
    question: str,
    found: Sequence[RetrievedPassage],
    options: PassagesOptions,
    given_tokens: int | None = None,
) -> ChosenPassages:
    """Choose among the passages that were found for a question, or came with it. ``given_tokens``: of
    a prompt, if they came with it. Raises DocumentsTooLong for many times that size."""
    chars = sum(len(each.text) for each in found)
    if given_tokens is not None and chars > (most := _TIMES * most_read(given_tokens)):
        raise DocumentsTooLong(
            f"The documents have {chars:,} characters; the best are chosen among {most:,} at most.",
            hint="Send less, or ingest them and ask their namespace.",
            param="documents",
        )

    texts = [(each.title, each.text) for each in found]

    def chosen() -> ChosenPassages:
        sizes = [len(builder.document_ids(*each)) for each in texts]
        kept = options.chosen(question, texts, sizes, search_scores(found))
        rest = sorted(set(range(len(found))).difference(kept))
        return ChosenPassages([*kept, *rest], len(kept), sum(sizes))

    read = builder.unread_chars(texts) if options.by == "score" else chars
    is_short = read < _INLINE_CHARS
    return chosen() if is_short else await asyncio.to_thread(chosen)


def search_scores(found: Sequence[RetrievedPassage]) -> list[float | None] | None:
    """The scores behind the passages' order: a reranker's, else cosines. None where the order has others: a
    reranker's that is fused with the search's, or that left passages out."""
    reranked = [each.rerank_score for each in found]
    if all(score is None for score in reranked):
        return [each.cosine for each in found]
    known = [score for score in reranked if score is not None]
    in_order = len(known) == len(found) and all(a >= b for a, b in pairwise(known))
    return reranked if in_order else None
