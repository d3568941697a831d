"""Chunks through HTTP and the clients: changed, kept by new versions of the file, imported, previewed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragserve.client import Client
from ragserve.errors import Conflict, InvalidRequest, NotFound
from tests.unit.api.scripted_server import DOCUMENTS, Live, Tenants, serving
from tests.unit.api.test_documents import finished

NEW = "The lighthouse of Skerryvore was finished by Alan Stevenson in 1844."


@pytest.fixture
def docs(live: Live, request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own, with one chunk a document."""
    name = str(abs(hash(request.node.name)))
    live.index(name, DOCUMENTS)
    return name


def ids(client: httpx.Client, namespace: str) -> dict[str, str]:
    found = client.get("/rag/documents", params={"namespace": namespace}).json()["documents"]
    return {each["source"]: each["doc_id"] for each in found}


def path_of(client: httpx.Client, namespace: str, source: str = "skerryvore", ordinal: int = 0) -> str:
    return f"/rag/documents/{ids(client, namespace)[source]}/chunks/{ordinal}?namespace={namespace}"


def change(client: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    version = client.get(path).json()["version"]
    response = client.patch(path, json={"version": version, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def found(client: httpx.Client, namespace: str, query: str, retrieval: str = "dense") -> list[Any]:
    body = {"namespace": namespace, "query": query, "retrieval": retrieval, "k": 10, "dedupe": 1}
    response = client.post("/rag/retrieve", json=body)
    assert response.status_code == 200, response.text
    return list(response.json()["results"])


@pytest.mark.parametrize("retrieval", ["dense", "lexical", "hybrid"])
def test_an_edit_is_searched_cited_and_said(
    client: httpx.Client, live: Live, docs: str, retrieval: str
) -> None:
    path = path_of(client, docs)
    before = client.get(path).json()
    assert (before["edited"], before["disabled"], before["original"]) == (False, False, None)
    after = change(client, path, text=NEW)
    assert (after["text"], after["edited"], after["original"]) == (NEW, True, DOCUMENTS["skerryvore"])
    assert (after["start"], after["end"], after["header_chars"]) == (0, len(DOCUMENTS["skerryvore"]), 0)
    assert after["chunk_id"] != before["chunk_id"]
    assert after["version"] != before["version"]
    assert client.get(path).json() == after
    best = found(client, docs, "Skerryvore finished 1844", retrieval)[0]
    assert (best["text"], best["edited"]) == (NEW, True)
    assert [each["text"] for each in found(client, docs, "lighthouse of", retrieval)].count(
        DOCUMENTS["skerryvore"]
    ) == 0
    asked = {"namespace": docs, "query": "Skerryvore finished 1844", "retrieval": retrieval}
    answer = client.post("/rag/query", json=asked).json()
    (cited,) = answer["citations"]
    assert (cited["text"], cited["edited"]) == (NEW, True)


@pytest.mark.parametrize("retrieval", ["dense", "lexical", "hybrid"])
def test_a_disabled_chunk_is_found_by_no_search(client: httpx.Client, docs: str, retrieval: str) -> None:
    path = path_of(client, docs)
    after = change(client, path, disabled=True)
    assert (after["disabled"], after["chunk_id"]) == (True, None)
    assert [each["source"] for each in found(client, docs, "Skerryvore", retrieval)].count("skerryvore") == 0
    listed = client.get(path.replace("/0?", "?")).json()
    assert [(each["ordinal"], each["disabled"]) for each in listed["chunks"]] == [(0, True)]
    change(client, path, disabled=False)
    assert found(client, docs, "Skerryvore", retrieval)[0]["source"] == "skerryvore"


@pytest.mark.parametrize("what", [{"text": NEW}, {"disabled": True}])
def test_sessions_that_rest_on_the_chunk_end(client: httpx.Client, docs: str, what: dict[str, Any]) -> None:
    asked = {"namespace": docs, "query": "the lighthouse of skerryvore", "k": 1, "retrieval": "lexical"}
    first = client.post("/rag/query", json={**asked, "session": "new"}).json()
    session = first["session"]["id"]
    change(client, path_of(client, docs), **what)
    response = client.post("/rag/query", json={**asked, "session": session})
    assert response.status_code in (404, 409), response.text
    sessions = client.get("/rag/sessions").json()["sessions"]
    assert all(each["outdated"] for each in sessions if each["id"] == session)


def test_a_change_must_name_the_version_that_it_has_seen(client: httpx.Client, docs: str) -> None:
    path = path_of(client, docs)
    seen = client.get(path).json()["version"]
    change(client, path, text=NEW)
    response = client.patch(path, json={"version": seen, "text": "Somebody else's text."})
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "chunk_changed"
    assert client.get(path).json()["text"] == NEW


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "invalid_request"),
        ({"version": "x"}, 400, "invalid_request"),
        ({"version": "V", "text": ""}, 400, "empty_chunk"),
        ({"version": "V", "text": " \n\u200b…"}, 400, "empty_chunk"),
        ({"version": "V", "text": "nul \0"}, 400, "invalid_request"),
        ({"version": "V", "text": "word " * 2_000}, 400, "chunk_too_long"),
        ({"version": "V", "text": "w" * 100_001}, 400, "invalid_request"),
        ({"version": "V", "disabled": "yes please"}, 400, "invalid_request"),
        ({"version": "V", "text": "a", "page": 3}, 400, "invalid_request"),
        ({"version": "other", "disabled": True}, 409, "chunk_changed"),
    ],
)
def test_bad_changes_are_refused(
    client: httpx.Client, docs: str, body: dict[str, Any], status: int, code: str
) -> None:
    path = path_of(client, docs)
    before = client.get(path).json()
    given = {name: before["version"] if value == "V" else value for name, value in body.items()}
    response = client.patch(path, json=given)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert client.get(path).json() == before


