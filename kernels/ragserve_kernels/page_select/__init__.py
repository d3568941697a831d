"""Choose the blocks of the KV that a decode step attends to (LServe 3.5; ArkVale's cuboid-mean as PSA uses
it). See README.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ragserve_kernels.dispatch import (
    check_dtype,
    check_head_dim,
    check_last_contiguous,
    check_same_device,
    check_shape,
    query_group,
    use_triton,
)
from ragserve_kernels.page_select import naive
from ragserve_kernels.page_select.naive import summarise
from ragserve_kernels.paged import check_block_size, check_index, check_lens, check_table

__all__ = ["PageSelection", "page_select", "summarise"]


class PageSelection(NamedTuple):
    """An index table for ``sparse_decode`` and ``progressive_decode``."""

    blocks: torch.Tensor
    """int32 [batch, kv_heads, capacity]: logical blocks; entries past the count are unspecified. With layers,
    [layers, batch, ...].
    """
    counts: torch.Tensor
    """int32 [batch, kv_heads], or [layers, batch, kv_heads]."""


def page_select(
    q: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    k_min: torch.Tensor | None = None,
    k_max: torch.Tensor | None = None,
    k_center: torch.Tensor | None = None,
    per_block: int = 1,
    budget_tokens: int | None = None,
    rank: bool = False,
    sink_blocks: int = 1,
    recent_blocks: int = 1,
    sum_group: bool = False,
    budgets: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    into: PageSelection | None = None,
) -> PageSelection:
    """Score every block of every (request, KV head) against the query group, then keep the best within a
    budget or rank all.

    ``q`` [batch, heads, head_dim]. Summaries [rows, kv_heads, head_dim] of q's dtype, either ``k_min`` and
    ``k_max`` (hierarchical scoring, equation 2 of LServe) or ``k_center`` (the mean of the keys, or the
    centre of their box): ``per_block`` logical pages per block, whose rows are ``block_table[b, j] *
    per_block + l``. ``block_table`` int32 [batch, max_blocks]: with a block per page it is the page table.
    ``seq_lens`` int32 [batch], the newest token included; the last block's summary may be stale if
    ``recent_blocks`` is at least 1, since it is then not used.

    A block's score is the best of its logical pages; a logical page's score is the best, or with
    ``sum_group`` the sum, over the query heads of the group. The first ``sink_blocks`` and last
    ``recent_blocks`` blocks are always chosen, within the budget.

    Exactly one of ``budget_tokens`` (blocks = budget_tokens // block_size, at least sink + recent; the result
    is in the order of the sequence) and ``rank`` (all blocks, forced ones first in their order, then by
    falling score; ties in the order of the sequence). With ``budget_tokens``: ``budgets`` int32 [batch] gives
    every request its own number of blocks, at most ``budget_tokens // block_size`` (values are not checked);
    ``into`` is where the result goes, contiguous and of this shape; with it, requests whose ``active`` (int32
    [batch]) is 0 keep what is there, and cost almost nothing: a selection is reused over decode steps that
    way.

    Several layers in one call: ``q`` [layers, batch, heads, head_dim], summaries [layers, rows, kv_heads,
    head_dim], and results with layers in front; ``into`` may then be a slice of wider tables along the batch.
    What all layers share is given once.

    Nothing here waits for the device. Raises ``ValueError`` and ``TypeError``.
    """
    if (k_center is None) == (k_min is None) or (k_min is None) != (k_max is None):
        raise ValueError("Give either k_min and k_max, or k_center.")
    if (budget_tokens is None) != rank:
        raise ValueError("Give either budget_tokens or rank=True.")
    if k_center is not None:
        summaries: tuple[torch.Tensor, ...] = (k_center,)
    else:
        summaries = tuple(s for s in (k_min, k_max) if s is not None)
    check_block_size(block_size)
    if per_block < 1 or block_size % per_block or per_block & (per_block - 1) or per_block > 32:
        raise ValueError(
            f"per_block is {per_block}; expected a power of two up to 32 that divides the block size, {block_size}."
        )
    check_dtype("q", q)
    layers = tuple(q.shape[:1]) if q.dim() == 4 else ()
    check_shape("q", q, (*layers, None, None, None))
    batch, heads, head_dim = q.shape[-3:]
    check_head_dim(head_dim)
    check_last_contiguous("q", q)
    for name, summary in zip(
        ("k_min", "k_max") if len(summaries) == 2 else ("k_center",), summaries, strict=True
    ):
        check_dtype(name, summary, (q.dtype,))
        check_shape(name, summary, (*layers, None, None, head_dim))
        check_last_contiguous(name, summary)
        check_same_device(q, **{name: summary})
    if len(summaries) == 2 and (
        summaries[0].shape != summaries[1].shape or summaries[0].stride() != summaries[1].stride()
    ):
        raise ValueError("k_min and k_max must have the same shape and strides.")
    kv_heads = summaries[0].shape[-2]
    query_group(heads, kv_heads)
    check_table("block_table", block_table, batch)
    check_lens(seq_lens, batch)
    check_same_device(q, block_table=block_table, seq_lens=seq_lens)
    if sink_blocks < 0 or recent_blocks < 0:
        raise ValueError(
            f"sink_blocks and recent_blocks are {sink_blocks} and {recent_blocks}; expected 0 or more."
        )
    budget = None
    if budget_tokens is not None:
        budget = budget_tokens // block_size
        if budget < max(1, sink_blocks + recent_blocks):
            raise ValueError(
                f"A budget of {budget_tokens} tokens holds {budget} blocks of {block_size}; "
                f"expected at least {max(1, sink_blocks + recent_blocks)}, the forced ones."
            )
        budget = min(budget, block_table.shape[1])
    _check_reuse(q, budget, kv_heads, budgets, active, into)
    if not q.numel() or not block_table.shape[1]:
        width = block_table.shape[1] if budget is None else budget
        return PageSelection(
            torch.empty(*layers, batch, kv_heads, width, dtype=torch.int32, device=q.device),
            torch.zeros(*layers, batch, kv_heads, dtype=torch.int32, device=q.device),
        )
    if not layers:
        q, summaries = q[None], tuple(summary[None] for summary in summaries)
    place = into if into is None or layers else PageSelection(into.blocks[None], into.counts[None])
    arguments: dict[str, Any] = {
        "block_size": block_size,
        "per_block": per_block,
        "budget": budget,
        "sink": sink_blocks,
        "recent": recent_blocks,
        "sum_group": sum_group,
        "budgets": budgets,
        "active": active,
        "into": place,
    }
    if use_triton(q):
        from ragserve_kernels.page_select import triton as kernels

        found = kernels.page_select(q, summaries, block_table, seq_lens, **arguments)
    else:
        found = naive.page_select(q, summaries, block_table, seq_lens, **arguments)
    if into is not None:
        return into
    return PageSelection(*found) if layers else PageSelection(found[0][0], found[1][0])


def _check_reuse(
    q: torch.Tensor,
    budget: int | None,
    kv_heads: int,
    budgets: torch.Tensor | None,
    active: torch.Tensor | None,
    into: PageSelection | None,
) -> None:
    batch = q.shape[-3]
    layers = tuple(q.shape[:-3])
    if budget is None and not (budgets is None and active is None and into is None):
        raise ValueError("budgets, active and into go with budget_tokens, not with rank.")
    if active is not None and into is None:
        raise ValueError("active goes with into, which holds what the other requests keep.")
    for name, tensor in (("budgets", budgets), ("active", active)):
        if tensor is not None:
            check_dtype(name, tensor, (torch.int32,))
            check_shape(name, tensor, (batch,))
            check_last_contiguous(name, tensor)
            check_same_device(q, **{name: tensor})
    if into is not None:
        check_shape("into.blocks", into.blocks, (*layers, batch, kv_heads, budget))
        check_shape("into.counts", into.counts, (*layers, batch, kv_heads))
        for blocks, counts in zip(into.blocks, into.counts, strict=True) if layers else (into,):
            check_index(blocks, counts, batch, kv_heads)
        check_same_device(q, blocks=into.blocks, counts=into.counts)
