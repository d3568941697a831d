"""The truth of ``progressive_decode`` in plain torch and float64: PSA's rounds, one head at a time."""

from __future__ import annotations

import math

import torch

from ragserve_kernels.context_gather.naive import context_rows
from ragserve_kernels.paged import KVPair, PagedBatch, PageSelection
from ragserve_kernels.progressive_decode.types import PagePlaces, Progressive
from ragserve_kernels.sparse_decode.naive import block_tokens, gather


def block_logs(scores: torch.Tensor, blocks: torch.Tensor, block_size: int, seq_len: int) -> torch.Tensor:
    """Return the log of each block's sum of exponentials, [heads, blocks].

    ``scores`` [heads, tokens]: of the tokens of ``blocks``, in their order."""
    there = blocks[:, None] * block_size + torch.arange(block_size) < seq_len  # [blocks, tokens of each]
    each = scores.new_full((len(scores), *there.shape), -torch.inf)
    each[:, there.to(scores.device)] = scores
    return torch.logsumexp(each, -1)


def weight_estimate(logs: torch.Tensor, forced: int, left: int, since: int | None = None) -> torch.Tensor:
    """Return P per head from the blocks attended to so far.

    Args:
        logs: ``[heads, blocks]`` as :func:`block_logs` gives them, in ranked order.
        forced: how many of the first blocks do not enter the bound.
        left: blocks not attended to. Each is taken to weigh as much as the lowest block so far (PSA), or,
        since: if given, as much as the mean of the blocks from this rank on, those of the latest round.
    """
    if left <= 0:
        return torch.ones(logs.shape[0], dtype=logs.dtype, device=logs.device)
    ranked = logs[:, max(forced, since or 0) :]
    if not ranked.shape[1]:
        return torch.zeros(logs.shape[0], dtype=logs.dtype, device=logs.device)
    each = ranked.amin(-1) if since is None else torch.logsumexp(ranked, -1) - math.log(ranked.shape[1])
    return torch.sigmoid(torch.logsumexp(logs, -1) - each - math.log(left))


