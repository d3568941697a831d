"""Memory of a server whose streaming heads have a pool of their own (LServe 3.3): its sizes and its tensors.

The other heads' KV lies in SGLang's pool, by slot, for all tokens. That of the streaming heads lies in rings:
a request's row of SGLang's request table has the pages of its first tokens, its newest page and those before
it, and no others. So a request that has a row has all the room that its streaming heads will ever take:
SGLang counts it by counting rows, and nothing is freed page by page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_ext.attention.pools.streaming_heads import load_pattern, read_pattern
from sglang_ext.wire.attention_config import AttentionConfig, from_environment

MOST_ROWS = 256  # unless the server is told otherwise
_RING_SHARE = 8  # the rings take at most one part in so many of the KV's memory, unless the rows are given
_ADVICE = "this server keeps streaming heads' KV in a pool of their own: set decode_heads_pool=shared"


def check_pattern(heads: Path) -> None:
    """Raise ValueError for a pattern file that leaves no head or all heads to the rings, or is none."""
    pattern = read_pattern(heads)
    if pattern.all() or not pattern.any():
        raise ValueError(
            f"{heads}: {'all heads stream' if pattern.any() else 'no head streams'}, and a pool of their own "
            "needs some that do and some that do not: make the pattern with another --share"
        )


@dataclass(frozen=True, eq=False)
class StreamingPlan:
    """Which heads stream and what they see: ``sinks`` pages of the first tokens, the page of the row that
    attends, and ``local`` pages before it. ``pattern``: bool [layers, kv_heads] of a rank. ``shares``: of
    each rank's heads, what streams."""

    pattern: torch.Tensor
    page: int
    sinks: int
    local: int
    shares: tuple[float, ...]

    @classmethod
    def of(
        cls, config: AttentionConfig, page: int, *, layers: int, kv_heads: int, rank: int = 0, world: int = 1
    ) -> StreamingPlan:
        """``kv_heads``: of a rank.

        Raises:
            ValueError: the pattern is for another model, or leaves no head or all heads to the rings.
        """
        heads = Path(str(config.heads))
        check_pattern(heads)
        patterns = [load_pattern(heads, layers, kv_heads, rank=each, world=world) for each in range(world)]
        shares = tuple(float(pattern.float().mean()) for pattern in patterns)
        sinks, local = (-(-tokens // page) for tokens in (config.sink_tokens, config.local_tokens))
        return cls(patterns[rank], page, sinks, local, shares)

    @property
    def share(self) -> float:
        """Of the heads of all ranks, what streams."""
        return sum(self.shares) / len(self.shares)

    @property
    def full_share(self) -> float:
        """Of a rank's KV of all heads, what most is of other heads: pools are sized alike."""
        return 1 - min(self.shares)

    @property
    def ring_share(self) -> float:
        """Of a rank's KV of all heads, what most is of streaming ones."""
        return max(self.shares)

    @property
    def ring(self) -> int:
        """Pages of a request in the rings."""
        return self.sinks + self.local + 1

    def cell_bytes(self, plain: int) -> int:
        """Return the bytes of a token's slot in SGLang's pool. ``plain``: with all heads."""
        return round(plain * self.full_share)

    def row_bytes(self, plain: int) -> int:
        """Return the bytes of a request's rings. ``plain``: of a token's slot with all heads."""
        return round(plain * self.ring_share * self.ring * self.page)

    def rows(self, tokens: int) -> int:
        """Return how many requests may run beside a pool of ``tokens``, where the server is not told."""
        cells, row = tokens * self.full_share, self.ring_share * self.ring * self.page
        return max(1, min(MOST_ROWS, int(cells / ((_RING_SHARE - 1) * row))))

    def tokens(self, available: int, plain: int, rows: int | None) -> int:
        """Return how many tokens the pool takes of ``available`` bytes, if ``rows`` requests may run; None:
        as many as `rows` says then. 0 or less: there is no room for the rings."""
        cell, row = self.cell_bytes(plain), self.row_bytes(plain)
        if rows is not None:
            return self._whole((available - (rows + 1) * row) // cell)  # SGLang's row 0 is for padding
        least = self._whole((available - row) * (_RING_SHARE - 1) // _RING_SHARE // cell)
        given = self.rows(least)
        more = self._whole((available - (given + 1) * row) // cell)
        return more if self.rows(more) == given else min(least, more)

    def _whole(self, tokens: int) -> int:
        return tokens // self.page * self.page


class OtherHeadsPool(MHATokenToKVPool):
    """SGLang's pool without the streaming heads of this server's pattern, ``plan``.

    Layers have different numbers of heads, so that only our backend can read it: SGLang's names raise."""

    plan: StreamingPlan

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"post_capture_active": False}))

    def _create_buffers(self) -> None:
        if self.use_hnd or self.v_head_dim != self.head_dim or self.is_quantized_kv_cache:
            raise ValueError(
                "a pool of their own for streaming heads is for plain multi-head attention laid out token by "
                "token: set decode_heads_pool=shared"
            )
        self.k_scale_buffer = self.v_scale_buffer = self.dq_k_buffer = self.dq_v_buffer = None
        self.plan = own_plan(self.page_size, layers=self.layer_num, kv_heads=self.head_num)
        rows, counts = self.size + self.page_size, (~self.plan.pattern).sum(1).tolist()
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.k_buffer, self.v_buffer = (
                [
                    torch.zeros(rows, heads, self.head_dim, dtype=self.store_dtype, device=self.device)
                    for heads in counts
                ]
                for _ in range(2)
            )
        self._init_data_ptrs_and_strides()

    def heads(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the other heads of a layer, in order: [slots, heads, head_dim]."""
        return self.k_buffer[layer], self.v_buffer[layer]

    def get_key_buffer(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError, by design: what asks expects all heads, and streaming ones are not here.
        So for the names below."""
        raise NotImplementedError(f"KV of all heads is not in one pool, for {_ADVICE}")

    get_value_buffer = get_kv_buffer = set_kv_buffer = move_kv_cache = get_key_buffer
    get_cpu_copy = load_cpu_copy = get_contiguous_buf_infos = set_kv_buffer_prefix_valid = get_key_buffer


def own_plan(page: int, *, layers: int, kv_heads: int) -> StreamingPlan:
    """Return the plan of this rank of this server, whose ranks have ``kv_heads`` each."""
    from sglang.srt.runtime_context import get_parallel

    config, parallel = from_environment(), get_parallel()
    if config is None or config.heads is None:
        raise ValueError("a pool of their own for streaming heads needs a pattern file of them: decode_heads")
    rank, world = parallel.attn_tp_rank, parallel.attn_tp_size
    return StreamingPlan.of(config, page, layers=layers, kv_heads=kv_heads, rank=rank, world=world)


class StreamingRings:
    """KV of the streaming heads, by row of SGLang's request table. ``bytes``: of this rank; ``all_bytes``: of
    all. Scheduler thread only."""

    def __init__(
        self, plan: StreamingPlan, rows: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``rows``: of the request table, with that for padding."""
        self.plan, self.rows = plan, rows
        tokens = rows * plan.ring * plan.page
        self._layers = [
            tuple(torch.zeros(tokens, heads, head_dim, dtype=dtype, device=device) for _ in range(2))
            for heads in plan.pattern.sum(1).tolist()
        ]
        self.bytes = sum(half.nbytes for layer in self._layers for half in layer)
        heads = sum(plan.shares) * plan.pattern.numel()
        self.all_bytes = round(heads * 2 * tokens * head_dim * dtype.itemsize)

    def heads(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the streaming heads of a layer, in order: [slots, heads, head_dim]."""
        k, v = self._layers[layer]
        return k, v

    def pages(self, row: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Return where pages of requests lie, or would if they were still there; shapes broadcast, integers.

        ``number``: of the page in the request."""
        plan = self.plan
        local = plan.sinks + (number - plan.sinks) % (plan.local + 1)
        return row * plan.ring + torch.where(number < plan.sinks, number, local)
