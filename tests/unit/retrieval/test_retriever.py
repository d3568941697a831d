"""Concurrent questions share a forward pass; one alone never waits; who leaves costs nothing; failures reach
only those who asked.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragserve.errors import Conflict, NotFound, Unavailable
from ragserve.retrieval.retriever import Retriever
from ragserve_index import IndexStore
from ragserve_index.sentence_vectors import SentenceVectors
from ragserve_index.types import NewChunk, NewDocument
from tests.unit.api.scripted_server import WordEmbedder


class Gated(WordEmbedder):
    """Blocks in the first batch until opened, so that a test decides what arrives meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.open = threading.Event(), threading.Event()

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        self.entered.set()
        if not self.open.wait(240):
            raise TimeoutError
        return super().encode_queries(texts)


class TwoSided(WordEmbedder):
    """Embeds questions as the opposite of documents, so that the two sides cannot be mistaken."""

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return -self.encode(texts)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[IndexStore]:
    store = IndexStore(tmp_path)
    yield store
    store.close()


def run(store: IndexStore, embedder: WordEmbedder, test: Any) -> Any:
    async def main() -> Any:
        retriever = Retriever(store, embedder)
        try:
            return await test(retriever)
        finally:
            await retriever.close()

    return asyncio.run(main())


async def entered(embedder: Gated) -> None:
    while not embedder.entered.is_set():
        await asyncio.sleep(0.001)


def test_what_arrives_during_a_batch_forms_the_next(store: IndexStore) -> None:
    embedder = Gated()

    async def test(retriever: Retriever) -> list[np.ndarray]:
        first = asyncio.create_task(retriever.embed("alone"))
        await entered(embedder)
        others = [asyncio.create_task(retriever.embed(f"text {i}")) for i in range(40)]
        await asyncio.sleep(0)
        embedder.open.set()
        return await asyncio.gather(first, *others)

    vectors = run(store, embedder, test)
    assert [len(call) for call in embedder.calls] == [1, 32, 8]
    expected = WordEmbedder().encode(["alone", *(f"text {i}" for i in range(40))])
    assert np.array_equal(np.stack(vectors), expected)


def test_questions_are_embedded_with_the_query_side(store: IndexStore) -> None:
    embedder = TwoSided()
    store.ensure_namespace("n", embedder=embedder.name, dim=embedder.dim)
    document = NewDocument("a", "A", "hash", "text/plain", 6)
    store.replace_documents("n", [(document, [NewChunk("otters", 0, 6, 1)], embedder.encode(["otters"]))])

    async def test(retriever: Retriever) -> None:
        assert np.array_equal(await retriever.embed("otters"), -embedder.encode(["otters"])[0])
        found = await retriever.retrieve("n", "otters", 1)
        assert found.hits[0].score == pytest.approx(-1, abs=1e-5), "the document side would score 1"

    run(store, embedder, test)


def test_who_left_is_not_embedded(store: IndexStore) -> None:
    embedder = Gated()

    async def test(retriever: Retriever) -> None:
        first = asyncio.create_task(retriever.embed("first"))
        await entered(embedder)
        leaver, stayer = (
            asyncio.create_task(retriever.embed("leaves")),
            asyncio.create_task(retriever.embed("stays")),
        )
        await asyncio.sleep(0)
        leaver.cancel()
        await asyncio.sleep(0)
        embedder.open.set()
        await asyncio.gather(first, stayer)

    run(store, embedder, test)
    assert embedder.calls == [["first"], ["stays"]]


def test_a_failing_batch_does_not_end_the_next(store: IndexStore) -> None:
    embedder = WordEmbedder()

    async def test(retriever: Retriever) -> None:
        embedder.error = RuntimeError("out of memory")
        results = await asyncio.gather(retriever.embed("a"), retriever.embed("b"), return_exceptions=True)
        assert [str(result) for result in results] == ["out of memory"] * 2
        embedder.error = None
        assert (await retriever.embed("c")).shape == (embedder.dim,)

    run(store, embedder, test)


def test_closing_leaves_nobody_waiting(store: IndexStore) -> None:
    embedder = Gated()

    async def main() -> list[Any]:
        retriever = Retriever(store, embedder)
        waiting: list[Coroutine[Any, Any, Any]] = [retriever.embed("a"), retriever.embed("b")]
        tasks = [asyncio.create_task(one) for one in waiting]
        await entered(embedder)
        closing = asyncio.create_task(retriever.close())
        results = await asyncio.gather(*tasks, return_exceptions=True)
        embedder.open.set()
        await closing
        return results

    results = asyncio.run(main())
    assert all(isinstance(result, Unavailable) for result in results)


