"""Search by words: any text is a query, scores are exact, and the index follows the documents."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ragserve.errors import NotFound
from ragserve_index import Eq, IndexStore, NewChunk, NewDocument, lexical_search, search
from ragserve_index.batch import document_id
from ragserve_index.errors import RegistryDamaged
from ragserve_index.fusion import by_standard_scores
from ragserve_index.sqlite.fts5 import Fts5
from ragserve_index.structures.ivf import Ivf
from tests.unit.index.index_samples import (
    DIM,
    TYPES,
    UP_TO_FORMAT_6,
    assert_clean,
    fill,
    item,
    make,
    on_both_registries,
    on_registries,
    on_sqlite,
    open_store,
    vectors_of,
)

pytestmark = on_registries
SYNTAX = (*"\"'*^():\0", "{title}:a", "NEAR(a b, 2)", "a AND", "OR", "NOT a", "a + b", "-a")


def write(
    store: IndexStore, texts: Mapping[str, str], *, namespace: str = "n", title: str = "", **metadata: Any
) -> None:
    """Write a document of one chunk for each text."""
    store.replace_documents(
        namespace,
        [
            (
                NewDocument(name, title, "hash", "text/plain", len(text), metadata),
                [NewChunk(text, 0, len(text), 1)],
                vectors_of(name, text),
            )
            for name, text in texts.items()
        ],
    )


def found(store: IndexStore, text: str, k: int = 10, *, namespace: str = "n", **options: Any) -> list[str]:
    return [hit.chunk.source for hit in store.search_text(namespace, text, k, **options).hits[0]]


@on_both_registries
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from([*SYNTAX, "a", "lamp"])).map(" ".join)))
@example("\ud800 lamp")
@example("; DROP TABLE chunks; --")
@example("lamp " * 5000)
@example(" ".join(f"word{i}" for i in range(5000)))
def test_any_text_is_a_query(store: IndexStore, text: str) -> None:
    if not store.namespace("n").n_documents:
        write(store, {"a": "a lamp of brass"})
    for hit in store.search_text("n", text, 5).hits[0]:
        assert hit.chunk.source == "a"
        assert hit.score == hit.bm25


@pytest.mark.parametrize("text", ["naive CAFE", "NAÏVE café", "naïve", "Café"])
def test_case_and_diacritics_are_folded(store: IndexStore, text: str) -> None:
    write(store, {"cafe": "Ein naïves Café", "other": "tea"})
    assert found(store, text) == ["cafe"]


def test_endings_and_titles_count(store: IndexStore) -> None:
    write(store, {"lamps": "lighting the lamps"}, title="Skerryvore")
    write(store, {"soup": "leeks and potatoes"})
    assert found(store, "who lights lamp") == found(store, "skerryvore") == ["lamps"]


def test_words_of_syntax_are_searched_for(store: IndexStore) -> None:
    write(store, {"gate": "a gate: NOT, AND, OR", "near": "near the sea"})
    assert found(store, "NOT AND") == ["gate"]
    assert found(store, "NEAR(") == ["near"]
    assert found(store, "title:") == []


def test_scores_do_not_depend_on_other_namespaces(store: IndexStore) -> None:
    write(store, {"a": "lamp and oil", "b": "oil", "c": "water"})
    before = store.search_text("n", "lamp oil", 5).hits[0]
    store.ensure_namespace("m", embedder="e", dim=DIM)
    write(store, {f"m{i}": "lamp lamp lamp" for i in range(50)}, namespace="m")
    assert store.search_text("n", "lamp oil", 5).hits[0] == before
    assert {hit.chunk.source for hit in before} == {"a", "b"}


@on_both_registries
def test_the_index_follows_the_documents(store: IndexStore) -> None:
    write(store, {"a": "lamp", "b": "lamp oil"})
    write(store, {"a": "water", "c": "lamp"})
    assert set(found(store, "lamp")) == {"b", "c"}
    assert found(store, "water") == ["a"]
    store.remove_document("n", store.documents("n", source_prefix="b")[0].doc_id)
    assert found(store, "lamp") == ["c"]
    assert_clean(store)
    store.drop_namespace("n")
    with pytest.raises(NotFound):
        found(store, "lamp")
    store.ensure_namespace("n", embedder="e", dim=DIM)
    assert found(store, "lamp") == []
    assert_clean(store)


@on_both_registries
@pytest.mark.parametrize("listed", [0, 4096], ids=["ids compared here", "by the registry"])
def test_filters(store: IndexStore, listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexical_search, "_LISTED", listed)
    write(store, {f"en{i}": "lamp oil" for i in range(3)}, lang="en")
    write(store, {f"de{i}": "lamp lamp oil" for i in range(30)}, lang="de")
    english = Eq(field="lang", value="en")
    assert set(found(store, "lamp", 5, filter=english)) == {"en0", "en1", "en2"}
    assert len(found(store, "lamp", 2, filter=english)) == 2
    assert found(store, "lamp", filter=Eq(field="lang", value="fr")) == []


def corpus(n: int) -> dict[str, str]:
    """Texts of which a few words are in most and most words are in few, as in a language."""
    chance = random.Random(0)
    return {
        f"d{i}": " ".join(f"w{int(chance.paretovariate(0.6))}" for _ in range(chance.randint(5, 40)))
        for i in range(n)
    }


@on_both_registries
@pytest.mark.parametrize("selected", [False, True], ids=["all", "filtered"])
def test_without_an_index_of_a_large_namespace_the_rarest_words_are_scored(
    store: IndexStore, selected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, {f"d{i}": "oil and water" if i % 3 == 0 else "a soup of leeks" for i in range(60)}, half=1)
    write(store, {"dry": "a lamp of old brass", "lit": "a lamp with fresh oil"}, half=1)
    options: dict[str, Any] = {"filter": Eq(field="half", value=1)} if selected else {}
    exact = store.search_text("n", "lamp fresh oil", 3, **options).hits[0]
    assert [hit.chunk.source for hit in exact][:2] == ["lit", "dry"]
    monkeypatch.setattr(lexical_search, "MATCHES", 3)
    rarest = store.search_text("n", "lamp fresh oil", 3, **options).hits[0]
    assert [hit.chunk.source for hit in rarest] == ["lit", "dry"], "chunks with oil alone are not scored"
    assert len(found(store, "oil water", 30, **options)) > 1, "the rarest word is, however frequent"


def test_common_words_alone_still_find_something(store: IndexStore) -> None:
    write(store, {f"d{i}": "the lamp" for i in range(20)} | {"oil": "the oil"})
    assert len(found(store, "the", 3)) == 3
    assert found(store, "the oil", 1) == ["oil"], "a word of all chunks says nothing"


@on_sqlite
def test_standard_scores_are_added() -> None:
    fused = by_standard_scores({1: 0.9, 2: 0.6, 3: 0.3}, {3: 9.0, 2: 6.0})
    # cosines: mean 0.6, deviation 0.1 * sqrt(6); BM25 0, 6 and 9: mean 5, deviation sqrt(14)
    expected = {
        1: 0.3 / (0.1 * 6**0.5) - 5 / 14**0.5,
        2: 1 / 14**0.5,
        3: 4 / 14**0.5 - 0.3 / (0.1 * 6**0.5),
    }
    assert {one.chunk_id: one.score for one in fused} == pytest.approx(expected)
    assert [(one.chunk_id, one.cosine, one.bm25) for one in fused] == [
        (2, 0.6, 6.0),
        (1, 0.9, None),
        (3, 0.3, 9.0),
    ]


@on_sqlite
def test_equal_scores_say_nothing() -> None:
    assert [one.chunk_id for one in by_standard_scores({1: 0.5, 2: 0.5}, {2: 3.0})] == [2, 1]
    assert [one.chunk_id for one in by_standard_scores({1: 0.1, 2: 0.5}, {1: 3.0, 2: 3.0})] == [2, 1]
    assert [one.score for one in by_standard_scores({1: 0.5}, {1: 3.0})] == [0.0]
    assert by_standard_scores({}, {}) == []


@on_sqlite
@pytest.mark.parametrize("index_type", TYPES)
def test_what_only_the_words_find_has_its_cosine(
    tmp_path: Path, index_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "DEPTH", 5)
    monkeypatch.setattr(Ivf, "TRAIN_FROM", 1_000)
    with make(tmp_path, index_type) as store:
        fill(store, 400, 3)
        store.replace_documents("n", [item("otter", 1), item("gone", 1)])
        store.remove_document("n", document_id("n", "gone"))
        vector = -vectors_of("otter", 0)[0]  # no passage is further away
        hits = store.search_text("n", "otter", 6, vector=vector).hits[0]
        (by_words,) = [hit for hit in hits if hit.bm25 is not None]
        assert by_words.chunk.source == "otter"
        assert by_words.cosine == pytest.approx(-1, abs=0.02)
        near = store.search("n", vector[None], 5).hits[0]
        assert {hit.chunk.chunk_id: hit.cosine for hit in hits if hit is not by_words} == {
            hit.chunk.chunk_id: hit.cosine for hit in near
        }
        (best,) = store.search_text("n", "otter", 1, vector=-vector).hits[0]
        assert best.chunk.source == "otter"


@on_sqlite
def test_a_search_that_tells_one_passage_apart_outvotes_one_that_tells_none() -> None:
    cosines = {i: 0.5 + 0.001 * i for i in range(9)}
    bm25 = dict.fromkeys(cosines, 1.0) | {0: 12.0}
    assert by_standard_scores(cosines, bm25)[0].chunk_id == 0, "its rank by cosine is the last"


def test_the_scores_of_several_wordings_are_averaged(store: IndexStore) -> None:
    texts = {f"lamp{i}": "lamp " * (i + 1) for i in range(3)} | {
        "oil": "oil of olives",
        "both": "lamp with oil",
    }
    write(store, texts)
    expected = dict.fromkeys(texts, 0.0)
    for text, weight in (("lamp", 0.5), ("oil", 0.25), ("olive oil", 0.25)):
        for hit in store.search_text("n", text, 10).hits[0]:
            expected[hit.chunk.source] += weight * hit.score
    hits = store.search_text("n", "lamp", 10, variants=["oil", "olive oil"]).hits[0]
    assert {hit.chunk.source: hit.score for hit in hits} == pytest.approx(expected)
    assert [hit.score for hit in hits] == sorted((hit.bm25 for hit in hits), reverse=True)
    best = max(expected, key=lambda name: expected[name])
    assert found(store, "lamp", 1, variants=["oil", "olive oil"]) == [best], "each is read deeper than k"


@pytest.mark.parametrize("tries", [4, 0], ids=["repeated", "in one transaction"])
def test_hybrid_searches_are_of_one_version(
    tmp_path: Path, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_TRIES", tries)
    done = Event()
    with make(tmp_path) as store, open_store(tmp_path) as other:

        def write_editions() -> None:
            for edition in range(1, 40):
                other.replace_documents("n", [item(f"d{i}", 5, edition=edition) for i in range(4)])
            done.set()

        store.replace_documents("n", [item(f"d{i}", 5) for i in range(4)])
        writer = Thread(target=write_editions)
        writer.start()
        versions = []
        while not done.is_set() or not versions:
            result = store.search_text("n", "d1 title", 100, vector=vectors_of("q")[0])
            editions = {hit.chunk.text.split("#")[1].split(".")[0] for hit in result.hits[0]}
            assert editions == {str(result.version - 1)}
            assert len(result.hits[0]) == 20
            versions.append(result.version)
        writer.join()
        assert versions == sorted(versions)


# the registry's file


def old_format(data_dir: Path) -> Path:
    """A registry of format 2, before there was a lexical index."""
    with make(data_dir) as store:
        store.ensure_namespace("m", embedder="e", dim=DIM)
        for i in range(5):
            store.replace_documents("n", [item(f"d{j}", 3, edition=i) for j in range(100)])
        write(store, {"lamp": "a lamp"}, namespace="m")
    path = data_dir / "ragserve.sqlite3"
    with sqlite3.connect(path) as connection:
        for namespace_id in (1, 2):
            connection.execute(f"DROP TABLE lexical_{namespace_id}")
        connection.execute("DROP TABLE sentences")
        connection.execute("DROP TABLE lexical_words")
        connection.execute("DROP TABLE namespace_settings")
        connection.executescript(UP_TO_FORMAT_6)
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    return path


def format_of(path: Path) -> tuple[int, int]:
    """The registry's format, and its number of lexical tables."""
    with sqlite3.connect(path) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute(
            "SELECT count(*) FROM sqlite_master WHERE name GLOB 'lexical_[0-9]*'"
        ).fetchone()
    connection.close()
    return version, tables


