"""BM25 by what a viewer sees alone.

The lexical indexes weigh words by all chunks of a namespace, so a score tells how many others have a word.
Where a viewer does not see all, the chunks that they find are scored again: by how many of the viewer's own
have a word, and by lengths in tokens, whose mean the registry has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ragserve_index import registry
from ragserve_index.bm25 import K1, B, weight
from ragserve_index.database import Connection
from ragserve_index.lexical_search import MAX_WORDS, Scored
from ragserve_index.structures.base import IdSelection
from ragserve_index.types import Chunk, NamespaceInfo
from ragserve_index.viewers import Viewer
from ragserve_index.word_cutting import distinct_words, words

_MAX_COUNTS = 65_536


class SeenWords:
    """Numbers of a viewer's chunks that have a word, exact for a version. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int, frozenset[str] | None, str], int] = {}

    def of(self, connection: Connection, sight: SeenChunks, word: str) -> int:
        """The number of chunks with the word."""
        key = sight.ns.id, sight.ns.version, sight.viewer.labels, word
        found = self._counts.get(key)
        if found is None:
            having = connection.dialect.lexical.having(connection, sight.ns.id, word)
            found = int(np.isin(having, sight.selection.ids).sum())
            if len(self._counts) >= _MAX_COUNTS:
                self._counts.clear()
            self._counts[key] = found
        return found


@dataclass(eq=False)
class SeenChunks:
    """What a viewer sees of a namespace that has more. ``info``: its numbers; ``selection``: its chunks."""

    ns: registry.Namespace
    viewer: Viewer
    info: NamespaceInfo
    selection: IdSelection
    _words: dict[int, Counter[str]] = field(default_factory=dict)

    def scored(self, connection: Connection, text: str, found: Scored, counts: SeenWords) -> Scored:
        """Score chunks that a lexical search has found for a text again, best first."""
        chunks = registry.chunks_by_id(connection, self.ns, [chunk for chunk, _ in found], self.viewer)
        wanted = distinct_words(text, MAX_WORDS)
        weights = {
            word: weight(self.info.n_chunks, n) for word in wanted if (n := counts.of(connection, self, word))
        }
        scores = [(chunk.chunk_id, self._score(chunk, weights)) for chunk in chunks.values()]
        return sorted(((i, score) for i, score in scores if score > 0), key=lambda one: (-one[1], one[0]))

    def _score(self, chunk: Chunk, weights: Mapping[str, float]) -> float:
        own = self._words.get(chunk.chunk_id)
        if own is None:
            own = self._words[chunk.chunk_id] = Counter(words(chunk.title) + words(chunk.text))
        return score(chunk, weights, self.info.n_tokens / max(1, self.info.n_chunks), own)


def score(
    chunk: Chunk, weights: Mapping[str, float], mean_tokens: float, own: Mapping[str, int] | None = None
) -> float:
    """BM25 of a chunk for weighed words, among chunks of ``mean_tokens`` on average. ``own``: its words, if
    they have been counted."""
    have = Counter(words(chunk.title) + words(chunk.text)) if own is None else own
    length = K1 * (1 - B + B * chunk.n_tokens / max(1.0, mean_tokens))
    return sum(
        each * n * (K1 + 1) / (n + length) for word, each in weights.items() if (n := have.get(word, 0))
    )
