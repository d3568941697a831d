"""The life of documents' KV on the real engine: warmed, counted, and removed with its text by any process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ragserve.commands import ingest as ingest_command
from tests.integration.engines import Server, WarmedElsewhere

TEXT = "The observatory of {} was founded in 1902 by Ada Brandt. It has a telescope of 40 inches. "


@pytest.fixture(scope="module")
def server(quick_server: Server) -> Server:
    """None of these answers need be right. Nothing that others have asked for is computed meanwhile."""
    quick_server.analysed()
    return quick_server


def ingest(server: Any, namespace: str, texts: dict[str, str], **fields: Any) -> dict[str, Any]:
    body = {
        "namespace": namespace,
        "texts": [{"name": name, "text": text} for name, text in texts.items()],
        **fields,
    }
    return server.finished(server.client.post("/rag/ingest", json=body))


def held(server: Any, namespace: str) -> tuple[int, int]:
    """Number of a namespace's documents on host and on disk, the system text included."""
    stat = server.client.get("/rag/cache").json()
    spaces = [stat[tier]["namespaces"].get(namespace, {"documents": 0}) for tier in ("host", "disk")]
    return spaces[0]["documents"], spaces[1]["documents"]


def ask(server: Any, namespace: str, k: int = 5) -> dict[str, Any]:
    body = {
        "query": "Who founded the observatory?",
        "namespace": namespace,
        "strategy": "concat",
        "k": k,
        "max_new_tokens": 4,
    }
    body["strategy_options"] = {"force": True}
    return dict(server.client.post("/rag/query", json=body).json())


def eventually(server: Any, namespace: str, want: tuple[int, int]) -> None:
    deadline = time.monotonic() + 240
    while (found := held(server, namespace)) != want:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_replaced_and_removed_documents_leave_every_tier_whoever_does_it(server: Any) -> None:
    space = "observatories"
    ingest(server, space, {name: TEXT.format(name) for name in ("quillmark", "norhaven", "osterby")})
    assert ask(server, space)["context"]["tokens_recomputed"] == 0
    eventually(server, space, (4, 4))
    ingest(server, space, {"quillmark": TEXT.format("Quillmark") + "It was closed in 1950."})
    assert held(server, space) == (3, 3), "gone when the job is done"
    found = server.client.get(
        "/rag/documents", params={"namespace": space, "source_prefix": "norhaven"}
    ).json()["documents"]
    assert (
        server.client.delete(f"/rag/documents/{found[0]['doc_id']}", params={"namespace": space}).status_code
        == 200
    )
    assert held(server, space) == (2, 2)
    command = [sys.executable, "-m", "ragserve.cli", "docs"]
    command[4:] = [
        "rm",
        "osterby",
        "--namespace",
        space,
        "--data-dir",
        str(server.data_dir),
        "--model",
        str(server.model),
    ]
    subprocess.run(command, check=True, capture_output=True)
    eventually(server, space, (1, 1))
    assert ask(server, space)["context"]["tokens_kept"] > 0
    eventually(server, space, (2, 2))
    command[4:] = ["drop", space, "--data-dir", str(server.data_dir)]
    subprocess.run(command, check=True, capture_output=True)
    eventually(server, space, (0, 0))


def test_an_engine_of_the_command_leaves_on_disk_what_a_server_will_look_for(
    server: Any, warmed_elsewhere: WarmedElsewhere
) -> None:
    given, report = warmed_elsewhere, warmed_elsewhere.report
    space = given.namespace
    assert (report["files"]["indexed"], report["warm"]["files"]["warmed"], report["warm"]["state"]) == (
        2,
        2,
        "done",
    )
    ours = {path.name: path.stat().st_size for path in (given.data / "kv").rglob("*.pages")}
    files = [("files", (n, t)) for n, t in given.texts.items()]
    server.finished(server.client.post("/rag/ingest", files=files, data={"namespace": space}))
    server.finished(server.client.post("/rag/cache/warm", json={"namespace": space}))
    theirs = {path.name: path.stat().st_size for path in (server.data_dir / "kv").rglob(f"{space}/*.pages")}
    assert ours == theirs, "the same keys: a server on that folder finds them"
    assert len(ours) == 3


