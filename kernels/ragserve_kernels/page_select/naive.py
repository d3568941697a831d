"""Plain torch: score the blocks, choose the best, or rank them all. Also the summaries that the scores are
made from.
"""

from __future__ import annotations

import torch


def summarise(
    k: torch.Tensor, logical_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(min, max, mean, box centre)`` of ``k`` [slots, kv_heads, head_dim] over runs of ``logical_size``
    slots: four of [rows, kv_heads, head_dim].

    For a pool whose pages are full; ``slots`` a multiple of ``logical_size``.
    """
    if k.shape[0] % logical_size:
        raise ValueError(f"{k.shape[0]} slots are not a multiple of the logical page, {logical_size}.")
    runs = k.view(k.shape[0] // logical_size, logical_size, *k.shape[1:])
    low, high = runs.amin(1), runs.amax(1)
    return low, high, runs.float().mean(1).to(k.dtype), ((low.float() + high.float()) / 2).to(k.dtype)


def forced_blocks(total: int, sink: int, recent: int) -> torch.Tensor:
    """Bool [total]: the first ``sink`` and the last ``recent`` blocks."""
    forced = torch.zeros(total, dtype=torch.bool)
    forced[:sink] = True
    forced[max(0, total - recent) :] = True
    return forced


def block_scores(
    q: torch.Tensor,
    summaries: tuple[torch.Tensor, ...],
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    per_block: int,
    sum_group: bool,
) -> torch.Tensor:
    """Scores float64 [batch, kv_heads, max_blocks] on the CPU, -inf past a request's blocks. Two summaries
    are (min, max), one is a centre."""
    batch, heads, head_dim = q.shape
    kv_heads = summaries[0].shape[1]
    logical = block_size // per_block
    scores = torch.full((batch, kv_heads, block_table.shape[1]), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        seq_len = int(seq_lens[b])
        total = -(-seq_len // block_size)
        rows = block_table[b, :total].long()[:, None] * per_block + torch.arange(per_block, device=q.device)
        parts = [s[rows.flatten()].double() for s in summaries]  # [total * per_block, kv_heads, head_dim]
        query = q[b].double().view(kv_heads, heads // kv_heads, head_dim)
        if len(parts) == 2:
            low, high = parts
            logits = torch.einsum("hgd,rhd->hgr", query.clamp_min(0), high) + torch.einsum(
                "hgd,rhd->hgr", query.clamp_max(0), low
            )
        else:
            logits = torch.einsum("hgd,rhd->hgr", query, parts[0])
        logits = logits.sum(1) if sum_group else logits.amax(1)  # [kv_heads, rows]
        empty = torch.arange(total * per_block, device=q.device) * logical >= seq_len
        logits = logits.masked_fill(empty, -torch.inf)
        scores[b, :, :total] = logits.view(kv_heads, total, per_block).amax(-1).cpu()
    return scores


def page_select(
    q: torch.Tensor,
    summaries: tuple[torch.Tensor, ...],
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    per_block: int,
    budget: int | None,
    sink: int,
    recent: int,
    sum_group: bool,
    budgets: torch.Tensor | None,
    active: torch.Tensor | None,
    into: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` [layers, batch, heads, head_dim] and summaries [layers, ...], as the result and ``into``.

    ``budget``: blocks to choose, in the order of the sequence; None ranks all blocks, forced ones first, then
    by score."""
    found = [
        _layer(
            q[i],
            tuple(summary[i] for summary in summaries),
            block_table,
            seq_lens,
            block_size=block_size,
            per_block=per_block,
            budget=budget,
            sink=sink,
            recent=recent,
            sum_group=sum_group,
            budgets=budgets,
            active=active,
            into=None if into is None else (into[0][i], into[1][i]),
        )
        for i in range(len(q))
    ]
    if into is not None:
        return into
    return torch.stack([index for index, _ in found]), torch.stack([counts for _, counts in found])


def _layer(
    q: torch.Tensor,
    summaries: tuple[torch.Tensor, ...],
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    per_block: int,
    budget: int | None,
    sink: int,
    recent: int,
    sum_group: bool,
    budgets: torch.Tensor | None,
    active: torch.Tensor | None,
    into: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, max_blocks = block_table.shape
    kv_heads = summaries[0].shape[1]
    rows = [b for b in range(batch) if active is None or int(active[b])]
    scores = block_scores(
        q[rows],
        summaries,
        block_table[rows],
        seq_lens[rows],
        block_size=block_size,
        per_block=per_block,
        sum_group=sum_group,
    )
    if into is None:
        index = torch.full(
            (batch, kv_heads, max_blocks if budget is None else budget),
            -1,
            dtype=torch.int32,
            device=q.device,
        )
        counts = torch.zeros(batch, kv_heads, dtype=torch.int32, device=q.device)
    else:
        index, counts = into
    for row, b in enumerate(rows):
        total = -(-int(seq_lens[b]) // block_size)
        most = budget if budgets is None or budget is None else min(budget, int(budgets[b]))
        take = total if most is None else min(most, total)
        ranked = scores[row, :, :total].masked_fill(forced_blocks(total, sink, recent), torch.inf)
        best = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :take]
        index[b, :, :take] = (best if budget is None else best.sort(-1).values).to(index)
        counts[b] = take
    return index, counts
