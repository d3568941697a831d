"""Sink, local and best-scoring blocks (LServe, sections 3.1 and 3.4), scored by block means."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from ragserve_kernels.dispatch import FLOAT_DTYPES, check, use_triton
from ragserve_kernels.kv import query_group
from ragserve_kernels.prefill_lists.block_scores import held_from, keys_of
from ragserve_kernels.sparse_prefill import BlockLists, PrefillBatch
from ragserve_kernels.sparse_prefill.lists import key_blocks, write_lists

_TOKENS = 2**14  # keys that are averaged at once


def choose_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    batch: PrefillBatch,
    *,
    alpha: float,
    share: float | None = None,
    sink: int = 1,
    local: int = 2,
    streaming: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Choose key blocks that hold ``alpha`` of the weight that block means estimate, per head.

    A query block's weight of a key block is tokens * exp(scale * mean(q) . mean(k)). Chunks that begin and
    end between query blocks choose what the whole prompt does in one pass, but for rounding.

    Args:
        q: ``[batch.rows, query_heads, head_dim]``.
        k: ``[pool slots, kv_heads, head_dim]``, with the new tokens.
        alpha: the share, above 0 and up to 1.
        share: of the key blocks up to the query block's own, taken instead of as many as hold ``alpha``.
        sink: first key blocks that are always chosen.
        local: key blocks before the query block's own that are always chosen; so are its own.
        streaming: bool ``[kv_heads]``: heads whose queries take no other blocks than these (LServe, section
            3.4; DuoAttention); None: no head.
        scale: of the scores; default 1 / sqrt(head_dim).

    Returns:
        bool ``[query blocks, query_heads, key blocks]``.

    Raises:
        ValueError, TypeError: sizes, shapes, dtypes or devices that do not fit.
    """
    scale = _checked(q, k, batch, alpha, share, sink, local, streaming, scale)
    group = query_group(q.shape[1], k.shape[1])
    longest = max((a + b for a, b in zip(batch.prefix, batch.new, strict=True)), default=0)
    width = -(-longest // batch.block_k)
    score = torch.full((batch.query_blocks, q.shape[1], width), -math.inf, device=q.device)
    row = 0
    for request, span in enumerate(batch.spans()):
        new = batch.new[request]
        if not new:
            continue
        length = batch.prefix[request] + new
        means = _key_means(k, batch, request, length)  # [key blocks, kv_heads, head_dim]
        queries = _means(q[row : row + new], batch.prefix[request], batch.block_q)
        scores = torch.einsum("thgd,khd->thgk", queries.unflatten(1, (-1, group)), means) * scale
        tokens = torch.full((len(means),), math.log(batch.block_k), device=q.device)
        tokens[-1] = math.log(length - (len(means) - 1) * batch.block_k)
        score[span.start : span.stop, :, : len(means)] = scores.flatten(1, 2) + tokens
        row += new
    step = torch.arange(width, device=q.device)
    own = batch.places[:, 1, None] * batch.block_q // batch.block_k
    forced = (step < sink) | (step >= own - local)
    reach = key_blocks(batch)
    forced &= step < reach[:, None]
    chosen = greedy_blocks(score, reach, forced, alpha, share)
    if streaming is None:
        return chosen
    return chosen & (forced[:, None] | ~streaming.repeat_interleave(group)[:, None])


def list_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    batch: PrefillBatch,
    lists: BlockLists,
    *,
    alpha: float,
    share: float | None = None,
    sink: int = 1,
    local: int = 2,
    streaming: torch.Tensor | None = None,
    scale: float | None = None,
) -> None:
    """Write the lists of :func:`choose_blocks`, in four launches a request.

    Where rounding decides, it may take another block than the choice in plain torch: where two scores differ
    by less than what sums in another order do, or a block ends on ``alpha``.

    Args:
        lists: of the batch's query blocks, each with room for all key blocks; see
            :func:`ragserve_kernels.sparse_prefill.list_room`. Written to.

    The other arguments and the errors are those of :func:`choose_blocks`.
    """
    scale = _checked(q, k, batch, alpha, share, sink, local, streaming, scale)
    check("lists.starts", lists.starts, torch.int32, (batch.query_blocks, q.shape[1]), like=q)
    if use_triton(q):
        from ragserve_kernels.prefill_lists.blocks_triton import list_blocks_triton

        list_blocks_triton(q, k, batch, lists, alpha, share, sink, local, streaming, scale)
        return
    chosen = choose_blocks(
        q, k, batch, alpha=alpha, share=share, sink=sink, local=local, streaming=streaming, scale=scale
    )
    write_lists(chosen, lists)


