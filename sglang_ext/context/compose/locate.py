"""Where a composed request's documents are: found in the device's tree or on host, loaded from disk, locked
while they are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_ext.context.compose.request import ComposedContext, DocumentOnDevice, DocumentOnHost
from sglang_ext.protocol import Span

_MAX_RELOADS = 8  # requests that take each other's host pages in turns would load for ever; a miss ends that


class Locator:
    """One rank's. ``is_removed``: whether a document was removed and only waits for its last reader."""

    def __init__(
        self, tree: Any, tiers: Any, is_removed: Callable[[str], bool], block: int, tp_group: Any
    ) -> None:
        self._tree = tree
        self._tiers = tiers
        self._is_removed = is_removed
        self._block = block
        self._tp_group = tp_group

    def resolve(self, context: ComposedContext) -> list[int] | None:
        """Find and lock every document. Numbers of the spans that are nowhere; None while one is being loaded
        from disk.
        """
        self.unlock(context)
        missing: list[int] = []
        loading = False
        for i, (span, key) in enumerate(zip(context.plan.spans, context.keys, strict=True)):
            found = self._find(context, i, span, key)
            if found == "loading":
                loading = True
            elif found is None:
                missing.append(i)
            else:
                context.sources.append(found)
        if loading:  # some may turn out to be missing: all that are get told at once
            context.waiting_since = context.waiting_since or time.perf_counter()
            return None
        if missing:
            return missing
        if context.waiting_since is not None:
            context.load_ms += (time.perf_counter() - context.waiting_since) * 1e3
            context.waiting_since = None
        return []

    def _find(self, context: ComposedContext, number: int, span: Span, key: str) -> Any:
        if self._is_removed(key):
            return None
        ids = context.ids[span.start : span.end]
        if not context.below_device:
            device = self._tree.document(ids, key)
            if device is not None:
                parts, node = device
                self._tree.inc_lock_ref(node)
                return DocumentOnDevice(parts[0] if len(parts) == 1 else torch.cat(parts), node)
        pages = self._tiers.host_pages(key, context.ids_32[span.start : span.end], context.plan.namespace)
        if pages is None:
            return None
        blocks = context.blocks(number, self._block)
        absent = blocks[pages[blocks] < 0].tolist()
        if absent:
            ticket = context.tickets.get(key)
            if ticket is None:
                context.tickets[key] = self._tiers.load(key, absent)
                return "loading"
            if not ticket.done():
                return "loading"
            if not ticket.ok or context.reloads >= _MAX_RELOADS:
                return None
            context.reloads += 1
            context.tickets[key] = self._tiers.load(
                key, absent
            )  # loaded, and evicted again before we came to it: once more
            return "loading"
        self._tiers.pin(key)
        return DocumentOnHost(key, pages, key in context.tickets)

    def unlock(self, context: ComposedContext) -> None:
        for source in context.sources:
            if isinstance(source, DocumentOnDevice):
                self._tree.dec_lock_ref(source.node)
            else:
                self._tiers.unpin(source.key)
        context.sources = []

    def all_agree(self, flag: bool) -> bool:
        """Whether every rank says so: what one rank's host memory lacks, no rank composes from."""
        return bool(self.agree([int(flag)])[0])

    def agree(self, votes: list[int]) -> list[int]:
        """The least vote of all ranks, for each of several questions."""
        if self._tp_group is None or self._tp_group.world_size == 1 or not votes:
            return votes
        ballot = torch.tensor(votes)
        torch.distributed.all_reduce(
            ballot, op=torch.distributed.ReduceOp.MIN, group=self._tp_group.cpu_group
        )
        return [int(vote) for vote in ballot.tolist()]

    def missing_anywhere(self, context: ComposedContext, missing: Sequence[int]) -> list[int]:
        """Numbers of the spans that any rank lacks."""
        if self._tp_group is None or self._tp_group.world_size == 1:
            return list(missing)
        lacks = torch.zeros(len(context.keys), dtype=torch.int64)
        lacks[list(missing)] = 1
        torch.distributed.all_reduce(lacks, op=torch.distributed.ReduceOp.MAX, group=self._tp_group.cpu_group)
        return [int(i) for i in lacks.nonzero().flatten()]
