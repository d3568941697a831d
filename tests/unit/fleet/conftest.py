"""The workers of the fleet's tests, and the product in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from ragserve.api.app import create_app
from ragserve.config import load
from ragserve.engine.proxy import ReverseProxy
from ragserve.fleet import worker_link
from ragserve.fleet.fleet_engine import FleetEngine
from tests.unit.api.scripted_server import WordEmbedder, running
from tests.unit.fleet.fake_worker import KEY, FakeWorker, workers


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[FakeWorker]]:
    with workers(tmp_path, 2) as both:
        yield both


@pytest.fixture
def client(two: list[FakeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """Of the product's app in front of `two`."""
    monkeypatch.setattr(worker_link, "PROBE_S", 0.05)
    settings = load(
        data_dir=tmp_path / "front",
        workers=",".join(each.url for each in two),
        engine_api_key=SecretStr(KEY),
        verify_share=0,
        idle_tuning=False,
        warm_ingested=False,
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
        embedder=lambda _: WordEmbedder(),
    )
    with running(app) as url, httpx.Client(base_url=url, timeout=240) as client:
        yield client
