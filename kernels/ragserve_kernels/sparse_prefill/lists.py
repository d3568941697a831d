"""Lists of key blocks from masks, and back."""

from __future__ import annotations

import torch

from ragserve_kernels.sparse_prefill.types import BlockLists, PrefillBatch


def key_blocks(batch: PrefillBatch) -> torch.Tensor:
    """Return how many key blocks each query block may list, int32 [query blocks]: up to the one of its last
    position, or of its request's.
    """
    request, number = batch.places.unbind(1)
    end = torch.minimum((number + 1) * batch.block_q, batch.bounds[request.long(), 1])
    return (end + batch.block_k - 1) // batch.block_k


def all_blocks(batch: PrefillBatch, heads: int) -> BlockLists:
    """Return lists of all blocks, which make dense attention; they share their entries."""
    longest = max((a + b for a, b in zip(batch.prefix, batch.new, strict=True)), default=0)
    device = batch.places.device
    index = torch.arange(-(-longest // batch.block_k), dtype=torch.int32, device=device)
    count = key_blocks(batch)[:, None].expand(-1, heads).to(torch.int32).contiguous()
    return BlockLists(index, torch.zeros_like(count), count)


def lists_of(mask: torch.Tensor) -> BlockLists:
    """Return the lists of a bool ``[query blocks, heads, key blocks]``, True for what is attended to.

    A list has room for all key blocks, so that nothing waits for the device; entries past its count are
    unspecified."""
    width = mask.shape[-1]
    count = mask.sum(-1, dtype=torch.int32)
    place = (mask.cumsum(-1) - 1).masked_fill_(~mask, width)  # one place more for what is not listed
    step = torch.arange(width, dtype=torch.int32, device=mask.device).expand(mask.shape)
    index = torch.empty((*mask.shape[:-1], width + 1), dtype=torch.int32, device=mask.device)
    index.scatter_(-1, place, step)
    start = torch.arange(count.numel(), dtype=torch.int32, device=mask.device).view(count.shape) * (width + 1)
    return BlockLists(index.flatten(), start, count)


def list_room(batch: PrefillBatch, heads: int) -> BlockLists:
    """Return lists of all blocks, each with room of its own for as many: to be written to, query block by
    query block, and layer after layer."""
    longest = max((a + b for a, b in zip(batch.prefix, batch.new, strict=True)), default=0)
    device, width = batch.places.device, -(-longest // batch.block_k)
    count = key_blocks(batch)[:, None].expand(-1, heads).to(torch.int32).contiguous()
    start = torch.arange(count.numel(), dtype=torch.int32, device=device).view(count.shape) * width
    index = torch.arange(width, dtype=torch.int32, device=device).repeat(count.numel())
    return BlockLists(index, start, count)


def lists_at(lists: BlockLists, blocks: slice) -> BlockLists:
    """Return the lists of some query blocks; they share their entries and counts with ``lists``."""
    return BlockLists(lists.blocks, lists.starts[blocks], lists.counts[blocks])


def list_all(room: BlockLists, blocks: slice, whole: BlockLists) -> None:
    """Let some query blocks of a :func:`list_room` list all their key blocks again. ``whole``: what
    :func:`all_blocks` returns for the room's batch and heads. Waits for nothing."""
    room.blocks.view(*room.starts.shape, -1)[blocks] = whole.blocks
    room.counts[blocks] = whole.counts[blocks]


def write_lists(mask: torch.Tensor, lists: BlockLists) -> None:
    """Write what is True in a bool ``[query blocks, heads, key blocks]`` to lists with room for it. Waits for
    the device."""
    block, head, entry = mask.nonzero(as_tuple=True)  # ascending
    place = mask.cumsum(-1)[block, head, entry] - 1
    lists.blocks[lists.starts[block, head] + place] = entry.to(torch.int32)
    lists.counts.copy_(mask.sum(-1))


def mask_of(lists: BlockLists, blocks: int) -> torch.Tensor:
    """Return bool ``[query blocks, heads, blocks]``, True for what the lists hold."""
    start, count = lists.starts.long(), lists.counts.long()
    step = torch.arange(blocks, device=start.device)
    valid = step < count[..., None]
    entries = lists.blocks.long()
    if not len(entries):
        return valid & False
    listed = entries[(start[..., None] + step).clamp_max(len(entries) - 1)].masked_fill(~valid, blocks)
    mask = torch.zeros(*start.shape, blocks + 1, dtype=torch.bool, device=start.device)
    return mask.scatter_(-1, listed, True)[..., :blocks]
