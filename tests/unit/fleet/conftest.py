"""The workers of the fleet's tests, and the product in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from pydantic import SecretStr

from ragserve.api.app import create_app
from ragserve.config import Settings, load
from ragserve.engine.proxy import ReverseProxy
from ragserve.fleet import worker_link
from ragserve.fleet.fleet_engine import FleetEngine
from tests.unit.api.scripted_server import WordEmbedder, running
from tests.unit.fleet.fake_worker import KEY, FakeWorker, workers

if TYPE_CHECKING:
    from tests.unit.index.postgres_server import PostgresServer


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[FakeWorker]]:
    with workers(tmp_path, 2) as both:
        yield both


@pytest.fixture
def client(two: list[FakeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """Of the product's app in front of `two`."""
    monkeypatch.setattr(worker_link, "PROBE_S", 0.05)
    with in_front(two, tmp_path / "front") as client:
        yield client


@pytest.fixture
def both_fronts(
    two: list[FakeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres: PostgresServer
) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Of two products in front of `two`, with one registry."""
    monkeypatch.setattr(worker_link, "PROBE_S", 0.05)
    registry = postgres.database()
    with (
        in_front(two, tmp_path / "one", registry_url=SecretStr(registry)) as one,
        in_front(two, tmp_path / "other", registry_url=SecretStr(registry)) as other,
    ):
        yield one, other
    postgres.give_back(registry)


@contextmanager
def in_front(
    made: list[FakeWorker],
    data_dir: Path,
    load_embedder: Callable[[Settings], Any] = lambda _: WordEmbedder(),
    **fields: Any,
) -> Iterator[httpx.Client]:
    """A client of the product's app in front of these workers."""
    settings = load(
        data_dir=data_dir,
        workers=",".join(each.url for each in made),
        engine_api_key=SecretStr(KEY),
        verify_share=0,
        idle_tuning=False,
        warm_ingested=False,
        **fields,
    )
    engine = FleetEngine(settings, str(settings.workers).split(","), start_s=0, others_s=0)
    proxy = ReverseProxy(settings, lambda: engine.least_loaded().url)

    @asynccontextmanager
    async def closing() -> AsyncIterator[None]:
        yield
        await proxy.close()

    app = create_app(
        settings,
        engine,
        upstream=proxy,
        upstream_lifespan=closing,
        serve_metrics=True,
        embedder=load_embedder,
    )
    with running(app) as url, httpx.Client(base_url=url, timeout=240) as client:
        yield client
