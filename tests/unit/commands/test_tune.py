"""What `ragserve tune` and `ragserve calibrate` refuse before anything is started."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from ragserve.commands import calibrate, tune
from ragserve.errors import InvalidRequest


@pytest.mark.parametrize("command", [tune, calibrate], ids=["tune", "calibrate"])
def test_strategies_that_choose_passages_are_not_measured_on_one_prompt(
    tmp_path: Path, command: ModuleType
) -> None:
    app = typer.Typer()
    command.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    name = command.__name__.rpartition(".")[2]
    arguments = [name, "--strategies", "concat:passages.keep=0.25", "--data-dir", str(tmp_path)]
    with pytest.raises(
        InvalidRequest, match=r"Strategy concat:passages\.keep=0\.25 reads the best passages alone"
    ):
        CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False)