def test_by_vectors_by_words_and_by_both(store: IndexStore) -> None:
    embedder = WordEmbedder()
    store.ensure_namespace("n", embedder=embedder.name, dim=embedder.dim)
    batch = []
    for name, text in {
        "a": "otters swim",
        "b": "otters swim and otters dive",
        "c": "a soup of leeks",
    }.items():
        document = NewDocument(name, name, "hash", "text/plain", len(text))
        batch.append((document, [NewChunk(text, 0, len(text), 1)], embedder.encode([text])))
    store.replace_documents("n", batch)
    embedder.calls.clear()

    async def test(retriever: Retriever) -> None:
        dense = await retriever.retrieve("n", "otters", 3)
        assert [(hit.score, hit.bm25) for hit in dense.hits] == [(hit.cosine, None) for hit in dense.hits]
        lexical = await retriever.retrieve("n", "Otters?", 3, retrieval="lexical")
        assert {hit.chunk.source for hit in lexical.hits} == {"a", "b"}
        assert [(hit.score, hit.cosine) for hit in lexical.hits] == [(hit.bm25, None) for hit in lexical.hits]
        assert lexical.embed_ms is None
        assert embedder.calls == [["otters"]], "a lexical search needs no vector"
        hybrid = await retriever.retrieve("n", "otters", 3, retrieval="hybrid")
        assert len(hybrid.hits) == 3
        scores = {
            "cosine": [hit.cosine or 0 for hit in hybrid.hits],
            "bm25": [h.bm25 or 0 for h in hybrid.hits],
        }
        assert {hit.chunk.source: hit.cosine for hit in hybrid.hits} == {
            hit.chunk.source: hit.cosine for hit in dense.hits
        }
        assert {hit.chunk.source: hit.bm25 for hit in hybrid.hits if hit.bm25 is not None} == {
            hit.chunk.source: hit.bm25 for hit in lexical.hits
        }
        standard = sum((np.array(own) - np.mean(own)) / np.std(own) for own in scores.values())
        assert [hit.score for hit in hybrid.hits] == pytest.approx(standard.tolist())
        assert [hit.score for hit in hybrid.hits] == sorted(standard, reverse=True)

    run(store, embedder, test)


def test_variants_of_a_question_count_half(store: IndexStore) -> None:
    embedder = WordEmbedder()
    store.ensure_namespace("n", embedder=embedder.name, dim=embedder.dim)
    texts = {"a": "otters swim", "b": "beavers swim", "c": "beavers build dams"}
    batch = []
    for name, text in texts.items():
        document = NewDocument(name, name, "hash", "text/plain", len(text))
        batch.append((document, [NewChunk(text, 0, len(text), 1)], embedder.encode([text])))
    store.replace_documents("n", batch)
    embedder.calls.clear()
    asked, variants = "swim", ["beavers swim", "dams swim"]

    async def test(retriever: Retriever) -> None:
        dense = await retriever.retrieve("n", asked, 3, variants=variants)
        assert embedder.calls == [[asked, *variants]], "one batch"
        mean = 2 * embedder.encode([asked])[0] + embedder.encode(variants).sum(axis=0)
        expected = embedder.encode(list(texts.values())) @ (mean / np.linalg.norm(mean))
        scores = dict(zip(texts, expected.tolist(), strict=True))
        assert {hit.chunk.source: hit.cosine for hit in dense.hits} == pytest.approx(scores, abs=1e-5)
        bm25 = dict.fromkeys(texts, 0.0)
        for text, weight in zip((asked, *variants), (0.5, 0.25, 0.25), strict=True):
            for hit in (await retriever.retrieve("n", text, 3, retrieval="lexical")).hits:
                bm25[hit.chunk.source] += weight * hit.score
        for retrieval in ("lexical", "hybrid"):
            found = await retriever.retrieve("n", asked, 3, variants=variants, retrieval=retrieval)
            assert {hit.chunk.source: hit.bm25 for hit in found.hits} == pytest.approx(bm25)
            assert [hit.score for hit in found.hits] == sorted(
                (hit.score for hit in found.hits), reverse=True
            )

    run(store, embedder, test)


def test_another_embedders_namespace_can_be_searched_by_words_only(store: IndexStore) -> None:
    store.ensure_namespace("n", embedder="another", dim=WordEmbedder.dim)

    async def test(retriever: Retriever) -> None:
        assert (await retriever.retrieve("n", "otters", 1, retrieval="lexical")).hits == []
        with pytest.raises(Conflict, match="another"):
            await retriever.retrieve("n", "otters", 1, retrieval="hybrid")

    run(store, WordEmbedder(), test)


def test_an_unknown_namespace(store: IndexStore) -> None:
    with pytest.raises(NotFound) as caught:
        run(store, WordEmbedder(), lambda retriever: retriever.retrieve("nowhere", "x", 3))
    assert caught.value.code == "namespace_not_found"


def test_hits_bring_the_scores_of_their_sentences(store: IndexStore) -> None:
    embedder = WordEmbedder()
    store.ensure_namespace("n", embedder=embedder.name, dim=embedder.dim)
    text = "Otters swim far. Whales sing."
    vectors = embedder.encode([text[:17], text[17:]])
    scored = NewChunk(text, 0, len(text), 6, sentences=SentenceVectors.of([0, 17], vectors))
    plain = NewChunk("Otters sleep.", 0, 13, 3)
    store.replace_documents(
        "n",
        [
            (NewDocument(name, name, "hash", "text/plain", 6), [chunk], embedder.encode([chunk.text]))
            for name, chunk in (("scored", scored), ("plain", plain))
        ],
    )

    async def test(retriever: Retriever) -> None:
        found = await retriever.retrieve("n", "otters swim far", 2, sentences=True)
        by_source = {hit.chunk.source: own for hit, own in zip(found.hits, found.sentences, strict=True)}
        assert by_source["plain"] == []
        [(first, near), (second, far)] = by_source["scored"]
        assert (first, second) == (0, 17)
        assert near == pytest.approx(1.0, abs=0.02)
        assert far < 0.3
        unasked = await retriever.retrieve("n", "otters swim far", 2)
        assert unasked.sentences == [[], []]

    run(store, embedder, test)
