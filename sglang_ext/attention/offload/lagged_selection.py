"""Choices of pages that serve only after a lag, for offloaded rows and for rows that are compared with
them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ragserve_kernels.paged import PageSelection
from sglang_ext.attention.decode.backend import SparseDecodeBackend
from sglang_ext.attention.decode.decode_state import DecodeState, Row
from sglang_ext.attention.decode.step_planner import Step
from sglang_ext.kv_offload.offloaded_rows import OffloadedRows
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow

EXCHANGE_EVERY = 16  # rounds of SGLang's scheduler: ranks tell each other what they have measured


@dataclass(slots=True)
class KeptSelection:
    """A row's chosen pages, in all layers: [layers, kv_heads, capacity] and [layers, kv_heads].

    ``current``: what it reads, but for a page that has begun since; ``pending``: what it will read.
    ``named``, ``pending_named``: the same, with the logical pages that were chosen in place of resident
    blocks."""

    current: PageSelection
    named: PageSelection
    pending: PageSelection | None = None
    pending_named: PageSelection | None = None

    def swap(self, *, reads: bool) -> None:
        """Forget the pending selection, having let the row read it, unless ``reads`` is False."""
        if reads and self.pending is not None and self.pending_named is not None:
            self.current, self.named = self.pending, self.pending_named
        self.pending = self.pending_named = None


class LaggedSelection:
    """Keeps them outside of the tables of a step, which know the next step only. Scheduler thread only."""

    def __init__(self, backend: SparseDecodeBackend, offloaded: OffloadedRows, page_size: int) -> None:
        self._backend = backend
        self._offloaded = offloaded
        self._page = page_size
        self._short = False
        self._rounds = 0
        backend.offloaded_statistics = offloaded.statistics_of

    def before(self, step: Step) -> None:
        """Put what rows read into the tables, where that changes with this step or the tables forgot it."""
        for i, row in enumerate(step.rows):
            kept = row.state.kept
            if not row.lag or kept is None:
                continue
            if step.swapped[i]:
                offloaded = row.state.offloaded
                kept.swap(reads=offloaded is None or self._offloaded.arrive(offloaded, kept.pending))
            elif step.kept[i] >= 0:
                continue
            if row.progressive:
                continue  # it finds each page where it is
            self._backend.place(i, kept.current, row.state.newest if row.state.widened else None)

    def after(self, step: Step, reqs: list[object]) -> None:
        """Take what the step just launched has chosen, and go on with copies and loads behind it."""
        self._offloaded.begin_step(time.monotonic())
        for i, row in enumerate(step.rows):
            if not row.lag:
                continue
            if row.state.offloaded is not None:
                self._offloaded.load_rest(row.state.offloaded)
            if step.active[i] or (row.progressive and row.state.kept is None):
                chosen = self._chosen(i, row, wanted=False)
                row.state.kept = KeptSelection(chosen, chosen)
            if step.lagged[i] and row.state.kept is not None:
                self.chosen(row.state, self._chosen(i, row, wanted=True))
            elif row.state.offloaded is None and may_be_offloaded(row, reqs[i], short=self._short):
                options = row.state.options
                row.state.offloaded = self._offloaded.begin(
                    reqs[i],
                    row.tokens,
                    options.budget // self._page,
                    options.resident_blocks,
                    row.state.offload_counts,
                    shared=row.progressive,
                )
        self._offloaded.copy()

    def _chosen(self, i: int, row: Row, *, wanted: bool) -> PageSelection:
        """Return what a row of the step just launched has chosen: at once, or for after its lag.

        A progressive row has ranked its pages in the step itself."""
        return self._backend.listed(i) if row.progressive else self._backend.taken(i, wanted=wanted)

    def chosen(self, state: DecodeState, named: PageSelection) -> None:
        """Let a request read a selection after its lag, and load what that takes meanwhile."""
        offloaded = state.offloaded
        state.kept.pending_named = named
        if offloaded is not None:
            named = self._offloaded.load(offloaded, named, state.options.lag_steps)
        state.kept.pending = named

    def read_again(self, offloaded: OffloadedRow, kept: KeptSelection) -> None:
        """Load the selection at hand of a request that is back on the device, for the pass that comes now."""
        kept.current = self._offloaded.load(offloaded, kept.named)
        self._offloaded.arrive(offloaded, kept.current)

    def before_schedule(self, rows: Sequence[OffloadedRow | None], *, short: bool) -> bool:
        """Let requests change what they hold, before SGLang decides on its next batch.

        ``rows``: of the running requests; None for those that are not offloaded. ``short``: others wait for
        room on the device. Return whether there is more of it now."""
        self._short = short
        if rows:
            self._rounds += 1
            if self._rounds % EXCHANGE_EVERY == 0:
                self._offloaded.resize(rows, others_wait=short)
        return self._offloaded.before_schedule(reads_next)


def may_be_offloaded(row: Row, req: object, *, short: bool) -> bool:
    """Return True for a row that asks for it, once the tree has its prompt. ``short``: others wait for room.

    With the overlap scheduler the tree takes the prompt after the first decode step has been launched, and
    changes its slots then. The KV of documents and sessions stays: the tree is to have it in the end."""
    state = row.state
    wanted = short if state.options.offloaded == "auto" else state.options.offloaded
    if not wanted or state.chosen_at == 0:
        return False
    context = getattr(req, "ragserve", None)
    plan = getattr(context, "plan", None)  # a document has none
    if context is not None and (plan is None or plan.session is not None):
        return False
    return len(req.origin_input_ids) + len(req.output_ids) >= state.first_tokens  # type: ignore[attr-defined]


def reads_next(row: OffloadedRow) -> bool:
    """Return True if a row's next step is the first to read its pending selection."""
    state = row.req.ragserve_decode
    return bool(state.pending_from) and state.tokens + 1 >= state.pending_from
