"""Ingestion through HTTP, jobs, documents and namespaces, with the real pipeline and index."""

from __future__ import annotations

import errno
import sqlite3
import time
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from tests.unit.api.scripted_server import DOCUMENTS, Live, eventually
from tests.unit.ingest.ingest_samples import make_xlsx


def finished(client: httpx.Client, response: httpx.Response) -> dict[str, Any]:
    """The job of a 202, when it is over."""
    assert response.status_code == 202, response.text
    job = response.json()
    assert response.headers["location"] == f"/rag/jobs/{job['job_id']}"
    assert job["state"] in ("queued", "running", "done")
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        job = client.get(response.headers["location"]).json()
        if job["state"] in ("done", "failed", "cancelled"):
            return dict(job)
        time.sleep(0.02)
    pytest.fail(f"the job never ended: {job}")


def test_texts_become_documents_that_are_found(client: httpx.Client) -> None:
    texts = [
        {
            "name": "bells",
            "text": "The bells of Kirkwall are rung on Sundays.",
            "title": "Bells",
            "metadata": {"year": 1850, "tags": ["a", "b"]},
        },
        {"name": "empty", "text": ""},
    ]
    job = finished(client, client.post("/rag/ingest", json={"namespace": "texts", "texts": texts}))
    assert job["state"] == "done"
    assert (job["counts"]["indexed"], job["counts"]["failed"], job["n_items"]) == (1, 1, 2)
    items = {item["source"]: item for item in job["items"]}
    assert items["bells"]["state"] == "indexed"
    assert items["bells"]["chunks"] == 1
    assert items["empty"]["state"] == "failed"
    assert items["empty"]["reason"]
    body = {
        "query": "bells of Kirkwall",
        "namespace": "texts",
        "filter": {"op": "eq", "field": "tags", "value": "b"},
    }
    (passage,) = client.post("/rag/retrieve", json=body).json()["results"]
    assert (passage["title"], passage["text"], passage["doc_id"]) == (
        "Bells",
        texts[0]["text"],
        items["bells"]["doc_id"],
    )
    assert passage["metadata"]["year"] == 1850
    again = finished(client, client.post("/rag/ingest", json={"namespace": "texts", "texts": texts[:1]}))
    assert again["counts"]["unchanged"] == 1


def test_files_become_documents(client: httpx.Client) -> None:
    files = [
        (
            "files",
            (
                "notes.md",
                b"# Muckle Flugga\n\nThe light of Muckle Flugga is the northernmost.",
                "text/markdown",
            ),
        ),
        (
            "files",
            (
                "page.html",
                "<html><body><p>Ein Leuchtturm auf Fair Isle, südlich gelegen.</p></body></html>".encode(),
                "text/html",
            ),
        ),
        ("files", ("broken.pdf", b"%PDF-1.7 nothing", "application/pdf")),
    ]
    response = client.post(
        "/rag/ingest", files=files, data={"namespace": "files", "metadata": '{"shelf": 3}'}
    )
    job = finished(client, response)
    states = {item["source"]: item["state"] for item in job["items"]}
    assert states == {"notes.md": "indexed", "page.html": "indexed", "broken.pdf": "failed"}
    found = client.post(
        "/rag/retrieve", json={"query": "Muckle Flugga light", "namespace": "files", "k": 1}
    ).json()["results"]
    assert found[0]["source"] == "notes.md"
    assert found[0]["metadata"]["shelf"] == 3
    page = client.get(f"/rag/jobs/{job['job_id']}", params={"limit": 2}).json()
    assert (len(page["items"]), page["next"]) == (2, 2)
    rest = client.get(f"/rag/jobs/{job['job_id']}", params={"limit": 2, "after": 2}).json()
    assert (len(rest["items"]), rest["next"]) == (1, None)
    failed = client.get(f"/rag/jobs/{job['job_id']}", params={"state": "failed"}).json()
    assert [item["source"] for item in failed["items"]] == ["broken.pdf"]


