"""The device side of sparse prefill: chooses key blocks layer by layer and attends to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ragserve_kernels.prefill_lists import SEGMENT, LinePlan, Lines, list_blocks, list_lines
from ragserve_kernels.sparse_prefill import (
    BlockLists,
    PrefillBatch,
    all_blocks,
    list_all,
    list_room,
    lists_at,
    sparse_prefill,
)
from sglang_ext.attention.prefill.planner import Computed, ExtendRow
from sglang_ext.stages import stages
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.prefill_options import PrefillOptions

BLOCK_Q, BLOCK_K = 128, 64
_WHOLE = 2**20  # positions of a segment that holds any prompt


@dataclass(frozen=True, eq=False)
class _SparseRow:
    """A sparse request of the batch: it alone as a batch, its rows of q, and its query blocks, of which
    those in ``dense`` list all key blocks. ``given``: the lines of an earlier turn, uint8
    ``[layers, 2, heads, bytes]``. ``ends``: the prompt ends in this pass."""

    options: PrefillOptions
    batch: PrefillBatch
    rows: slice
    blocks: slice
    dense: slice
    given: torch.Tensor | None
    ends: bool

    @property
    def tokens(self) -> int:
        """Tokens of the request with those of the pass."""
        return self.batch.prefix[0] + self.batch.new[0]


class SparsePrefill:
    """Attends for the extend at hand, all of its requests: the dense ones to all blocks.

    Made anew for each pass with sparse requests. Scheduler thread only."""

    def __init__(
        self,
        rows: Sequence[ExtendRow],
        req_to_token: torch.Tensor,
        page_size: int,
        config: AttentionConfig,
        pattern: torch.Tensor | None = None,
        attend: Callable[..., torch.Tensor] = sparse_prefill,
    ) -> None:
        """``req_to_token``: SGLang's request table, int32 ``[requests, tokens]``: slots. ``pattern``: bool
        ``[layers, kv_heads]``, streaming heads of this rank's; None if there are none. ``attend``: computes
        as `sparse_prefill`."""
        self._attend = attend
        self.rows = tuple(rows)
        prefix, new = [row.prefix for row in rows], [row.new for row in rows]
        longest = max(a + b for a, b in zip(prefix, new, strict=True))
        picked = torch.tensor([row.row for row in rows])
        if req_to_token.is_cuda:
            picked = picked.pin_memory().to(req_to_token.device, non_blocking=True)
        first = req_to_token[:, :longest:page_size].index_select(0, picked)
        table = (first // page_size).to(torch.int32)
        self._batch = PrefillBatch.of(table, page_size, prefix, new, block_q=BLOCK_Q, block_k=BLOCK_K)
        self._sink = -(-config.sink_tokens // BLOCK_K)
        self._local = -(-config.local_tokens // BLOCK_K)
        self._pattern = pattern
        self._lines_by_end = config.lines_by == "prompt_end"
        self._sparse: list[_SparseRow] = []
        start = 0
        for i, (row, span) in enumerate(zip(rows, self._batch.spans(), strict=True)):
            own, blocks = slice(start, start + row.new), slice(span.start, span.stop)
            start += row.new
            if row.state is None:
                continue  # attends to all blocks, as the lists do from the start
            alone = PrefillBatch.of(
                table[i : i + 1], page_size, [row.prefix], [row.new], block_q=BLOCK_Q, block_k=BLOCK_K
            )
            options = row.state.options
            place = max(0, row.prompt - options.dense_last) // BLOCK_Q - row.prefix // BLOCK_Q
            dense_from = min(len(span), max(0, place)) if options.dense_last else len(span)
            dense = slice(span.start + dense_from, span.stop)
            given, ends = row.state.given, row.ends_prompt
            self._sparse.append(_SparseRow(options, alone, own, blocks, dense, given, ends))
        count = len(self._sparse)
        # int64 [sparse requests, 2]: lines of the turn before, and others
        self._taken = torch.zeros(count, 2, dtype=torch.int64, device=table.device)
        self._room: BlockLists | None = None  # the lists, written anew by every layer
        self._whole: BlockLists | None = None  # lists of all blocks
        # int64 [query blocks, heads]: their lengths, summed over the layers so far
        self._listed: torch.Tensor | None = None
        self._plans: dict[int, LinePlan] = {}  # by a request's first query block; for all layers
        self._lines: dict[int, list[torch.Tensor]] = {}  # the same; packed, by layer; of prompts that end
        self._has_failed = False
        self._heads = 0  # query heads, summed over the layers so far
        self._layer = 0  # layers so far

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend one layer; shapes as `ragserve_kernels.sparse_prefill`. ``q`` may have rows of padding
        behind the batch's, whose output is zero."""
        lists = None
        if not self._has_failed:
            lists = stages.run_alike("sparse prefill", self._fail, self._choose, q, k, scale)
        if lists is None:  # what has failed ends; the batch's other requests go on
            lists = all_blocks(self._batch, q.shape[1])
        self._listed = lists.counts.long() if self._listed is None else self._listed.add_(lists.counts)
        self._heads += q.shape[1]
        self._layer += 1
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        out[self._batch.rows :] = 0
        self._attend(
            q[: self._batch.rows], k, v, self._batch, lists, scale=scale, out=out[: self._batch.rows]
        )
        return out

    def _fail(self, message: str) -> None:
        """End the sparse requests; nothing more is chosen for them."""
        self._has_failed = True
        stages.ending(row.req for row in self.rows if row.state is not None)(message)

    def computed(self) -> Computed:
        """Return what was computed for each sparse request, over all layers and query heads of this rank."""
        possible, segments, lines = [], [], []
        counts = torch.zeros(len(self._sparse), 3, dtype=torch.float64, device=self._taken.device)
        counts[:, 1:] = self._taken
        for i, row in enumerate(self._sparse):
            if self._listed is not None:
                counts[i, 0] = self._listed[row.blocks].sum()
            prefix, end = row.batch.prefix[0], row.tokens
            ends = [min((i + 1) * BLOCK_Q, end) for i in range(prefix // BLOCK_Q, -(-end // BLOCK_Q))]
            possible.append(float(self._heads * sum(-(-at // BLOCK_K) for at in ends)))
            segments.append(float(self._heads * (-(-end // SEGMENT) - prefix // SEGMENT)))
            packed = self._lines.get(row.blocks.start)
            lines.append(None if packed is None or self._has_failed else torch.stack(packed))
        return Computed(counts, tuple(possible), tuple(segments), tuple(lines))

    def _choose(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> BlockLists:
        """Return the lists of what is attended to."""
        if self._room is None:
            self._room = list_room(self._batch, q.shape[1])
        pattern = self._pattern
        for i, row in enumerate(self._sparse):
            options, own, lists = row.options, q[row.rows], lists_at(self._room, row.blocks)
            if options.mode == "vertical_slash":
                self._by_lines(i, own, k, lists, scale)
            else:
                list_blocks(
                    own,
                    k,
                    row.batch,
                    lists,
                    alpha=options.alpha,
                    share=options.share,
                    sink=self._sink,
                    local=self._local,
                    streaming=None if pattern is None or not options.streaming else pattern[self._layer],
                    scale=scale,
                )
            if row.dense.start < row.dense.stop:
                self._whole = self._whole or all_blocks(self._batch, q.shape[1])
                list_all(self._room, row.dense, self._whole)
        return self._room

    def _by_lines(self, i: int, q: torch.Tensor, k: torch.Tensor, lists: BlockLists, scale: float) -> None:
        """Write the lists of a sparse request by lines."""
        row, layer = self._sparse[i], self._layer
        first, options = row.blocks.start, row.options
        if first not in self._plans:
            by_end = self._lines_by_end
            self._plans[first] = LinePlan.of(
                row.batch,
                q.shape[1],
                observe=options.observe,
                segment=_WHOLE if by_end else SEGMENT,
                newest=by_end,
            )
        given = None
        if row.given is not None:
            given = Lines.unpacked(row.given[layer], -(-row.tokens // BLOCK_K))
        (last,) = list_lines(
            q,
            k,
            self._plans[first],
            lists,
            alpha=options.alpha,
            share=options.share,
            given=(given,),
            counts=self._taken[i : i + 1],
            last=row.ends,
            scale=scale,
        )
        if last is not None:
            self._lines.setdefault(first, []).append(last.packed())
