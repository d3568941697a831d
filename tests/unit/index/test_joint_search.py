"""Several namespaces are searched as one: what is found, in which order and with which scores, is what one
namespace with all of their documents has."""

from __future__ import annotations

import random
from collections.abc import Sequence
from threading import Event, Thread

import numpy as np
import pytest

from ragserve.errors import InvalidRequest, NotFound
from ragserve_index import Eq, IndexStore, NewChunk, NewDocument, joint_search, lexical_indexes
from ragserve_index.batch import document_id
from ragserve_index.types import Hit
from ragserve_index.viewers import UNLABELLED, Viewer
from tests.unit.index.index_samples import DIM, on_both_registries, on_registries, vectors_of
from tests.unit.index.test_lexical import write

pytestmark = on_registries
PARTS = ("a", "b", "c")
QUERIES = ("lamp of brass", "keeper", "the the of", "brass lamp keeper tower sea", "nothing of this")
WORDS = ("lamp", "brass", "keeper", "tower", "sea", "of", "the", "oil")


def texts(n: int, seed: int) -> dict[str, str]:
    """Texts of very different length; words of the end of `WORDS` are in most."""
    chance = random.Random(seed)
    return {
        f"t{i}": " ".join(
            word
            for place, word in enumerate(WORDS)
            for _ in range(chance.choice([0, 1, 3]) if place < 5 else chance.randint(0, 9) * (i % 3))
        )
        or "lamp"
        for i in range(n)
    }


@pytest.fixture
def parted(store: IndexStore) -> IndexStore:
    """A namespace ``n``, and its documents in three others: the longest, those about keepers, the rest."""
    every = texts(90, 7)
    for name in PARTS:
        store.ensure_namespace(name, embedder="e", dim=DIM)
    write(store, every, group="x")
    home = {
        name: "a" if len(text) > 120 else "b" if "keeper" in text else "c" for name, text in every.items()
    }
    for part in PARTS:
        write(store, {n: t for n, t in every.items() if home[n] == part}, namespace=part, group=part)
    assert len(set(home.values())) == len(PARTS)
    return store


def scores(hits: Sequence[Hit]) -> dict[str, tuple[float | None, float | None]]:
    return {hit.chunk.source: (hit.cosine, hit.bm25) for hit in hits}


@on_both_registries
@pytest.mark.parametrize("query", QUERIES)
def test_words_score_as_in_one_namespace(parted: IndexStore, query: str) -> None:
    whole = scores(parted.search_text("n", query, 90).hits[0])
    found = parted.search_several(PARTS, 90, text=query)
    assert {source: own[1] for source, own in scores(found.hits).items()} == pytest.approx(
        {source: own[1] for source, own in whole.items()}, rel=1e-4, abs=1e-5
    )
    order = [hit.score for hit in found.hits]
    assert order == sorted(order, reverse=True)
    assert {hit.chunk.namespace for hit in found.hits} <= set(PARTS)
    assert found.versions == dict.fromkeys(PARTS, 1)


