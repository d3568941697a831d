"""`ragserve serve --workers` in front of a real worker: the same answers as in one process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ragserve.engine.running_server import RunningServer
from tests.integration.engines import Server, WarmedElsewhere, shared_folder
from tests.integration.forked_starts import forked_server
from tests.integration.prompts import rows

KEY = "workers-key"
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "prefix": {},
    "concat": {"recompute": "sentences", "share": 0.1},
    "epic": {},
    "cacheblend": {},
    "random": {},
    "samkv": {"keep": 0.3},
}
TEXTS = {
    name: f"The observatory of {name} was founded by Mara {name}. It stands by the sea." for name in "ABC"
}


@pytest.fixture(scope="module")
def worker(
    quick_server: Server,
    warmed_elsewhere: WarmedElsewhere,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningServer]:
    """It reads the store to which another engine has given documents, and gives it none."""
    flags = {"model": quick_server.model, "worker": True, "api_key": KEY}
    flags |= shared_folder(warmed_elsewhere.shared, value=1e9)
    with forked_server(data_dir=tmp_path_factory.mktemp("worker") / "data", **flags) as running:
        yield running


@pytest.fixture(scope="module")
def front(worker: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("front")
    flags = {"workers": worker.url, "engine_api_key": KEY, "warm_ingested": False}
    with forked_server(data_dir=folder / "data", **flags) as running, running.client() as client:
        yield Server(running, client)


def asked(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    response = server.client.post("/rag/query", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def analysed(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The answer by passages that are all analysed: until then another rule chooses what to recompute."""
    asked(server, body)
    server.analysed()
    return asked(server, body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_answers_as_in_one_process(quick_server: Server, front: Server, strategy: str) -> None:
    row = rows("crossdoc")[2]
    composed = strategy not in ("full", "prefix")
    body = {
        "query": row["question"],
        "documents": [{"title": title, "text": text} for title, text in row["docs"][:3]],
        "namespace": "fleet-same",
        "strategy": strategy,
        "strategy_options": STRATEGIES[strategy] | ({"force": True} if composed else {}),
        "max_new_tokens": 8,
    }
    near, far = analysed(quick_server, body), analysed(front, body)
    assert far["answer"] == near["answer"]
    for name in ("strategy", "tokens_kept", "tokens_recomputed", "notes"):
        assert far["context"][name] == near["context"][name], name
    assert far["context"]["strategy"] == strategy
    assert far["usage"]["prompt"] == near["usage"]["prompt"]


def test_documents_are_warmed_found_and_deleted_on_the_worker(front: Server, worker: RunningServer) -> None:
    space = "fleet"

    def listed() -> dict[str, int]:
        with worker.client() as client:
            body = {"operation": "held", "arguments": {"most": 1000}}
            answer = client.post("/worker/control", json=body).json()
        assert answer["scanned"]
        assert answer["memory_tokens"] > answer["in_memory"]
        documents: list[tuple[str, int]] = answer["documents"]
        assert answer["in_memory"] <= len(documents)
        return dict(documents)

    others = listed()

    def held() -> int:
        cache = front.client.get("/rag/cache").json()
        return int(cache["disk"]["namespaces"].get(space, {}).get("documents", 0))

    texts = [{"name": name, "title": name, "text": text} for name, text in TEXTS.items()]
    front.finished(front.client.post("/rag/ingest", json={"namespace": space, "texts": texts}))
    job = front.finished(front.client.post("/rag/cache/warm", json={"namespace": space}))
    assert (job["state"], job["counts"]["warmed"]) == ("done", 3)
    before = held()
    assert before == 4, "the documents and the system text"
    assert len(listed().keys() - others.keys()) in (3, 4), "the system text is another namespace's, too"
    body = {"query": "Who founded the observatory of B?", "namespace": space, "strategy": "concat"}
    answer = asked(front, body | {"strategy_options": {"force": True}, "max_new_tokens": 4, "k": 3})
    assert sum(answer["context"]["tokens_by_tier"].values()) == answer["context"]["tokens_kept"]
    found = front.client.get("/rag/documents", params={"namespace": space}).json()["documents"]
    assert front.client.delete(f"/rag/documents/{found[0]['doc_id']}", params={"namespace": space}).is_success
    assert held() == before - 1, "gone when the answer comes"
    front.client.delete(f"/rag/namespaces/{space}").raise_for_status()
    assert held() == 0
    assert listed().keys() == others.keys()


def found_in_the_store(worker: RunningServer, elsewhere: WarmedElsewhere) -> None:
    """Wait until the worker knows what the store has. A question waits half a second for that, and then has
    the documents computed."""
    keys = [path.stem for path in elsewhere.shared.glob(f"*/*/{elsewhere.namespace}/*.pages")]
    assert len(keys) == len(elsewhere.texts) + 1, "the system text, too"
    where = {"keys": keys, "namespace": elsewhere.namespace, "tokens": [1] * len(keys)}
    deadline = time.monotonic() + 240
    with worker.client() as client:
        while True:
            found = client.post("/worker/control", json={"operation": "where", "arguments": where}).json()
            if found["below"] == ["remote"] * len(keys):
                return
            assert time.monotonic() < deadline, found


def test_documents_that_another_engine_has_warmed_come_from_the_store(
    quick_server: Server, front: Server, worker: RunningServer, warmed_elsewhere: WarmedElsewhere
) -> None:
    space = warmed_elsewhere.namespace
    body = {
        "query": "Who founded the observatory of Marrow?",
        "namespace": space,
        "k": 2,
        "strategy": "concat",
        "strategy_options": {"force": True},
        "max_new_tokens": 8,
    }
    found_in_the_store(worker, warmed_elsewhere)
    files = [("files", (name, text)) for name, text in warmed_elsewhere.texts.items()]
    for server, name in ((quick_server, "fleet-elsewhere"), (front, space)):
        server.finished(server.client.post("/rag/ingest", files=files, data={"namespace": name}))
    answer = asked(front, body)
    tiers = answer["context"]["tokens_by_tier"]
    assert tiers["remote"] > 0
    assert tiers["remote"] == sum(tiers.values()) == answer["context"]["tokens_kept"]
    assert answer["answer"] == asked(quick_server, body | {"namespace": "fleet-elsewhere"})["answer"]


def test_a_stream_and_sglangs_own_routes(front: Server) -> None:
    row = rows("onehop")[0]
    body = {
        "query": row["question"],
        "documents": [{"text": text} for _, text in row["docs"][:1]],
        "max_new_tokens": 4,
    }
    with front.client.stream("POST", "/rag/query", json=body | {"stream": True}) as stream:
        events = "".join(stream.iter_text()).split("\n\n")
    said = [event.partition("data: ")[2] for event in events if event.startswith("event: message")]
    assert "".join(json.loads(data)["text"] for data in said) == asked(front, body)["answer"]
    assert any(event.startswith("event: done") for event in events)
    plain = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}
    assert front.client.post("/generate", json=plain).json()["output_ids"]


