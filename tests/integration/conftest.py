"""The real server: one for the whole session, and more where a test needs special settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.measuring.server import RunningServer, running_server
from tests.conftest import MODEL
from tests.integration.models import random_llama
from tests.integration.reference import Reference
from tests.integration.small_engine import Engine


@dataclass
class Server:
    running: RunningServer
    client: httpx.Client

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def data_dir(self) -> Path:
        return self.running.data_dir


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The small model in transformers; modules with another model have their own."""
    return Reference(MODEL)


@pytest.fixture(scope="session")
def builder() -> PromptBuilder:
    return PromptBuilder.load(str(MODEL))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`ragserve serve` with its defaults and the small model, shared by all tests: use a namespace of your
    own.
    """
    data_dir = tmp_path_factory.mktemp("server") / "data"
    with running_server(data_dir=data_dir) as running, running.client() as client:
        yield Server(running, client)


@pytest.fixture(scope="session")
def start_server():  # type: ignore[no-untyped-def]
    """The context manager itself, for a server with other settings. Each start costs about 15 seconds."""
    return running_server


@pytest.fixture(scope="session")
def locked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with an API key ("secret"), sparse decoding for requests that ask for it in pages of 64, and a
    KV pool of 8 bits.
    """
    data_dir = tmp_path_factory.mktemp("locked-server") / "data"
    sparse = {
        "sparse_attention": "on",
        "decode_mode": "dense",
        "decode_dense_below": 0,
        "decode_page_size": 64,
    }
    chunks = {"engine_args": '{"chunked_prefill_size": 256}'}
    with (
        running_server(data_dir=data_dir, api_key="secret", kv_bits=8, **sparse, **chunks) as running,
        running.client() as client,
    ):
        yield Server(running, client)


@pytest.fixture(scope="session")
def _small_engine(start_server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("small-engine")
    engine = Engine(start_server, random_llama(folder / "model", kv_heads=2), folder / "data")
    yield engine
    engine.down()


@pytest.fixture
def small_engine(_small_engine: Engine) -> Engine:
    """Shared by the tests of the document cache, which may stop and kill it."""
    if not _small_engine.is_up:
        _small_engine.down()
        _small_engine.up()
    return _small_engine
