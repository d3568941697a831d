"""`ragserve serve` that cannot work ends with one message, before anything is loaded."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ragserve.api.starting import StartingAnswers
from ragserve.commands import serve, serve_checks
from ragserve.config import Settings
from ragserve.engine import local
from ragserve.engine.base import EngineInfo
from ragserve.errors import RagserveError
from sglang_ext.documents.disk.page_files import DocumentFiles
from tests.conftest import MODEL


def error_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    def load(*_: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(local, "serve", load)
    app = typer.Typer()
    serve.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    error = CliRunner().invoke(app, ["serve", "--port", "0", *arguments]).exception
    assert isinstance(error, RagserveError), error
    return str(error)


def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ("--data-dir", str(tmp_path / "data"))
    missing = error_of(monkeypatch, *folder, "--model", str(tmp_path / "no" / "model"))
    assert "no/model does not exist" in missing
    assert "--model" in missing
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in error_of(monkeypatch, *folder, "--model", str(tmp_path / "empty"))
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "has no weights" in error_of(monkeypatch, *folder, "--model", str(tmp_path / "empty"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "some-org/some-model" in error_of(monkeypatch, *folder, "--model", "some-org/some-model")


def test_a_reranker_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    folder = ("--data-dir", str(tmp_path / "data"))
    assert "reranker 'nobody/it'" in error_of(monkeypatch, *folder, "--rerank", "nobody/it")
    more = error_of(monkeypatch, *folder, "--rerank-models", f"keys, {tmp_path}/empty")
    assert "was not found" in more


def test_an_engine_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        message = error_of(monkeypatch, "--data-dir", str(tmp_path), "--engine-url", url)
    assert url in message
    assert "--engine-url" in message


def test_a_data_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in error_of(monkeypatch, "--data-dir", str(tmp_path / "file"))
    (tmp_path / "ragserve.sqlite3").write_text("something else, long enough to have a header of another kind")
    assert "ragserve.sqlite3" in error_of(monkeypatch, "--data-dir", str(tmp_path))


def test_document_kv_that_another_server_owns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = DocumentFiles(tmp_path / "kv", rank=0, world=1)
    assert owner.acquire(0)
    monkeypatch.setattr(serve_checks, "_OWNER_WAIT_S", 0.2)
    message = error_of(monkeypatch, "--data-dir", str(tmp_path))
    assert "Another server" in message
    assert "--data-dir" in message
    owner.release()
    started: list[Settings] = []
    monkeypatch.setattr(serve, "_serve", lambda settings, *_: started.append(settings))
    serve.serve(Settings(port=0, data_dir=tmp_path))
    assert started


def test_disks_that_are_full_or_read_only(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(disk)]
    if shutil.which("unshare") is None or subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a disk")
    command = f"{sys.executable} -m ragserve.cli serve --port 0 --data-dir {disk} --model {MODEL}"
    script = f"""
        mount -t tmpfs -o size=8k none {disk}; {command}; echo $?
        mount -t tmpfs -o ro none {disk}; {command}; echo $?
    """
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["1", "1"]
    full, read_only = done.stderr.strip().split("\n")
    assert "Free some space" in full
    assert "not writable" in read_only


INFO = EngineInfo("local", "m", "t", "1", "cpu", "torch_native", 64, 64, ("full",))


@pytest.mark.parametrize(
    ("info", "took"),
    [
        (INFO, ""),
        (
            replace(INFO, start_s=61.04, warm_up_s=2.5),
            " (engine started in 61.0 s, 2.5 s of them warming up)",
        ),
    ],
    ids=["elsewhere", "ours"],
)
def test_the_line_that_says_when_it_is_ready(
    capsys: pytest.CaptureFixture[str], info: EngineInfo, took: str
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.complete"})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        starting = StartingAnswers(listener, "the engine loads its model")
        starting.start()
        announced = serve._announced(app, Settings(port=port), starting, lambda: info)
        asyncio.run(announced({"type": "lifespan"}, None, send))  # type: ignore[arg-type]
        socket.create_connection(
            ("127.0.0.1", port), timeout=240
        ).close()  # whoever waited for the line connects
    assert sent == [{"type": "lifespan.startup.complete"}]
    url = f"http://127.0.0.1:{port}"
    pages = f"; playground: {url}/playground, API: {url}/docs"
    assert capsys.readouterr().err == f"ragserve: ready on {url}{took}{pages}\n"


def test_an_ipv6_address_is_shown_as_a_url_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.complete"})

    async def send(message: Any) -> None:
        pass

    settings = Settings(host="::1", port=30000, data_dir=tmp_path)
    monkeypatch.setattr(serve.logs, "configure", lambda *_: None)
    monkeypatch.setattr(serve, "_serve_local", lambda *_: None)
    serve._serve(settings, None, False)  # type: ignore[arg-type]
    assert "starting on http://[::1]:30000 (data" in capsys.readouterr().err
    starting = SimpleNamespace(stop=lambda: None)
    announced = serve._announced(app, settings, starting, lambda: INFO)  # type: ignore[arg-type]
    asyncio.run(announced({"type": "lifespan"}, None, send))  # type: ignore[arg-type]
    url = "http://[::1]:30000"
    said = f"ragserve: ready on {url}; playground: {url}/playground, API: {url}/docs\n"
    assert capsys.readouterr().err == said
