"""Which documents a store that engines share is worth: those whose prefill it saves often, for few bytes."""

from __future__ import annotations

from collections import Counter

_MIB = 2**20
_MOST = 100_000  # documents counted; then all counts are halved, so that old ones fade
# Without a cost profile: a prefill of 20,000 tokens a second.
DEFAULT_PREFILL_MS = (0.0, 0.05, 0.0)


class DocumentValues:
    """Counts how often documents are retrieved, and compares their value with a threshold.

        value = retrievals x (a0 + a1 n + a2 n^2) / MiB of KV     n tokens; milliseconds per MiB

    The coefficients are those of exact prefill in the cost profile. Not thread-safe."""

    def __init__(
        self,
        threshold: float,
        page_bytes: int,
        block: int,
        prefill_ms: tuple[float, float, float] = DEFAULT_PREFILL_MS,
    ) -> None:
        """``threshold`` in milliseconds per MiB; 0 lets everything in, retrieved or not. ``page_bytes``: of
        ``block`` tokens, over all tensor-parallel ranks."""
        self._threshold = threshold
        self._page_bytes = page_bytes
        self._block = block
        self._prefill_ms = prefill_ms
        self._retrieved: Counter[str] = Counter()

    def note(self, key: str) -> None:
        """Count a retrieval."""
        self._retrieved[key] += 1
        if len(self._retrieved) > _MOST:
            self._retrieved = Counter({key: n // 2 for key, n in self._retrieved.items() if n > 1})

    def forget(self, key: str) -> None:
        """Drop a removed document's count."""
        self._retrieved.pop(key, None)

    def value(self, key: str, n_tokens: int) -> float:
        """Milliseconds of prefill per MiB that the document's retrievals so far have cost or saved."""
        mib = -(-n_tokens // self._block) * self._page_bytes / _MIB
        a0, a1, a2 = self._prefill_ms
        return self._retrieved[key] * (a0 + a1 * n_tokens + a2 * n_tokens**2) / mib

    def admits(self, key: str, n_tokens: int) -> bool:
        """True for a document that is worth its bytes."""
        return not self._threshold or self.value(key, n_tokens) >= self._threshold
