"""How many chunks of namespaces have a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragserve_index import IndexStore


def word_counts(store: IndexStore, names: Sequence[str], words: Sequence[str]) -> dict[str, int]:
    """`IndexStore.word_counts` of several namespaces together."""
    every = [store.word_counts(name, words) for name in names]
    return {word: sum(counts[word] for counts in every) for word in every[0]}
