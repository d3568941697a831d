"""Commands that start an engine say what is wrong before they do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ragserve.commands import calibrate, calibrate_decode, evaluate, ingest, tune
from ragserve.config import Settings, load
from ragserve.errors import RagserveError
from ragserve.profiles.sparse_attention import FILE_NAME as SPARSE_FILE
from ragserve.profiles.sparse_attention import SPARSE, SparseEntry, SparseFigures, SparseRecord, under
from sglang_ext.documents.fingerprint import model_fingerprint
from tests.conftest import MODEL
from tests.integration.prompts import QUESTIONS
from tests.unit.index.index_samples import make

ONEHOP = ("eval", "--data", str(QUESTIONS / "onehop_8.jsonl"))
COMMANDS: dict[str, tuple[Any, Sequence[str]]] = {
    "calibrate": (calibrate, ["calibrate"]),
    "calibrate-decode": (calibrate_decode, ["calibrate-decode"]),
    "eval": (evaluate, ONEHOP),
    "eval-gate": (evaluate, [*ONEHOP, "--write-gate"]),
    "eval-multiturn": (evaluate, [*ONEHOP, "--mode", "multiturn"]),
    "tune": (tune, ["tune", "--namespace", "n"]),
    "ingest": (ingest, ["ingest", "--warm", "somewhere"]),
}


def error_of(command: str, *arguments: str) -> str:
    module, begin = COMMANDS[command]
    app = typer.Typer()
    module.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    error = CliRunner().invoke(app, [*begin, *arguments]).exception
    assert isinstance(error, RagserveError), error
    return str(error)


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("ragserve.engine.offline.run_once", start)
    monkeypatch.setattr("ragserve.verification.calibration.tune_process.tune", start)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_is_not_there(command: str, tmp_path: Path) -> None:
    make(tmp_path / "data").close()
    folder = ("--data-dir", str(tmp_path / "data"))
    assert "no/model does not exist" in error_of(command, *folder, "--model", str(tmp_path / "no" / "model"))
    if command != "ingest":
        too_long = error_of(command, *folder, "--model", str(MODEL), "--context-length", "9000")
        assert "context_length 9000 exceeds the model's" in too_long


def test_parts_of_a_calibration_say_what_is_too_short_for_them(tmp_path: Path) -> None:
    heads = ("--part", "heads", "--out", str(tmp_path / "heads.json"))
    assert "--tokens 8 is too short for --part heads" in error_of("calibrate", *heads, "--tokens", "8")
    assert "--out" in error_of("calibrate", "--part", "heads")
    assert "--data" in error_of("calibrate", "--part", "sparse")
    said = error_of("calibrate", "--part", "decode", "--max-tokens", "100")
    assert "--max-tokens 100 is too short for --part decode" in said


@pytest.mark.parametrize("command", ["calibrate", "calibrate-decode", "eval-gate"])
def test_a_data_folder_that_cannot_be_used(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in error_of(command, "--data-dir", str(tmp_path / "file"))


def test_a_calibration_measures_what_auto_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = SparseFigures(n=200, dense=60, score=60, loss_bound=2, prompt_tokens=8000, read=0.2)
    entry = SparseEntry({"decode_mode": "hierarchical", "decode_budget": 512}, {"lines": figures})
    found = SparseRecord(under(load()), (entry,), "float32", "m", "h", "d")
    SPARSE.save(tmp_path / SPARSE_FILE, model_fingerprint(str(MODEL)), found)
    started: list[Settings] = []
    monkeypatch.setattr(
        "ragserve.engine.offline.run_once", lambda settings, *_, **__: started.append(settings)
    )
    app = typer.Typer()
    calibrate.register(app)
    app.command("other")(lambda: None)
    flags = ["--model", str(MODEL), "--data-dir", str(tmp_path), "--dtype", "float32"]
    done = CliRunner().invoke(
        app, ["calibrate", "--part", "costs", *flags, "--sparse-attention", "auto"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    (settings,) = started
    assert settings.data_dir != tmp_path
    assert (settings.sparse_attention, settings.decode_budget) == ("on", 512)
