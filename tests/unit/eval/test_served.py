"""`ragserve eval` over one's own documents: against the product's app, with a scripted model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import typer
from typer.testing import CliRunner

from ragserve.client import Client
from ragserve.commands import evaluate
from ragserve.engine.running_server import RunningServer
from ragserve.errors import EngineError, InvalidRequest, NotFound, RagserveError, Unavailable
from ragserve.eval.served import OwnClient
from tests.unit.api.scripted_server import DOCUMENTS, Live

HOSTILE = "</style><script>alert('x')</script> ]]> & \" \x0b\x01 <img src=x onerror=alert(1)>"
SHOWN = HOSTILE.replace("\x0b\x01", "\ufffd\ufffd")
QUESTIONS: list[dict[str, Any]] = [
    {
        "id": "built",
        "question": "Who built the lighthouse of Skerryvore?",
        "answers": ["Alan Stevenson"],
        "documents": ["skerryvore"],
    },
    {
        "id": "soup",
        "question": f"What is in the soup? {SHOWN}",
        "answers": ["leeks", SHOWN],
        "documents": ["soup"],
    },
    {"id": "open", "question": "What is a lighthouse?"},
]


def run(live: Live, data: Path, *arguments: str) -> str:
    app = typer.Typer()
    evaluate.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    done = CliRunner().invoke(app, ["eval", "--data", str(data), "--url", live.url, *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return f"{done.exit_code}\n{done.output}"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS), encoding="utf-8")
    return path


def test_answers_are_judged_by_strategy(live: Live, docs: str, data: Path, tmp_path: Path) -> None:
    report, records = tmp_path / "report.json", tmp_path / "records.jsonl"
    output = run(
        *(live, data, "-n", docs, "--strategies", "full,prefix", "--k", "2", "--max-new-tokens", "9"),
        *("--json", str(report), "--records", str(records)),
    )
    assert output.startswith("0\n")
    assert "F1 beside full" in output
    assert "with answers: 2, with documents: 2, with passages: 0" in output
    assert {request.sampling.max_new_tokens for request in live.engine.requests} == {9}
    found = json.loads(report.read_text())
    assert (found["workload"]["namespace"], found["workload"]["k"]) == (docs, 2)
    full, prefix = found["rows"]
    assert (full["strategy"], full["questions"], full["failed"], full["f1_n"]) == ("full", 3, 0, 2)
    assert (full["recall"], full["mrr"], full["em"], full["f1"]) == (100.0, 100.0, 50.0, 50.0)
    assert full["citation_precision"] == full["citation_recall"] == 100.0
    assert full["causes"] == {"right": 1, "read wrongly": 1, "not retrieved": 0, "failed": 0}
    assert full["total_ms"]["p50"] >= full["ttft_ms"]["p50"] > 0
    assert (prefix["f1"], prefix["f1_vs_first"]) == (50.0, 0.0)
    rows = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    assert [(row["id"], row["strategy"]) for row in rows[2:4]] == [("open", "full"), ("built", "prefix")]
    first = rows[0]["passages"][0]
    assert (first["text"], first["supports"], first["cited"]) == (DOCUMENTS["skerryvore"], True, "marker")
    assert rows[2]["f1"] is None


def test_the_page_holds_hostile_text_as_text(live: Live, data: Path, tmp_path: Path) -> None:
    live.index("hostile", {"soup": f"A soup of leeks. {HOSTILE}", HOSTILE: "The lighthouse of nobody."})
    live.engine.deltas = (" Nobody knows.", " <b>&amp;")
    page = tmp_path / "report.html"
    run(live, data, "-n", "hostile", "--strategies", "full", "--html", str(page))
    text = page.read_text(encoding="utf-8")
    root = ET.fromstring(text)
    kinds = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert "svg" in kinds
    assert not kinds & {"script", "img", "b/", "iframe", "link", "a", "form", "object"}
    attributes = {name for element in root.iter() for name in element.attrib}
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "href", "style")]
    words = "".join(root.itertext())
    assert words.count(SHOWN) >= 4, "as question, accepted answer, passage and source"
    assert "Nobody knows. <b>&amp;" in words
    assert "default-src 'none'" in text
    pictures = [element for element in root.iter() if element.tag.rpartition("}")[2] == "svg"]
    assert len(pictures) == 4
    assert list(root.iter("details")), "what was answered wrongly is shown"


def test_a_run_goes_on_where_it_stopped(live: Live, docs: str, data: Path, tmp_path: Path) -> None:
    arguments = ("-n", docs, "--strategies", "full", "--work", str(tmp_path / "work"))
    live.engine.reply = lambda request: None
    live.engine.error, live.engine.error_after = EngineError("It is tired."), 0
    failed = run(live, data, *arguments, "--limit", "1")
    assert failed.startswith("1\n")
    assert "engine_error: It is tired." in failed
    live.engine.error = None
    live.engine.requests.clear()
    assert run(live, data, *arguments, "--limit", "2").startswith("0\n")
    assert len(live.engine.requests) == 2, "the failed one is asked again"
    assert run(live, data, *arguments).startswith("0\n")
    assert len(live.engine.requests) == 3
    with pytest.raises(InvalidRequest, match="k differ"):
        run(live, data, *arguments, "--k", "1")
    live.index(docs, {"new": "Something else."})
    with pytest.raises(InvalidRequest, match="documents differ"):
        run(live, data, *arguments)


def test_rows_under_another_system_text_or_other_settings_are_another_run_s(
    live: Live, docs: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("-n", docs, "--strategies", "full", "--work", str(tmp_path / "work"))
    assert run(live, data, *arguments).startswith("0\n")
    live.engine.requests.clear()
    assert run(live, data, *arguments).startswith("0\n")
    assert not live.engine.requests, "the same run has all its answers"
    with pytest.raises(InvalidRequest, match="system text differ"):
        run(live, data, *arguments, "--system-prompt", "Be brief.")
    with monkeypatch.context() as patch:
        patch.setattr(live.settings, "system_prompt", "Be brief.")
        with pytest.raises(InvalidRequest, match="system text differ"):
            run(live, data, *arguments)
    with live.client() as client:
        client.put(f"/rag/namespaces/{docs}/settings", json={"system": "Be brief."}).raise_for_status()
        with pytest.raises(InvalidRequest, match="namespaces differ"):
            run(live, data, *arguments)
        client.put(f"/rag/namespaces/{docs}/settings", json={}).raise_for_status()
    engine = replace(live.engine.info, sparse="hierarchical 512")
    monkeypatch.setattr(type(live.engine), "info", engine)
    with pytest.raises(InvalidRequest, match="engine differ"):
        run(live, data, *arguments)
    assert not live.engine.requests


def test_ndcg_is_at_the_k_of_the_namespace(live: Live, tmp_path: Path) -> None:
    live.index("two", {"skerryvore": DOCUMENTS["skerryvore"]})
    data, report = tmp_path / "own.jsonl", tmp_path / "report.json"
    data.write_text(json.dumps(QUESTIONS[0] | {"documents": ["skerryvore", "elsewhere"]}) + "\n")

    def ndcg() -> float:
        run(live, data, "-n", "two", "--strategies", "full", "--json", str(report))
        return float(json.loads(report.read_text())["rows"][0]["ndcg"])

    assert ndcg() == 61.3, "of five passages asked for one was found"
    with live.client() as client:
        client.put("/rag/namespaces/two/settings", json={"k": 1}).raise_for_status()
    assert ndcg() == 100.0


def test_a_folder_is_ingested_for_the_run(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, longest = Client.wait, []

    def waited(*arguments: Any, timeout_s: float = 3600.0) -> Any:
        longest.append(timeout_s)
        return wait(*arguments, timeout_s=timeout_s)

    monkeypatch.setattr(Client, "wait", waited)
    folder = tmp_path / "docs"
    (folder / "isles").mkdir(parents=True)
    (folder / "isles" / "a.txt").write_text(DOCUMENTS["skerryvore"])
    (folder / "b.txt").write_text(DOCUMENTS["soup"])
    (folder / "empty.txt").write_text("")
    data, report = tmp_path / "own.jsonl", tmp_path / "report.json"
    data.write_text(json.dumps(QUESTIONS[0] | {"documents": ["isles/a.txt"]}) + "\n")
    output = run(live, data, "--documents", str(folder), "--strategies", "full", "--json", str(report))
    assert output.startswith("0\n")
    assert longest == [math.inf]
    found = json.loads(report.read_text())
    assert (found["rows"][0]["recall"], found["rows"][0]["citation_recall"]) == (100.0, 100.0)
    assert (found["workload"]["documents"], found["workload"]["folder"]) == (2, "docs")
    assert found["workload"]["unreadable"][0].startswith("empty.txt: ")
    with live.client() as client:
        names = [space["name"] for space in client.get("/rag/namespaces").json()["namespaces"]]
    assert not [name for name in names if name.startswith("eval-")]
    (folder / "isles" / "a.txt").unlink()
    (folder / "b.txt").unlink()
    with pytest.raises(RagserveError, match=r"None of the 1 files could be read: empty.txt"):
        run(live, data, "--documents", str(folder))


def test_what_cannot_be_asked_is_refused(live: Live, docs: str, data: Path, tmp_path: Path) -> None:
    for arguments, says in (
        (["--html", "x.html"], "--namespace or --documents"),
        (["-n", docs, "--documents", str(tmp_path)], "Give one of them"),
        (["-n", docs, "--write-gate"], "full prefill"),
        (["--documents", str(tmp_path / "nowhere")], "no files"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            run(live, data, *arguments)
    with pytest.raises(NotFound, match="nowhere"):
        run(live, data, "-n", "nowhere")


def test_nothing_waits_for_an_own_server_that_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("it ran\n")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        process.kill()
        process.wait()
        server = RunningServer("http://127.0.0.1:9", tmp_path, process, log, 0.0)
        with OwnClient(server) as client, pytest.raises(Unavailable, match=r"exited with -9:\nit ran"):
            client.wait("a-job", timeout_s=math.inf)
