"""`ragserve docs warm` on the data folder: its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ragserve.commands import docs, warm
from ragserve.config import Settings
from ragserve.ingest.jobs.job_report import JobReport, Progress
from ragserve_index import IndexStore
from tests.unit.verification.idle_engine import fill


def test_a_command_whose_job_is_cancelled_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cancelled(
        _settings: Settings, _store: IndexStore, job_id: str, *_: object, **__: object
    ) -> JobReport:
        return JobReport(job_id, "notes", "cancelled", 0.0, Progress())

    with IndexStore(tmp_path) as store:
        fill(store, "notes", 1)
    app = typer.Typer()
    docs.register(app)
    monkeypatch.setattr(warm, "run_warm", cancelled)
    ran = CliRunner().invoke(app, ["docs", "warm", "notes", "--data-dir", str(tmp_path)])
    assert "namespace notes: cancelled" in ran.output
    assert ran.exit_code == 3
