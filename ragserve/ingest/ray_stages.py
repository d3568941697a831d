"""What the actors of a Ray cluster do with a batch of files: parse, then embed. They need no Ray themselves.

Rows are pickled, because documents are no table; Ray itself runs whatever its clients pickle."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ragserve.ingest.attachments import Result, results_of
from ragserve.ingest.chunk_embedding import Vectors, embed_chunks
from ragserve.ingest.parsing.parse_process import Failed, ParsedFile, ParseProcess
from ragserve.ingest.pipeline import OF_A_DOCUMENT, new_document
from ragserve.ingest.planned import PlannedFile

COLUMN = "file"
Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EmbeddedFile(ParsedFile):
    """A parsed file whose chunks have their sentences, with the chunks' vectors, [chunks, dim]."""

    vectors: Vectors = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32), repr=False)


class ParseStage:
    """Parses in a process of its own, as on one machine: ``options`` are those of `ParseProcess`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._parser = ParseProcess(**options)

    def __call__(self, batch: Batch) -> dict[str, list[bytes]]:
        files: list[PlannedFile] = [pickle.loads(row) for row in batch[COLUMN]]
        return rows(results_of(self._parser, file) for file in files)


class EmbedStage:
    """Embeds the files that were parsed, and passes the others on. ``options`` are those of `Embedder`."""

    def __init__(self, options: Mapping[str, Any], sentence_bytes: int) -> None:
        from ragserve.retrieval.embedder import Embedder

        self._embedder = Embedder(**options)
        self._sentence_bytes = sentence_bytes

    def __call__(self, batch: Batch) -> dict[str, list[bytes]]:
        families: list[list[Result]] = [
            pickle.loads(row) for row in batch[COLUMN]
        ]  # a file and its attachments
        results = [result for family in families for result in family]
        try:
            embedded = self._with_vectors(results)
        except OF_A_DOCUMENT:  # each alone, so that one odd document costs no other
            embedded = [row for result in results for row in self._alone(result)]
        left = iter(embedded)
        return rows([next(left) for _ in family] for family in families)

    def _alone(self, result: Result) -> list[Result]:
        try:
            return self._with_vectors([result])
        except OF_A_DOCUMENT as error:
            return [(result[0], Failed(f"could not be indexed: {error}", "not_indexed"))]

    def _with_vectors(self, results: list[Result]) -> list[Result]:
        parsed = [(file, result) for file, result in results if isinstance(result, ParsedFile)]
        if not parsed:
            return results
        titled = [(new_document(file, result).title, result.chunks) for file, result in parsed]
        embedded = iter(embed_chunks(self._embedder, titled, self._sentence_bytes, lambda: False))
        return [
            (file, _embedded(result, *next(embedded)) if isinstance(result, ParsedFile) else result)
            for file, result in results
        ]


def _embedded(parsed: ParsedFile, chunks: Any, vectors: Vectors) -> EmbeddedFile:
    known = {each.name: getattr(parsed, each.name) for each in fields(ParsedFile)}
    return EmbeddedFile(**known | {"chunks": chunks, "vectors": vectors})


def rows(items: Any) -> dict[str, list[bytes]]:
    """A batch of these objects."""
    return {COLUMN: [pickle.dumps(item) for item in items]}
