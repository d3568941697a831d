"""Fixtures of several rooms: tokenizer, parser process and embedder, each started once, and a scripted server
(`live`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from ragserve.config import DEFAULT_MODEL, Settings, load
from ragserve.ingest.ingestor import Ingestor
from ragserve.ingest.parsing.parse_process import Failed, ParsedFile, ParseProcess, ParseRequest, Unchanged
from ragserve.ingest.tokenizer import Counter, TokenizerSource
from ragserve.retrieval.embedder import Embedder
from ragserve_index import IndexStore
from tests.unit.api.scripted_server import DOCUMENTS, Live, serving
from tests.unit.ingest.lent_parsers import lent_parsers
from tests.unit.request_shapes import publish

if TYPE_CHECKING:
    from tests.unit.index.postgres_server import PostgresServer

MAX_BYTES = 64 * 2**20


@pytest.fixture(scope="session", autouse=True)
def _published() -> None:
    publish(Path(DEFAULT_MODEL))


@pytest.fixture(scope="session")
def tokenizer() -> TokenizerSource:
    return TokenizerSource.load(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def count(tokenizer: TokenizerSource) -> Counter:
    return Counter(tokenizer)


@pytest.fixture(scope="session")
def parser(tokenizer: TokenizerSource) -> Iterator[ParseProcess]:
    with ParseProcess(
        tokenizer_json=tokenizer.json, chunk_tokens=256, max_bytes=MAX_BYTES, timeout_s=60
    ) as process:
        yield process


@pytest.fixture
def parse(parser: ParseProcess) -> Callable[..., ParsedFile | Unchanged | Failed]:
    def parse_file(path: Path, **known: str) -> ParsedFile | Unchanged | Failed:
        return parser.parse(ParseRequest(str(path), path.name, path.suffix.lower(), salt="s", **known))

    return parse_file


@pytest.fixture(scope="session", autouse=True)
def _lent_parsers() -> Iterator[None]:
    """Jobs of this process take over each other's parsing process. What that one does with files, time
    limits and failures is tested in `ingest/parsing`; commands under test start one each."""
    with lent_parsers():
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A Postgres server, which makes databases for tests."""
    from tests.unit.index.postgres_server import running_postgres

    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Callable[[Callable[[int, Path], None], Path], None]]:
    """Lets two processes work as ranks, see `rank_processes`."""
    from tests.unit.rank_processes import rank_processes

    with rank_processes() as work:
        yield work


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    return Embedder()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(data_dir=tmp_path / "data")


@pytest.fixture
def store(settings: Settings) -> Iterator[IndexStore]:
    with IndexStore(settings.data_dir) as store:
        yield store


@pytest.fixture
def ingestor(settings: Settings, store: IndexStore, embedder: Embedder) -> Ingestor:
    return Ingestor(settings, store, embedder)


@pytest.fixture(scope="module")
def _live(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("api"), model_path, max_concurrent_queries=16) as live:
        yield live


@pytest.fixture
def live(_live: Live) -> Live:
    """Server of a module's tests; its engine and embedder begin afresh for each."""
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