def greedy_blocks(
    score: torch.Tensor,
    reach: torch.Tensor,
    forced: torch.Tensor,
    alpha: float,
    share: float | None = None,
) -> torch.Tensor:
    """Take the forced blocks, then those of the greatest weight, until ``alpha`` of it is held; all for 1.
    With a ``share`` until that part of the ``reach`` is taken, rounded up. Of equal ones the first are taken.

    Args:
        score: float32 ``[query blocks, heads, key blocks]``: logarithms of weights.
        reach: int32 ``[query blocks]``: first key blocks that may be taken at all.
        forced: bool ``[query blocks, key blocks]``.

    Returns:
        bool, as ``score``.
    """
    possible = torch.arange(score.shape[-1], device=score.device) < reach[:, None]
    score = score.masked_fill(~possible[:, None], -math.inf)
    order = score.masked_fill(forced[:, None], math.inf).argsort(dim=-1, descending=True, stable=True)
    if share is None:
        weight = score.softmax(-1)
        taken = weight.gather(-1, order)
        before = taken.cumsum(-1) - taken
        within = before < held_from(weight.sum(-1, keepdim=True), alpha)
    else:
        place = torch.arange(score.shape[-1], device=score.device)
        within = (place < (reach[:, None, None] * share).ceil()).expand_as(order)
    chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order, within)
    return (chosen | forced[:, None]) & possible[:, None]


def check_share(share: float | None) -> None:
    """Raises ValueError for a share that is neither None nor above 0 and up to 1."""
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"share {share} must be above 0 and up to 1.")


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    batch: PrefillBatch,
    alpha: float,
    share: float | None,
    sink: int,
    local: int,
    streaming: torch.Tensor | None,
    scale: float | None,
) -> float:
    """Check the arguments of a choice and return the scale of its scores."""
    check("q", q, FLOAT_DTYPES, (batch.rows, None, None), like=batch.page_table)
    check("k", k, q.dtype, (None, None, q.shape[2]), like=q)
    query_group(q.shape[1], k.shape[1])
    if not 0 < alpha <= 1 or min(sink, local) < 0:
        raise ValueError(f"alpha {alpha} must be above 0 and up to 1, sink {sink} and local {local} from 0.")
    check_share(share)
    if streaming is not None:
        check("streaming", streaming, torch.bool, (k.shape[1],), like=q)
    return 1.0 / math.sqrt(q.shape[2]) if scale is None else scale


def _key_means(k: torch.Tensor, batch: PrefillBatch, request: int, length: int) -> torch.Tensor:
    parts = []
    for start in range(0, length, _TOKENS):
        tokens = torch.arange(start, min(start + _TOKENS, length), device=k.device)
        parts.append(_means(keys_of(k, batch, request, tokens), start, batch.block_k))
    return torch.cat(parts)


def _means(rows: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """Return the mean of each block's rows, float32 ``[blocks, ...]``; the first row is of position
    ``first``, and blocks of ``size`` positions are counted from position 0."""
    before = first % size
    after = -(before + len(rows)) % size
    if before or after:
        rows = pad(rows, (0, 0) * (rows.dim() - 1) + (before, after))
    sums = rows.unflatten(0, (-1, size)).sum(1, dtype=torch.float32)
    count = torch.full((len(sums),), float(size), device=rows.device)
    count[0] -= before
    count[-1] -= after
    return sums / count.view(-1, *[1] * (rows.dim() - 1))
