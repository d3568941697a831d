"""The short form of campaign `kill`: writers without an engine."""

from __future__ import annotations

from pathlib import Path

from tests.campaigns import kill
from tests.campaigns.progress import Progress


def test_writers_killed_at_any_point_leave_what_was_there(tmp_path: Path) -> None:
    progress = Progress(tmp_path, "kill", seed=1, target=8)
    kill.run(progress, ("page write", "index save"))
    assert (dict(progress.counts), progress.violations) == ({"page write": 4, "index save": 4}, [])
