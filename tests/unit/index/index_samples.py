"""Documents for the index tests, whose vectors follow from their names, so that any process can make
them again.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragserve_index import IndexStore, MetadataValue, NewChunk, NewDocument

DIM = 16
REGISTRY = "TEST_REGISTRY_URL"
"""Environment variable: where the registry is, if not in the data directory."""

on_registries = pytest.mark.usefixtures("registry")
"""For modules whose tests run on SQLite's registry, and in the exhaustive form on Postgres's, too."""
on_both_registries = pytest.mark.parametrize("registry", ["sqlite", "postgres"], indirect=True)
"""For tests of what the two do differently: on both in every run."""
on_sqlite = pytest.mark.parametrize("registry", ["sqlite"], indirect=True)
"""For tests of SQLite's file."""

TYPES = ("flat", "sq8", "ivf", "hnsw")
Item = tuple[NewDocument, list[NewChunk], np.ndarray]


def unit(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float32)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def vectors_of(*name: object, n: int = 1, dim: int = DIM) -> np.ndarray:
    """n unit vectors [n, dim] that depend on the name alone."""
    seed = int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:8], "little")
    return unit(np.random.default_rng(seed).standard_normal((n, dim)))


def item(
    source: str,
    n_chunks: int = 3,
    *,
    edition: int = 0,
    metadata: Mapping[str, MetadataValue] | None = None,
    dim: int = DIM,
) -> Item:
    """A document of ``n_chunks`` chunks whose texts name source, edition and ordinal."""
    chunks = [
        NewChunk(f"{source}#{edition}.{i}", 10 * i, 10 * i + 9, n_tokens=2, page=i + 1)
        for i in range(n_chunks)
    ]
    document = NewDocument(
        source, f"title of {source}", f"hash{edition}", "text/plain", 10 * n_chunks, dict(metadata or {})
    )
    return document, chunks, vectors_of(source, edition, n=n_chunks, dim=dim)


UP_TO_FORMAT_6 = (
    "DROP INDEX documents_by_labels; ALTER TABLE documents DROP COLUMN labels; DROP TABLE corrections;"
    "ALTER TABLE chunks DROP COLUMN edited"
)
"""Takes from a registry what formats up to 6 (of Postgres: 3) had not."""


def open_store(data_dir: Path, **options: Any) -> IndexStore:
    """An IndexStore on the registry of the test."""
    return IndexStore(data_dir, registry_url=os.environ.get(REGISTRY), **options)


def make(data_dir: Path, index_type: str = "flat", *, namespace: str = "n", dim: int = DIM) -> IndexStore:
    """A store with one empty namespace."""
    store = open_store(data_dir)
    store.ensure_namespace(namespace, embedder="e", dim=dim, index_type=index_type)
    return store


def fill(
    store: IndexStore,
    n_documents: int,
    n_chunks: int = 10,
    *,
    namespace: str = "n",
    prefix: str = "d",
    dim: int = DIM,
) -> None:
    store.replace_documents(
        namespace, [item(f"{prefix}{i}", n_chunks, dim=dim, metadata={"i": i}) for i in range(n_documents)]
    )


def texts(store: IndexStore, query: np.ndarray, k: int, *, namespace: str = "n", **options: Any) -> list[str]:
    return [hit.chunk.text for hit in store.search(namespace, query.reshape(1, -1), k, **options).hits[0]]


def all_chunks(store: IndexStore, namespace: str = "n") -> dict[int, np.ndarray]:
    """Every chunk id with its vector, made again from its text."""
    found: dict[int, np.ndarray] = {}
    for document in store.documents(namespace, limit=1_000_000):
        for chunk in store.document_chunks(namespace, document.doc_id):
            source, _, rest = chunk.text.rpartition("#")
            edition, ordinal = rest.split(".")
            found[chunk.chunk_id] = vectors_of(source, int(edition), n=document.n_chunks)[int(ordinal)]
    return found


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread or server does."""
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_clean(store: IndexStore) -> None:
    for report in store.check():
        assert report.ok, report


def overlap(found: np.ndarray, truth: np.ndarray) -> float:
    """Share of the true ids [n, k] that were found."""
    return float(
        np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), truth.tolist(), strict=True)])
    )


def exact(
    vectors: np.ndarray, ids: Sequence[int] | np.ndarray, queries: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    scores = queries @ vectors.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.asarray(ids)[order]
