"""SGLang 0.5.17's radix cache, which is given requests when they end and between their chunks."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixCache

from sglang_ext.versions.tree_contents import TreeContents


class FinishedTree(TreeContents, RadixCache):
    """`RequestTree`: subclasses define what enters the tree."""

    def removed(self, node: Any) -> None:
        """Tell SGLang's listeners that a node's KV is gone."""
        self._record_remove_event(node)

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        if self.enters(req):
            super().cache_unfinished_req(req, chunked=chunked)
            if not self.disable:
                self.on_cached(req, req.last_node)
            return
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, : req.extend_range.end]
        req.prefix_indices = slots.to(dtype=torch.int64, copy=True)

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        kept = self.leaving(req, kv_len_to_handle, inserts=is_insert and not self.disable)
        if (own := self.own_slots(req, kv_len_to_handle)) is not None:
            self.token_to_kv_pool_allocator.free(own)
            self.on_left()
            return
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, :kv_len_to_handle]
        taken = kv_len_to_handle if kept is None else kept
        self._inserted: Any = None
        super().cache_finished_req(req, is_insert=kept is not None, kv_len_to_handle=taken)
        if taken < kv_len_to_handle:
            self.token_to_kv_pool_allocator.free(slots[taken:])
        if self._inserted is not None:
            self.on_cached(req, self._inserted)
        self.on_left()

    def insert(self, params: Any) -> Any:
        result = super().insert(params)
        self._inserted = result.last_device_node
        return result