@pytest.mark.parametrize("path", ["doc_none/chunks/0", "{}/chunks/1", "{}/chunks/-1", "{}/chunks/x"])
def test_chunks_that_are_not_there(client: httpx.Client, docs: str, path: str) -> None:
    where = f"/rag/documents/{path.format(ids(client, docs)['bell'])}?namespace={docs}"
    assert client.get(where).status_code in (400, 404)
    response = client.patch(where, json={"version": "v", "disabled": True})
    assert response.status_code in (400, 404), response.text


def test_what_cannot_be_stored_is_left_out_as_ingestion_does(client: httpx.Client, docs: str) -> None:
    after = change(client, path_of(client, docs), text="bell\x07 and \x1bbook\tof Skerryvore")
    assert after["text"] == "bell and book\tof Skerryvore"


def test_an_unavailable_embedder_changes_nothing(client: httpx.Client, live: Live, docs: str) -> None:
    path = path_of(client, docs)
    before = client.get(path).json()
    live.embedder.error = RuntimeError("the model is gone")
    assert client.patch(path, json={"version": before["version"], "text": NEW}).status_code == 500
    live.embedder.error = None
    assert client.get(path).json() == before
    live.embedder.calls.clear()
    change(client, path, disabled=True)
    change(client, path, disabled=False)
    assert live.embedder.calls == [], "the vector is still there"


def test_a_correction_stays_with_an_unchanged_chunk_and_is_reported_when_lost(
    client: httpx.Client, live: Live
) -> None:
    pages = [f"Page {n} tells of the lighthouse number {n}. " * 30 for n in range(3)]
    name = "kept-corrections"

    def ingest(texts: list[str], title: str = "") -> dict[str, Any]:
        body = {"name": "book", "text": "\n\n".join(texts), "title": title}
        return finished(client, client.post("/rag/ingest", json={"namespace": name, "texts": [body]}))

    ingest(pages)
    path = path_of(client, name, "book")
    chunks = client.get(path.replace("/0?", "?")).json()["chunks"]
    assert len(chunks) >= 3
    for ordinal in (0, len(chunks) - 1):
        change(client, path.replace("/0?", f"/{ordinal}?"), text=f"Corrected text {ordinal}.")
    assert ingest(pages)["counts"]["unchanged"] == 1
    assert client.get(path).json()["text"] == "Corrected text 0."
    job = ingest(pages, title="A book of lights")  # the same chunks under another title
    assert job["items"][0]["reason"] == "2 corrections of chunks kept"
    assert client.get(path).json()["text"] == "Corrected text 0."
    assert "A book of lights\nCorrected text 0." in [text for batch in live.embedder.calls for text in batch]
    job = ingest(["Another first page, which tells of seals. " * 30, *pages[1:]])
    (item,) = job["items"]
    assert item["state"] == "indexed"
    assert "1 correction of chunks lost, because the file no longer has the text: chunk 0" in str(
        item["reason"]
    )
    lost_path = path.replace("/chunks/0", "/lost-corrections")
    lost = client.get(lost_path).json()["lost"]
    assert "Corrected text 0." in [each["text"] for each in lost]
    ingest(pages)
    assert client.get(path).json()["text"] == "Corrected text 0.", "it comes back with its text"
    ingest(["Yet another text."])
    assert len(client.get(lost_path).json()["lost"]) == 2
    assert client.delete(lost_path).json() == {"lost": []}
    assert client.get(lost_path).json() == {"lost": []}


