"""Choices of pages that serve only after a lag, for offloaded rows and for rows that are compared with
them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ragserve_kernels.paged import PageSelection
from sglang_ext.attention.decode.backend import SparseDecodeBackend
from sglang_ext.attention.decode.decode_state import DecodeState, KeptSelection, Row
from sglang_ext.attention.decode.step_planner import Selects, Step
from sglang_ext.documents.pages.types import IntegrityError
from sglang_ext.kv_offload.offloaded_rows import OffloadedRows
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow

EXCHANGE_EVERY = 16  # rounds of SGLang's scheduler: ranks tell each other what they have measured


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
            kept, selection = row.state.kept, row.state.selection
            if not row.lag or kept is None:
                continue
            if step.swapped[i]:
                offloaded, pending = row.state.offload.row, kept.pending
                reads = offloaded is None or pending is None or self._offloaded.arrive(offloaded, pending)
                self.swap(kept, reads=reads)
            elif step.kept[i] >= 0:
                continue
            if row.progressive:
                continue  # it finds each page where it is
            self._backend.place(i, kept.current, selection.newest if selection.widened else None)

    def after(self, step: Step, reqs: list[object]) -> None:
        """Take what the step just launched has chosen, and go on with copies and loads behind it."""
        self._offloaded.begin_step(time.monotonic())
        for i, row in enumerate(step.rows):
            if not row.lag:
                continue
            state = row.state
            if state.offload.row is not None:
                self._offloaded.load_rest(state.offload.row)
            if step.selects[i] is Selects.NOW:
                self.first(state, self._chosen(i, row, wanted=False))
            if step.selects[i] is Selects.LATER and state.kept is not None:
                self.chosen(state, self._chosen(i, row, wanted=True))
            elif state.offload.row is None and may_be_offloaded(row, reqs[i], short=self._short):
                options = state.options
                begun = self._offloaded.begin(
                    reqs[i],
                    row.tokens,
                    options.budget // self._page,
                    options.resident_blocks,
                    state.counts,
                    shared=row.progressive,
                )
                state.offload.begin(begun)
        self._offloaded.copy()

    def _chosen(self, i: int, row: Row, *, wanted: bool) -> PageSelection:
        """Return what a row of the step just launched has chosen: at once, or for after its lag.

        A progressive row has ranked its pages in the step itself."""
        return self._backend.listed(i) if row.progressive else self._backend.taken(i, wanted=wanted)

    def chosen(self, state: DecodeState, named: PageSelection) -> None:
        """Let a request read a selection after its lag, and load what that takes meanwhile.

        Raises:
            IntegrityError: it has no selection that it reads until then.
        """
        offloaded, kept = state.offload.row, state.kept
        if kept is None:
            raise IntegrityError("pages were selected for later steps, and none for the steps before them")
        kept.pending_named = named
        if offloaded is not None:
            named = self._offloaded.load(offloaded, named, state.options.lag_steps)
        kept.pending = named

    def first(self, state: DecodeState, named: PageSelection) -> KeptSelection:
        """Let a request read a selection at once. Return what is kept of it."""
        state.kept = KeptSelection(named, named)
        return state.kept

    def swap(self, kept: KeptSelection, *, reads: bool) -> None:
        """Forget the pending selection, having let the row read it, unless ``reads`` is False."""
        if reads and kept.pending is not None and kept.pending_named is not None:
            kept.current, kept.named = kept.pending, kept.pending_named
        kept.pending = kept.pending_named = None

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
    if not wanted or state.selection.chosen_at == 0:
        return False
    context = getattr(req, "ragserve", None)
    plan = getattr(context, "plan", None)  # a document has none
    if context is not None and (plan is None or plan.session is not None):
        return False
    return len(req.origin_input_ids) + len(req.output_ids) >= state.selection.first_tokens  # type: ignore[attr-defined]


def reads_next(row: OffloadedRow) -> bool:
    """Return True if a row's next step is the first to read its pending selection."""
    selection = row.req.ragserve_decode.selection
    return bool(selection.pending_from) and selection.tokens + 1 >= selection.pending_from
