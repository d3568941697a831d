"""`ragserve docs ls --url` lists what a server has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
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


def listed(live: Live, tmp_path: Path, *arguments: str, key: str = KEY) -> str:
    app = typer.Typer()
    docs.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    own = ("--data-dir", str(tmp_path / "none"), "--api-key", key)
    done = CliRunner().invoke(app, ["docs", "ls", "--url", live.url, *own, *arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


def test_documents_of_a_server(live: Live, tmp_path: Path) -> None:
    assert "3 documents" in listed(live, tmp_path)
    found = json.loads(listed(live, tmp_path, "--json", "--namespace", "animals"))
    assert {document["source"] for document in found} == {"bee", "cat"}
    assert "1 documents" in listed(live, tmp_path, "--limit", "1")
    assert "oak" in listed(live, tmp_path, "--prefix", "oa")
    assert "bee" not in listed(live, tmp_path, "--prefix", "oa")
    with pytest.raises(Exception, match="key"):
        listed(live, tmp_path, key="another")
