"""The choice among passages found, and the scores that it reads."""

from __future__ import annotations

import asyncio

import pytest

from ragserve.answering.chosen_passages import choose, search_scores
from ragserve.answering.prompt import PromptBuilder
from ragserve.answering.results import RetrievedPassage
from ragserve.best_passages import PassagesOptions
from tests.conftest import MODEL

Scores = list[float | None]


def found(
    cosines: Scores, reranked: Scores | None = None, text: str = "It rained."
) -> list[RetrievedPassage]:
    by_reranker: Scores = [None] * len(cosines) if reranked is None else reranked
    return [
        RetrievedPassage(index=index, title=f"T{index}", text=text, cosine=cosine, rerank_score=score)
        for index, (cosine, score) in enumerate(zip(cosines, by_reranker, strict=True), 1)
    ]


@pytest.mark.parametrize(
    ("cosines", "reranked", "read"),
    [
        ([0.5, 0.4], None, [0.5, 0.4]),
        ([0.4, 0.5], None, [0.4, 0.5]),  # a hybrid search's order, which BM25 joins
        ([0.5, None], None, [0.5, None]),  # a neighbour
        ([0.4, 0.5], [7.0, -2.0], [7.0, -2.0]),
        ([0.4, 0.5], [-2.0, 7.0], None),  # fused with the search's order
        ([0.4, 0.5, 0.3], [7.0, None, -2.0], None),  # not analysed: it kept its place
    ],
)
def test_the_scores_are_those_of_the_order(
    cosines: Scores, reranked: Scores | None, read: Scores | None
) -> None:
    assert search_scores(found(cosines, reranked)) == read


@pytest.mark.parametrize("text", ["It rained.", "It rained. " * 2000], ids=["short", "in-a-thread"])
def test_the_chosen_come_first_each_group_in_its_order(text: str) -> None:
    passages, options = found([0.1, 0.5, 0.4], text=text), PassagesOptions(keep=0.67)
    builder = PromptBuilder.load(str(MODEL))
    chosen = asyncio.run(choose(builder, "?", passages, options))
    assert (chosen.order, chosen.kept) == ([1, 2, 0], 2)
    assert chosen.tokens == sum(len(builder.document_ids(each.title, each.text)) for each in passages)
