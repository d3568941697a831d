"""Readiness means that nothing is left to compile: the first requests are as fast as later ones."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["dense", "pages", "sparse", "bits"])
def test_no_first_request_of_a_kind_takes_twice_as_long_as_later_ones(tmp_path: Path, mode: str) -> None:
    out = tmp_path / "first.json"
    module = "tests.integration.first_requests_main"
    command = [sys.executable, "-m", module, tmp_path / "data", out, mode]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=900)
    assert out.exists(), done.stderr[-4000:]
    found = json.loads(out.read_text())
    print(json.dumps(found, indent=1))  # with the start-up time
    assert not found["failed"]
    slow = {kind: ms for kind, ms in found["ms"].items() if ms[0] > 2 * statistics.median(ms[1:])}
    assert not slow, f"{slow}, engine started in {found['start_s']} s"
    compiled = [
        (kind, each["what"])
        for kind, kernels in found["compiled"].items()
        for each in kernels
        if each["what"].startswith("ragserve_kernels.")
    ]
    assert not compiled, "the warm-up does not reach them"