def gather_placed(
    kv: KVPair, head: int, tokens: torch.Tensor, row: int, places: PagePlaces
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one head's K and V, float64 [tokens, head_dim], of the tokens of request ``row``."""
    page = places.host.shape[4]
    found = places.places[row, head, tokens // page].long().cpu()
    shared_block = shared_blocks_of(places, head, found)
    in_pool, in_shared_block, within = found >= 0, shared_block >= 0, tokens % page
    in_context = ~in_pool & ~in_shared_block
    if places.contexts is None:
        in_context = torch.zeros_like(in_pool)
    else:
        table = places.contexts.tokens.cpu()
        in_context &= table[(-1 - found).clamp_min(0), 0, 0] >= 0
        there = table[-1 - found[in_context], within[in_context]].long().to(places.places.device)
        of = torch.full((len(there),), head)
        read = context_rows(
            places.contexts.host, places.contexts.turns, there, places.layer, of, places.host.dtype
        )
    on_host = ~in_pool & ~in_shared_block & ~in_context
    halves = []
    for half, cache in enumerate(kv):
        values = torch.empty(len(tokens), cache.shape[2], dtype=torch.float64)
        slots = (found * page + within)[in_pool].to(cache.device)
        values[in_pool] = cache[slots, head].double().cpu()  # type: ignore[index]
        offloaded = places.host[-1 - found[on_host], half, places.layer, head, within[on_host]]
        values[on_host] = offloaded.double()
        if places.contexts is not None:
            values[in_context] = read[half].double().cpu()
        if places.shared_blocks is not None:
            pool = places.shared_blocks.pool
            buffers, heads = (pool.k, pool.v)[half], pool.kv_heads
            lists = shared_block % (pool.layers * heads)
            for number in lists[in_shared_block].unique().tolist():
                here = in_shared_block & (lists == number)
                slots = (shared_block[here] // (pool.layers * heads) * page + within[here]).to(cache.device)
                values[here] = buffers[number // heads][slots, number % heads].double().cpu()
        halves.append(values.to(cache.device))
    return halves[0], halves[1]


def fill_shared_blocks(
    kv: KVPair, head: int, blocks: torch.Tensor, row: int, places: PagePlaces, seq_len: int
) -> None:
    """Write the pages among these that are to be in shared blocks to them, and enter them."""
    if places.shared_blocks is None or not len(places.shared_blocks.of):
        return
    of, pool = places.shared_blocks
    page, heads = places.host.shape[4], pool.kv_heads
    numbers = -1 - places.places[row, head].cpu()[blocks].long()
    expected = -2 - of[:, places.layer, head].cpu()[numbers.clamp_min(0)].long()
    filled = (numbers >= 0) & (expected >= 0) & ((blocks + 1) * page <= seq_len)
    for block, number, shared_block in torch.stack((blocks, numbers, expected), 1)[filled].tolist():
        tokens = torch.arange(block * page, (block + 1) * page)
        first = shared_block // (pool.layers * heads) * page
        for buffers, rows in zip((pool.k, pool.v), gather_placed(kv, head, tokens, row, places), strict=True):
            buffer = buffers[shared_block // heads % pool.layers]
            buffer[first : first + page, shared_block % heads] = rows.to(buffer.dtype)
        of[number, places.layer, head] = shared_block


def shared_blocks_of(places: PagePlaces, head: int, found: torch.Tensor) -> torch.Tensor:
    """Return the shared blocks of pages of one head, int64 on the host, of their ``places``; less than 0:
    not in one."""
    if places.shared_blocks is None:
        return torch.full_like(found, -1)
    of = places.shared_blocks.of[:, places.layer, head].cpu().long()
    if not len(of):
        return torch.full_like(found, -1)
    return torch.where(found < 0, of[(-1 - found).clamp_min(0)], -1)


def progressive_decode(
    q: torch.Tensor,
    kv: KVPair,
    batch: PagedBatch,
    ranking: PageSelection,
    threshold: float | torch.Tensor,
    ends: list[int],
    places: PagePlaces | None,
    *,
    forced: int,
    bound: str,
    scale: float,
) -> Progressive:
    """See :func:`ragserve_kernels.progressive_decode.progressive_decode`; ``ends``: of the rounds."""
    kv_heads = kv[0].shape[1]
    group = q.shape[1] // kv_heads
    out = torch.zeros_like(q)
    used = torch.zeros(batch.size, kv_heads, dtype=torch.int32, device=q.device)
    weight = torch.ones(q.shape[:2], dtype=torch.float32, device=q.device)
    from_host = None if places is None else torch.zeros_like(used)
    for b in range(batch.size):
        seq_len, pages = int(batch.seq_lens[b]), batch.page_table[b]
        enough = float(threshold[b]) if isinstance(threshold, torch.Tensor) else threshold
        for h in range(kv_heads):
            total = min(max(0, int(ranking.counts[b, h])), ranking.blocks.shape[2]) if seq_len else 0
            if not total:
                continue
            rows = slice(h * group, (h + 1) * group)
            blocks = ranking.blocks[b, h, :total].long().cpu()
            tokens = block_tokens(blocks, batch.block_size, seq_len)
            if places is None:
                k, v = (gather(cache, h, tokens, pages, batch.page_size) for cache in kv)
            else:
                k, v = gather_placed(kv, h, tokens, b, places)
            scores = q[b, rows].double() @ k.T * scale
            logs = block_logs(scores, blocks, batch.block_size, seq_len)
            for start, end in zip([0, *ends], ends, strict=False):
                n = min(end, total)
                since = start if bound == "round" else None
                estimate = weight_estimate(logs[:, :n], forced, total - n, since)
                if bool((estimate > enough).all()) or n == total:
                    break
            kept = len(block_tokens(blocks[:n], batch.block_size, seq_len))
            out[b, rows] = (torch.softmax(scores[:, :kept], -1) @ v[:kept]).to(q.dtype)
            used[b, h] = n
            if places is not None and from_host is not None:
                found = places.places[b, h, blocks[:n].to(q.device)].long().cpu()
                from_host[b, h] = ((found < 0) & (shared_blocks_of(places, h, found) < 0)).sum()
                fill_shared_blocks(kv, h, blocks[:n], b, places, seq_len)
            weight[b, rows] = estimate.float()
    return Progressive(out, used, weight, from_host)
