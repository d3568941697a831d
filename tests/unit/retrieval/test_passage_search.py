"""The passages of a prompt: without copies, reranked, above a floor, as many as fit, with their
neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragserve.errors import InvalidRequest
from ragserve.retrieval.passage_search import FoundPassage, FoundPassages, PassageSearch, fitting
from ragserve.retrieval.retriever import Retriever
from ragserve.retrieval.search_options import SearchOptions
from ragserve_index import IndexStore
from ragserve_index.types import Chunk, NewChunk, NewDocument
from tests.unit.api.scripted_server import DIM, WordEmbedder

OTTERS = ["otters swim far", "they eat fish", "they sleep on ice", "in winter otters rest"]
DOCUMENTS = {"otters": OTTERS, "copy": ["Otters swim FAR!"], "cats": ["cats swim seldom", "cats sleep"]}


class ByLength:
    """Prefers long texts; cannot score those of two words."""

    comparable = True

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def scores(self, namespace: str, question: str, chunks: Sequence[Chunk]) -> Sequence[float | None]:
        self.asked.append((question, len(chunks)))
        return [float(len(c.text)) if len(c.text.split()) > 2 else None for c in chunks]

    async def close(self) -> None:
        return


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexStore]:
    with IndexStore(tmp_path_factory.mktemp("passages")) as store:
        store.ensure_namespace("n", embedder="words", dim=DIM)
        batch = []
        for name, texts in DOCUMENTS.items():
            chunks = [
                NewChunk(text, 100 * i, 100 * i + len(text), len(text.split()))
                for i, text in enumerate(texts)
            ]
            document = NewDocument(name, name, name, "text/plain", 1)
            batch.append((document, chunks, WordEmbedder().encode(texts)))
        store.replace_documents("n", batch)
        yield store


def found(store: IndexStore, options: SearchOptions, **more: Any) -> FoundPassages:
    async def main() -> FoundPassages:
        retriever = Retriever(store, WordEmbedder())
        try:
            search = PassageSearch(retriever, {"length": more.pop("reranker", ByLength())})
            return await search.search("n", "otters swim far", options, **more)
        finally:
            await retriever.close()

    return asyncio.run(main())


def texts(result: FoundPassages) -> list[str]:
    return [passage.chunk.text for passage in result.passages]


PLAIN = SearchOptions(k=2)


def test_nothing_is_changed_unasked(store: IndexStore) -> None:
    result = found(store, PLAIN)
    assert texts(result) == ["otters swim far", "Otters swim FAR!"]
    assert (result.reranked, result.rerank_ms) == (None, None)
    assert all(p.score == p.cosine is not None and p.search_rank is None for p in result.passages)


def test_copies_of_better_passages_are_left_out_for_others(store: IndexStore) -> None:
    result = found(store, replace(PLAIN, dedupe=0.8))
    assert texts(result) == ["otters swim far", "cats swim seldom"]


def test_a_reranker_orders_the_candidates(store: IndexStore) -> None:
    ranker = ByLength()
    options = SearchOptions(k=2, rerank="length", candidates=4)
    result = found(store, options, reranker=ranker)
    assert ranker.asked == [("otters swim far", 4)]
    assert texts(result) == ["in winter otters rest", "Otters swim FAR!"]
    assert [p.search_rank for p in result.passages] == [4, 2]
    assert [p.rerank_score for p in result.passages] == [21.0, 16.0]
    assert result.reranked is not None
    assert sorted(p.search_rank or 0 for p in result.reranked) == [1, 2, 3, 4]
    assert result.rerank_ms is not None
    found(store, options, reranker=ranker, variants=["and far? otters", "x"])
    assert ranker.asked[1:] == [("and far? otters", 4)], "the question after the turn before it"


def test_a_passage_without_a_score_keeps_its_place(store: IndexStore) -> None:
    every = found(store, SearchOptions(k=10)).passages
    place = [p.chunk.text for p in every].index("cats sleep")
    assert place > 0
    result = found(store, SearchOptions(k=10, rerank="length"))
    assert texts(result)[place] == "cats sleep"
    assert result.passages[place].rerank_score is None
    scores = [p.rerank_score for p in result.passages if p.rerank_score is not None]
    assert scores == sorted(scores, reverse=True)


def test_scores_of_one_question_only_are_fused_with_the_search(store: IndexStore) -> None:
    ranker = ByLength()
    ranker.comparable = False
    every = found(store, SearchOptions(k=10)).passages
    result = found(store, SearchOptions(k=10, rerank="length", min_score=0.5), reranker=ranker)
    assert all((p.cosine or 0) >= 0.5 for p in result.passages), "the floor is the search's"
    reranked = result.reranked or []
    scored = [p for p in reranked if p.rerank_score is not None]
    old = sorted(scored, key=lambda p: p.search_rank or 0)
    by_score = sorted(old, key=lambda p: -(p.rerank_score or 0))
    weights = [1 / (61 + old.index(p)) + 1 / (61 + by_score.index(p)) for p in scored]
    assert weights == sorted(weights, reverse=True)
    assert [p.search_rank for p in reranked] != list(range(1, len(every) + 1))


def test_an_unknown_reranker_is_refused_before_the_search(store: IndexStore) -> None:
    with pytest.raises(InvalidRequest, match=r"no reranker 'other'.*off, length") as caught:
        found(store, SearchOptions(k=1, rerank="other"))
    assert (caught.value.code, caught.value.param) == ("reranker_not_found", "rerank")


@pytest.mark.parametrize("retrieval", ["dense", "hybrid"])
def test_the_floor_is_the_cosines(store: IndexStore, retrieval: Any) -> None:
    options = SearchOptions(k=10, retrieval=retrieval, min_score=0.5)
    result = found(store, options)
    assert result.passages
    assert all((p.cosine or 0) >= 0.5 for p in result.passages)
    assert found(store, replace(options, min_score=1.1)).passages == []


def test_the_floor_of_words_and_of_a_reranker(store: IndexStore) -> None:
    lexical = SearchOptions(k=10, retrieval="lexical")
    best = found(store, lexical).passages[0].bm25 or 0
    assert len(found(store, replace(lexical, min_score=best)).passages) < len(found(store, lexical).passages)
    reranked = found(store, SearchOptions(k=10, rerank="length", min_score=17))
    assert texts(reranked) == ["in winter otters rest", "they sleep on ice"]


def test_neighbours_stand_around_their_passage(store: IndexStore) -> None:
    result = found(store, SearchOptions(k=1, neighbours=1))
    assert texts(result) == OTTERS[:2]
    assert [p.score is None for p in result.passages] == [False, True]
    near = found(store, SearchOptions(k=3, dedupe=0.8, neighbours=1))
    assert texts(near) == [*OTTERS, *DOCUMENTS["cats"]], "two passages near each other are one group"


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_no_passage_stands_twice_in_whatever_order_they_are_found(n: int) -> None:
    chunks = {
        i: Chunk(i, "d" if i < 9 else "e", i, f"chunk {i}", 0, 7, None, 1, "s", "t", {}) for i in range(12)
    }
    for order in permutations((1, 3, 5, 8, 10), 4):
        hits = [FoundPassage(chunks[i], score=1.0) for i in order]
        for most in (0, 5):
            chosen = fitting(hits, chunks, SearchOptions(k=4, neighbours=n, context_tokens=most))
            ids = [each.chunk.chunk_id for each in chosen]
            assert len(ids) == len(set(ids)), (order, ids)
            assert not most or len(ids) <= most
            scored = {each.chunk.chunk_id for each in chosen if each.score is not None}
            if not most:
                assert scored == set(order)
                for hit in order:
                    around = range(max(0, hit - n), min(11, hit + n) + 1)
                    wanted = [i for i in around if (i < 9) == (hit < 9)]
                    place = ids.index(wanted[0])
                    assert ids[place : place + len(wanted)] == wanted, "its neighbours stand around it"


def test_as_many_passages_as_the_budget_has_room_for(store: IndexStore) -> None:
    def within(tokens: int, **options: Any) -> list[str]:
        return texts(found(store, SearchOptions(k=10, dedupe=0.8, context_tokens=tokens, **options)))

    assert within(6) == ["otters swim far", "cats swim seldom"]
    assert within(9) == within(6), "the next has four"
    assert within(1) == ["otters swim far"], "the best stays"
    assert within(6, neighbours=1) == OTTERS[:2]
    assert within(5, neighbours=1) == OTTERS[:1], "the best stays without its neighbours"


def test_sentences_are_those_of_the_passages(store: IndexStore, tmp_path: Path) -> None:
    from ragserve_index.sentence_vectors import SentenceVectors

    embedder = WordEmbedder()
    with IndexStore(tmp_path) as own:
        own.ensure_namespace("n", embedder="words", dim=DIM)
        for name in ("a far swim", "otters swim far"):
            sentences = SentenceVectors.of([0], embedder.encode([name]))
            chunk = NewChunk(name, 0, len(name), 3, sentences=sentences)
            own.replace_documents(
                "n", [(NewDocument(name, name, name, "text/plain", 1), [chunk], embedder.encode([name]))]
            )
        result = found(own, SearchOptions(k=2, rerank="length"), sentences=True)
    assert texts(result)[0] == "otters swim far"
    assert [own[0][1] for own in result.sentences] == pytest.approx(
        [float(p.cosine or 0) for p in result.passages], abs=0.02
    )
    assert np.diff([own[0][1] for own in result.sentences])[0] < 0