def test_the_client_changes_chunks(live: Live, docs: str) -> None:
    with Client(live.url) as client:
        (document,) = (each for each in client.documents(docs) if each.source == "bell")
        (chunk,) = client.chunks(document.doc_id, docs)
        assert chunk.version is not None
        edited = client.change_chunk(document.doc_id, 0, chunk.version, text=NEW, namespace=docs)
        assert edited.edited
        assert client.chunk(document.doc_id, 0, docs) == edited
        with pytest.raises(Conflict):
            client.change_chunk(document.doc_id, 0, chunk.version, disabled=True, namespace=docs)
        with pytest.raises(InvalidRequest):
            client.change_chunk(document.doc_id, 0, chunk.version, namespace=docs)
        with pytest.raises(NotFound):
            client.chunk(document.doc_id, 7, docs)
        assert client.lost_corrections(document.doc_id, docs) == []
        assert client.forget_lost_corrections(document.doc_id, docs).lost == []


def test_long_documents_are_listed_by_pages(client: httpx.Client, live: Live) -> None:
    text = "\n\n".join(f"Paragraph {n} tells of the lighthouse number {n}. " * 12 for n in range(12))
    finished(
        client,
        client.post("/rag/ingest", json={"namespace": "paged", "texts": [{"name": "long", "text": text}]}),
    )
    path = path_of(client, "paged", "long")
    change(client, path.replace("/0?", "/1?"), disabled=True)
    listing = path.replace("/chunks/0", "/chunks")
    everything = client.get(listing).json()["chunks"]
    paged: list[Any] = []
    after: int | None = 0
    while after is not None:
        page = client.get(f"{listing}&limit=2&after={after}").json()
        assert len(page["chunks"]) <= 2
        paged += page["chunks"]
        after = page["next"]
    assert paged == everything
    assert [each["ordinal"] for each in paged] == list(range(len(paged)))
    assert [each["disabled"] for each in paged].count(True) == 1


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Tenants]:
    with serving(tmp_path_factory.mktemp("chunks"), model_path) as live:
        live.index("mine", DOCUMENTS)
        live.index("theirs", DOCUMENTS)
        found = Tenants(live)
        found.keys.create("first", (), ["admin"])
        yield found


def test_rights(tenants: Tenants) -> None:
    with (
        tenants.client("writer", "read ingest", "mine") as writer,
        tenants.client("reader", "read", "mine") as reader,
        tenants.client("admin", "admin") as admin,
    ):
        path = path_of(writer, "mine")
        change(writer, path, text=NEW)
        seen = reader.get(path).json()
        assert (seen["text"], seen["edited"], seen["original"], seen["version"]) == (NEW, True, None, None)
        version = writer.get(path).json()["version"]
        assert reader.patch(path, json={"version": version, "disabled": True}).status_code == 403
        assert reader.get(path.replace("/chunks/0", "/lost-corrections")).status_code == 403
        change(writer, path, disabled=True)
        assert reader.get(path).status_code == 404, "what nobody finds is not read by key either"
        assert reader.get(path.replace("/0?", "?")).json()["chunks"] == []
        theirs = path_of(admin, "theirs")
        version = admin.get(theirs).json()["version"]
        for where in (theirs, theirs.replace("theirs", "nowhere")):
            assert writer.get(where).status_code == 404
            refused = writer.patch(where, json={"version": version, "disabled": True})
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "namespace_not_found")
            assert writer.get(where.replace("/chunks/0", "/lost-corrections")).status_code == 404
            assert writer.delete(where.replace("/chunks/0", "/lost-corrections")).status_code == 404
        assert not admin.get(theirs).json()["disabled"]
        record = [row for row in tenants.audited() if row.get("chunk") == 0]
        assert record, "a change is in the audit log"
        assert record[0]["namespace"] == "mine"


