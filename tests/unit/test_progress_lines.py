"""Progress where no bar can be drawn."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from ragserve import progress_lines
from ragserve.commands.job_console import progress_bar
from ragserve.eval.console import progress
from ragserve.ingest.jobs.job_report import Progress


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines without their seconds."""
    return [line.split(" s  ", 1)[1] for line in capsys.readouterr().err.splitlines()]


def test_a_line_at_each_phase_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("tune", 40) as step:
        step(done=0, what="profile")
        step(done=0, what="profile")
        step(done=3, what="questions")
        step(done=5, what="questions")
        assert told(capsys) == ["tune: 0 of 40", "profile: 0 of 40", "questions: 3 of 40"]
        step()
    assert told(capsys) == ["questions: 6 of 40"]


def test_a_line_every_few_seconds_though_nothing_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_lines, "EVERY_S", 0.05)
    lines: list[str] = []
    with progress("answers", None):
        until = time.monotonic() + 240
        while len(lines) < 3 and time.monotonic() < until:
            time.sleep(0.05)
            lines += told(capsys)
    assert set(lines) == {"answers: 0"}
    assert len(lines) >= 3


def test_files_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO())
    with progress_bar(console, enabled=True, phase="ingesting") as show:
        show(Progress(total=8, indexed=2, chunks=31, tokens=4000, current="/a/b\x1b.md"))
    lines = told(capsys)
    assert lines == [
        "ingesting: starting",
        "ingesting: 2 of 8 files, 31 chunks, 4,000 tokens  b\\x1b.md",
    ]
    with progress_bar(console, enabled=False) as show:
        show(Progress(total=8))
    assert not told(capsys)
