"""Sparse prefill on Hopper GPUs: FlashAttention 4's block-sparse kernel, which SGLang ships.

It wants K and V in one piece. With the copy of a request's it takes a half to seven tenths of the time of
`ragserve_kernels.sparse_prefill` (docs/sparse-prefill.md). So requests with many new tokens get it, and the
others of a batch our own kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from ragserve_kernels.sparse_prefill import BlockLists, PrefillBatch, lists_at, sparse_prefill, split_lists

log = logging.getLogger(__name__)
LEAST_ROWS = 1024  # new tokens: with a tenth of the blocks of 128k tokens they gain what the copy costs
ROWS = 128  # queries that a program of it computes
_DIMS, _DTYPES = (64, 128), (torch.bfloat16, torch.float16)
_HOPPER = 9  # major compute capability


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER


class HopperPrefill:
    """Attends as `sparse_prefill`, by FlashAttention 4 where that can. One per scheduler; its thread only."""

    def __init__(self, device: torch.device) -> None:
        self._usable = is_hopper(device)
        self._attend: Callable[..., None] | None = None  # imported at first use: that takes seconds

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: PrefillBatch,
        lists: BlockLists,
        *,
        scale: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """See `sparse_prefill`. K and V of a pool: whole pages, one after the other."""
        fits = q.shape[2] in _DIMS and q.dtype in _DTYPES and batch.block_q == ROWS
        if not fits or not self._usable or max(batch.new, default=0) < LEAST_ROWS:
            return sparse_prefill(q, k, v, batch, lists, scale=scale, out=out)
        others: list[range] = []  # requests that are left to our kernel
        starts = [*accumulate(batch.new, initial=0)]
        for request, new in enumerate(batch.new):
            rows = slice(starts[request], starts[request + 1])
            if new >= LEAST_ROWS and self._request(request, q[rows], k, v, batch, lists, scale, out[rows]):
                continue
            begins = others.pop().start if others and others[-1].stop == request else request
            others.append(range(begins, request + 1))
        spans = batch.spans()
        for each in others:
            rows = slice(starts[each.start], starts[each.stop])
            own = lists_at(lists, slice(spans[each.start].start, spans[each.stop - 1].stop))
            sparse_prefill(q[rows], k, v, batch.part(each), own, scale=scale, out=out[rows])
        return out

    def _request(
        self,
        request: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: PrefillBatch,
        lists: BlockLists,
        scale: float,
        out: torch.Tensor,
    ) -> bool:
        """Attend for the rows of a request. False: it could not, and `sparse_prefill` is to."""
        if not self._usable:
            return False
        prefix, page = batch.prefix[request], batch.page_size
        length = prefix + batch.new[request]
        try:
            if self._attend is None:
                self._attend = _load()
            pages = batch.page_table[request, : -(-length // page)]
            keys, values = (
                side[: len(side) // page * page].unflatten(0, (-1, page)).index_select(0, pages)
                for side in (k, v)
            )
            keys, values = keys.flatten(0, 1)[:length], values.flatten(0, 1)[:length]
            # its query blocks begin with the first row, ours with position 0
            before = prefix % batch.block_q
            rows = torch.cat([q.new_zeros(before, *q.shape[1:]), q]) if before else q
            found = torch.empty_like(rows) if before else out
            split = split_lists(batch, lists, request, q.shape[1])
            self._attend(rows, keys, values, split, (batch.block_q, batch.block_k), scale, found)
            if before:
                out.copy_(found[before:])
        except torch.cuda.OutOfMemoryError:
            log.debug("no memory for a copy of %d tokens' KV: the slower kernel reads it where it is", length)
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, our own kernel does without
            self._usable = False
            log.warning("sparse prefill runs by the slower kernel: FlashAttention 4 failed: %s", error)
            return False
        return True


def _load() -> Callable[..., None]:
    """Import FlashAttention 4. It compiles its kernel at the first call."""
    import cutlass
    from cutlass import cute
    from sglang.kernels.ops.attention.flash_attn.cute import interface, utils
    from sglang.kernels.ops.attention.flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    @cute.jit
    def causal(batch, head, query, key, lengths, tensors):  # type: ignore[no-untyped-def]  # it reads them
        before = utils.scalar_to_ssa(lengths.seqlen_k - lengths.seqlen_q, cutlass.Int32)
        return key <= query + before

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        split: Any,
        block: tuple[int, int],
        scale: float,
        out: torch.Tensor,
    ) -> None:
        full_counts, full, masked_counts, masked = (each[None] for each in split)
        # the public functions take no tile and no output
        interface._flash_attn_fwd(
            *(side[None] for side in (q, k, v)),
            softmax_scale=scale,
            mask_mod=causal,
            tile_mn=block,
            block_sparse_tensors=BlockSparseTensorsTorch(
                masked_counts, masked, full_counts, full, block_size=block
            ),
            out=out[None],
        )

    return attend
