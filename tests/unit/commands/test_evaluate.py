"""`ragserve eval --write-gate` measures engines as any server has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ragserve.commands import evaluate, serve_checks
from ragserve.config import Settings
from ragserve.engine.server_args import sparse_defaults
from ragserve.errors import EngineError
from ragserve.eval import parallel
from tests.conftest import MODEL
from tests.integration.prompts import QUESTIONS


def test_what_a_verdict_depends_on_is_given_by_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def run(plan: parallel.Plan, *_: Any) -> None:
        seen.append(plan.settings)
        raise EngineError("It ends here.")

    monkeypatch.setattr(parallel, "run", run)
    monkeypatch.setattr(serve_checks, "check_engine", lambda *_, **__: None)
    app = typer.Typer()
    evaluate.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    flags = {
        "--data": str(QUESTIONS / "onehop_8.jsonl"),
        "--strategies": "full,epic",
        "--data-dir": str(tmp_path),
        "--model": str(MODEL),
        "--verify-margin": "3",
        "--kv-prefix": "fixed",
        "--sparse-attention": "on",
        "--decode-mode": "hierarchical",
        "--decode-budget": "640",
        "--prefill-mode": "vertical_slash",
        "--prefill-alpha": "0.5",
        "--prefill-dense-below": "512",
    }
    arguments = ["eval", "--write-gate", *(part for flag in flags.items() for part in flag)]
    with pytest.raises(EngineError, match="It ends here"):
        CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False)
    (settings,) = seen
    assert sparse_defaults(settings) == "hierarchical 640, vertical_slash 0.5"
    assert (settings.verify_margin, settings.kv_prefix) == (3, "fixed")


@pytest.mark.parametrize("flag", ["--json", "--html", "--records"])
def test_a_report_is_no_folder(tmp_path: Path, flag: str) -> None:
    app = typer.Typer()
    evaluate.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    data = str(QUESTIONS / "onehop_8.jsonl")
    arguments = ["eval", "--data", data, "--url", "no-url", flag, str(tmp_path)]
    with pytest.raises(Exception, match="is a directory"):
        CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False)
