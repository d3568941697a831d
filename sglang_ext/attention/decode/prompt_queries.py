"""Queries of the prompt's end, for requests whose pages they choose."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_ext.attention.decode.observed_queries import ObservedQueries
from sglang_ext.attention.decode.tables import TableShape


class PromptQueries:
    """Keeps the means of an extend's last queries with the requests. Scheduler thread only.

    Queries of a pass before, of a chunk or of what the prefix cache has, do not count. A pass that does not
    come by here, in a graph or with a composed context, leaves a request without."""

    def __init__(self, shape: TableShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._of: Sequence[tuple[ObservedQueries, int, int]] = ()  # of the extend at hand: see `Step.asked`
        self._places = self._weights = self._means = torch.empty(0)

    def begin(self, asked: Sequence[tuple[ObservedQueries, int, int]]) -> None:
        """Prepare the next pass: see `Step.asked`."""
        self._of = asked
        if not asked:
            return
        within = torch.arange(max(count for _, _, count in asked))
        firsts = torch.tensor([first for _, first, _ in asked])[:, None]
        counts = torch.tensor([count for _, _, count in asked])[:, None]
        # past a request's own queries the last one counts nothing
        self._places = self._sent(firsts + torch.minimum(within, counts - 1))
        self._weights = self._sent(((within < counts) / counts).to(self._shape.dtype))
        sizes = self._shape.layers, len(asked), self._shape.heads, self._shape.head_dim
        self._means = torch.empty(sizes, dtype=self._shape.dtype, device=self._device)

    def observe(self, q: torch.Tensor, layer: int) -> None:
        """Take the queries of a layer, [new tokens, heads * head_dim] or [new tokens, heads, head_dim]."""
        if not self._of:
            return
        latest = q.reshape(len(q), -1)[self._places]  # [requests, window, heads * head_dim]
        means = torch.bmm(self._weights[:, None], latest)
        self._means[layer].copy_(means.view(self._means.shape[1:]))
        if layer == self._shape.layers - 1:
            for i, (queries, _, count) in enumerate(self._of):
                queries.show(self._means[:, i], count)

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        return (values.pin_memory() if self._device.type == "cuda" else values).to(
            self._device, non_blocking=True
        )
