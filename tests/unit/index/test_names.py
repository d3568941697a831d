"""Names and metadata are one text in whatever form of Unicode they are typed."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ragserve.errors import InvalidRequest
from ragserve_index import Eq, In, IndexStore, NewChunk, NewDocument, Not, Range, batch
from ragserve_index.errors import InvalidDocument
from tests.unit.index.index_samples import assert_clean, item, on_both_registries, on_registries, vectors_of

NFC = unicodedata.normalize("NFC", "Übersicht/Köln.md")
NFD = unicodedata.normalize("NFD", NFC)
MIXED = NFD[:4] + NFC[3:]
pytestmark = on_registries


@contextmanager
def _before_forms_were_compared() -> Iterator[None]:
    """Write as an earlier version did."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "forms", lambda text: [text])
        patch.setattr(batch, "normal", lambda text: text)
        yield


def _texts(store: IndexStore) -> list[str]:
    return [
        chunk.text
        for document in store.documents("n")
        for chunk in store.document_chunks("n", document.doc_id)
    ]


@on_both_registries
@pytest.mark.parametrize(("first", "second"), [(NFC, NFD), (NFD, NFC), (MIXED, NFD)])
def test_one_name_in_two_forms_is_one_document(store: IndexStore, first: str, second: str) -> None:
    (old,) = store.replace_documents("n", [item(first, 2)])
    (new,) = store.replace_documents("n", [item(second, 1, edition=1)])
    assert (new.doc_id, new.created_at, new.source) == (old.doc_id, old.created_at, second)
    assert _texts(store) == [f"{second}#1.0"]
    for form in (NFC, NFD, MIXED):
        assert store.find_source("n", form) == new
    assert_clean(store)


@on_both_registries
@pytest.mark.parametrize("older", [[NFD], [NFC], [NFD, NFC]], ids=["nfd", "nfc", "both"])
def test_documents_of_earlier_versions_are_found_and_replaced(store: IndexStore, older: list[str]) -> None:
    with _before_forms_were_compared():
        written = [store.replace_documents("n", [item(name, 2), item("other")])[0] for name in older]
    assert len({document.doc_id for document in written}) == len(older)
    known = written[-1]  # of both, that with today's id
    assert store.find_source("n", NFC) == store.find_source("n", NFD) == known
    (kept,) = store.replace_documents("n", [item(known.source, 2, edition=1)], as_read=[known])
    assert kept.doc_id == known.doc_id
    store.replace_documents("n", [item(NFC, 1, edition=2)])
    assert [text for text in _texts(store) if "other" not in text] == [f"{NFC}#2.0"]
    assert store.namespace("n").n_documents == 2
    assert_clean(store)
    found = store.find_source("n", NFD)
    assert found is not None
    store.remove_document("n", found.doc_id)
    assert store.find_source("n", NFC) is None


def test_two_forms_of_a_name_in_one_batch_are_refused(store: IndexStore) -> None:
    with pytest.raises(InvalidDocument, match="twice"):
        store.replace_documents("n", [item(NFC), item(NFD)])


@on_both_registries
@pytest.mark.parametrize("stored", [NFC, NFD, MIXED])
def test_prefixes_are_compared_in_one_form(store: IndexStore, stored: str) -> None:
    store.replace_documents("n", [item(stored), item("Ubersicht/Koln.md")])
    for prefix in (NFC[:-3], NFD[:-3], MIXED[:-3], NFC):
        assert [document.source for document in store.documents("n", source_prefix=prefix)] == [stored]
    # a letter is no beginning of the letter with an accent
    assert [document.source for document in store.documents("n", source_prefix="U")] == ["Ubersicht/Koln.md"]


_Make = Callable[[str], Any]
_FILTERS: dict[str, _Make] = {
    "metadata": lambda ort: Eq(field="ort", value=ort),
    "list": lambda ort: In(field="orte", values=("x", ort)),
    "field": lambda ort: Eq(field=f"in {ort}", value=True),
    "range": lambda ort: Range(field="ort", gte=ort, lte=ort),
    "not null": lambda ort: Not(filter=Eq(field=f"in {ort}", value=None)),
    "source": lambda ort: Eq(field="source", value=ort),
    "title": lambda ort: Range(field="title", gte=f"title of {ort}", lte=f"title of {ort}"),
}


@on_both_registries
@pytest.mark.parametrize("make", _FILTERS.values(), ids=_FILTERS)
@pytest.mark.parametrize("stored", [NFC, NFD])
@pytest.mark.parametrize("version", ["earlier", "this"])
def test_filters_are_compared_in_one_form(store: IndexStore, make: _Make, stored: str, version: str) -> None:
    metadata: dict[str, Any] = {"ort": stored, "orte": ["y", stored], f"in {stored}": True}
    documents = [item(stored, metadata=metadata), item("z", metadata={"ort": "Koln", "orte": []})]
    if version == "earlier":
        with _before_forms_were_compared():
            store.replace_documents("n", documents)
    else:
        store.replace_documents("n", documents)
        assert NFC in store.documents("n", filter=Eq(field="ort", value=NFC))[0].metadata["orte"]
    if version == "earlier" and make is _FILTERS["range"] and stored == NFD:
        return  # text of an earlier version has the order of the form it was stored in
    for typed in (NFC, NFD, MIXED):
        assert [document.source for document in store.documents("n", filter=make(typed))] == [stored]


@on_both_registries
@pytest.mark.parametrize("place", ["text", "title", "metadata", "source"])
def test_text_that_cannot_be_stored_is_that_documents_fault(store: IndexStore, place: str) -> None:
    odd = "odd \ud800"
    document = NewDocument(
        odd if place == "source" else "a",
        odd if place == "title" else "t",
        "hash",
        "text/plain",
        1,
        {"x": odd} if place == "metadata" else {},
    )
    chunk = NewChunk(odd if place == "text" else "text", 0, 4, 1)
    with pytest.raises(InvalidDocument, match="lone surrogate") as caught:
        store.replace_documents("n", [item("good"), (document, [chunk], vectors_of("v"))])
    assert isinstance(caught.value, InvalidRequest)
    assert store.documents("n") == []
