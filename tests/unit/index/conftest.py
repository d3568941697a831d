"""Give FAISS one thread: the tests' own threads run at once, and graphs come out the same every time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import faiss
import pytest

from ragserve_index import IndexStore
from tests.unit.index.index_samples import make


@pytest.fixture(autouse=True)
def _one_faiss_thread() -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[IndexStore]:
    with make(tmp_path / "data") as opened:
        yield opened


@pytest.fixture(autouse=True)
def _nothing_had_to_be_put_right(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An index that turns out wrong is built anew, which would hide the mistake: it logs an error, and that
    fails the test.
    """
    yield
    errors = [
        record.getMessage()
        for when in ("setup", "call")
        for record in caplog.get_records(when)
        if record.levelno >= logging.ERROR
    ]
    assert not errors