def metric(server: Any, name: str) -> float:
    """Sum of one metric, given with its labels, over the processes."""
    lines = [line for line in server.client.get("/metrics").text.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_warmed_documents_are_found_by_their_first_query_and_counted_by_tier(server: Any) -> None:
    space = "warmed"
    names = [f"station-{i}" for i in range(6)]
    # as long as a chunk, for the bound below
    texts = {name: (7 * TEXT).format(*7 * [name]) for name in names}
    analyses = server.client.get("/rag/cache").json()["analyses"]
    job = ingest(server, space, {name: texts[name] for name in names[:3]}, warm=True)
    assert (job["kind"], job["counts"]["indexed"]) == ("upload", 3)
    deadline = time.monotonic() + 240
    while True:
        (follow_up,) = [
            job
            for job in server.client.get("/rag/jobs", params={"namespace": space}).json()["jobs"]
            if job["kind"] == "warm"
        ]
        if follow_up["state"] == "done":
            break
        assert time.monotonic() < deadline, follow_up
        time.sleep(0.05)
    assert follow_up["counts"]["warmed"] == 3
    found = server.client.get("/rag/cache").json()["analyses"]
    assert found["prefilled"] - analyses["prefilled"] == found["computed"] - analyses["computed"] == 3
    assert held(server, space) == (4, 4), "three documents and the system text"
    ingest(server, space, {name: texts[name] for name in names[3:]})
    command = [
        sys.executable,
        "-m",
        "ragserve.cli",
        "docs",
        "warm",
        space,
        "--data-dir",
        str(server.data_dir),
        "--json",
    ]
    done = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert (done["state"], done["files"]["warmed"], done["files"]["unchanged"]) == ("done", 3, 3)
    again = server.finished(
        server.client.post("/rag/cache/warm", json={"namespace": space, "documents": names[:2]})
    )
    assert (again["n_items"], again["counts"]["unchanged"]) == (2, 2)
    assert held(server, space) == (7, 7)
    misses = metric(server, "ragserve_kv_misses_total")
    for tiers, tier in ((["device"], "host"), (["device", "host"], "disk")):
        assert server.client.post("/rag/cache/evict", json={"tiers": tiers}).status_code == 200
        before = metric(server, f'ragserve_kv_hits_total{{tier="{tier}"}}')
        answer = ask(server, space, k=6)
        assert answer["context"]["tokens_by_tier"] == {tier: answer["context"]["tokens_kept"]}, (
            "nothing was computed for it"
        )
        assert metric(server, f'ragserve_kv_hits_total{{tier="{tier}"}}') == before + 7
    assert metric(server, "ragserve_kv_misses_total") == misses
    stat = server.client.get("/rag/cache").json()
    for tier in ("host", "disk"):
        assert metric(server, f'ragserve_kv_bytes{{tier="{tier}"}}') == stat[tier]["bytes"] > 0
    # Only these documents: metadata of shorter ones, as other tests leave them, takes more. Two layers have
    # little KV a token; `test_engine_samkv` has the bound for the embedded model.
    host, disk = stat["host"], stat["disk"]["namespaces"][space]
    assert list(host["namespaces"]) == [space], "it was emptied above"
    assert host["pages"] == disk["pages"]
    assert 0 < host["metadata_bytes"] <= 0.2 * host["bytes"]
    assert 0 < disk["bytes"] - host["bytes"] <= 0.2 * host["bytes"]


def test_what_another_process_ingests_is_warmed_in_the_background(server: Any, tmp_path: Path) -> None:
    space = "background"
    (tmp_path / "sule.txt").write_text(TEXT.format("Sule"))
    app = typer.Typer()
    ingest_command.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    command = ["ingest", str(tmp_path / "sule.txt"), "--json", "--namespace", space]
    ran = CliRunner().invoke(app, [*command, "--data-dir", str(server.data_dir)])  # not the server's process
    assert ran.exit_code == 0, ran.output
    done = json.loads(ran.stdout)
    assert (done["files"]["indexed"], done["warm_job"]) == (1, None), "it does not wait for the server"
    eventually(server, space, (2, 2))
    assert ask(server, space)["context"]["tokens_kept"] > 0
    deadline = time.monotonic() + 240
    while left := server.client.get("/info").json()["warming"]["documents_left"]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_candidates_are_reranked_by_their_stored_keys(server: Any) -> None:
    space = "reranked"
    texts = {
        "reef": "The lighthouse on the reef was built by Alan Stevenson. It was lit in 1844.",
        "soup": "A soup of leeks and potatoes is made in half an hour. Add salt and pepper.",
        "observatory": TEXT.format("Quillmark"),
    }
    ingest(server, space, texts)
    found = server.client.get("/rag/documents", params={"namespace": space}).json()["documents"]
    server.finished(
        server.client.post("/rag/cache/warm", json={"namespace": space, "documents": ["reef", "soup"]})
    )
    query = {"query": "Who built the lighthouse on the reef, Alan Stevenson?", "namespace": space}
    plain = server.client.post("/rag/retrieve", json=query).json()
    assert plain["reranking"] is None
    reranked = server.client.post("/rag/retrieve", json=query | {"rerank": "keys"}).json()
    said = reranked["reranking"]
    assert (said["by"], said["scored"], len(said["candidates"])) == ("keys", 2, len(found))
    assert "1 of 3 candidates keep their places" in said["note"]
    scores = {passage["source"]: passage["rerank_score"] for passage in reranked["results"]}
    assert scores["observatory"] is None, "it was not analysed"
    assert scores["reef"] > scores["soup"], "the words of the question stand there"
    places = {p["source"]: (p["index"], p["search_rank"]) for p in reranked["results"]}
    assert places["observatory"][0] == places["observatory"][1]
    assert reranked["timings"]["rerank_ms"] > 0
    again = server.client.post("/rag/retrieve", json=query | {"rerank": "keys"}).json()
    assert again["results"] == reranked["results"]
    answer = server.client.post("/rag/query", json=query | {"rerank": "keys", "max_new_tokens": 4}).json()
    assert answer["reranking"] == said
    assert answer["context"]["documents_kept"] == 3