def test_operators_see_the_workers_and_nobody_calls_them_without_the_key(
    front: Server, worker: RunningServer
) -> None:
    info = front.client.get("/info").json()
    assert info["engine"]["kind"] == "fleet"
    (one,) = info["engine"]["workers"]
    assert (one["url"], one["state"], one["unconfirmed_deletions"]) == (worker.url, "serving", 0)
    assert {"concat", "samkv"} <= set(info["strategies"])
    metrics = front.client.get("/metrics").text
    assert f'ragserve_worker_serving{{worker="{worker.url}"}} 1.0' in metrics
    for path in ("/worker", "/worker/control", "/generate"):
        assert httpx.post(worker.url + path, json={}).status_code == 401
    with worker.client() as client:
        deadline = time.monotonic() + 240
        while (drained := client.post("/worker/drain", json={}).json()) != {"draining": True, "in_flight": 0}:
            assert time.monotonic() < deadline, drained  # what has been answered ends a moment later
        while front.client.get("/ready").is_success:  # until the next probe
            assert time.monotonic() < deadline
            time.sleep(0.05)
        refused = front.client.post("/rag/query", json={"query": "Who?", "documents": [{"text": "Nobody."}]})
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["code"] == "no_worker"
        client.post("/worker/drain", json={"draining": False}).raise_for_status()
