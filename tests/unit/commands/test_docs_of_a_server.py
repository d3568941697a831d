"""`ragserve docs ls --url` lists what a server has, `warm --url` warms there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from ragserve.api.views import JobDetail
from ragserve.client import Client
from ragserve.commands import docs
from ragserve.errors import Unavailable
from tests.unit.api.scripted_server import Live, serving

KEY = "a-key"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("data"), model_path, api_key=KEY) as live:
        live.index("animals", {"bee": "Bees.", "cat": "Cats purr."})
        live.index("plants", {"oak": "Oaks are old."})
        yield live


def run(live: Live, tmp_path: Path, command: str, *arguments: str, key: str = KEY, status: int = 0) -> Result:
    app = typer.Typer()
    docs.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    own = ("--data-dir", str(tmp_path / "none"), "--api-key", key)
    done = CliRunner().invoke(app, ["docs", command, "--url", live.url, *own, *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status
    return done


def listed(live: Live, tmp_path: Path, *arguments: str, key: str = KEY) -> str:
    return run(live, tmp_path, "ls", *arguments, key=key).stdout


def test_documents_of_a_server(live: Live, tmp_path: Path) -> None:
    assert "3 documents" in listed(live, tmp_path)
    found = json.loads(listed(live, tmp_path, "--json", "--namespace", "animals"))
    assert {document["source"] for document in found} == {"bee", "cat"}
    assert "1 document\n" in listed(live, tmp_path, "--limit", "1")
    assert "oak" in listed(live, tmp_path, "--prefix", "oa")
    assert "bee" not in listed(live, tmp_path, "--prefix", "oa")
    with pytest.raises(Exception, match="key"):
        listed(live, tmp_path, key="another")


class WarmingClient:
    """A client of a server that computes three chunks."""

    def __enter__(self) -> WarmingClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def warm(self, namespace: str, documents: list[str] | None) -> Any:
        return SimpleNamespace(job_id=f"job-of-{namespace}-{documents}")

    def wait(self, job: Any, *, timeout_s: float, on_progress: Any) -> Any:
        assert timeout_s == math.inf, "a warm-up may take longer than an hour"
        for chunks in (1, 3):
            now = SimpleNamespace(
                state="done", chunks=chunks, tokens=10 * chunks, counts={"warmed": 1}, job_id=job.job_id
            )
            now.model_dump = lambda: {"state": "done"}
            on_progress(now)
        return now


def test_warming_on_a_server_says_how_far_it_is(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "_client", lambda *_: WarmingClient())
    done = run(live, tmp_path, "warm", "plants")
    lines = [line.split(" s  ", 1)[1] for line in done.stderr.splitlines()]
    assert lines == [
        "warming: 1 chunks, 10 tokens computed",
        "warming: 3 chunks, 30 tokens computed",
    ]
    assert "1 warmed; 3 chunks" in done.stdout
    done = run(live, tmp_path, "warm", "plants", "--json")
    assert not done.stderr
    assert json.loads(done.stdout) == {"state": "done"}


class EndedClient(Client):
    """A client of a server whose warm-up has ended before all is warmed."""

    state, error = "cancelled", ""

    def warm(self, *_: Any, **__: Any) -> Any:
        return self.job("j1")

    def job(self, job_id: str, **_: Any) -> JobDetail:
        times = {"created_at": 0.0, "updated_at": 1.0}
        return JobDetail(
            **times, job_id=job_id, kind="warm", namespace="plants", state=self.state,
            counts={"warmed": 1, "pending": 2}, n_items=3, chunks=4, tokens=40, size_bytes=0,
            cancel_requested=True, error=self.error, items=[], next=None,
        )  # fmt: skip


def test_a_warm_up_on_a_server_that_was_cancelled_ends_as_one_here(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EndedClient("http://host")
    monkeypatch.setattr(docs, "_client", lambda *_: client)
    done = run(live, tmp_path, "warm", "plants", status=3)
    assert done.stdout == "cancelled: 1 warmed, 2 pending; 4 chunks, 40 tokens computed (j1)\n"
    done = run(live, tmp_path, "warm", "plants", "--json", status=3)
    assert json.loads(done.stdout)["state"] == "cancelled"
    client.state, client.error = "failed", "The disk is full."
    with pytest.raises(Unavailable, match=r"Job j1 failed: The disk is full\."):
        run(live, tmp_path, "warm", "plants")


class InterruptedClient(EndedClient):
    """A client of a server whose warm-up goes on when somebody presses Ctrl-C, or ends the command."""

    def __init__(self, state: str, signalled: BaseException) -> None:
        super().__init__("http://host")
        self.state = state
        self.signalled = signalled
        self.cancelled: list[str] = []

    def wait(self, *_: Any, **__: Any) -> Any:
        raise self.signalled

    def cancel_job(self, job_id: str) -> Any:
        self.cancelled.append(job_id)
        return SimpleNamespace(state=self.state)


@pytest.mark.parametrize(("state", "said"), [("running", "cancelled j1"), ("done", "j1 had ended: done")])
@pytest.mark.parametrize(("signalled", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_a_signal_cancels_the_warm_up_on_a_server(
    live: Live,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    said: str,
    signalled: BaseException,
    status: int,
) -> None:
    client = InterruptedClient(state, signalled)
    monkeypatch.setattr(docs, "_client", lambda *_: client)
    done = run(live, tmp_path, "warm", "plants", status=status)
    assert client.cancelled == ["j1"]
    assert done.stderr.endswith(f"{said}\n")