def test_documents_that_came_in_chunks(client: httpx.Client, live: Live) -> None:
    lines = [
        '{"document": "manual", "text": "Oil the lens bearings.", "page": 4, "metadata": {"lang": "en"}}',
        "{broken",
        '{"document": "manual", "text": "Trim the wick.", "page": 2, "order": 1}',
    ]
    files = {"files": ("c.jsonl", "\n".join(lines))}
    data = {"namespace": "cut", "prechunked": "true", "metadata": '{"shelf": 3}'}
    job = finished(client, client.post("/rag/ingest", files=files, data=data))
    assert {item["source"]: item["state"] for item in job["items"]} == {
        "manual": "indexed",
        "c.jsonl:2": "failed",
    }
    chunks = client.get(path_of(client, "cut", "manual").replace("/0?", "?")).json()["chunks"]
    assert [(each["text"], each["page"]) for each in chunks] == [
        ("Trim the wick.", 2),
        ("Oil the lens bearings.", 4),
    ]
    (hit, *_) = found(client, "cut", "lens bearings", "lexical")
    assert (hit["page"], hit["metadata"]["shelf"], hit["metadata"]["lang"]) == (4, 3, "en")
    files = {"files": ("c.jsonl", "no lines")}
    response = client.post("/rag/ingest", files=files, data=data)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_chunks")
    with Client(live.url) as ours:
        job_view = ours.ingest_files([("d.jsonl", b'{"text": "One."}')], namespace="cut", prechunked=True)
        assert ours.wait(job_view).counts["indexed"] == 1


def test_a_preview_shows_the_chunks_and_stores_nothing(client: httpx.Client, live: Live) -> None:
    text = "# Lights\n\n" + "The lamp of the tower is trimmed every four hours. " * 40
    before = client.get("/rag/namespaces").json()
    files = {"file": ("a/lights.md", text)}
    shown = client.post("/rag/ingest/preview", files=files, data={"chunk_tokens": "64", "limit": "2"}).json()
    assert (shown["filename"], shown["mime"], shown["chunk_tokens"]) == ("lights.md", "text/markdown", 64)
    assert (len(shown["chunks"]), shown["n_chunks"] > 4) == (2, True)
    assert all(0 < each["n_tokens"] <= 64 for each in shown["chunks"])
    assert shown["chunks"][0]["text"] == text[: shown["chunks"][0]["end"]]
    assert client.get("/rag/namespaces").json() == before
    assert client.get("/rag/jobs", params={"state": "queued"}).json()["jobs"] == []
    assert not live.embedder.calls
    with Client(live.url) as ours:
        assert ours.preview(("lights.md", text.encode()), chunk_tokens=64, limit=2).chunks[1].ordinal == 1


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"files": {"file": ("b.pdf", b"%PDF-1.7 nothing")}}, 415, "corrupt_document"),
        ({"files": {"file": ("b.txt", b"")}}, 415, "empty_document"),
        ({"files": {"file": ("b.txt", b"x")}, "data": {"chunk_tokens": "4"}}, 400, "invalid_request"),
        ({"files": {"file": ("b.txt", b"x")}, "data": {"namespace": "n"}}, 400, "invalid_request"),
        ({"files": [("files", ("a.txt", b"x")), ("files", ("b.txt", b"y"))]}, 400, "invalid_request"),
        ({"json": {"text": "x"}}, 415, "unsupported_media_type"),
    ],
)
def test_previews_that_are_refused(
    client: httpx.Client, options: dict[str, Any], status: int, code: str
) -> None:
    response = client.post("/rag/ingest/preview", **options)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text


def test_previews_are_bounded(client: httpx.Client, live: Live) -> None:
    previewer = live.services.ingestor.previewer
    files = {"file": ("a.txt", b"A text.")}
    for _ in range(2):
        assert previewer._free.acquire(blocking=False)
    refused = client.post("/rag/ingest/preview", files=files)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "previews_busy")
    assert "retry-after" in refused.headers
    for _ in range(2):
        previewer._free.release()
    assert client.post("/rag/ingest/preview", files=files).status_code == 200
