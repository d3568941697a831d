"""Two KV caches (LServe 3.3): all tokens of most heads, sink and local pages of streaming heads.

The classes are SGLang's own for models with sliding windows. Each KV head of each layer is a layer of one
head in `SWAKVPool`, so that any pattern fits; `SWATokenToKVPoolAllocator` maps slots of the one cache to the
other's; SGLang's rule for pages behind the window frees them, and its floor keeps the sinks. The server does
not use them yet: docs/sparse-decoding.md says what remains. `two_cache_attention` attends over them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.common import free_swa_out_of_window_slots
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_ext.cpu.allocator import make_allocator


class _HeadsPool(MHATokenToKVPool):
    """K and V of the heads of a kind: "layers" of one head each, side by side in one tensor."""

    def _create_buffers_normal(self) -> None:
        shape = self.layer_num, self.size + self.page_size, self.head_num, self.head_dim
        self.heads = tuple(torch.zeros(shape, dtype=self.store_dtype, device=self.device) for _ in range(2))
        self.k_buffer, self.v_buffer = (list(half.unbind()) for half in self.heads)


class TwoCaches:
    """KV of requests, of which streaming heads keep sink and local pages only.

    A row of a streaming head sees, up to itself, the pages of the first ``sink`` tokens, its own page, and
    the ``local / page`` pages before that. One thread only."""

    def __init__(
        self,
        streaming: torch.Tensor,
        head_dim: int,
        size: int,
        streaming_size: int,
        *,
        page: int,
        sink: int,
        local: int,
        requests: int = 1,
        longest: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        """``streaming``: bool [layers, kv_heads]; ``size`` and ``streaming_size``: tokens of the caches,
        multiples of ``page``; ``sink`` and ``local``: tokens, rounded up to pages; ``requests``: at once, of
        up to ``longest`` tokens each, by default ``size``.

        Raises:
            ValueError: a size that is no multiple of ``page``.
        """
        if size % page or streaming_size % page:
            raise ValueError(f"caches of {size} and {streaming_size} tokens: expected whole pages of {page}")
        self.streaming, self.page = streaming.cpu(), page
        self.sink, self.local = (-(-tokens // page) * page for tokens in (sink, local))
        numbers = torch.arange(streaming.numel()).view_as(self.streaming)
        self.pool = SWAKVPool(
            size,
            streaming_size,
            page,
            dtype,
            head_num=1,
            head_dim=head_dim,
            swa_attention_layer_ids=numbers[self.streaming].tolist(),
            full_attention_layer_ids=numbers[~self.streaming].tolist(),
            device=device,
            token_to_kv_pool_class=_HeadsPool,
        )
        self.allocator: Any = SWATokenToKVPoolAllocator(
            size, streaming_size, page, dtype, device, self.pool, need_sort=False
        )
        if torch.device(device).type == "cpu":
            for name, tokens, pool in (
                ("full_attn_allocator", size, self.pool.full_kv_pool),
                ("swa_attn_allocator", streaming_size, self.pool.swa_kv_pool),
            ):  # SGLang's are for GPUs
                plain = make_allocator(
                    tokens, page_size=page, dtype=dtype, device=device, kvcache=pool, need_sort=False
                )
                setattr(self.allocator, name, plain)
        self._sizes = size, streaming_size
        # int64 [requests, tokens]: slots in the full cache
        self.table = torch.zeros(requests, longest or size, dtype=torch.int64, device=device)
        self.tokens = [0] * requests
        self._requests = [self._new_request(row) for row in range(requests)]

    @staticmethod
    def streaming_room(requests: int, chunk: int, *, page: int, sink: int, local: int) -> int:
        """Return how many tokens the streaming heads' cache must take: of so many requests, which are all
        released before every step, and of which one at a time is prefilled, ``chunk`` tokens in a step."""
        pages = [-(-tokens // page) for tokens in (sink, local, chunk)]
        return (requests * (pages[0] + pages[1] + 1) + pages[2]) * page  # and a page that has begun

    def _new_request(self, row: int) -> Any:
        """Return what SGLang's rule reads of a request."""
        kv = SimpleNamespace(swa_evicted_seqlen=0)
        return SimpleNamespace(kv=kv, req_pool_idx=row, cache_protected_len=0, swa_evict_floor=self.sink)

    def extend(self, new: Mapping[int, int]) -> None:
        """Take slots for the next tokens of requests, by row, in both caches: for all of them, or for none.

        Raises:
            MemoryError: one of the caches is full.
        """
        rows, counts = list(new), list(new.values())
        before = torch.tensor([self.tokens[row] for row in rows])
        after = before + torch.tensor(counts)
        device = self.table.device
        held = torch.tensor(rows, device=device), before.to(device)
        last = torch.where(held[1] > 0, self.table[held[0], (held[1] - 1).clamp_min(0)], -1)
        slots = self.allocator.alloc_extend(held[1], before, after.to(device), after, last, sum(counts))
        if slots is None:
            wanted = ", ".join(f"{n} tokens behind {self.tokens[row]}" for row, n in new.items())
            raise MemoryError(f"no slots for {wanted}")
        for row, taken in zip(rows, slots.split(counts), strict=True):
            self.table[row, self.tokens[row] : self.tokens[row] + len(taken)] = taken
            self.tokens[row] += len(taken)

    def release(self, row: int = 0, tokens: int | None = None) -> None:
        """Free a request's streaming pages that no token from ``tokens`` on sees; default: none to come."""
        free_swa_out_of_window_slots(
            self._requests[row],
            self.tokens[row] if tokens is None else tokens,
            sliding_window_size=self.local,
            page_size=self.page,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool_allocator=self.allocator,
            is_chunk_cache=True,
        )

    def finish(self, row: int = 0) -> None:
        """Give all pages of a request back: it has ended, was aborted or is retracted."""
        if self.tokens[row]:
            self.allocator.free(self.table[row, : self.tokens[row]])
        self.tokens[row], self._requests[row] = 0, self._new_request(row)

    def slots(self, rows: torch.Tensor, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 [rows, tokens]: slots in the full cache and in the streaming heads', there 0 for what
        they have released. Entries past a request's tokens are unspecified."""
        full = self.table[rows, tokens]
        return full, self.allocator.full_to_swa_index_mapping[full]

    def heads(self, layer: int, *, streaming: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer's heads of a kind, in order: views [slots, heads, head_dim]."""
        kind = self.streaming == streaming
        first, count = int(kind[:layer].sum()), int(kind[layer].sum())
        pool: Any = self.pool.swa_kv_pool if streaming else self.pool.full_kv_pool
        k, v = (half[first : first + count, :, 0].transpose(0, 1) for half in pool.heads)
        return k, v

    def pages(self) -> tuple[int, int]:
        """Return the pages that the two caches hold, by the allocator."""
        free = self.allocator.full_available_size(), self.allocator.swa_available_size()
        full, streaming = ((size - left) // self.page for size, left in zip(self._sizes, free, strict=True))
        return full, streaming

    def held(self) -> float:
        """Return the pages held, where a page of all heads of all layers counts as one."""
        full, streaming = self.pages()
        share = float(self.streaming.float().mean())
        return (1 - share) * full + share * streaming
