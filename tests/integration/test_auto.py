"""`ragserve calibrate` and strategy auto on the real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ragserve.commands import calibrate as command_module
from ragserve.config import Settings
from ragserve.profiles.costs import COSTS, Costs
from ragserve.profiles.costs import FILE_NAME as COSTS_FILE
from ragserve.profiles.figures import Figures
from ragserve.profiles.gate import FILE_NAME as GATE_FILE
from ragserve.profiles.gate import Entry, record
from ragserve.profiles.samkv import FILE_NAME as SAMKV_FILE
from ragserve.profiles.samkv import SAMKV
from sglang_ext.documents.fingerprint import model_fingerprint
from tests.conftest import EXHAUSTIVE, MODEL
from tests.integration.served_engine import on

GOOD = Figures(n=500, f1=99.0, f1_vs_full=0.0, kl=0.01, kept=100.0, recomputed=10.0)


def calibrate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Run the command on the shared engine, in this process; in the exhaustive form as a process that starts
    its own. Return what it says."""
    arguments = ("calibrate", *arguments, "--context-length", "2048")
    if EXHAUSTIVE:
        command = [sys.executable, "-m", "ragserve.cli", *arguments]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout + done.stderr
    server = request.getfixturevalue("control_server")

    def run_once(settings: Settings, work: Any, **_: Any) -> Any:
        return on(server, work, settings.context_length)

    monkeypatch.setattr("ragserve.engine.offline.run_once", run_once)
    app = typer.Typer()
    command_module.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_calibrate_measures_every_tier_and_leaves_both_profiles(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source = tmp_path / "model", MODEL
    model.mkdir()
    if not EXHAUSTIVE:
        source = request.getfixturevalue("control_server").model
    for file in source.iterdir():
        if file.name != SAMKV_FILE:
            (model / file.name).symlink_to(file.resolve())
    own = ("--data-dir", str(tmp_path), "--model", str(model))
    schedule = ("--sets", "1", "--questions", "1", "--max-tokens", "500", "--repeats", "1")
    said = calibrate(request, monkeypatch, *own, *schedule, "--strategies", "epic:first=8")
    assert "do not all fit" not in said
    fingerprint = model_fingerprint(str(source), "")
    costs = COSTS.load(tmp_path / COSTS_FILE, fingerprint)
    assert costs is not None
    assert set(costs.composed) == {"epic:first=8"}
    assert set(costs.composed["epic:first=8"]) == {"device", "host", "disk", "absent"}
    # That more tokens always cost more is tested in tests/unit/profiles/test_costs.py.
    found = SAMKV.load(tmp_path / SAMKV_FILE, fingerprint)
    assert found is not None
    assert not (model / SAMKV_FILE).exists(), "nothing is written to a model's folder"
    assert found.probes["documents"] == 3
    assert found.stable
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    assert set(found.stable) <= set(range(layers // 2, layers)), "of the later half"
    assert (found.selection, found.options) == ("", {}), "the built-in ones"
    assert set(found.figures["proportion"]) == {"built_in", "found"}


def test_auto_reads_fewer_passages_where_they_are_verified(server: Any) -> None:
    fingerprint = model_fingerprint(str(MODEL), "")
    prefix = server.client.get("/info").json()["engine"]["prefix"]
    files = (server.data_dir / GATE_FILE, server.data_dir / COSTS_FILE)
    texts = [
        f"The lighthouse of Corran {n} was built by Ida Marsh in 18{n}. It is of granite."
        for n in (10, 20, 30)
    ]
    body = {
        "query": "Who built the lighthouse of Corran 20?",
        "namespace": "auto-fewer",
        "strategy": "auto",
        "max_new_tokens": 4,
    }
    named = [{"name": f"Corran {n}", "text": text} for n, text in enumerate(texts)]
    server.finished(server.client.post("/rag/ingest", json={"namespace": "auto-fewer", "texts": named}))
    try:
        for label, kept in (
            ("passages:by=score,count=1", 1),
            ("concat:passages.by=score,passages.count=2", 2),
        ):
            entry = Entry({"s": GOOD}, "ragserve-tiny", "d", "h", "float32", prefix=prefix)
            files[0].unlink(missing_ok=True)
            record(files[0], fingerprint, {label: entry})
            composed = {"concat": dict.fromkeys(("device", "host", "disk", "absent"), (0.0, 0.01, 0.0))}
            costs = Costs((1.0, 1.0, 0.0), composed, 0.0, "ragserve-tiny", "", "d")
            COSTS.save(files[1], fingerprint, costs)
            response = server.client.post("/rag/query", json=body)
            assert response.status_code == 200, response.text
            found = response.json()["context"]
            assert found["strategy"] == label.partition(":")[0]
            assert (found["documents_retrieved"], found["documents_kept"]) == (3, kept)
            assert f"the best {kept} of 3 passages; verified by 500 questions with labels" in found["choice"]
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def test_auto_knows_what_the_engine_has_cached(server: Any) -> None:
    """In this made-up profile the choice depends only on the cache: composing is cheap, computing a document
    is not."""
    fingerprint = model_fingerprint(str(MODEL), "")
    prefix = server.client.get("/info").json()["engine"]["prefix"]
    files = (server.data_dir / GATE_FILE, server.data_dir / COSTS_FILE)
    texts = [
        f"The lighthouse of Corran {number} was built by Ida Marsh in 18{number}. It is made of granite." * 3
        for number in (10, 20)
    ]
    body = {
        "query": "Who built the lighthouse?",
        "namespace": "auto",
        "documents": [{"title": "Corran", "text": text} for text in texts],
    }

    def ask(strategy: str, **options: Any) -> dict[str, Any]:
        response = server.client.post(
            "/rag/query",
            json={**body, "strategy": strategy, "strategy_options": options, "max_new_tokens": 4},
        )
        assert response.status_code == 200, response.text
        return dict(response.json()["context"])

    try:
        entry = Entry({"s": GOOD}, "ragserve-tiny", "d", "h", "float32", prefix=prefix)
        record(files[0], fingerprint, {"concat": entry})
        costs = Costs(
            (10.0, 1.0, 0.0), {"concat": {"device": (5.0, 0.01, 0.0)}}, 0.0, "ragserve-tiny", "", "d"
        )
        COSTS.save(files[1], fingerprint, costs)
        cold = ask("auto")
        assert (cold["strategy"], "3 of 3 documents cached nowhere" in cold["choice"]) == ("prefix", True)
        again = ask("auto")
        assert again["strategy"] == "prefix"
        assert again["tokens_by_tier"]["device"] == again["tokens_kept"], "the prefix cache has all of it"
        ask("concat")
        body["query"] = "Where?"
        body["documents"].reverse()
        warm = ask("auto")
        assert (warm["strategy"], warm["tokens_by_tier"]) == ("concat", {"device": warm["tokens_kept"]})
        assert warm["choice"].startswith("concat: expected concat ")
    finally:
        for file in files:
            file.unlink(missing_ok=True)
