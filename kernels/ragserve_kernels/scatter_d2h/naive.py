"""The truth of ``scatter_d2h`` in plain torch, and what each CPU thread of the saver runs on its share of the blocks."""

from __future__ import annotations

import torch


def scatter_d2h_naive(src: torch.Tensor, host: torch.Tensor, index: torch.Tensor) -> None:
    """See :func:`ragserve_kernels.scatter_d2h.scatter_d2h`."""
    scatter(src.cpu(), host, index, 0, index.shape[1])


def scatter(rows: torch.Tensor, host: torch.Tensor, index: torch.Tensor, first: int, last: int) -> None:
    """Blocks ``first`` to ``last`` (exclusive) of ``rows`` ``[tokens, kv_heads, head_dim]`` on the CPU into ``host``.

    One indexed copy for the whole blocks that are saved and one for a partial last block: torch holds no interpreter lock meanwhile.
    """
    block_tokens = host.shape[1]
    whole = min(last, rows.shape[0] // block_tokens)
    if whole > first:
        # [kv_heads, blocks, block_tokens, head_dim], a view
        blocks = rows[first * block_tokens : whole * block_tokens].unflatten(0, (-1, block_tokens)).permute(2, 0, 1, 3)
        target = index[:, first:whole].long()
        if bool((target >= 0).all()):
            host.index_put_((target,), blocks)
        else:
            host.index_put_((target[target >= 0],), blocks[target >= 0])
    if last > whole:
        tail = rows[whole * block_tokens :].permute(1, 0, 2)  # [kv_heads, tokens left, head_dim]
        for head, block in enumerate(index[:, whole].tolist()):
            if block >= 0:
                host[block, : tail.shape[1]].copy_(tail[head])
