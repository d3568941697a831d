"""Typing errors in what is searched for: what is corrected, and above all what is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import thread_time
from typing import Any

import pytest

from ragserve.errors import NotFound
from ragserve.retrieval.namespace_words import MAX_WORDS, NamespaceWords, WordTable
from ragserve.retrieval.spelling import SpellingCorrector, _words
from ragserve_index import IndexStore
from ragserve_index.types import NewChunk, NewDocument
from tests.unit.api.scripted_server import DIM, WordEmbedder
from tests.unit.index.postgres_server import PostgresServer

KNOWN = frozenset({"what", "which", "where", "does", "tower", "house", "music", "barge", "known", "built"})
TEXTS = {
    "lights": "The lighthouse of Skerryvore was built on a reef. Its lamps are lit. Alan Stevenson built it.",
    "more": "A lighthouse on Skerryvore: the lamp is bright, and Stevenson was its engineer. Karin kept it.",
    "names": "Norvik and Norvig are towns. Zürich and Straßburg, too. Hunde bellen, Kunden zahlen. Done.",
}


def index(store: IndexStore, namespace: str, texts: Mapping[str, str]) -> None:
    store.ensure_namespace(namespace, embedder="words", dim=DIM)
    batch = []
    for name, text in texts.items():
        document = NewDocument(name, name, text[:64], "text/plain", 1)
        chunk = NewChunk(text, 0, len(text), len(text.split()))
        batch.append((document, [chunk], WordEmbedder().encode([text])))
    store.replace_documents(namespace, batch)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[IndexStore]:
    with IndexStore(tmp_path) as store:
        index(store, "n", TEXTS)
        yield store


def corrected(
    store: IndexStore, *texts: str, namespace: str = "n"
) -> tuple[list[str], list[tuple[str, str]]]:
    async def main() -> tuple[list[str], list[tuple[str, str]]]:
        corrector = SpellingCorrector(store, KNOWN)
        try:
            found = await corrector.correct(namespace, texts)
            return found.texts, found.corrections
        finally:
            await corrector.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Skeryvore", "Skerryvore"),
        ("skerrryvore", "skerryvore"),
        ("skerryvoer", "skerryvore"),
        ("skerruvore", "skerryvore"),
        ("Ksyerryvore", None),
        ("kserryvore", "skerryvore"),
        ("xkerryvore", None),
        ("(Stevensn’s)?", "(Stevenson’s)?"),
        ("STEVENSNO", "STEVENSON"),
        ("züric", "zürich"),
        ("Strasßburg", "Straßburg"),
        ("lampd", "lamp"),
        ("Hunden", "Hunde"),
        ("towr", "tower"),
    ],
)
def test_one_error_is_corrected(store: IndexStore, typed: str, meant: str | None) -> None:
    assert corrected(store, typed)[0] == [meant or typed]


def test_words_of_a_registry_in_postgres(store: IndexStore, tmp_path: Path, postgres: PostgresServer) -> None:
    url = postgres.database()
    typed = ("lampd", "Skeryvore", "z\u00fcric", "Strass\u00dfburg", "Hunden", "Norvit", "lamps")
    with IndexStore(tmp_path / "postgres", registry_url=url) as other:
        index(other, "n", TEXTS)
        for text in typed:
            assert corrected(other, text) == corrected(store, text)
        assert corrected(other, "Skeryvore")[0] == ["Skerryvore"]
    postgres.give_back(url)


@pytest.mark.parametrize(
    "text",
    [
        "Which lamps, lamp or lighthouses does Skerryvore have?",
        "Lam skr k8s skerryvor3 skeryvore_2 Skery-vore2 SkeryVore x.skeryvore.org/skeryvore a@skeryvore.org",
        "`skeryvore` $skeryvore --skeryvore skeryvore() skeryvore=1 C:\\skeryvore #skeryvore",
        "the SKERYVORE is an acronym here",
        "\"Skeryvore\" (“Stevensn’s”)? „towr“ «towr» »towr« ‘the towr’s’ 'Skeryvore\u2019s towr'",
        "Скеривор скеривора 灯台はどこ σκερυβορε",
        "barges houses",
        "dont",
        "Norvix",
        "which lihgthouse of Skeryvore",
        "Skrvore",
        "Wie hoch ist der Leuchtturm von Skeryvore, und welche Lampe brennt dort?",
        "",
        "  \n ",
    ],
)
def test_everything_else_is_left_alone(store: IndexStore, text: str) -> None:
    assert corrected(store, text) == ([text], [])


def test_ten_thousand_quotations_are_looked_through_once(store: IndexStore) -> None:
    assert list(_words('"Skeryvore" ' * 4000 + "lampd")) == [(48_000, 48_005)]
    started = thread_time()
    list(_words('"a" lampd ' * 10_000))
    assert thread_time() - started < 3  # each word beside each quotation: 30 s


def test_the_most_frequent_word_wins_and_equals_none(store: IndexStore) -> None:
    assert corrected(store, "Norvit")[1] == []
    index(store, "n", {"again": "Norvig was in Norvik once more.", "north": "Norvik lies in the north."})
    assert corrected(store, "Norvit")[1] == [("Norvit", "Norvik")]


def test_words_of_the_embedder_are_a_last_resort(store: IndexStore) -> None:
    assert corrected(store, "which muxic does")[0] == ["which music does"]
    assert corrected(store, "Norvik Hunde lamp which muxic does")[1] == [], "may be another language"
    index(store, "n", {"musical": "Muxico is a town."})
    assert corrected(store, "which muxic does")[0] == ["which muxico does"]
    assert corrected(store, "which muisc does")[0] == ["which music does"], "exchanged letters say more"


def test_each_text_is_corrected_and_each_error_told_once(store: IndexStore) -> None:
    texts, corrections = corrected(
        store,
        "Skeryvore",
        "what of skeryvore\nSkeryvore, which lihgthouse known built house does tower barge",
    )
    assert texts == [
        "Skerryvore",
        "what of skerryvore\nSkerryvore, which lighthouse known built house does tower barge",
    ]
    assert corrections == [
        ("Skeryvore", "Skerryvore"),
        ("skeryvore", "skerryvore"),
        ("lihgthouse", "lighthouse"),
    ]


def test_other_namespaces_are_not_read(store: IndexStore) -> None:
    index(store, "other", {"x": "Muckle Flugga has a secret called Zanzibarium."})
    assert corrected(store, "Zanzibarum")[1] == []
    assert corrected(store, "Zanzibarum", namespace="other")[0] == ["Zanzibarium"]
    assert corrected(store, "Skeryvore", namespace="other")[1] == []
    with pytest.raises(NotFound):
        corrected(store, "Skeryvore", namespace="nowhere")


def test_words_come_and_go_with_their_documents(store: IndexStore) -> None:
    async def main() -> list[Sequence[tuple[str, str]]]:
        corrector, found = SpellingCorrector(store, KNOWN), []

        async def ask() -> None:
            found.append((await corrector.correct("n", ["Zanzibarum"])).corrections)

        await ask()
        index(store, "n", {str(i): f"Text {i} of many." for i in range(40)})
        index(store, "n", {"x": "Zanzibarium is an island."})
        await ask()
        [own] = [each for each in store.documents("n") if each.source == "x"]
        store.remove_document("n", own.doc_id)
        await ask()
        store.drop_namespace("n")
        index(store, "n", {"x": "Zanzibarom is another island."})
        await ask()
        await corrector.close()
        return found

    pair = ("Zanzibarum", "Zanzibarium")
    assert asyncio.run(main()) == [[], [pair], [], [("Zanzibarum", "Zanzibarom")]]


def test_a_large_namespace_is_read_by_a_thread(store: IndexStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragserve.retrieval.namespace_words._AT_ONCE", 1)
    asked, read_all = threading.Event(), NamespaceWords._read_all

    def after_the_question(*args: Any) -> None:
        assert asked.wait(240)
        read_all(*args)

    monkeypatch.setattr(NamespaceWords, "_read_all", after_the_question)

    async def main() -> tuple[list[str], list[str]]:
        corrector = SpellingCorrector(store, KNOWN)
        try:
            first = await corrector.correct("n", ["which Skeryvore"])
            asked.set()
            await corrector.read("n")
            return first.texts, (await corrector.correct("n", ["which Skeryvore"])).texts
        finally:
            await corrector.close()

    assert asyncio.run(main()) == (["which Skeryvore"], ["which Skerryvore"])


def test_a_search_goes_on_without_a_lexical_index(store: IndexStore) -> None:
    with store.database.write() as connection:
        connection.execute("DROP TABLE lexical_1")
    assert corrected(store, "Skeryvore") == (["Skeryvore"], [])


def test_a_table_is_merged_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragserve.retrieval.namespace_words._PENDING", 2)
    monkeypatch.setattr("ragserve.retrieval.namespace_words.MAX_WORDS", 5)
    table = WordTable()
    texts = [
        "often here",
        "often there",
        "Oftén, often",
        "here there",
        "rare",
        "other words",
        "more words again",
    ]
    for text in texts:
        table.add([text])
    assert table.counts(["often", "here", "there", "missing"]) == [3, 2, 2, 0]
    assert len(table) <= 5 + 2 < MAX_WORDS