def test_uploads_leave_nothing_behind(client: httpx.Client, live: Live) -> None:
    finished(
        client,
        client.post(
            "/rag/ingest", files={"file": ("a.txt", b"Some words of text.")}, data={"namespace": "clean"}
        ),
    )
    uploads = Path(live.settings.data_dir) / "uploads"
    eventually(lambda: list(uploads.iterdir()) == [], "the upload is removed after the job has ended")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"files": {"files": ("", b"x")}, "data": {}}, None),
        ({"files": {"upload": ("a.txt", b"x")}}, "upload"),
        ({"files": {"files": ("a.txt", b"x")}, "data": {"collection": "x"}}, "collection"),
        ({"files": {"files": ("a.txt", b"x")}, "data": {"namespace": "../x"}}, "namespace"),
        ({"files": {"files": ("a.txt", b"x")}, "data": {"metadata": "[1]"}}, "metadata"),
        ({"files": {"files": ("a.txt", b"x")}, "data": {"metadata": '{"a": {"b": 1}}'}}, "metadata"),
        ({"files": {"files": ("a.txt", b"x")}, "data": {"metadata": "{"}}, None),
        ({"files": {"metadata": ("a.txt", b"{}")}}, "metadata"),
        ({"files": [("files", ("a.txt", b"x")), ("files", ("a.txt", b"y"))]}, "name"),
        ({"files": [("files", (f"{i}.txt", b"x")) for i in range(101)]}, None),
        ({"content": b"garbage", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, None),
        ({"content": b"garbage", "headers": {"Content-Type": "multipart/form-data"}}, None),
        ({"json": {"texts": []}}, "texts"),
        ({"json": {"texts": [{"name": "a"}]}}, "texts[0].text"),
        ({"json": {"texts": [{"name": " ", "text": "x"}]}}, "texts[0].name"),
        ({"json": {"texts": [{"name": "a", "text": "a\0b"}]}}, "texts[0].text"),
        ({"json": {"texts": [{"name": "a", "text": "b", "metadata": {"": 1}}]}}, "texts[0].metadata"),
        (
            {"json": {"texts": [{"name": "a", "text": "b", "metadata": {"k": {"deep": 1}}}]}},
            "texts[0].metadata",
        ),
        ({"json": {"texts": [{"name": "a", "text": "b"}, {"name": "a", "text": "c"}]}}, "name"),
        ({"json": {"text": "x"}}, "texts"),
    ],
)
def test_bad_ingestions(client: httpx.Client, options: dict[str, Any], param: str | None) -> None:
    before = client.get("/rag/jobs").json()
    response = client.post("/rag/ingest", **options)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"]
    if param is not None:
        assert error["param"].startswith(param)
    assert client.get("/rag/jobs").json() == before


def test_another_kind_of_body(client: httpx.Client) -> None:
    response = client.post("/rag/ingest", content=b"words", headers={"Content-Type": "text/plain"})
    assert response.status_code == 415
    assert "curl -F" in response.json()["error"]["hint"]


