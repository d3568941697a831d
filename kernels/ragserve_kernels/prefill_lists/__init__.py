"""Lists of key blocks for a sparse prefill, chosen by the queries of the batch itself.

Two producers: ``choose_lines`` finds vertical and slash lines of the attention of sampled queries (LoopServe,
section 5.1), ``choose_blocks`` scores blocks by their means beside sink and local ones (LServe, section 3.1).
Both return a mask for :func:`ragserve_kernels.sparse_prefill.lists_of`."""

from __future__ import annotations

from ragserve_kernels.prefill_lists.best_blocks import choose_blocks, greedy_blocks, list_blocks
from ragserve_kernels.prefill_lists.block_scores import block_lse
from ragserve_kernels.prefill_lists.lines import (
    SEGMENT,
    LineChoice,
    LinePlan,
    Lines,
    LineShape,
    choose_lines,
    greedy_lines,
    list_lines,
)
from ragserve_kernels.prefill_lists.naive import greedy_blocks_naive, greedy_lines_naive

__all__ = [
    "SEGMENT",
    "LineChoice",
    "LinePlan",
    "LineShape",
    "Lines",
    "block_lse",
    "choose_blocks",
    "choose_lines",
    "greedy_blocks",
    "greedy_blocks_naive",
    "greedy_lines",
    "greedy_lines_naive",
    "list_blocks",
    "list_lines",
]
