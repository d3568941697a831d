"""`ragserve eval` on the real server, with a few rows of the model's own sets."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from ragserve.best_passages import NOT_COMPOSED
from ragserve.commands import evaluate
from ragserve.errors import InvalidRequest, Unavailable
from ragserve.eval import engine_worker
from ragserve.eval.presets import expanded
from ragserve.strategy_spec import parse
from tests.conftest import EXHAUSTIVE
from tests.integration.prompts import QUESTIONS
from tests.integration.served_engine import on


def run_eval(*arguments: str) -> Result:
    app = typer.Typer()
    evaluate.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    return CliRunner().invoke(app, ["eval", *arguments])


def test_given_documents_are_read_as_the_models_readme_says(server: Any, tmp_path: Path) -> None:
    """The README says 98 percent of 200 rows, and these are among them. Both strategies give the same
    answers."""
    report, records = tmp_path / "report.json", tmp_path / "records.jsonl"
    data = str(QUESTIONS / "crossdoc_8.jsonl")
    files = ("--json", str(report), "--records", str(records))
    done = run_eval("--data", data, "--limit", "2", "--url", server.url, *files)
    assert done.exit_code == 0, done.output
    rows = json.loads(report.read_text())["rows"]
    assert [row["strategy"] for row in rows] == ["full", "prefix"]
    for row in rows:
        assert (row["n"], row["failed"], row["documents_dropped"]) == (2, 0, 0)
        assert row["em"] == 100
        assert row["prompt_tokens"] > 1000
    assert rows[0]["cached_tokens"] == 0
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    answers = [
        [line["answer"] for line in lines if line["strategy"] == strategy] for strategy in ("full", "prefix")
    ]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 2


def test_retrieved_says_where_answers_are_lost(server: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run_eval(
        *(
            "--data",
            str(QUESTIONS / "onehop_8.jsonl"),
            "--limit",
            "4",
            "--mode",
            "retrieved",
            "--strategies",
            "prefix",
            "--k",
            "4",
        ),
        *("--url", server.url, "--json", str(report)),
    )
    assert done.exit_code == 0, done.output
    found = json.loads(report.read_text())
    assert found["workload"]["documents"] == 32
    assert [row["context"] for row in found["rows"]] == ["retrieved", "gold documents alone"]
    retrieved, gold = found["rows"]
    assert gold["em"] >= 75
    [lost] = json.loads((tmp_path / "report-losses.json").read_text())["rows"]
    assert lost["right"] + lost["right_by_chance"] == retrieved["em"]
    causes = ("right", "right_by_chance", "lost_retrieval", "lost_reading_context", "lost_reading")
    assert sum(lost[cause] for cause in causes) == pytest.approx(100.0)
    assert lost["found"] >= 50.0  # each question names its document's title among 32
    names = [row["name"] for row in server.client.get("/rag/namespaces").json()["namespaces"]]
    assert not [name for name in names if name.startswith("eval-")]


@pytest.fixture
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the worker of an evaluation run in this process, on the shared engine. In the exhaustive form it is
    a process that starts its own."""
    if EXHAUSTIVE:
        return
    server = request.getfixturevalue("control_server")

    def spawn(command: Sequence[str], *_: Any) -> subprocess.Popen[bytes]:
        engine_worker.run(json.loads(Path(command[-1]).read_text()))
        return subprocess.Popen(["true"], start_new_session=True)

    monkeypatch.setattr("ragserve.eval.parallel.spawn", spawn)
    monkeypatch.setattr("ragserve.engine.offline.run_once", lambda _settings, work: on(server, work))


