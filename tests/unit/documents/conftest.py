"""SGLang is imported once, after the preparation that a CPU-only machine needs."""

from __future__ import annotations

import pytest

from sglang_ext.cpu.torchvision import prepare


@pytest.fixture(autouse=True, scope="session")
def _prepared() -> None:
    prepare()
