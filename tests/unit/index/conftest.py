"""Give FAISS one thread: the tests' own threads run at once, and graphs come out the same every time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import faiss
import pytest

from ragserve_index import IndexStore
from tests.conftest import EXHAUSTIVE
from tests.unit.index.index_samples import DIM, REGISTRY, make
from tests.unit.index.postgres_server import PostgresServer


@pytest.fixture(params=["sqlite", "postgres"] if EXHAUSTIVE else ["sqlite"])
def registry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kind of registry that `open_store` opens in the test, and in processes that it starts."""
    if request.param == "sqlite":
        yield "sqlite"
        return
    server = request.getfixturevalue("postgres")
    url = server.database()
    monkeypatch.setenv(REGISTRY, url)
    yield "postgres"
    server.give_back(url)


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    url = postgres.database()
    yield url
    postgres.give_back(url)


@pytest.fixture
def fronts(tmp_path: Path, url: str) -> Iterator[tuple[IndexStore, IndexStore]]:
    """Two servers that share nothing but the registry."""
    with (
        IndexStore(tmp_path / "one", registry_url=url) as one,
        IndexStore(tmp_path / "two", registry_url=url) as two,
    ):
        one.ensure_namespace("n", embedder="e", dim=DIM)
        yield one, two


@pytest.fixture(autouse=True)
def _one_faiss_thread() -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[IndexStore]:
    if "registry" in request.fixturenames:
        request.getfixturevalue("registry")  # it is where the store goes
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
