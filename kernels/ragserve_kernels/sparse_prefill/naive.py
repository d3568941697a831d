"""The truth of ``sparse_prefill`` in plain torch."""

from __future__ import annotations

import math

import torch

from ragserve_kernels.sparse_prefill.lists import mask_of
from ragserve_kernels.sparse_prefill.types import BlockLists, PrefillBatch

_ROWS = 1024  # of scores at once


def sparse_prefill_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: PrefillBatch,
    lists: BlockLists,
    out: torch.Tensor,
    *,
    scale: float,
    precision: torch.dtype = torch.float64,
) -> None:
    """See :func:`ragserve_kernels.sparse_prefill.sparse_prefill`; scores and sums are in ``precision``."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    row = 0
    for request, span in enumerate(batch.spans()):
        prefix, new = batch.prefix[request], batch.new[request]
        if not new:
            continue
        length = prefix + new
        places = torch.arange(length, device=q.device)
        slots = batch.page_table[request, places // batch.page_size].long() * batch.page_size
        slots += places % batch.page_size
        own = BlockLists(
            *(lists.blocks, lists.starts[span.start : span.stop], lists.counts[span.start : span.stop])
        )
        # [query blocks, heads, key blocks] to [heads, rows, keys]
        mask = mask_of(own, -(-length // batch.block_k))
        mask = mask.repeat_interleave(heads // mask.shape[1], 1).transpose(0, 1)
        keys, values = (side[slots].to(precision).repeat_interleave(group, 1) for side in (k, v))
        for queries in places[prefix:].split(_ROWS):
            block = queries // batch.block_q - prefix // batch.block_q
            listed = mask[:, block]
            near = places[: int(queries[-1]) + 1]
            near = near[listed.flatten(0, 1).any(0)[near // batch.block_k]]  # what some row may see
            seen = listed[..., near // batch.block_k] & (near <= queries[:, None])
            own_q = q[row : row + len(queries)].to(precision)
            scores = torch.einsum("rhd,khd->hrk", own_q, keys[near]) * scale
            weights = torch.softmax(scores.masked_fill_(~seen, -math.inf), -1)
            weights.nan_to_num_(0.0)  # a row without keys: 0 / 0
            attended = torch.einsum("hrk,khd->rhd", weights, values[near])
            out[row : row + len(queries)] = attended.to(out.dtype)
            row += len(queries)
