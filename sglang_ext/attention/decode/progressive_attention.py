"""Attention to pages in descending order of their scores until a threshold is met (PSA, algorithm 1).

Pages on the host that no resident block has are read by the attention itself, so what is attended to does not
depend on where pages are."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ragserve_kernels.page_select import page_select
from ragserve_kernels.paged import KVPair, PagedBatch, PageSelection
from ragserve_kernels.progressive_decode import PagePlaces, Progressive, SharedPages, progressive_decode
from sglang_ext.attention.decode.page_stats import PageStatistics
from sglang_ext.kv_offload.documents.context_table import ContextTable
from sglang_ext.wire.attention_config import AttentionConfig


class ProgressiveAttention:
    """Ranks the pages of requests by their statistics and attends to them in rounds.

    Attributes:
        host: host pages ``[pages, 2 (K, V), layers, kv_heads, page, head_dim]``; None where no request's KV
            is on the host.
        shared_blocks: where the pool has copies of them; set before the first pass, with ``host``.
        contexts: those that are read in documents' host pages; likewise, None where none are.
    """

    def __init__(
        self, config: AttentionConfig, statistics: PageStatistics, host: torch.Tensor | None
    ) -> None:
        self._config = config
        self._statistics = statistics
        self.host = host
        self.shared_blocks: SharedPages | None = None
        self.contexts: ContextTable | None = None

    def attend(
        self,
        q: torch.Tensor,
        kv: KVPair,
        batch: PagedBatch,
        scored: PagedBatch,
        layer: int,
        *,
        threshold: float | torch.Tensor,
        scale: float,
        is_ranked: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
    ) -> tuple[PageSelection, Progressive]:
        """Return the ranking of all pages and what attention to the first of them gave.

        Args:
            q: ``[batch, heads, head_dim]``.
            kv: the layer's, of the pool.
            batch: the pages of the pool. ``scored``: those where the statistics lie.
            threshold: as that of `progressive_decode`.
            is_ranked: int32 ``[batch, kv_heads]``: 0 for heads that attend otherwise. Default: none does.
            places: int32 ``[batch, kv_heads, n]``: where each head has its pages, as `PagePlaces`, if not in
                ``shared_blocks``; None: in ``batch``.
        """
        tables = self._statistics.tables
        keys = tables.centers(layer) if self._config.ranking == "center" else tables.bounds(layer)
        ranking = page_select(q, scored, keys)
        if is_ranked is not None:
            ranking = ranking._replace(counts=ranking.counts * is_ranked)
        offloaded = None
        if places is not None and self.host is not None:
            contexts = None if self.contexts is None else self.contexts.contexts
            offloaded = PagePlaces(places, self.host, layer, self.shared_blocks, contexts)
        bound = self._config.bound
        return ranking, progressive_decode(
            q, kv, batch, ranking, threshold=threshold, bound=bound, scale=scale, places=offloaded
        )


@dataclass(eq=False, slots=True)
class ProgressiveToken:
    """The one new token of a request that was retracted: it attends as its decode step would have.

    Attributes:
        place: of the token among the new tokens of the pass.
        batch, scored, places: as those of `ProgressiveAttention.attend`, of the request alone.
        layers: how many have attended so far.
    """

    place: int
    attention: ProgressiveAttention
    batch: PagedBatch
    scored: PagedBatch
    places: torch.Tensor
    threshold: float
    layers: int = 0
    _ranked: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def attend(self, q: torch.Tensor, out: torch.Tensor, kv: KVPair, layer: int, scale: float) -> None:
        """Overwrite the token's row of ``out``; ``q`` and ``out`` ``[new tokens, heads, head_dim]``."""
        own = slice(self.place, self.place + 1)
        ranking, part = self.attention.attend(
            *(q[own].contiguous(), kv, self.batch, self.scored, layer),
            threshold=self.threshold,
            scale=scale,
            places=self.places,
        )
        out[own] = part.out
        self._ranked.append((ranking.blocks[0], part.blocks_used[0]))
        self.layers += 1

    def listed(self, most: int, capacity: int) -> PageSelection:
        """Return its pages for resident blocks, in all layers: see `listed`."""
        blocks = torch.stack([ranked[:, :capacity] for ranked, _ in self._ranked])
        return listed(blocks, torch.stack([used for _, used in self._ranked]), most)


def listed(blocks: torch.Tensor, used: torch.Tensor, most: int | torch.Tensor) -> PageSelection:
    """Return ranked pages ``[layers, kv_heads, capacity]`` as a selection of pages for shared_blocks: see
    `SharedTable.assign`.

    ``used``: int32 ``[layers, kv_heads]``, how many were attended to. ``most``: so many have been ranked,
    one number or int32 ``[layers, kv_heads, 1]``."""
    is_none = torch.arange(blocks.shape[2], device=blocks.device) >= most
    return PageSelection(blocks.masked_fill(is_none, -1), used.clone())
