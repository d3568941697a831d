"""The short form of campaign `disk`, in a process that may mount."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO


def test_a_full_or_read_only_disk_and_a_wrong_clock_break_nothing(tmp_path: Path) -> None:
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us mount a small disk")
    command = [sys.executable, "-m", "tests.campaigns", "disk", "--no-record"]
    command += ["--operations", "8", "--work", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "8 operations" in done.stdout
