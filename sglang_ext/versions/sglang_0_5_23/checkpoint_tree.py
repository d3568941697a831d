"""SGLang 0.5.23's radix cache, which takes KV at checkpoints. SGLang frees what it does not keep."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixCache

from sglang_ext.versions.tree_contents import TreeContents


class CheckpointTree(TreeContents, RadixCache):
    """`RequestTree`: subclasses define what enters the tree."""

    _leaving: Any = None  # the request that is being released, and may yet be offered to the tree
    _left: Any = None  # the same afterwards, until its slots are freed

    def removed(self, node: Any) -> None:
        """Tell SGLang's listeners that a node's KV is gone."""
        self.kv_events.record_remove(node)

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        shown = getattr(req, "ragserve_prefix", None)
        if shown is None:
            return super().prefix_device_indices(req)
        req.ragserve_prefix = None  # it has a row from now on
        return shown

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        taken: int | None = up_to
        if req is self._leaving:
            taken, self._leaving = self.leaving(req, up_to, inserts=not self.disable), None
            self._left = req
        elif not self.enters(req):
            return
        if taken is not None:
            super().checkpoint(req, up_to=taken)
            if not self.disable:
                self.on_cached(req, req.last_node)

    def claim_kv_row(self, req: Any) -> bool:
        """The first thing that SGLang asks when a request is released, before it may make a checkpoint."""
        self._leaving, self._left = req, None
        return bool(super().claim_kv_row(req))

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        _, end = ranges[-1]
        if self._leaving is not None:  # without a checkpoint
            self.leaving(self._leaving, end, inserts=False)
            self._leaving, self._left = None, self._leaving
            ranges = [(kv.cache_protected_len, end)]  # which that may have changed
        req, self._left = self._left, None
        own = None if req is None else self.own_slots(req, end)
        if own is None:
            super().free_kv_row(kv, ranges)
        else:
            self.token_to_kv_pool_allocator.free(own)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self.on_left()
