"""A server whose embedder and reranker are elsewhere: another server of ours, or one that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from pydantic import SecretStr
from starlette.responses import JSONResponse

from ragserve.answering.key_reranker import make_rerankers
from ragserve.api.services import load_embedder
from ragserve.config import load
from ragserve.errors import InvalidRequest
from ragserve.ingest.ingestor import Ingestor
from ragserve.ingest.jobs import runner
from ragserve.retrieval import remote_calls, remote_embedder
from ragserve.retrieval.embedder import Embedder
from ragserve.retrieval.remote_calls import Patience
from tests.unit.api.scripted_server import DOCUMENTS, Live, Tenants, eventually, raw_request, serving
from tests.unit.commands.test_ingest import Cli
from tests.unit.retrieval.remote_server import Remote, remote_server, right
from tests.unit.retrieval.tiny_models import cross_encoder
from tests.unit.retrieval.tiny_models import embedder as embedder_in

KEY = "sk-of-the-operator"
QUESTION = "who built the lighthouse of skerryvore?"
DOWN = JSONResponse({"error": {"message": "being moved"}}, 503)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """An embedder and a reranker, in folders."""
    folder = tmp_path_factory.mktemp("models")
    return embedder_in(folder, {}), cross_encoder(folder / "ranker")


@pytest.fixture(scope="module")
def owner(
    models: tuple[str, str], model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tenants]:
    """The server that has the models."""
    own, ranker = models
    data = tmp_path_factory.mktemp("owner")
    with serving(data, model_path, load=lambda _: Embedder(own), rerank=ranker) as live:
        yield Tenants(live)


def test_a_server_embeds_and_reranks_by_another_one(
    owner: Tenants, models: tuple[str, str], model_path: Path, tmp_path: Path
) -> None:
    own, ranker = models
    _, secret = owner.keys.create("front", ("nothing*",), ["read"])
    url = f"{owner.live.url}/v1"
    options: dict[str, Any] = {
        "embedder": f"openai:{url}#{own}",
        "rerank_models": f"{url}#{ranker}",
        "embedder_api_key": SecretStr(secret),
        "rerank_api_key": SecretStr(secret),
    }
    with serving(tmp_path, model_path, load=load_embedder, **options) as live, live.client() as client:
        texts = [{"name": name, "text": text} for name, text in DOCUMENTS.items()]
        job = client.post("/rag/ingest", json={"namespace": "docs", "texts": texts}).headers["location"]
        eventually(lambda: client.get(job).json()["state"] == "done", "ingestion")
        assert client.get(job).json()["counts"]["indexed"] == 3
        body = {"query": QUESTION, "namespace": "docs", "k": 3}
        found = client.post("/rag/retrieve", json=body).json()
        local = Embedder(own)
        asked = local.encode_queries([QUESTION])[0]
        for passage in found["results"]:
            vector = local.encode([f"{passage['title']}\n{passage['text']}"])[0]
            assert passage["cosine"] == pytest.approx(float(vector @ asked), abs=1e-3)
        reranked = client.post("/rag/retrieve", json=body | {"rerank": ranker}).json()
        assert (reranked["reranking"]["by"], reranked["reranking"]["scored"]) == (ranker, 3)
        direct = client.post(
            f"{url}/rerank",
            json={"model": ranker, "query": QUESTION, "documents": [p["text"] for p in found["results"]]},
            headers={"Authorization": f"Bearer {secret}"},
        )
        assert direct.status_code == 200
        info = client.get("/info").text
        assert client.get("/info").json()["embedder"] == {"name": f"openai:{own}", "dim": 16}
        assert secret not in info
        assert url not in info, "where a model is concerns operators alone"
        assert client.get("/rag/namespaces/docs").json()["embedder"] == f"openai:{own}"
        assert client.post("/v1/embeddings", json={"model": own, "input": "a"}).status_code == 404


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    with remote_server() as found:
        yield found


@pytest.fixture
def front(
    remote: Remote, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Live]:
    """A server with remote models, which answers soon that they are down."""
    remote.reset()
    monkeypatch.setattr(remote_calls, "_FIRST_PAUSE_S", 1000.0)  # no second attempt
    monkeypatch.setattr(remote_embedder, "_DOCUMENTS", Patience(240.0, 240.0))
    monkeypatch.setattr(remote_calls, "_REST_S", 0.0)
    monkeypatch.setattr(runner, "_FIRST_PAUSE_S", 0.2)
    options: dict[str, Any] = {
        "embedder": f"openai:{remote.url}/v1#words",
        "rerank_models": f"{remote.url}/v1#ranker",
        "embedder_api_key": SecretStr(KEY),
        "remote_timeout_s": 240.0,
    }
    with serving(tmp_path, model_path, load=load_embedder, **options) as live:
        live.services.store.ensure_namespace("docs", embedder="openai:words", dim=64)
        yield live


def ingested(client: httpx.Client, texts: dict[str, str]) -> str:
    body = {"namespace": "docs", "texts": [{"name": name, "text": text} for name, text in texts.items()]}
    return client.post("/rag/ingest", json=body).headers["location"]


def documents(client: httpx.Client) -> list[Any]:
    return client.get("/rag/documents", params={"namespace": "docs"}).json()["documents"]


def test_a_job_waits_for_its_model_and_goes_on_where_it_stopped(front: Live, remote: Remote) -> None:
    with front.client() as client:
        first = ingested(client, {"bell": DOCUMENTS["bell"]})
        eventually(lambda: client.get(first).json()["state"] == "done", "the first job")
        remote.reply = lambda path, body: DOWN
        job = ingested(client, DOCUMENTS)
        eventually(lambda: client.get(job).json()["error"] is not None, "the reason")
        waiting = client.get(job).json()
        assert waiting["state"] == "running"
        assert "The remote embedder words answers HTTP 503: being moved." in waiting["error"]
        assert "goes on where it stopped" in waiting["error"]
        assert KEY not in waiting["error"]
        assert len(documents(client)) == 1
        remote.seen.clear()
        remote.reply = right
        eventually(lambda: client.get(job).json()["state"] == "done", "the job goes on")
        done = client.get(job).json()
        assert (done["error"], done["counts"]) == (None, done["counts"] | {"indexed": 2, "unchanged": 1})
        assert len(documents(client)) == 3
        assert not any(DOCUMENTS["bell"] in text for _, body, _ in remote.seen for text in body["input"])


def test_a_job_that_waits_can_be_cancelled(front: Live, remote: Remote) -> None:
    remote.reply = lambda path, body: DOWN
    with front.client() as client:
        job = ingested(client, DOCUMENTS)
        eventually(lambda: client.get(job).json()["error"] is not None, "the reason")
        client.delete(job).raise_for_status()
        eventually(lambda: client.get(job).json()["state"] == "cancelled", "the end")


def test_search_by_words_goes_on_without_the_model(front: Live, remote: Remote) -> None:
    with front.client() as client:
        job = ingested(client, DOCUMENTS)
        eventually(lambda: client.get(job).json()["state"] == "done", "ingestion")
        ask = {"query": QUESTION, "namespace": "docs", "k": 2}
        whole = client.post("/rag/retrieve", json=ask | {"retrieval": "hybrid"}).json()
        assert (whole["retrieval"], whole["notes"]) == ("hybrid", [])
        assert whole["results"][0]["cosine"] is not None
        remote.reply = lambda path, body: DOWN
        dense = client.post("/rag/retrieve", json=ask | {"retrieval": "dense"})
        error = dense.json()["error"]
        assert (dense.status_code, error["code"]) == (503, "embedder_unavailable")
        assert error["message"].startswith("The remote embedder words answers HTTP 503: being moved.")
        assert dense.headers["retry-after"] == "1"
        note = "Searched by words alone: The remote embedder words answers HTTP 503: being moved."
        found = client.post("/rag/retrieve", json=ask | {"retrieval": "hybrid"}).json()
        assert (found["retrieval"], found["notes"]) == ("lexical", [note])
        assert found["results"][0]["source"] == "skerryvore"
        answer = client.post("/rag/query", json=ask | {"retrieval": "hybrid"}).json()
        assert (answer["retrieval"], answer["context"]["notes"][0]) == ("lexical", note)
        refuse = {"query": "zebra", "retrieval": "hybrid", "not_found": "refuse"}
        nothing = client.post("/rag/query", json=ask | refuse)
        assert nothing.json()["context"]["notes"] == [note, "No passage was found: the model was not asked."]
        plain = client.post("/rag/retrieve", json=ask | {"retrieval": "lexical"}).json()
        assert [each["source"] for each in plain["results"]] == [each["source"] for each in found["results"]]
        assert plain["notes"] == []


def test_a_floor_is_not_passed_by_scores_that_are_missing(front: Live, remote: Remote) -> None:
    """Else nothing would be found, as if the documents had no answer."""
    with front.client() as client:
        job = ingested(client, DOCUMENTS)
        eventually(lambda: client.get(job).json()["state"] == "done", "ingestion")
        ask = {"query": QUESTION, "namespace": "docs", "retrieval": "hybrid", "min_score": 0.1}
        assert client.post("/rag/retrieve", json=ask).json()["results"]
        remote.reply = lambda path, body: DOWN if "embeddings" in path else right(path, body)
        for path in ("/rag/retrieve", "/rag/query"):
            refused = client.post(path, json=ask)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "embedder_unavailable")
            assert error["message"].startswith("The remote embedder words answers HTTP 503: being moved.")
            assert "min_score" in error["hint"]
        reranked = client.post("/rag/retrieve", json=ask | {"rerank": "ranker"}).json()
        assert reranked["retrieval"] == "lexical", "the floor is about the reranker's scores"
        assert reranked["results"]


def test_a_correction_waits_no_longer_than_a_question(front: Live, remote: Remote) -> None:
    with front.client() as client:
        job = ingested(client, DOCUMENTS)
        eventually(lambda: client.get(job).json()["state"] == "done", "ingestion")
        doc = documents(client)[0]["doc_id"]
        path = f"/rag/documents/{doc}/chunks/0?namespace=docs"
        before = client.get(path).json()
        new = {"version": before["version"], "text": "The tower was lit in 1844."}
        for reply, status, code, said in (
            (DOWN, 503, "embedder_unavailable", "The remote embedder words answers HTTP 503: being moved."),
            (JSONResponse({"error": "too odd"}, 422), 503, "embedder_unavailable", "refuses any text"),
        ):
            remote.reply = lambda path, body, reply=reply: reply
            failed = client.patch(path, json=new)
            error = failed.json()["error"]
            assert (failed.status_code, error["code"]) == (status, code), error
            assert said in error["message"]
        odd = JSONResponse({"error": "too odd"}, 422)
        remote.reply = lambda path, body: odd if "1844" in str(body) else right(path, body)
        refused = client.patch(path, json=new)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "text_refused")
        assert client.get(path).json() == before
        assert client.patch(path, json=new | {"text": None, "disabled": True}).status_code == 200, "no text"
        version = client.get(path).json()["version"]
        remote.reply = right
        assert client.patch(path, json=new | {"version": version}).json()["text"] == new["text"]


def test_without_its_reranker_the_order_of_the_search_stays(front: Live, remote: Remote) -> None:
    with front.client() as client:
        job = ingested(client, DOCUMENTS)
        eventually(lambda: client.get(job).json()["state"] == "done", "ingestion")
        ask = {"query": "lighthouse of skerryvore", "namespace": "docs", "retrieval": "lexical"}
        ask |= {"rerank": "ranker"}
        assert client.post("/rag/retrieve", json=ask).json()["reranking"]["scored"] == 3
        remote.reply = lambda path, body: DOWN
        found = client.post("/rag/retrieve", json=ask).json()
        reason = "The remote reranker ranker answers HTTP 503: being moved."
        assert (found["reranking"]["scored"], found["reranking"]["note"]) == (0, reason)
        assert found["notes"] == [f"Not reranked: {reason}"]
        assert [each["source"] for each in found["results"]][:2] == ["skerryvore", "bell"]
        floor = client.post("/rag/retrieve", json=ask | {"min_score": 0.1})
        assert (floor.status_code, floor.json()["error"]["code"]) == (503, "reranker_unavailable")


def test_an_index_of_another_space_is_refused_in_one_line(front: Live, remote: Remote) -> None:
    with front.client() as client:
        store = front.services.store
        store.ensure_namespace("wide", embedder="openai:words", dim=8)
        store.ensure_namespace("other", embedder="openai:letters", dim=64)
        for namespace, said in (
            ("wide", "Namespace 'wide' has vectors of 8 components, and 'openai:words' gives 64 now."),
            (
                "other",
                "Namespace 'other' was embedded with 'openai:letters', this server embeds with 'openai:",
            ),
        ):
            refused = client.post("/rag/retrieve", json={"query": "a", "namespace": namespace})
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "embedder_mismatch")
            assert refused.json()["error"]["message"].startswith(said)
        refused = client.post(
            "/rag/ingest", json={"namespace": "other", "texts": [{"name": "a", "text": "b"}]}
        )
        assert refused.status_code == 409
        assert "--embedder openai:URL#letters" in refused.json()["error"]["hint"]


def test_a_server_starts_without_its_model_and_searches_when_it_is_there(
    remote: Remote, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.reset()
    monkeypatch.setattr(remote_calls, "_REST_S", 0.0)
    monkeypatch.setattr(remote_calls, "_FIRST_PAUSE_S", 1000.0)
    remote.reply = lambda path, body: DOWN
    options = {"embedder": f"openai:{remote.url}/v1#words", "remote_timeout_s": 240.0}
    with serving(tmp_path, model_path, load=load_embedder, **options) as live, live.client() as client:
        assert client.get("/info").json()["embedder"] == {"name": "openai:words", "dim": None}
        live.services.store.ensure_namespace("docs", embedder="openai:words", dim=64)
        ask = {"query": QUESTION, "namespace": "docs"}
        assert client.post("/rag/retrieve", json=ask).status_code == 503
        remote.reply = right
        assert client.post("/rag/retrieve", json=ask).status_code == 200
        assert client.get("/info").json()["embedder"]["dim"] == 64


def test_a_question_whose_client_left_is_not_waited_for(front: Live, remote: Remote) -> None:
    remote.delay_s = 600.0
    remote.seen.clear()
    with raw_request(front, "/rag/retrieve", {"query": "a", "namespace": "docs"}):
        eventually(lambda: len(remote.seen) > 0, "the call begins")
    eventually(lambda: remote.left > 0, "the call ends")


def test_two_remote_rerankers_of_one_name_are_refused(remote: Remote, tmp_path: Path) -> None:
    settings = load(data_dir=tmp_path, rerank_models="http://one, http://two")
    with pytest.raises(InvalidRequest, match="Two rerankers of the settings have the name 'remote'"):
        make_rerankers(settings, cast("Any", None), cast("Any", None))


def test_ray_embeds_with_local_models_only(tmp_path: Path) -> None:
    settings = load(data_dir=tmp_path, embedder="openai:http://one/v1#e5")
    with pytest.raises(InvalidRequest, match="A Ray cluster embeds with a local model") as caught:
        Ingestor(settings, cast("Any", None), cast("Any", None), ray="auto")
    assert caught.value.param == "embedder"


def test_the_doctor_asks_remote_models(remote: Remote, tmp_path: Path) -> None:
    from ragserve.commands.doctor_checks import examine

    remote.reset()
    settings = load(
        data_dir=tmp_path,
        embedder=f"openai:{remote.url}/v1#words",
        rerank=remote.url,
        remote_timeout_s=0.3,
        embedder_api_key=SecretStr(KEY),
    )
    names = ["embedder", "reranker"]
    found = {check.name: check for check in examine(settings, names)}
    assert found["embedder"].found.startswith(
        f"openai:words, 64 dimensions, {remote.url}/v1/embeddings answered"
    )
    assert found["reranker"].found.startswith(f"remote, {remote.url}/rerank answered in ")
    remote.reply = lambda path, body: DOWN
    for check in examine(settings, names):
        assert (check.status, "answers HTTP 503: being moved" in check.found) == ("fail", True)
        assert KEY not in f"{check.found} {check.advice}"


def test_ingest_on_the_command_line_goes_on_where_it_stopped(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    remote.reset()
    monkeypatch.setattr(remote_embedder, "_DOCUMENTS", Patience(0.3, 0.3))
    monkeypatch.setenv("RAGSERVE_EMBEDDER_API_KEY", KEY)
    ragserve = Cli(monkeypatch, capfd, tmp_path)
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in DOCUMENTS.items():
        (folder / f"{name}.txt").write_text(text)
    options = ("--data-dir", str(tmp_path / "data"), "--embedder", f"openai:{remote.url}/v1#words")
    assert ragserve("ingest", str(folder / "bell.txt"), *options).returncode == 0
    remote.reply = lambda path, body: DOWN
    failed = ragserve("ingest", str(folder), *options)
    assert failed.returncode == 1
    assert "error: The remote embedder words answers HTTP 503: being moved." in failed.stderr
    remote.reply = right
    remote.seen.clear()
    assert ragserve("ingest", str(folder), *options).returncode == 0
    assert {headers["authorization"] for _, _, headers in remote.seen} == {f"Bearer {KEY}"}
    assert not any(DOCUMENTS["bell"] in text for _, body, _ in remote.seen for text in body["input"])
