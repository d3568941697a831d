"""Engines that tests share, one for each configuration of `engines`, started when a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ragserve.answering.prompt import PromptBuilder
from tests.conftest import MODEL
from tests.integration import engines
from tests.integration.engines import Server, WarmedElsewhere
from tests.integration.forked_starts import end_fork_parent, forked_server
from tests.integration.models import random_llama
from tests.integration.reference import Reference
from tests.integration.small_engine import Engine


@pytest.fixture(scope="session", autouse=True)
def _fork_parent() -> Iterator[None]:
    """Set up before all others, so that it ends after all servers."""
    yield
    end_fork_parent()


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The embedded model in transformers; modules with another model have their own."""
    return Reference(MODEL)


@pytest.fixture(scope="session")
def builder() -> PromptBuilder:
    return PromptBuilder.load(str(MODEL))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`ragserve serve` with its defaults and the embedded model. Use a namespace of your own."""
    with engines.default(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session")
def quick_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same with a small model of random weights, for all that needs no answer that is right."""
    with engines.quick(tmp_path_factory.mktemp("quick-server")) as server:
        yield server


@pytest.fixture(scope="session")
def control_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """That model with control routes, for commands that are given its engine (`served_engine`)."""
    with engines.control(tmp_path_factory.mktemp("control-server")) as server:
        yield server


@pytest.fixture(scope="session")
def quick_reference(quick_server: Server) -> Reference:
    assert quick_server.model is not None
    return Reference(quick_server.model)


@pytest.fixture(scope="session")
def locked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with engines.locked(tmp_path_factory.mktemp("locked-server")) as server:
        yield server


@pytest.fixture(scope="session")
def parallel_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with engines.parallel(tmp_path_factory.mktemp("parallel-server")) as server:
        yield server


@pytest.fixture(scope="session")
def stress_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with engines.stress(tmp_path_factory.mktemp("stress-server")) as server:
        yield server


@pytest.fixture(scope="session")
def streaming_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with engines.streaming(tmp_path_factory.mktemp("streaming-server")) as server:
        yield server


@pytest.fixture(scope="session")
def warmed_elsewhere(quick_server: Server, tmp_path_factory: pytest.TempPathFactory) -> WarmedElsewhere:
    """What `ragserve ingest --warm` left, which starts an engine with the model of ``quick_server``."""
    return engines.warmed_elsewhere(tmp_path_factory.mktemp("elsewhere"), quick_server.model)


@pytest.fixture(scope="session")
def _small_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("small-engine")
    engine = Engine(forked_server, random_llama(folder / "model", kv_heads=2), folder / "data")
    yield engine
    engine.down()


@pytest.fixture
def small_engine(_small_engine: Engine) -> Engine:
    """The engine of the document cache's tests, started again if a test has stopped or killed it."""
    if not _small_engine.is_up:
        _small_engine.down()
        _small_engine.up()
    return _small_engine
