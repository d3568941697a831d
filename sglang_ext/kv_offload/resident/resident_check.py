"""Compares resident blocks with the host pages that they hold."""

from __future__ import annotations

from functools import partial

import torch

from ragserve_kernels.context_gather import HostContexts, context_shared_gather
from ragserve_kernels.kv import KVLayers
from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.kv_offload.documents.context_table import ContextTable
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow
from sglang_ext.kv_offload.resident.shared_blocks import SharedTable

_CHECKED_PAGES = 4  # pages of the pool for entries that are loaded once more


def differing(row: OffloadedRow, kv: KVLayers, host: torch.Tensor, contexts: ContextTable | None) -> int:
    """Return how many resident blocks of a request do not hold what their host pages do, in some head.

    ``kv``: SGLang's pool; ``host``: ``[pages, 2 (K, V), layers, kv_heads, page, head_dim]``, of the requests'
    own pages; ``contexts``: those that progressive requests read in documents."""
    if row.blocks.table is None or row.blocks.pages is None:
        return 0
    if isinstance(row.blocks.table, SharedTable):
        read = partial(_own_entries, host)
        if row.context is not None and contexts is not None:
            read = partial(_entries_in_documents, contexts.contexts, kv)
        return row.blocks.table.differing(row.blocks.pages, row.numbers, host.shape[4], read)
    page = host.shape[4]
    bad = torch.zeros(row.blocks.table.held.shape[1:], dtype=torch.bool)  # [kv_heads, resident_blocks]
    within = torch.arange(page, device=row.blocks.pages.device)
    slots = row.blocks.pages.long()[:, None] * page + within  # [resident_blocks, page]
    for layer in range(kv.layers):
        held = row.blocks.table.held[layer]
        slots = slots[: held.shape[1]]  # resident blocks that it loses hold nothing that is looked up
        if row.context is None:
            wanted = _own(row, held.cpu(), host, layer)
        else:
            wanted = _of_documents(row.context, held, kv, layer)
        for want, buffer in zip(wanted, (kv.k[layer], kv.v[layer]), strict=True):
            kept = buffer[slots].permute(2, 0, 1, 3).cpu()  # [kv_heads, resident blocks, page, head_dim]
            bad |= (kept != want).flatten(2).any(-1) & (held >= 0).cpu()
    return int(bad.sum())


def _own_entries(host: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    layers, heads = host.shape[2:4]
    of = entries % (layers * heads)
    return host[entries // (layers * heads), :, of // heads, of % heads]


def _entries_in_documents(contexts: HostContexts, kv: KVLayers, entries: torch.Tensor) -> torch.Tensor:
    """Load them once more, into memory like the pool's, a few pages of it at a time."""
    lists, page, heads = kv.layers * kv.kv_heads, contexts.tokens.shape[1], kv.kv_heads
    shape = _CHECKED_PAGES * page, heads, kv.head_dim
    into = KVLayers(
        *([torch.zeros(shape, dtype=kv.dtype, device=kv.device) for _ in range(kv.layers)] for _ in "kv")
    )
    read = [torch.empty(0, 2, page, kv.head_dim, dtype=kv.dtype)]
    for some in entries.int().to(kv.device).split(_CHECKED_PAGES * lists):
        shared_blocks = torch.arange(len(some), dtype=torch.int32, device=kv.device)
        count = torch.full((1,), len(some), dtype=torch.int32, device=kv.device)
        context_shared_gather(contexts, into, some, shared_blocks, count)
        halves = [
            torch.stack([each.view(-1, page, heads, kv.head_dim).transpose(1, 2) for each in half], 1)
            for half in (into.k, into.v)
        ]
        read.append(torch.stack(halves, 3).flatten(0, 2)[: len(some)].cpu())
    return torch.cat(read)


def _own(row: OffloadedRow, held: torch.Tensor, host: torch.Tensor, layer: int) -> list[torch.Tensor]:
    numbers = row.host.cpu()[held.clamp_min(0).long()].long()  # [kv_heads, resident_blocks]
    head = torch.arange(len(held))[:, None]
    return [host[numbers, half, layer, head] for half in (0, 1)]


def _of_documents(context: ContextPages, held: torch.Tensor, kv: KVLayers, layer: int) -> list[torch.Tensor]:
    """Load them once more, into memory like the pool's."""
    (heads, resident_blocks), page = held.shape, context.page_size
    shape = resident_blocks * page, heads, kv.head_dim
    into = KVLayers(*([torch.zeros(shape, dtype=kv.dtype, device=kv.device)] for _ in "kv"))
    target = torch.arange(resident_blocks, dtype=torch.int32, device=kv.device).expand(
        1, heads, resident_blocks
    )
    context.gather(into, held[None].contiguous(), target.contiguous(), first_layer=layer)
    return [
        each[0].view(resident_blocks, page, heads, -1).permute(2, 0, 1, 3).cpu() for each in (into.k, into.v)
    ]
