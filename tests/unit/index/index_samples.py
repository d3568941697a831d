"""Documents for the index tests, whose vectors follow from their names, so that any process can make
them again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragserve_index import IndexStore, MetadataValue, NewChunk, NewDocument

DIM = 16
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


def make(data_dir: Path, index_type: str = "flat", *, namespace: str = "n", dim: int = DIM) -> IndexStore:
    """A store with one empty namespace."""
    store = IndexStore(data_dir)
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
