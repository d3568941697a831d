"""The short form of campaign `damage`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns import damage
from tests.campaigns.progress import Progress


def test_no_damaged_file_is_served(tmp_path: Path) -> None:
    progress = Progress(tmp_path, "damage", seed=1, target=48)
    damage.run(progress)
    assert (progress.operations, progress.violations) == (48, [])


def test_a_file_damaged_unnoticed_is_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign can fail: damage that it is not told of is found."""
    progress = Progress(tmp_path, "damage", seed=1, target=3)
    monkeypatch.setattr(damage, "DAMAGES", (lambda path, other, chance: None,))
    damage.run(progress)
    assert progress.n_violations == 1
    assert "served whole: True" in progress.violations[0]
