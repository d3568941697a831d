"""The truth of ``page_select`` in plain torch: score the blocks, choose the best, or rank them all.

Also the summaries that the scores are made from."""

from __future__ import annotations

import torch

from ragserve_kernels.page_select.types import KeySummary
from ragserve_kernels.paged import PagedBatch, PageSelection


def summarise(
    k: torch.Tensor, logical_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``(min, max, mean, box centre)`` of keys over runs of ``logical_size`` slots.

    ``k`` [slots, kv_heads, head_dim], of full pages; each result [slots / logical_size, kv_heads, head_dim].
    Raise ValueError if the runs do not divide the slots."""
    if k.shape[0] % logical_size:
        raise ValueError(f"{k.shape[0]} slots are not a multiple of the logical page, {logical_size}.")
    runs = k.view(k.shape[0] // logical_size, logical_size, *k.shape[1:])
    low, high = runs.amin(1), runs.amax(1)
    return low, high, runs.float().mean(1).to(k.dtype), ((low.float() + high.float()) / 2).to(k.dtype)


def forced_blocks(total: int, sink: int, recent: int) -> torch.Tensor:
    """Return bool [total], True for the first ``sink`` and the last ``recent`` blocks."""
    forced = torch.zeros(total, dtype=torch.bool)
    forced[:sink] = True
    forced[max(0, total - recent) :] = True
    return forced


def block_scores(q: torch.Tensor, batch: PagedBatch, keys: KeySummary) -> torch.Tensor:
    """Return one layer's scores, float64 [batch, kv_heads, max_blocks] on the CPU; -inf past the end."""
    heads, head_dim = q.shape[1:]
    kv_heads, per = keys.high.shape[1], keys.per_block
    logical = batch.block_size // per
    scores = torch.full((batch.size, kv_heads, batch.page_table.shape[1]), -torch.inf, dtype=torch.float64)
    for b in range(batch.size):
        seq_len = int(batch.seq_lens[b])
        total = -(-seq_len // batch.block_size)
        within = torch.arange(per, device=q.device)
        rows = (batch.page_table[b, :total].long()[:, None] * per + within).flatten()
        query = q[b].double().view(kv_heads, heads // kv_heads, head_dim)
        high = keys.high[rows].double()  # [total * per_block, kv_heads, head_dim]
        if keys.low is None:
            logits = torch.einsum("hgd,rhd->hgr", query, high)
        else:
            logits = torch.einsum("hgd,rhd->hgr", query.clamp_min(0), high)
            logits += torch.einsum("hgd,rhd->hgr", query.clamp_max(0), keys.low[rows].double())
        empty = torch.arange(total * per, device=q.device) * logical >= seq_len
        logits = logits.amax(1).masked_fill(empty, -torch.inf)  # [kv_heads, rows]
        scores[b, :, :total] = logits.view(kv_heads, total, per).amax(-1).cpu()
    return scores


def page_select(
    q: torch.Tensor,
    batch: PagedBatch,
    keys: KeySummary,
    *,
    budget: int | None,
    sink: int,
    recent: int,
    budgets: torch.Tensor | None,
    active: torch.Tensor | None,
    into: PageSelection | None,
) -> PageSelection:
    """See :func:`ragserve_kernels.page_select.page_select`; always with layers; ``budget`` in blocks."""
    shape = (len(q), batch.size, keys.high.shape[-2])
    found = into or PageSelection(
        torch.full(
            (*shape, batch.page_table.shape[1] if budget is None else budget),
            -1,
            dtype=torch.int32,
            device=q.device,
        ),
        torch.zeros(shape, dtype=torch.int32, device=q.device),
    )
    scored = batch  # rows that keep what they have cost nothing
    if active is not None:
        lens = batch.seq_lens * (active != 0)
        scored = PagedBatch(batch.page_table, lens, batch.page_size, batch.block_size)
    for layer in range(len(q)):
        low = None if keys.low is None else keys.low[layer]
        scores = block_scores(q[layer], scored, KeySummary(keys.high[layer], low, keys.per_block))
        for b in range(batch.size):
            if active is not None and not int(active[b]):
                continue
            total = -(-int(batch.seq_lens[b]) // batch.block_size)
            take = total if budget is None else min(total, budget)
            if budgets is not None:
                take = min(take, int(budgets[b]))
            ranked = scores[b, :, :total].masked_fill(forced_blocks(total, sink, recent), torch.inf)
            best = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :take]
            found.blocks[layer, b, :, :take] = (best if budget is None else best.sort(-1).values).to(
                found.blocks
            )
            found.counts[layer, b] = take
    return found