@pytest.mark.parametrize("query", QUERIES)
def test_words_score_as_in_one_large_namespace(
    parted: IndexStore, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has an index of tantivy, as two of the three at most. It rounds lengths, so scores come near."""
    monkeypatch.setattr(lexical_indexes, "FROM", len(texts(90, 7)) // 3)
    parted.save()
    whole = scores(parted.search_text("n", query, 90).hits[0])
    found = scores(parted.search_several(PARTS, 90, text=query).hits)
    assert {source: own[1] for source, own in found.items()} == pytest.approx(
        {source: own[1] for source, own in whole.items()}, rel=0.08, abs=0.02
    )


@on_both_registries
def test_vectors_and_both_find_what_one_namespace_has(parted: IndexStore) -> None:
    vector = vectors_of("t3", texts(90, 7)["t3"])[0]
    whole = parted.search("n", vector[None], 12).hits[0]
    found = parted.search_several(PARTS, 12, vector=vector).hits
    assert [hit.chunk.source for hit in found] == [hit.chunk.source for hit in whole]
    assert [hit.score for hit in found] == pytest.approx([hit.score for hit in whole], abs=1e-6)
    for query, variants in (("lamp of brass", ()), ("tower", ("keeper of the sea", "lamp"))):
        whole = parted.search_text("n", query, 12, variants=variants, vector=vector).hits[0]
        found = parted.search_several(PARTS, 12, text=query, variants=variants, vector=vector).hits
        assert [hit.score for hit in found] == pytest.approx([hit.score for hit in whole], abs=1e-3)


def test_a_filter_is_of_each_and_gone_documents_are_not_found(parted: IndexStore) -> None:
    vector = vectors_of("t3")[0]
    only = Eq(field="group", value="b")
    for options in ({"text": "lamp"}, {"vector": vector}, {"text": "lamp", "vector": vector}):
        hits = parted.search_several(PARTS, 90, filter=only, **options).hits  # type: ignore[arg-type]
        assert hits
        assert {hit.chunk.namespace for hit in hits} == {"b"}
    gone = hits[0].chunk
    parted.remove_document("b", gone.doc_id)
    again = parted.search_several(PARTS, 90, text="lamp", vector=vector)
    assert gone.chunk_id not in {hit.chunk.chunk_id for hit in again.hits}
    assert again.versions == {"a": 1, "b": 2, "c": 1}


@on_both_registries
def test_what_a_viewer_does_not_see_is_neither_found_nor_counted(parted: IndexStore) -> None:
    def hidden(name: str, text: str) -> None:
        document = NewDocument(name, "", "h", "text/plain", 1, {}, labels=("board",))
        chunk = NewChunk(text, 0, len(text), len(text.split()))
        parted.replace_documents("b", [(document, [chunk], vectors_of("t3"))])

    def found(viewer: Viewer) -> dict[str, tuple[float | None, float | None]]:
        own = parted.seen_by(viewer)
        every: dict[str, tuple[float | None, float | None]] = {}
        for options in ({"text": "lamp oil keeper"}, {"text": "sea", "vector": vectors_of("t3")[0]}):
            hits = own.search_several(PARTS, 90, **options).hits  # type: ignore[arg-type]
            every |= {f"{name} {len(options)}": each for name, each in scores(hits).items()}
        return every

    hidden("minutes", "the keeper sold the lamp")
    before = found(UNLABELLED)
    assert not [name for name in before if name.startswith(("minutes", "plans"))]
    for number in range(20):
        hidden(f"plans {number}", f"lamp oil keeper sea {'tower ' * 30}")
    assert found(UNLABELLED) == before, "hidden documents do not change a score"
    assert [name for name in found(Viewer.holding(["board"])) if name.startswith("plans")]


def test_a_filter_has_the_time_of_one_namespace_for_all(
    parted: IndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_search, "MAX_S", 0.0)
    with pytest.raises(InvalidRequest, match="The filter took longer") as caught:
        parted.search_several(PARTS, 5, text="lamp", filter=Eq(field="group", value="b"))
    assert caught.value.code == "filter_too_costly"
    assert parted.search_several(PARTS, 5, text="lamp").hits


def test_an_empty_namespace_adds_nothing_and_a_missing_one_is_said(parted: IndexStore) -> None:
    parted.ensure_namespace("empty", embedder="e", dim=DIM)
    vector = np.ones(DIM, dtype=np.float32) / 4
    expected = scores(parted.search_several(PARTS, 10, text="lamp", vector=vector).hits)
    assert scores(parted.search_several([*PARTS, "empty"], 10, text="lamp", vector=vector).hits) == expected
    assert parted.search_several(["empty"], 10, text="lamp").hits == []
    for options in ({"text": "lamp"}, {"vector": vector}):
        with pytest.raises(NotFound, match="no namespace 'lost'"):
            parted.search_several([*PARTS, "lost"], 10, **options)  # type: ignore[arg-type]


@on_both_registries
def test_writers_meanwhile_leave_whole_versions(parted: IndexStore) -> None:
    """One transaction reads all namespaces: a document that moves from one to another is in exactly one."""
    write(parted, {"moving": "lamp lamp lamp"}, namespace="a")
    done = Event()

    def move() -> None:
        try:
            for number in range(20):
                source, target = ("a", "b") if number % 2 == 0 else ("b", "a")
                write(parted, {"moving": "lamp lamp lamp"}, namespace=target)
                parted.remove_document(source, document_id(source, "moving"))
        finally:
            done.set()

    mover = Thread(target=move)
    mover.start()
    vector = vectors_of("moving", "lamp lamp lamp")[0]
    seen: list[set[str]] = []
    while not done.is_set():
        hits = parted.search_several(PARTS, 10, text="lamp", vector=vector).hits
        seen.append({hit.chunk.namespace for hit in hits if hit.chunk.source == "moving"})
    mover.join()
    assert seen
    assert all(seen), "in no moment it is nowhere"
