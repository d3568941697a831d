"""What a radix cache asks about requests that it may take KV of, in all versions of SGLang."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class TreeContents(ABC):
    """What enters a tree, and when it has."""

    @abstractmethod
    def enters(self, req: Any) -> bool:
        """True for a running request whose KV the tree takes."""

    @abstractmethod
    def on_cached(self, req: Any, node: Any) -> None:
        """The KV of a request's whole pages is in the tree; it ends in this node."""

    @abstractmethod
    def leaving(self, req: Any, tokens: int, *, inserts: bool) -> int | None:
        """A request has ended, with KV of ``tokens`` in its row. Return how many of them the tree takes; None
        for none. ``inserts``: False if SGLang lets it take none."""

    @abstractmethod
    def own_slots(self, req: Any, tokens: int) -> torch.Tensor | None:
        """All slots of a request that has ended, if they are not those of its row behind what the tree owns;
        None if they are."""

    @abstractmethod
    def on_left(self) -> None:
        """A request has ended and its slots are free or in the tree."""
