"""BM25 with the constants of FTS5."""

from __future__ import annotations

from math import log

K1, B = 1.2, 0.75
LEAST = 1e-6  # weight of a word that is in half of the chunks, or more


def weight(n_chunks: int, n: int) -> float:
    """Inverse document frequency. ``n`` may exceed ``n_chunks``: it may have been counted before removals."""
    return log((n_chunks - n + 0.5) / (n + 0.5)) if 2 * n < n_chunks else LEAST
