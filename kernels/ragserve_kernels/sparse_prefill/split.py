"""A request's lists in two: blocks before its queries, which need no mask, and those that do."""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import use_triton
from ragserve_kernels.sparse_prefill.lists import lists_at, mask_of
from ragserve_kernels.sparse_prefill.types import BlockLists, PrefillBatch, SplitLists

__all__ = ["split_lists"]


def split_lists(batch: PrefillBatch, lists: BlockLists, request: int, heads: int) -> SplitLists:
    """Return the lists of one request as kernels take them that mask some blocks and not others.

    Args:
        batch, lists: as for `sparse_prefill`.
        request: its number in the batch; it has new tokens.
        heads: query heads, a multiple of the lists' heads.

    Raises:
        ValueError: other numbers of heads, or a request without new tokens.
    """
    span = batch.spans()[request]
    if not span or heads % lists.starts.shape[1]:
        raise ValueError(
            f"request {request} has {len(span)} query blocks and lists of {lists.starts.shape[1]} heads; "
            f"expected some, and heads that divide {heads}."
        )
    places, own = batch.places[span.start : span.stop], lists_at(lists, slice(span.start, span.stop))
    width = -(-(batch.prefix[request] + batch.new[request]) // batch.block_k)
    sizes = (heads, len(span)), (heads, len(span), width), (heads, len(span), batch.most_masked)
    counts, full, masked = (torch.empty(size, dtype=torch.int32, device=places.device) for size in sizes)
    split = SplitLists(counts, full, torch.empty_like(counts), masked)
    if use_triton(places):
        from ragserve_kernels.sparse_prefill.split_triton import split_lists_triton

        split_lists_triton(batch, places, own, split)
    else:
        _split_naive(batch, places, own, split)
    return split


def _split_naive(batch: PrefillBatch, places: torch.Tensor, own: BlockLists, split: SplitLists) -> None:
    """Write ``split``. Waits for the device."""
    heads, _, width = split.full.shape
    mask = mask_of(own, width).repeat_interleave(heads // own.starts.shape[1], 1).transpose(0, 1)
    first = places[:, 1].long() * batch.block_q // batch.block_k  # [query blocks]
    before = torch.arange(width, device=mask.device) < first[:, None]
    for part, counts, entries in (
        (mask & before, split.full_counts, split.full),
        (mask & ~before, split.masked_counts, split.masked),
    ):
        counts.copy_(part.sum(-1))
        head, block, entry = part.nonzero(as_tuple=True)  # ascending
        entries[head, block, part.cumsum(-1)[head, block, entry] - 1] = entry.to(torch.int32)
