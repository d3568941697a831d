"""Passages that were cut by the tokens of another model are found by their counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ragserve.config import DEFAULT_MODEL
from ragserve.errors import InvalidRequest
from ragserve.ingest.foreign_cuts import foreign_cuts
from ragserve.ingest.tokenizer import Counter, TokenizerSource
from ragserve_index import IndexStore, NewChunk, NewDocument

TEXTS = ("Rivers run down to the sea.", "Ferries leave at nine, and again at noon.")


def add(store: IndexStore, namespace: str, counts: list[int]) -> None:
    store.ensure_namespace(namespace, embedder="e", dim=4)
    chunks = [NewChunk(text, 0, len(text), n) for text, n in zip(TEXTS, counts, strict=True)]
    document = NewDocument("d", "D", "d", "text/plain", 9, {})
    store.replace_documents(namespace, [(document, chunks, np.eye(2, 4, dtype=np.float32))])


def test_namespaces_whose_passages_have_other_counts(tmp_path: Path) -> None:
    counts = Counter(TokenizerSource.load(DEFAULT_MODEL)).counts(list(TEXTS))
    with IndexStore(tmp_path) as store:
        store.ensure_namespace("empty", embedder="e", dim=4)
        assert foreign_cuts(store, "no such tokenizer") == [], "there is nothing to count"
        add(store, "own", counts)
        add(store, "foreign", [counts[0], counts[1] + 3])
        assert foreign_cuts(store, DEFAULT_MODEL) == ["foreign"]
        with pytest.raises(InvalidRequest, match="could not be loaded"):
            foreign_cuts(store, "no such tokenizer")
