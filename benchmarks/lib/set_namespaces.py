"""Question sets as namespaces of a store, with their passages embedded once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ragserve.eval.data import Question, distinct_passages
from ragserve.ingest.chunk_embedding import embedding_text
from ragserve.retrieval.embedder import Embedder
from ragserve.setting_groups.answering import Retrieval
from ragserve_index import IndexStore
from ragserve_index.types import Hit, NewChunk, NewDocument


class SetNamespace:
    """A set's passages in a store, each a document of one chunk; ``n`` of them."""

    def __init__(self, name: str, questions: Sequence[Question], store: IndexStore, vectors: Path) -> None:
        """``vectors``: the folder that keeps them for the next run."""
        self.name, self.store, self.embedder = name, store, Embedder()
        passages = distinct_passages(questions)
        self.n = len(passages)
        path = vectors / f"{name}.npy"
        if not path.exists():
            np.save(path, self.embedder.encode([embedding_text(each.title, each.text) for each in passages]))
        embedded: npt.NDArray[np.float32] = np.load(path)
        self._asked: dict[str, npt.NDArray[np.float32]] = {}
        self.vectors = {each.key: row for each, row in zip(passages, embedded, strict=True)}
        store.ensure_namespace(name, embedder=self.embedder.name, dim=self.embedder.dim)
        store.replace_documents(
            name,
            [
                (
                    NewDocument(each.key, each.title, "0", "text/plain", len(each.text)),
                    [NewChunk(each.text, 0, len(each.text), len(each.text) // 4)],
                    embedded[number : number + 1],
                )
                for number, each in enumerate(passages)
            ],
        )

    def hits(self, question: str, mode: Retrieval, n: int) -> list[Hit]:
        """The ``n`` best passages of a search."""
        vector = None if mode == "lexical" else self.asked(question)
        if mode == "dense" and vector is not None:
            return self.store.search(self.name, vector[None], n).hits[0]
        return self.store.search_text(self.name, question, n, vector=vector).hits[0]

    def asked(self, question: str) -> npt.NDArray[np.float32]:
        """A question's vector, embedded once."""
        if question not in self._asked:
            self._asked[question] = self.embedder.encode_queries([question])[0]
        return self._asked[question]
