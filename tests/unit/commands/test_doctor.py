"""`ragserve doctor`: what it finds, what it advises, and that it changes nothing."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from ragserve.commands import doctor, doctor_checks
from ragserve.commands.doctor_checks import Check
from ragserve.config import Settings
from ragserve.engine import gguf_weights
from ragserve.engine.packaged_model import place
from ragserve_index import IndexStore, NewChunk, NewDocument
from tests.conftest import MODEL


def examine(*arguments: str) -> tuple[int, dict[str, Any]]:
    """(exit code, report), checks and settings by name."""
    app = typer.Typer()
    doctor.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    done = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    report = json.loads(done.output)
    report["checks"] = {check["name"]: check for check in report["checks"]}
    report["settings"] = {setting["name"]: setting for setting in report["settings"]}
    return done.exit_code, report


def test_a_good_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGSERVE_TOP_K", "7")
    monkeypatch.setenv("RAGSERVE_API_KEY", "very-secret")
    monkeypatch.setenv("RAGSERVE_REPLICAS", "1")  # a worker of this machine needs what an engine needs
    Path("ragserve.toml").write_text("max_new_tokens = 99\n")
    code, report = examine("--data-dir", str(tmp_path / "data"), "--port", "0")
    bad = {name: check for name, check in report["checks"].items() if check["status"] == "fail"}
    assert not bad
    assert (code, report["ok"]) == (0, True)
    for name in (
        "settings",
        "python",
        "versions",
        "plugins",
        "platform",
        "device",
        "model",
        "tokenizer",
        "embedder",
        "data folder",
    ):
        assert report["checks"][name]["status"] in {"ok", "warn"}, name
    assert report["checks"]["index"]["status"] == report["checks"]["engine"]["status"] == "skip"
    assert "384 dimensions" in report["checks"]["embedder"]["found"]
    assert not (tmp_path / "data").exists()
    settings = report["settings"]
    sources = {name: settings[name]["from"] for name in ("data_dir", "top_k", "max_new_tokens", "model")}
    assert sources == {
        "data_dir": "flag",
        "top_k": "environment",
        "max_new_tokens": "ragserve.toml",
        "model": "default",
    }
    assert settings["top_k"]["value"] == 7
    assert "very-secret" not in json.dumps(report)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_every_failure_says_what_to_do(tmp_path: Path, taken_port: int) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "file").write_text("not a folder")
    code, report = examine(
        *("--model", str(model), "--data-dir", str(tmp_path / "file"), "--port", str(taken_port)),
        *("--embedder", str(tmp_path / "no" / "embedder"), "--index-device", "gpu"),
    )
    assert (code, report["ok"]) == (1, False)
    expected = {
        "model": "no weights",
        "data folder": "is a file",
        "port": "in use",
        "embedder": "no/embedder",
    }
    for name, says in expected.items():
        check = report["checks"][name]
        assert check["status"] == "fail", check
        assert says in check["found"]
    assert report["checks"]["tokenizer"]["status"] == "fail"
    assert report["checks"]["index device"]["status"] in {"fail", "ok"}  # ok where faiss-gpu is installed
    assert all(check["advice"] for check in report["checks"].values() if check["status"] == "fail")


@pytest.mark.parametrize(
    ("content", "arguments", "says"),
    [
        ("top_k = 0\n", [], "top_k"),
        ("top_k = \n", [], "ragserve.toml"),
        ("nonsense = 1\n", [], "nonsense"),
        ("", ["--host", "0.0.0.0"], "RAGSERVE_API_KEY"),
    ],
    ids=["out-of-range", "not-toml", "unknown", "open-without-key"],
)
def test_wrong_settings_are_a_finding(content: str, arguments: list[str], says: str) -> None:
    Path("ragserve.toml").write_text(content)
    code, report = examine(*arguments)
    assert code == 1
    assert list(report["checks"]) == ["settings"]
    assert says in report["checks"]["settings"]["found"]
    assert report["checks"]["settings"]["advice"]


def test_model_that_is_not_here(tmp_path: Path) -> None:
    _, missing = examine("--model", str(tmp_path / "deeper" / "nowhere"), "--port", "0")
    assert missing["checks"]["model"]["status"] == "fail"
    assert "does not exist" in missing["checks"]["model"]["found"]
    _, remote = examine(
        "--model", "some-org/some-model", "--embedder", "some-org/some-embedder", "--port", "0"
    )
    for name in ("model", "embedder"):
        assert remote["checks"][name]["status"] == "warn"
        assert "downloaded" in remote["checks"][name]["advice"]


def tokenizer_of(model: str, data_dir: Path) -> Check:
    [found] = doctor_checks.examine(Settings(model=model, data_dir=data_dir), ["tokenizer"])
    return found


@pytest.mark.parametrize("model", ["smollm2", "m.gguf", "folder"])
def test_the_tokenizer_of_a_model_that_is_made_at_the_start(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, data_dir = tmp_path / "folder" / "m.gguf", tmp_path / "data"
    file.parent.mkdir()
    file.write_bytes(b"GGUF" + bytes(99))
    name = model if model == "smollm2" else str(file if model == "m.gguf" else file.parent)
    before = tokenizer_of(name, data_dir)
    assert (before.status, before.found) == ("skip", "it is made with the model when the server starts")
    made = place() if model == "smollm2" else gguf_weights.place(file, data_dir / "models")
    shutil.copytree(MODEL, made)
    after = tokenizer_of(name, data_dir)
    assert after.status == "ok", after
    filled(data_dir, "all-MiniLM-L6-v2", n_tokens=7)
    settings = Settings(model=name, data_dir=data_dir)
    [index] = doctor_checks.examine(settings, ["index"])
    assert (index.status, "another model" in index.found) == ("warn", True)


def test_the_index_is_looked_at_whatever_the_model_is(tmp_path: Path) -> None:
    filled(tmp_path / "data", "all-MiniLM-L6-v2")
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    settings = Settings(model=str(tmp_path), data_dir=tmp_path / "data")
    checks = {check.name: check.status for check in doctor_checks.examine(settings, ["model", "index"])}
    assert checks == {"model": "fail", "index": "ok"}


def filled(data_dir: Path, embedder: str, n_tokens: int = 1) -> None:
    store = IndexStore(data_dir)
    store.ensure_namespace("notes", embedder=embedder, dim=4)
    document = NewDocument(source="a", title="A", content_hash="0", mime="text/plain", size_bytes=1)
    store.replace_documents(
        "notes", [(document, [NewChunk("x", 0, 1, n_tokens)], np.eye(1, 4, dtype=np.float32))]
    )
    store.save("notes")
    store.close()


def test_index_whole_damaged_and_of_another_embedder(tmp_path: Path) -> None:
    filled(tmp_path / "whole", "all-MiniLM-L6-v2")
    _, report = examine("--data-dir", str(tmp_path / "whole"), "--port", "0")
    assert report["checks"]["index"] == {
        "name": "index",
        "status": "ok",
        "found": "1 namespaces, 1 documents, 1 chunks",
        "advice": None,
    }
    filled(tmp_path / "other", "another-model")
    _, report = examine("--data-dir", str(tmp_path / "other"), "--port", "0")
    assert report["checks"]["index"]["status"] == "warn"
    assert "notes" in report["checks"]["index"]["found"]
    database = tmp_path / "whole" / "ragserve.sqlite3"
    database.write_bytes(b"\0" * database.stat().st_size)
    code, report = examine("--data-dir", str(tmp_path / "whole"), "--port", "0")
    assert (code, report["checks"]["index"]["status"]) == (1, "fail")
    assert "damaged" in report["checks"]["index"]["found"]


class Engine(BaseHTTPRequestHandler):
    """SGLang's /model_info, behind the key "right"."""

    def do_GET(self) -> None:
        right = self.headers.get("Authorization") == "Bearer right"
        body = json.dumps(
            {"model_path": "org/model", "is_generation": True} if right else {"error": "Unauthorized"}
        ).encode()
        self.send_response(200 if right else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def test_engine_elsewhere(monkeypatch: pytest.MonkeyPatch, taken_port: int) -> None:
    server = HTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        code, refused = examine("--engine-url", url, "--port", "0")
        assert (code, refused["checks"]["engine"]["status"]) == (1, "fail")
        assert "RAGSERVE_ENGINE_API_KEY" in refused["checks"]["engine"]["advice"]
        monkeypatch.setenv("RAGSERVE_ENGINE_API_KEY", "right")
        _, reached = examine("--engine-url", url, "--port", "0")
        assert reached["checks"]["engine"]["status"] == "ok"
        assert "org/model" in reached["checks"]["engine"]["found"]
        assert reached["checks"]["model"]["status"] == reached["checks"]["platform"]["status"] == "skip"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    code, gone = examine("--engine-url", url, "--port", "0")
    assert (code, gone["checks"]["engine"]["status"]) == (1, "fail")
    assert "launch_server" in gone["checks"]["engine"]["advice"]
