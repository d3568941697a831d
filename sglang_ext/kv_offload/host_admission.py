"""Admits requests whose prompt lies on host pages: with resident blocks and what follows it, and no
prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.kv_offload.host_prefix import HostPrefix
from sglang_ext.kv_offload.host_prefixes import HostPrefixes
from sglang_ext.kv_offload.offloaded_rows import OffloadedRows
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow
from sglang_ext.versions import prefix_shown, restore_prefix, show_prefix

if TYPE_CHECKING:
    from sglang_ext.documents.radix import DocumentRadixCache


class HostAdmission:
    """Decides on such requests, by lengths and counts of free slots: the same on all ranks. Scheduler thread
    only."""

    def __init__(self, rows: OffloadedRows, tree: DocumentRadixCache) -> None:
        """``tree``: SGLang's prefix cache, ours."""
        self._rows = rows
        self._prefixes = HostPrefixes(rows)
        self._tree = tree
        self._page = rows.page_size

    def admit(
        self, adder: Any, prefix: HostPrefix, add: Callable[[], Any]
    ) -> tuple[Any, OffloadedRow | None]:
        """Run around `PrefillAdder.add_one_req`; ``add`` calls the original.

        Return SGLang's result, and the request's row if it has been admitted. SGLang sees a prefix of
        ``prefix.tokens`` slots, of which the request owns those from its resident blocks on."""
        from sglang.srt.managers.schedule_policy import AddReqResult

        slots = self._take(adder, prefix)
        if slots is None:
            return AddReqResult.NO_TOKEN, None
        req, n_resident = prefix.req, prefix.n_resident * self._page
        before = prefix_shown(req)
        row, result = None, None
        try:
            row = self._prefixes.admit(prefix, slots[:n_resident])
            self._show(row, prefix, slots[n_resident:])
            result = add()
        finally:
            if not any(each is req for each in adder.can_run_list):
                restore_prefix(req, before)
                req.ragserve_resident_blocks = None
                self._tree.token_to_kv_pool_allocator.free(slots)
                if row is not None:
                    self._prefixes.put_back(row, prefix)
                    row = None
        return result, row

    def _show(self, row: OffloadedRow, prefix: HostPrefix, tail: torch.Tensor) -> None:
        """Let SGLang find resident blocks and tail as the request's prefix; before them is the pool's dummy
        page.
        """
        held = self._rows.slots.in_order(row)
        self._rows.slots.note(row, held, placed=True)
        dummy = torch.arange(self._page, dtype=torch.int64, device=held.device)
        unused = dummy.repeat(row.pages - row.blocks.count)
        rest = prefix.tokens - row.pages * self._page
        show_prefix(row.req, torch.cat((unused, held, tail[:rest])))

    def _take(self, adder: Any, prefix: HostPrefix) -> torch.Tensor | None:
        """Return slots of resident blocks and tail, int64; None if they do not fit, or if SGLang would find
        no room for the rest of the request beside them."""
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        req, page = prefix.req, self._page
        tail = -(-(prefix.tokens - prefix.pages * page) // page)
        wanted = (prefix.n_resident + tail) * page
        rest = len(req.full_untruncated_fill_ids) - prefix.tokens
        left = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
        if wanted + rest + min(left, CLIP_MAX_NEW_TOKENS) + page >= adder.rem_total_tokens:
            return None
        return self._rows.slots.take(prefix.n_resident + tail)

    def drop_gone(self, queued: Iterable[Any]) -> None:
        """Forget the requests that have left SGLang's queues. ``queued``: those that are in them."""
        if not self._rows.waiting:
            return
        there = {id(req) for req in queued}
        for prefix in list(self._rows.waiting.values()):
            if id(prefix.req) not in there:
                self._prefixes.forget(prefix)
