"""The product's app in front of workers: deletion, operators' figures, and requests without a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.api.services import load_embedder
from ragserve.cache.evictions import clean_files
from ragserve.config import load
from ragserve.retrieval.embedder import Embedder
from ragserve_index import EvictionLog, IndexStore
from sglang_ext.wire.protocol import document_key, session_key
from tests.conftest import MODEL
from tests.unit.api.scripted_server import eventually
from tests.unit.fleet.conftest import in_front
from tests.unit.fleet.fake_worker import PRINT, FakeWorker


def states(client: httpx.Client) -> list[str]:
    return [one["state"] for one in client.get("/info").json()["engine"]["workers"]]


def ingested_and_cached(client: httpx.Client, made: list[FakeWorker], *names: str) -> dict[str, str]:
    """Ingest a document of each name, and let every worker hold all of them. The documents' ids by name."""
    texts = [{"name": name, "text": f"All about {name}."} for name in names]
    job = client.post("/rag/ingest", json={"texts": texts}).headers["location"]
    eventually(lambda: client.get(job).json()["state"] == "done", "ingestion")
    prompts = PromptBuilder.load(str(MODEL))
    documents = client.get("/rag/documents").json()["documents"]
    for one in documents:
        (chunk,) = client.get(f"/rag/documents/{one['doc_id']}/chunks").json()["chunks"]
        ids = prompts.document_ids(one["title"], chunk["text"])
        for each in made:
            each.ledger.documents[document_key("default", PRINT, ids)] = len(ids)
    return {one["source"]: one["doc_id"] for one in documents}


def test_a_removed_document_is_gone_from_every_worker_or_its_worker_serves_nobody(
    client: httpx.Client, two: list[FakeWorker], tmp_path: Path
) -> None:
    found = ingested_and_cached(client, two, "eels", "owls")
    client.delete(f"/rag/documents/{found['eels']}").raise_for_status()
    assert [len(each.ledger.documents) for each in two] == [1, 1]
    two[0].ledger.deaf = True
    client.delete(f"/rag/documents/{found['owls']}").raise_for_status()
    assert [len(each.ledger.documents) for each in two] == [1, 0]
    assert states(client) == ["fenced", "serving"]
    metrics = client.get("/metrics").text
    for number, each in enumerate(two):
        assert f'ragserve_worker_serving{{worker="{each.url}"}} {number}.0' in metrics
        assert f'ragserve_worker_unconfirmed_deletions{{worker="{each.url}"}} {1 - number}.0' in metrics
    two[0].ledger.deaf = False
    eventually(lambda: states(client) == ["serving", "serving"], "the worker confirms")
    assert [len(each.ledger.documents) for each in two] == [0, 0]


def test_two_servers_in_front_of_the_same_workers_delete_for_each_other(
    both_fronts: tuple[httpx.Client, httpx.Client], two: list[FakeWorker]
) -> None:
    one, other = both_fronts
    found = ingested_and_cached(one, two, "eels", "owls")
    body = {"query": "What swims?", "strategy": "prefix", "k": 2}
    first = one.post("/rag/query", json=body).json()
    assert other.post("/rag/query", json=body).json()["answer"] == first["answer"]
    other.delete(f"/rag/documents/{found['eels']}").raise_for_status()
    assert [len(each.ledger.documents) for each in two] == [1, 1]
    two[0].ledger.deaf = True
    one.delete(f"/rag/documents/{found['owls']}").raise_for_status()
    assert [len(each.ledger.documents) for each in two] == [1, 0]
    assert states(one) == ["fenced", "serving"]
    eventually(lambda: states(other) == ["fenced", "serving"], "the other server hears of the removal")
    assert [each.get("/rag/documents").json()["documents"] for each in both_fronts] == [[], []]
    two[0].ledger.deaf = False
    for each in both_fronts:
        eventually(lambda front=each: states(front) == ["serving", "serving"], "the worker confirms")  # type: ignore[misc]
    assert [len(each.ledger.documents) for each in two] == [0, 0]


