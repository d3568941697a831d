"""Choose the blocks of the KV that a decode step attends to (LServe 3.5; PSA's cuboid-mean).

See README.md."""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import check, use_triton
from ragserve_kernels.kv import query_group
from ragserve_kernels.page_select import naive
from ragserve_kernels.page_select.naive import summarise
from ragserve_kernels.page_select.types import KeySummary
from ragserve_kernels.paged import PagedBatch, PageSelection, check_query, check_selection

__all__ = ["KeySummary", "PageSelection", "page_select", "summarise"]


def page_select(
    q: torch.Tensor,
    batch: PagedBatch,
    keys: KeySummary,
    *,
    budget_tokens: int | None = None,
    sink_blocks: int = 1,
    recent_blocks: int = 1,
    budgets: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    into: PageSelection | None = None,
) -> PageSelection:
    """Score every block of every (request, KV head) against its query group; keep the best, or rank all.

    A logical page's score is the best over the query heads of the group: with min and max keys the upper
    bound of q . k (LServe, equation 2), else q . centre. A block's score is the best of its logical pages.
    The first ``sink_blocks`` and last ``recent_blocks`` blocks always come first, within the budget, whatever
    their score; so the last block's summary may be stale if ``recent_blocks`` is at least 1.

    Several layers in one call: ``q`` ``[layers, batch, heads, head_dim]``, with layers in front in ``keys``,
    the result and ``into``, which may then be a slice of wider tables along the batch. Layers share all other
    arguments.

    The call can be captured in a CUDA graph: nothing waits for the device.

    Args:
        q: ``[batch, heads, head_dim]``.
        batch: the requests' pages and lengths; a block is a page.
        keys: the summaries of all pages of the pool.
        budget_tokens: choose budget_tokens // block_size blocks, at least sink + recent, in the order of the
            sequence. Default: rank all blocks, the forced ones first in their order, then by falling score.
            Ties go to the earlier block.
        budgets: int32 ``[batch]``: blocks of each request, at most those of ``budget_tokens``; values are not
            checked.
        active: int32 ``[batch]``: requests with 0 keep what is in ``into`` and cost almost nothing.
        into: receives the result, contiguous per layer. It is what lets steps reuse a selection.

    Raises:
        ValueError, TypeError: shapes, sizes, dtypes or devices that do not fit.
    """
    check_query(q, batch)
    if batch.block_size != batch.page_size:
        raise ValueError(f"Blocks of {batch.block_size} tokens are not pages of {batch.page_size}.")
    _check_keys(q, batch, keys)
    layers = tuple(q.shape[:-3])
    kv_heads, max_blocks = keys.high.shape[-2], batch.page_table.shape[1]
    if sink_blocks < 0 or recent_blocks < 0:
        raise ValueError(
            f"sink_blocks and recent_blocks are {sink_blocks} and {recent_blocks}; expected 0 or more."
        )
    budget = None
    if budget_tokens is not None:
        budget, forced = budget_tokens // batch.block_size, max(1, sink_blocks + recent_blocks)
        if budget < forced:
            raise ValueError(
                f"A budget of {budget_tokens} tokens holds {budget} blocks of {batch.block_size}; "
                f"expected at least {forced}, the forced ones."
            )
        budget = min(budget, max_blocks)
    elif not (budgets is None and active is None and into is None):
        raise ValueError("budgets, active and into need budget_tokens; a ranking has none.")
    if active is not None and into is None:
        raise ValueError("active goes with into, which holds what the other requests keep.")
    for name, tensor in (("budgets", budgets), ("active", active)):
        if tensor is not None:
            check(name, tensor, torch.int32, (batch.size,), like=q)
    if into is not None:
        check_selection(into, q, kv_heads, budget)
    if not q.numel() or not max_blocks:
        shape = (*layers, batch.size, kv_heads)
        return PageSelection(
            torch.empty(*shape, max_blocks if budget is None else budget, dtype=torch.int32, device=q.device),
            torch.zeros(shape, dtype=torch.int32, device=q.device),
        )
    place = into
    if not layers:
        q, keys = (
            q[None],
            KeySummary(keys.high[None], None if keys.low is None else keys.low[None], keys.per_block),
        )
        place = None if into is None else PageSelection(into.blocks[None], into.counts[None])
    forward = naive.page_select
    if use_triton(q):
        from ragserve_kernels.page_select import triton as kernels

        forward = kernels.page_select
    found = forward(
        q,
        batch,
        keys,
        budget=budget,
        sink=sink_blocks,
        recent=recent_blocks,
        budgets=budgets,
        active=active,
        into=place,
    )
    if into is not None:
        return into
    return found if layers else PageSelection(found.blocks[0], found.counts[0])


def _check_keys(q: torch.Tensor, batch: PagedBatch, keys: KeySummary) -> None:
    per = keys.per_block
    if per < 1 or batch.block_size % per or per & (per - 1) or per > 128:
        raise ValueError(
            f"per_block is {per}; expected a power of two up to 128 that divides the block size, "
            f"{batch.block_size}."
        )
    for name, summary in (("high", keys.high), ("low", keys.low)):
        if summary is not None:
            check(name, summary, q.dtype, (*q.shape[:-3], None, None, q.shape[-1]), like=q)
    if keys.low is not None and (keys.low.shape, keys.low.stride()) != (keys.high.shape, keys.high.stride()):
        raise ValueError("high and low must have the same shape and strides.")
    query_group(q.shape[-2], keys.high.shape[-2])
