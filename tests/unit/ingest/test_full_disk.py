"""Every write of registry, index, job log and uploads on a disk without room, and on a read-only one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.ingest import full_disk_writer


def test_no_write_loses_anything_or_leaves_a_file_open(tmp_path: Path) -> None:
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a disk")
    command = f"{sys.executable} {full_disk_writer.__file__} {tmp_path}"
    script = f"mount -t tmpfs -o size=16m none {tmp_path} && {command}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    full, read_only = map(int, done.stdout.split())
    assert full >= 18  # of 24: a removal may fit where nothing else does
    assert read_only == 2
