"""Give the pages of a selection resident blocks, per layer and KV head: least recently named first. See
README.md.
"""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import check, use_triton
from ragserve_kernels.paged import PageSelection
from ragserve_kernels.resident_assign.naive import resident_assign_naive
from ragserve_kernels.resident_assign.types import ResidentBlocks, ResidentState

__all__ = ["ResidentBlocks", "ResidentState", "resident_assign", "resident_assign_naive"]


def resident_assign(
    selection: PageSelection,
    state: ResidentState,
    host: torch.Tensor,
    resident_pages: torch.Tensor,
    *,
    number: int,
    recent: int,
) -> ResidentBlocks:
    """Give every page of a selection a resident block, and note that in ``state``. Nothing waits for the
    device.

    A page that a resident block holds keeps it. Others take the resident blocks that have been named longest
    ago, in the order of their numbers where that is the same; one that the selection before has named is
    *late*: ``held`` does not say yet that the page is there.

    Args:
        selection: blocks int32 ``[layers, kv_heads, n]``, distinct in each list, and counts ``[layers,
            kv_heads]``; those that are negative or not below ``pages`` are left alone. At most as many others
            in a list as there are resident blocks.
        state: is changed.
        host: int32 ``[pages]``, contiguous: stands for pages in ``ResidentBlocks.source``.
        resident_pages: int32 ``[at least resident_blocks]``, contiguous: stands for resident blocks in
            ``ResidentBlocks.target``.
        number: of the selection, from 1; one more each time.
        recent: how many selections, this one included, the last figure of ``ResidentBlocks.tally`` is about.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    blocks = selection.blocks
    check("selection.blocks", blocks, torch.int32, (None, None, None), dense=True)
    lists = blocks.shape[:2]
    check("selection.counts", selection.counts, torch.int32, lists, like=blocks, dense=True)
    check("state.held", state.held, torch.int32, (*lists, None), like=blocks, dense=True)
    check("state.used", state.used, torch.int32, state.held.shape, like=blocks, dense=True)
    check("state.named", state.named, torch.int32, (*lists, len(host)), like=blocks, dense=True)
    check("host", host, torch.int32, (None,), like=blocks, dense=True)
    check("resident_pages", resident_pages, torch.int32, (None,), like=blocks, dense=True)
    if number < 1 or recent < 1:
        raise ValueError(f"number is {number} and recent {recent}; expected at least 1.")
    if not 1 <= state.held.shape[2] <= len(resident_pages):
        raise ValueError(f"{state.held.shape[2]} resident blocks and {len(resident_pages)} pages for them.")
    if not use_triton(blocks):
        return resident_assign_naive(selection, state, host, resident_pages, number=number, recent=recent)
    from ragserve_kernels.resident_assign import triton as kernels

    return kernels.resident_assign(selection, state, host, resident_pages, number=number, recent=recent)