def test_a_removal_without_a_server_waits_for_the_next_one(
    client: httpx.Client, two: list[FakeWorker], tmp_path: Path
) -> None:
    """Workers have the KV: a command that finds none in the data folder must not strike the removal out."""
    settings = load(data_dir=tmp_path / "front")
    with IndexStore(settings.data_dir) as store:
        store.ensure_namespace("n", embedder="e", dim=4)
        store.drop_namespace("n")
        assert not clean_files(settings, store)
        assert len(EvictionLog(store.database)) == 1


def test_without_a_worker_requests_are_refused_with_retry_after(
    client: httpx.Client, two: list[FakeWorker]
) -> None:
    body: dict[str, Any] = {"query": "What swims?", "documents": [{"text": "Eels swim."}]}
    first = client.post("/rag/query", json=body)
    assert first.status_code == 200, first.text
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny", "SGLang's routes go to a worker"
    for each in two:
        each.kill()
    eventually(lambda: client.get("/ready").status_code == 503, "the loss is seen")
    assert "lost, lost" in client.get("/ready").text
    refused = client.post("/rag/query", json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "no_worker"
    two[1].start()
    eventually(lambda: client.get("/ready").status_code == 200, "it is back")
    assert states(client) == ["lost", "serving"]
    assert client.post("/rag/query", json=body).json()["answer"] == first.json()["answer"]


def ended(worker: FakeWorker, session: str) -> bool:
    """True if a session's KV was removed from a worker."""
    removal = {"op": "remove_session", "key": session_key("default", session)}
    return removal in worker.ledger.removed


def test_a_session_goes_on_after_a_restart_and_its_end_reaches_the_workers(
    two: list[FakeWorker], tmp_path: Path
) -> None:
    """The workers live on, with the KV of its turns."""
    body: dict[str, Any] = {"query": "What swims?", "strategy": "prefix"}
    given = [{"title": "Eels", "text": "Eels swim to the Sargasso Sea."}]
    with in_front(two, tmp_path / "front") as client:
        answer = client.post("/rag/query", json={**body, "documents": given, "session": "new"}).json()
        name = answer["session"]["id"]
    with in_front(two, tmp_path / "front") as client:
        body = {"query": "And whereto?", "documents": [], "session": name}
        answer = client.post("/rag/query", json=body).json()
        assert (answer["session"]["turn"], answer["session"]["documents"]) == (2, 1)
    with in_front(two, tmp_path / "front") as client:
        client.delete(f"/rag/sessions/{name}").raise_for_status()
    assert all(ended(each, name) for each in two)


def test_the_kv_of_sessions_that_expire_while_the_server_is_down_is_removed(
    two: list[FakeWorker], tmp_path: Path
) -> None:
    body: dict[str, Any] = {"query": "What swims?", "strategy": "prefix", "documents": [], "session": "new"}
    with in_front(two, tmp_path / "front") as client:
        name = client.post("/rag/query", json=body).json()["session"]["id"]
    with in_front(two, tmp_path / "front", session_ttl_s=1e-3):
        eventually(lambda: all(ended(each, name) for each in two), "its KV is removed")


def test_models_are_served_and_asked_by_the_server_in_front(
    two: list[FakeWorker], tmp_path: Path, embedder: Embedder
) -> None:
    with in_front(two, tmp_path / "one", lambda _: embedder) as one:
        body = {"model": "all-MiniLM-L6-v2", "input": "All about eels."}
        served = one.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
        assert served == pytest.approx(embedder.encode([body["input"]])[0].tolist(), abs=1e-5)
        url = f"{one.base_url}/v1#all-MiniLM-L6-v2".replace("//v1", "/v1")
        with in_front(two, tmp_path / "other", load_embedder, embedder=f"openai:{url}") as other:
            ingested_and_cached(other, two, "eels", "owls")
            found = other.post("/rag/retrieve", json={"query": "owls", "k": 1}).json()
            assert found["results"][0]["source"] == "owls"