@pytest.mark.parametrize("size", [100_001, 5_000_000])
def test_a_file_over_its_limit(
    live: Live, client: httpx.Client, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.settings, "max_upload_bytes", 100_000)
    files = [("files", ("small.txt", b"x" * 99_999)), ("files", ("large.txt", b"x" * size))]
    response = client.post("/rag/ingest", files=files)
    assert response.status_code == 413
    assert "'large.txt' is over 100,000 bytes" in response.json()["error"]["message"]
    assert client.post("/rag/ingest", files=files[:1], data={"namespace": "limits"}).status_code == 202


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left"), sqlite3.OperationalError("database or disk is full")]
)
def test_a_full_disk_is_said(
    client: httpx.Client, live: Live, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(live.services.ingestor, "submit_texts", full)
    response = client.post("/rag/ingest", json={"texts": [{"name": "a", "text": "b"}]})
    assert (response.status_code, response.json()["error"]["code"]) == (507, "storage_full")


def test_a_namespace_of_another_embedder(client: httpx.Client, live: Live) -> None:
    live.services.store.ensure_namespace("foreign", embedder="another", dim=8)
    query = client.post("/rag/query", json={"query": "x y", "namespace": "foreign"})
    assert (query.status_code, query.json()["error"]["code"]) == (409, "embedder_mismatch")
    assert (
        client.post(
            "/rag/ingest", json={"namespace": "foreign", "texts": [{"name": "a", "text": "b"}]}
        ).status_code
        == 409
    )


def test_jobs_are_listed_and_cancelled(client: httpx.Client) -> None:
    job = finished(
        client,
        client.post(
            "/rag/ingest", json={"namespace": "jobs", "texts": [{"name": "a", "text": "some words"}]}
        ),
    )
    listed = client.get("/rag/jobs", params={"namespace": "jobs", "state": "done"}).json()["jobs"]
    assert [one["job_id"] for one in listed] == [job["job_id"]]
    response = client.delete(f"/rag/jobs/{job['job_id']}")
    assert (response.status_code, response.json()["state"]) == (202, "done")  # over: left as it is
    for call in (client.get, client.delete):
        missing = call("/rag/jobs/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "job_not_found")


def test_documents_are_listed_page_by_page(client: httpx.Client, live: Live) -> None:
    live.index("pages", {f"doc{i:02}": f"text {i}" for i in range(7)}, shelf=1)
    live.index("pages", {"other": "text"}, shelf=2)
    seen, after = [], None
    while True:
        params = {
            "namespace": "pages",
            "limit": 3,
            "filter": '{"op":"eq","field":"shelf","value":1}',
            **({"after": after} if after else {}),
        }
        page = client.get("/rag/documents", params=params).json()
        seen += [document["source"] for document in page["documents"]]
        after = page["next"]
        if after is None:
            break
        assert len(page["documents"]) == 3
    assert sorted(seen) == [f"doc{i:02}" for i in range(7)]
    prefixed = client.get("/rag/documents", params={"namespace": "pages", "source_prefix": "oth"}).json()
    assert [document["source"] for document in prefixed["documents"]] == ["other"]


def test_a_page_of_chunks_reads_no_others(client: httpx.Client, live: Live, docs: str) -> None:
    (document, *_) = client.get("/rag/documents", params={"namespace": docs}).json()["documents"]
    path = f"/rag/documents/{document['doc_id']}/chunks"
    with mock.patch.object(type(live.services.store.chunk_changes), "states", return_value=[]) as read:
        assert client.get(path, params={"namespace": docs, "limit": 5, "after": 9}).json()["next"] is None
    assert read.call_args.kwargs == {"after": 9, "limit": 6}
    beyond = client.get(path, params={"namespace": docs, "after": "9" * 50})
    assert beyond.json() == {"chunks": [], "next": None}


def test_a_document_is_shown_and_removed(client: httpx.Client, docs: str) -> None:
    listed = client.get("/rag/documents", params={"namespace": docs}).json()["documents"]
    assert {one["source"] for one in listed} == set(DOCUMENTS)
    path = f"/rag/documents/{next(one['doc_id'] for one in listed if one['source'] == 'soup')}"
    where = {"namespace": docs}
    shown = client.get(path, params=where).json()
    assert (shown["title"], shown["n_chunks"], shown["metadata"]) == (
        "Soup",
        1,
        {"name": "soup", "lang": "en"},
    )
    chunks = client.get(f"{path}/chunks", params=where).json()
    assert [chunk["text"] for chunk in chunks["chunks"]] == [DOCUMENTS["soup"]]
    assert client.delete(path, params=where).json() == shown
    for call in (client.get, client.delete):
        missing = call(path, params=where)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "document_not_found")
    assert client.get(f"{path}/chunks", params=where).status_code == 404
    found = client.post("/rag/retrieve", json={"query": "soup", "namespace": docs, "k": 9}).json()["results"]
    assert {passage["source"] for passage in found} == {"skerryvore", "bell"}


def test_namespaces_are_shown_and_dropped(client: httpx.Client, live: Live) -> None:
    live.index("drop-me", {"a": "b", "c": "d"})
    shown = client.get("/rag/namespaces/drop-me").json()
    assert (shown["n_documents"], shown["n_chunks"], shown["embedder"], shown["dim"]) == (
        2,
        2,
        "words",
        live.embedder.dim,
    )
    assert "drop-me" in {one["name"] for one in client.get("/rag/namespaces").json()["namespaces"]}
    assert client.delete("/rag/namespaces/drop-me").json()["n_documents"] == 2
    for call in (client.get, client.delete):
        missing = call("/rag/namespaces/drop-me")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "namespace_not_found")
    assert client.get("/rag/documents", params={"namespace": "drop-me"}).status_code == 404