@pytest.mark.usefixtures("worker")
def test_strategies_are_compared_with_full_prefill_and_a_run_goes_on(tmp_path: Path) -> None:
    """The first token's distribution shows that recomputing everything equals full prefill and that plain
    reuse does not."""
    report, records, work = tmp_path / "report.json", tmp_path / "records.jsonl", tmp_path / "work"
    data = ",".join(str(QUESTIONS / f"{name}_8.jsonl") for name in ("onehop", "crossdoc"))
    arguments = (
        "--data",
        data,
        "--limit",
        "1",
        "--work",
        str(work),
        "--json",
        str(report),
        "--records",
        str(records),
    )
    done = run_eval(
        *arguments, "--strategies", "full,concat,concat:recompute=all,epic:first=8", "--concurrency", "1"
    )
    assert done.exit_code == 0, done.output
    found = {(row["set"], row["strategy"]): row for row in json.loads(report.read_text())["rows"]}
    assert len(found) == 8
    for name in ("onehop_8", "crossdoc_8"):
        full, reused, exact, epic = (
            found[name, label] for label in ("full", "concat", "concat:recompute=all", "epic:first=8")
        )
        assert {row["n"] for row in (full, reused, exact, epic)} == {1}
        assert {
            row["failed"] + row["fallbacks"] + row["documents_dropped"] for row in (full, reused, exact, epic)
        } == {0}
        assert full["kl"] == 0.0
        assert exact["kl"] < 1e-6
        assert (exact["em"], exact["agrees"]) == (full["em"], 100.0)
        assert (reused["recomputed"], exact["recomputed"], reused["kept"]) == (0.0, 100.0, 100.0)
        assert 0 < epic["recomputed"] < 15
    assert found["crossdoc_8", "concat"]["kl"] > 1e-3, "what its documents say about each other is lost"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(lines) == 8
    # What is known is not asked again: no worker starts.
    log = (work / "worker-0.log").stat().st_mtime_ns
    again = run_eval(*arguments, "--strategies", "concat:recompute=all,full")
    assert again.exit_code == 0, again.output
    assert (work / "worker-0.log").stat().st_mtime_ns == log
    assert len(json.loads(report.read_text())["rows"]) == 4
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        raise run_eval(*arguments, "--max-new-tokens", "5").exception  # type: ignore[misc]


@pytest.mark.usefixtures("worker")
def test_a_benchmark_asks_all_rivals_with_documents_on_the_host(tmp_path: Path) -> None:
    report, records = tmp_path / "report.json", tmp_path / "records.jsonl"
    data = str(QUESTIONS / "crossdoc_8.jsonl")
    files = ("--json", str(report), "--records", str(records), "--concurrency", "1")
    done = run_eval("--data", data, "--limit", "1", "--benchmark", "short-answers", "--tier", "host", *files)
    assert done.exit_code == 0, done.output
    rows = {row["strategy"]: row for row in map(json.loads, records.read_text().splitlines())}
    assert list(rows) == [spec.label for spec in parse(expanded("rivals"))]
    for label, row in rows.items():
        composed = label.partition(":")[0] not in NOT_COMPOSED
        read = {tier for tier, tokens in row["tiers"].items() if tokens}
        assert read == {"host" if composed else "computed"}, label
    full, part = rows["full"], rows["passages:keep=0.25"]
    assert 0 < part["recomputed"] == part["kept"] < full["kept"] == full["document_tokens"]
    [line] = [line for line in json.loads(report.read_text())["pooled"] if line["strategy"] == "full"]
    assert (line["sets"], line["n"], line["f1_vs_full"]) == (1, 1, 0.0)


def test_failed_requests_count_and_fail_the_command(server: Any, tmp_path: Path) -> None:
    data = tmp_path / "set.jsonl"
    good = {
        "question": "Where is Refland?",
        "answers": ["Skailuia"],
        "docs": [["Refland", "Refland lies in the region of Skailuia."]],
    }
    too_long = {**good, "question": "word " * 8000}
    data.write_text(json.dumps(good) + "\n" + json.dumps(too_long) + "\n")
    report = tmp_path / "report.json"
    done = run_eval("--data", str(data), "--strategies", "full", "--url", server.url, "--json", str(report))
    assert done.exit_code == 1
    assert "Some requests failed" in done.output
    [row] = json.loads(report.read_text())["rows"]
    assert (row["n"], row["failed"]) == (2, 1)


def test_what_cannot_be_evaluated_is_refused() -> None:
    data = str(QUESTIONS / "onehop_8.jsonl")
    for arguments, error, says in (
        (["--data", "nowhere.jsonl"], InvalidRequest, "does not exist"),
        (["--data", "onehop"], InvalidRequest, "--sets"),
        (["--data", data, "--strategies", "magic"], InvalidRequest, "'magic'"),
        (["--data", data, "--url", "http://127.0.0.1:9", "--model", "x"], InvalidRequest, "one of them"),
        (["--data", data, "--url", "http://127.0.0.1:9"], Unavailable, "running there"),
    ):
        raised = run_eval(*arguments).exception
        assert isinstance(raised, error)
        assert says in str(raised)
