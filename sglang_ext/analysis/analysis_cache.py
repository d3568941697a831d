"""Decoded analyses in memory, evicted in LRU order; the tiers below keep their bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from sglang_ext.analysis.document_analysis import Analysis


class AnalysisCache:
    """Analyses by document key and cut (block size, local blocks). Requests in flight hold their own
    references.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget = budget_bytes
        self.used = 0
        self._entries: OrderedDict[tuple[str, int, int], Analysis] = OrderedDict()

    def stat(self) -> dict[str, int]:
        """Return the number of analyses, their bytes and the budget."""
        return {"documents": len(self._entries), "bytes": self.used, "budget_bytes": self.budget}

    def get(self, key: str, block: int, local_blocks: int) -> Analysis | None:
        found = self._entries.get((key, block, local_blocks))
        if found is not None:
            self._entries.move_to_end((key, block, local_blocks))
        return found

    def put(self, key: str, analysis: Analysis) -> None:
        """Keep an analysis, unless it is larger than the whole budget."""
        name = (key, analysis.block, analysis.local_blocks)
        self._drop(name)
        if analysis.nbytes > self.budget:
            return
        self._entries[name] = analysis
        self.used += analysis.nbytes
        while self.used > self.budget:
            self._drop(next(iter(self._entries)))

    def remove(self, keys: Collection[str]) -> None:
        """Drop the analyses of these documents."""
        for name in [name for name in self._entries if name[0] in keys]:
            self._drop(name)

    def clear(self) -> None:
        self._entries.clear()
        self.used = 0

    def _drop(self, name: tuple[str, int, int]) -> None:
        gone = self._entries.pop(name, None)
        if gone is not None:
            self.used -= gone.nbytes
