"""The truth of ``resident_assign`` in plain torch."""

from __future__ import annotations

import torch

from ragserve_kernels.paged import PageSelection
from ragserve_kernels.resident_assign.types import ResidentBlocks, ResidentState

NONE = -1


def resident_assign_naive(
    selection: PageSelection,
    state: ResidentState,
    host: torch.Tensor,
    resident_pages: torch.Tensor,
    *,
    number: int,
    recent: int,
) -> ResidentBlocks:
    """See :func:`ragserve_kernels.resident_assign.resident_assign`."""
    blocks, (held, used, named) = selection.blocks, state
    pages, resident_blocks = named.shape[2], held.shape[2]
    n = min(blocks.shape[2], resident_blocks)
    entry = torch.arange(blocks.shape[2], device=blocks.device)
    is_page = (entry < selection.counts[..., None]) & (blocks >= 0) & (blocks < pages)
    wanted = blocks.masked_fill(~is_page, NONE)
    same = (wanted[..., :, None] == held[..., None, :]) & is_page[..., :, None]  # [.., n, resident_blocks]
    there = same.any(-1)
    # victims in order: longest unused first, then by number; what the selection names goes last
    age = used.masked_fill(same.any(-2), number)
    order = torch.sort(age, dim=-1, stable=True)
    victims = order.indices[..., :n].to(torch.int32)
    # what has never been named has age 0, and so has the selection before the first
    is_read = order.values[..., :n] >= max(1, number - 1)
    missing = is_page & ~there
    rank = (missing.cumsum(-1) - 1).clamp(0, n - 1)
    found = torch.where(
        there, same.to(torch.int32).argmax(-1).to(torch.int32), victims.gather(-1, rank)
    ).masked_fill_(~is_page, NONE)
    late = missing & is_read.gather(-1, rank)
    now = torch.full_like(wanted, number)
    put(held, found.masked_fill(late, NONE), wanted)
    put(used, found, now)
    put(named, wanted, now)
    counts = [each.sum(-1) for each in (there, missing, late, named > max(0, number - recent))]
    at_once = missing & ~late
    return ResidentBlocks(
        torch.where(is_page, pages - 1 - found, blocks),
        _first(host[wanted.clamp_min(0).long()], at_once),
        _first(resident_pages[found.clamp_min(0).long()], at_once),
        _first(wanted, late),
        _first(found, late),
        torch.stack(counts, -1).to(torch.int32),
    )


def _first(values: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Move some entries to the front; the entry behind the last takes what is not among them."""
    n = values.shape[2]
    out = values.new_full((*values.shape[:2], n + 1), NONE)
    place = (which.cumsum(-1) - 1).masked_fill(~which, n)
    return out.scatter_(-1, place, values.masked_fill(~which, NONE))[..., :n].contiguous()


def put(table: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """Write values to places along the last dimension; negative places are none."""
    wider = torch.cat((table, table[..., :1]), -1)  # with a place for them
    table.copy_(wider.scatter_(-1, places.long().masked_fill(places < 0, table.shape[-1]), values)[..., :-1])