def test_dropping_a_namespace_without_documents_forgets_what_queries_sent(
    client: httpx.Client, live: Live
) -> None:
    live.engine.forgotten.clear()
    answer = client.delete("/rag/namespaces/only-queries")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "namespace_not_found")
    assert live.engine.forgotten == [("only-queries", None)]


def test_info_says_what_is_serving(client: httpx.Client, live: Live, docs: str) -> None:
    info = client.get("/info").json()
    assert info["engine"]["kind"] == "local"
    assert info["engine"]["tokenizer"] == live.settings.model
    assert info["strategies"] == ["full", "prefix", "epic", "samkv", "passages"]
    assert info["embedder"] == {"name": "words", "dim": live.embedder.dim}
    assert info["limits"]["max_query_chars"] == live.settings.max_query_chars
    assert info["defaults"]["k"] == live.settings.top_k
    assert info["index"]["documents"] >= len(DOCUMENTS)


def test_an_engine_without_a_document_cache_warms_nothing(client: httpx.Client, docs: str) -> None:
    before = client.get("/rag/jobs").json()
    texts = [{"name": "a", "text": "b"}]
    form = {"files": ("a.txt", b"words")}
    calls = [
        client.post("/rag/cache/warm", json={"namespace": docs}),
        client.post("/rag/ingest", json={"namespace": docs, "texts": texts, "warm": True}),
        client.post("/rag/ingest", files=form, data={"namespace": docs, "warm": "true"}),
    ]
    assert [(call.status_code, call.json()["error"]["code"]) for call in calls] == [
        (400, "no_document_cache")
    ] * 3
    assert client.get("/rag/jobs").json() == before


def test_citations_name_the_sheet_and_keep_the_header_of_the_table(client: httpx.Client) -> None:
    rows = [[f"Harbour {n}", n * 31, "gravel and sand"] for n in range(60)]
    book = make_xlsx({"Contents": [["About harbours."]], "Depths": [["harbour", "ships", "ground"], *rows]})
    job = finished(
        client, client.post("/rag/ingest", files={"files": ("a.xlsx", book)}, data={"namespace": "sheets"})
    )
    assert job["counts"]["indexed"] == 1
    asked = {"query": "Harbour 55", "namespace": "sheets", "retrieval": "lexical", "k": 1}
    (passage,) = client.post("/rag/retrieve", json=asked).json()["results"]
    place = {"page": 2, "page_kind": "sheet", "page_name": "Depths"}
    assert {name: passage[name] for name in place} == place
    assert passage["metadata"]["page_kind"] == "sheet"
    assert "page_names" not in passage["metadata"], "the other sheets' names"
    header = "| harbour | ships | ground |\n|---|---|---|\n"
    assert passage["text"][: passage["header_chars"]] == header
    (citation,) = client.post("/rag/query", json=asked).json()["citations"]
    assert {name: citation[name] for name in passage if name != "metadata"} == {
        name: value for name, value in passage.items() if name != "metadata"
    }
    chunks = client.get(f"/rag/documents/{passage['doc_id']}/chunks", params={"namespace": "sheets"}).json()[
        "chunks"
    ]
    assert {chunk["page_name"] for chunk in chunks} == {"Contents", "Depths"}
    own = "".join(chunk["text"][chunk["header_chars"] :] for chunk in chunks)
    assert own.count(header) == 1
    assert own[passage["start"] : passage["end"]] == passage["text"][len(header) :]


def test_urls_are_taken_and_addresses_of_the_servers_networks_are_not(
    client: httpx.Client, live: Live
) -> None:
    body = {"namespace": "web", "urls": [f"{live.url}/info"], "sitemap": False, "metadata": {"lang": "en"}}
    job = finished(client, client.post("/rag/ingest", json=body))
    assert (job["kind"], job["state"]) == ("urls", "done")
    assert [(item["state"], "no public address" in item["reason"]) for item in job["items"]] == [
        ("failed", True)
    ]
    for wrong, param in (
        ({"urls": []}, "urls"),
        ({"urls": ["file:///etc/passwd"]}, "urls"),
        ({"urls": ["https://example.com/"], "texts": []}, "texts"),
    ):
        response = client.post("/rag/ingest", json=wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), wrong