def assert_migrated(data_dir: Path) -> None:
    with open_store(data_dir) as store:
        assert_clean(store)
        assert len(found(store, "d7", 400)) == 3
        assert found(store, "lamp", namespace="m") == ["lamp"]
        store.replace_documents("n", [item("d7", 2, edition=9)])
        assert len(found(store, "d7", 400)) == 2


@on_sqlite
def test_an_old_registry_is_migrated(tmp_path: Path) -> None:
    path = old_format(tmp_path)
    assert format_of(path) == (2, 0)
    assert_migrated(tmp_path)


@on_sqlite
def test_a_killed_migration_leaves_the_old_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = old_format(tmp_path)
    child = os.fork()
    if child == 0:
        whole, calls = Fts5.add, 0

        def add(*arguments: Any) -> None:
            nonlocal calls
            whole(*arguments)
            calls += 1
            if calls == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(Fts5, "add", add)
        open_store(tmp_path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert format_of(path) == (2, 0)
    assert_migrated(tmp_path)


@on_sqlite
def test_check_finds_damage_and_a_rebuild_mends_it(tmp_path: Path) -> None:
    with make(tmp_path) as store:
        write(store, {f"d{i}": f"lamp number{i}" for i in range(300)})
    for statements, says in (
        (["DELETE FROM lexical_1_docsize WHERE id = 7"], "1 chunks are missing from the lexical index: [7]"),
        (["INSERT INTO lexical_1_docsize VALUES (9999, x'0101')"], "have no chunk: [9999]"),
        (["UPDATE lexical_1_data SET block = zeroblob(length(block)) WHERE id > 10"], "is damaged"),
        (["DROP TABLE lexical_1"], "cannot be read"),
    ):
        with sqlite3.connect(tmp_path / "ragserve.sqlite3") as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()
        with open_store(tmp_path) as store:
            assert says in " ".join(store.check()[0].problems)
            store.rebuild_lexical("n")
            assert_clean(store)
            assert found(store, "number42") == ["d42"]


@on_sqlite
@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE lexical_1_data SET block = substr(block, 1, 5) WHERE id = 10",
        "INSERT INTO lexical_1 (rowid, title, text) VALUES (999, '', 'number42')",
    ],
    ids=["cut", "a chunk that is gone"],
)
def test_a_damaged_index_says_what_to_do(tmp_path: Path, damage: str) -> None:
    with make(tmp_path) as store:
        write(store, {f"d{i}": f"lamp number{i}" for i in range(300)})
    with sqlite3.connect(tmp_path / "ragserve.sqlite3") as connection:
        connection.execute(damage)
    connection.close()
    with open_store(tmp_path) as store:
        with pytest.raises(RegistryDamaged, match="docs check --repair") as caught:
            found(store, "number42")
        assert caught.value.code == "lexical_index_damaged"
        assert store.search("n", vectors_of("d1", "lamp number1"), 1).hits[0][0].chunk.source == "d1"


