"""`ragserve docs ls --url` lists what a server has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from ragserve.commands import docs
from tests.unit.api.scripted_server import Live, serving

KEY = "a-key"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("data"), model_path, api_key=KEY) as live:
        live.index("animals", {"bee": "Bees.", "cat": "Cats purr."})
        live.index("plants", {"oak": "Oaks are old."})
        yield live


def run(live: Live, tmp_path: Path, command: str, *arguments: str, key: str = KEY) -> Result:
    app = typer.Typer()
    docs.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    own = ("--data-dir", str(tmp_path / "none"), "--api-key", key)
    done = CliRunner().invoke(app, ["docs", command, "--url", live.url, *own, *arguments])
    if done.exception is not None:
        raise done.exception
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

    def warm(self, namespace: str, documents: list[str] | None) -> str:
        return f"job-of-{namespace}-{documents}"

    def wait(self, job: str, *, on_progress: Any) -> Any:
        for chunks in (1, 3):
            now = SimpleNamespace(chunks=chunks, tokens=10 * chunks, counts={"warmed": 1}, job_id=job)
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
