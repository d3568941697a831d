"""The document cache on the SGLang of machines without a GPU."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from sglang_ext.wire.protocol import CPU_SGLANG
from tests.integration.forked_starts import run_module

FOLDER = Path(sys.prefix) / f"sglang-{CPU_SGLANG}"


@pytest.mark.skipif(
    version("sglang") != CPU_SGLANG and not FOLDER.is_dir(), reason="scripts/install has not put it here"
)
def test_the_document_cache_frees_what_it_does_not_keep() -> None:
    env = {} if version("sglang") == CPU_SGLANG else {"PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])}
    done = run_module("tests.unit.process.other_sglang_main", timeout=300, env=env)
    assert (done.returncode, done.stdout.strip()) == (0, "fits"), done.stderr[-4000:]
