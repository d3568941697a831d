"""Fixtures over `scripted_server`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.unit.api.scripted_server import DOCUMENTS, Live, serving


@pytest.fixture(scope="module")
def _live(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("api"), model_path, max_concurrent_queries=16) as live:
        yield live


@pytest.fixture
def live(_live: Live) -> Live:
    """One server for the tests of a module; its engine and embedder begin afresh for each."""
    _live.engine.reset()
    _live.embedder.calls.clear()
    _live.embedder.error = None
    _live.seen_upstream.clear()
    return _live


@pytest.fixture
def client(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client


@pytest.fixture
def docs(live: Live) -> str:
    """A namespace with three documents of a chunk each."""
    live.index("docs", DOCUMENTS, lang="en")
    return "docs"
