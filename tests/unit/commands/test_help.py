"""The help of each command, as a newcomer meets it."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ragserve import cli
from ragserve.config import Settings
from ragserve.errors import InvalidRequest
from tests.conftest import REPO

WIDE = {"COLUMNS": "300", "TERM": "dumb"}


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, epilog=cli._EPILOG)
    monkeypatch.setattr(cli, "app", app)
    cli._register()
    return app


def test_the_first_page_says_how_to_begin(app: typer.Typer) -> None:
    page = CliRunner().invoke(app, ["--help"], env=WIDE).output
    for word in ("ragserve ingest", "ragserve serve", "ragserve query", "ragserve doctor"):
        assert word in page


def test_settings_are_grouped_and_readable(app: typer.Typer) -> None:
    page = CliRunner().invoke(app, ["serve", "--help"], env=WIDE).output
    for name in Settings.model_fields:
        assert "--" + name.replace("_", "-") in page
    for panel in ("engine", "document cache", "server", "limits"):
        assert f"Settings: {panel}" in page
    assert "(512 MiB)" in page
    assert "A JSON object" in page
    assert str(REPO) not in page, "where the model is on this machine"


@pytest.mark.parametrize("part", ["decode", "heads"])
def test_old_commands_are_not_shown_and_name_the_new_one(app: typer.Typer, part: str, tmp_path: Path) -> None:
    assert f"calibrate-{part}" not in CliRunner().invoke(app, ["--help"], env=WIDE).output
    own = [str(tmp_path)] if part == "heads" else ["--decode-mode", "dense"]
    done = CliRunner().invoke(app, [f"calibrate-{part}", *own], env=WIDE)
    assert isinstance(done.exception, InvalidRequest), "it would have run"
    assert f"ragserve calibrate --part {part}" in done.stderr


@pytest.mark.parametrize(
    "command", ["serve", "ingest", "docs", "query", "cache", "doctor", "tune", "eval", "bench"]
)
def test_every_command_has_help(app: typer.Typer, command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env=WIDE)
    assert done.exit_code == 0, done.output
    assert "Usage" in done.output


def test_the_name_of_an_extra_is_not_eaten_as_markup(app: typer.Typer) -> None:
    for arguments in (["--help"], ["mcp", "--help"]):
        assert "ragserve[mcp]" in CliRunner().invoke(app, arguments, env=WIDE).output
