"""The product's app in front of workers: deletion, operators' figures, and requests without a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from ragserve.answering.prompt import PromptBuilder
from ragserve.cache.evictions import clean_files
from ragserve.config import load
from ragserve_index import EvictionLog, IndexStore
from sglang_ext.protocol import document_key
from tests.conftest import MODEL
from tests.unit.api.scripted_server import eventually
from tests.unit.fleet.fake_worker import PRINT, FakeWorker


def states(client: httpx.Client) -> list[str]:
    return [one["state"] for one in client.get("/info").json()["engine"]["workers"]]


def test_a_removed_document_is_gone_from_every_worker_or_its_worker_serves_nobody(
    client: httpx.Client, two: list[FakeWorker], tmp_path: Path
) -> None:
    texts = [{"name": name, "text": f"All about {name}."} for name in ("eels", "owls")]
    accepted = client.post("/rag/ingest", json={"texts": texts})
    job = accepted.headers["location"]
    eventually(lambda: client.get(job).json()["state"] == "done", "ingestion")
    prompts = PromptBuilder.load(str(MODEL))
    found = {one["source"]: one for one in client.get("/rag/documents").json()["documents"]}
    for one in found.values():
        (chunk,) = client.get(f"/rag/documents/{one['doc_id']}/chunks").json()["chunks"]
        ids = prompts.document_ids(one["title"], chunk["text"])
        for each in two:
            each.ledger.documents[document_key("default", PRINT, ids)] = len(ids)
    client.delete(f"/rag/documents/{found['eels']['doc_id']}").raise_for_status()
    assert [len(each.ledger.documents) for each in two] == [1, 1]
    two[0].ledger.deaf = True
    client.delete(f"/rag/documents/{found['owls']['doc_id']}").raise_for_status()
    assert [len(each.ledger.documents) for each in two] == [1, 0]
    assert states(client) == ["fenced", "serving"]
    metrics = client.get("/metrics").text
    for number, each in enumerate(two):
        assert f'ragserve_worker_serving{{worker="{each.url}"}} {number}.0' in metrics
        assert f'ragserve_worker_unconfirmed_deletions{{worker="{each.url}"}} {1 - number}.0' in metrics
    two[0].ledger.deaf = False
    eventually(lambda: states(client) == ["serving", "serving"], "the worker confirms")
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
