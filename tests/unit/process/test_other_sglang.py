"""The document cache on the other SGLang that is served, where `scripts/install` has put it. An engine starts
on it in `tests/integration/test_restart.py`, which checks the hooks, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_ext.wire.protocol import SGLANG_VERSIONS
from tests.conftest import REPO

FOLDER = Path(sys.prefix) / f"sglang-{SGLANG_VERSIONS[-1]}"


@pytest.mark.skipif(not FOLDER.is_dir(), reason="scripts/install has not put it here")
def test_the_document_cache_frees_on_the_other_version_what_it_does_not_keep() -> None:
    path = os.pathsep.join([str(FOLDER), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.process.other_sglang_main"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "fits"), done.stderr[-4000:]
