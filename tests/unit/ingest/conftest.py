"""The tokenizer, the parsing process and the embedder, each started once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ragserve.config import DEFAULT_MODEL, Settings, load
from ragserve.ingest.ingestor import Ingestor
from ragserve.ingest.parsing.process import Failed, ParsedFile, ParseProcess, ParseRequest, Unchanged
from ragserve.ingest.tokenizer import Counter, TokenizerSource
from ragserve.retrieval.embedder import Embedder
from ragserve_index import IndexStore

MAX_BYTES = 64 * 2**20


@pytest.fixture(scope="session")
def tokenizer() -> TokenizerSource:
    return TokenizerSource.load(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def count(tokenizer: TokenizerSource) -> Counter:
    return Counter(tokenizer)


@pytest.fixture(scope="session")
def parser(tokenizer: TokenizerSource) -> Iterator[ParseProcess]:
    with ParseProcess(tokenizer_json=tokenizer.json, chunk_tokens=256, max_bytes=MAX_BYTES, timeout_s=60) as process:
        yield process


@pytest.fixture
def parse(parser: ParseProcess) -> Callable[..., ParsedFile | Unchanged | Failed]:
    def parse_file(path: Path, **known: str) -> ParsedFile | Unchanged | Failed:
        return parser.parse(ParseRequest(str(path), path.name, path.suffix.lower(), salt="s", **known))

    return parse_file


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