@on_both_registries
def test_chunks_are_counted_by_word(store: IndexStore) -> None:
    write(store, {"a": "lamps oil", "b": "a lamp", "c": "Lamp lamp oil Z\u00fcrich"})
    wanted = {"lamps": 3, "LAMP": 3, "oil": 2, "tea": 0, "oil zurich": 1, "": 0, "'\\": 0}
    assert store.word_counts("n", list(wanted)) == wanted
    write(store, {"b": "tea"})
    assert store.word_counts("n", ["lamp", "tea"]) == {"lamp": 2, "tea": 1}
    with pytest.raises(NotFound):
        store.word_counts("other", ["lamp"])


@on_both_registries
def test_added_chunks_are_read_in_the_order_of_the_log(store: IndexStore) -> None:
    write(store, {"a": "one", "b": "two"})
    write(store, {"c": "three"})
    write(store, {"a": "four"})
    read, position = [], (0, 0)
    while (added := store.added_chunks("n", position, 2)).n_added:
        assert added.n_added <= 2
        assert added.n_chunks == 3
        read.append({chunk.text for chunk in added.chunks})
        position = added.position
    assert read == [{"two", "three"}, {"four"}]
    write(store, {"d": "five"})
    assert [chunk.text for chunk in store.added_chunks("n", position, 2).chunks] == ["five"]
