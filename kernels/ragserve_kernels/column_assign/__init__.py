"""Give the pages of a choice columns, per layer and KV head: least recently named first. See README.md."""

from __future__ import annotations

import torch

from ragserve_kernels.column_assign.naive import column_assign_naive
from ragserve_kernels.column_assign.types import Columns, ColumnState
from ragserve_kernels.dispatch import check, use_triton
from ragserve_kernels.paged import PageSelection

__all__ = ["ColumnState", "Columns", "column_assign", "column_assign_naive"]


def column_assign(
    choice: PageSelection,
    state: ColumnState,
    host: torch.Tensor,
    column_pages: torch.Tensor,
    *,
    number: int,
    recent: int,
) -> Columns:
    """Give every page of a choice a column, and note that in ``state``. Nothing waits for the device.

    A page that a column holds keeps it. Others take the columns that have been named longest ago, in the
    order of their numbers where that is the same; one that the choice before has named is *late*: ``held``
    does not say yet that the page is there.

    Args:
        choice: blocks int32 ``[layers, kv_heads, n]``, distinct in each list, and counts ``[layers,
            kv_heads]``; those that are negative or not below ``pages`` are left alone. At most as many others
            in a list as there are columns.
        state: is changed.
        host: int32 ``[pages]``, contiguous: stands for pages in ``Columns.source``.
        column_pages: int32 ``[at least columns]``, contiguous: stands for columns in ``Columns.target``.
        number: of the choice, from 1; one more each time.
        recent: how many choices, this one included, the last figure of ``Columns.tally`` is about.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    blocks = choice.blocks
    check("choice.blocks", blocks, torch.int32, (None, None, None), dense=True)
    lists = blocks.shape[:2]
    check("choice.counts", choice.counts, torch.int32, lists, like=blocks, dense=True)
    check("state.held", state.held, torch.int32, (*lists, None), like=blocks, dense=True)
    check("state.used", state.used, torch.int32, state.held.shape, like=blocks, dense=True)
    check("state.named", state.named, torch.int32, (*lists, len(host)), like=blocks, dense=True)
    check("host", host, torch.int32, (None,), like=blocks, dense=True)
    check("column_pages", column_pages, torch.int32, (None,), like=blocks, dense=True)
    if number < 1 or recent < 1:
        raise ValueError(f"number is {number} and recent {recent}; expected at least 1.")
    if not 1 <= state.held.shape[2] <= len(column_pages):
        raise ValueError(f"{state.held.shape[2]} columns and {len(column_pages)} pages for them.")
    if not use_triton(blocks):
        return column_assign_naive(choice, state, host, column_pages, number=number, recent=recent)
    from ragserve_kernels.column_assign import triton as kernels

    return kernels.column_assign(choice, state, host, column_pages, number=number, recent=recent)
