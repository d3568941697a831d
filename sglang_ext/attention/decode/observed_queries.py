"""The queries that choose a request's pages, while no table of a step has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class QueryMean:
    """The mean of ``count`` queries, [layers, heads, head_dim]."""

    mean: torch.Tensor
    count: int


@dataclass(slots=True)
class ObservedQueries:
    """Changed by its methods only.

    Attributes:
        count: queries in the mean that pages are chosen by, at most the window.
        shown: None if no pass has shown the queries of the prompt's end, or a step's tables go on with them.
    """

    count: int = 0
    shown: QueryMean | None = None

    def show(self, mean: torch.Tensor, count: int) -> None:
        """Note the mean of ``count`` queries, which a pass has shown or a step's tables had."""
        self.shown = QueryMean(mean, count)

    def restart(self) -> None:
        """Count anew: the next tables begin with the queries of the prompt's end, if there are any."""
        self.count = 0 if self.shown is None else self.shown.count

    def add(self, window: int) -> float:
        """Count a query more. Return its share in the mean of the latest ``window``."""
        self.count = min(self.count + 1, window)
        return 1 / self.count

    def take(self, query: torch.Tensor, window: int) -> None:
        """Take a query, [layers, heads, head_dim], into the mean of the latest ``window``, as a decode step
        would."""
        share = self.add(window)
        before = self.shown if self.count > 1 else None
        self.show(query if before is None else before.mean.lerp(query, share), self.count)

    def hand_over(self) -> None:
        """The tables of a step have taken the mean, and go on with it."""
        self.shown = None

    def forget(self) -> None:
        """Forget all queries."""
        self.count, self.shown = 0, None
