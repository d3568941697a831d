"""Requests whose KV is on the host while they wait: how they are retracted, and admitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_ext.attention.decode.backend import SparseDecodeBackend
from sglang_ext.attention.decode.decode_state import DecodeState
from sglang_ext.attention.decode.step_planner import StepPlanner
from sglang_ext.attention.offload.segmented_prefill import SegmentedPrefill
from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.kv_offload.documents.context_table import ContextTable
from sglang_ext.kv_offload.documents.host_documents import HostDocuments
from sglang_ext.kv_offload.host_admission import HostAdmission
from sglang_ext.kv_offload.host_prefixes import HostPrefixes
from sglang_ext.kv_offload.host_target import PIECE_BYTES, HostTarget
from sglang_ext.kv_offload.offloaded_rows import OffloadedRows
from sglang_ext.stages import stages

if TYPE_CHECKING:
    from sglang_ext.documents.radix import DocumentRadixCache


class OffloadedRequests:
    """Scheduler thread only. ``req.ragserve_on_host``: the request must not match the prefix cache."""

    def __init__(
        self,
        planner: StepPlanner,
        backend: SparseDecodeBackend,
        offloaded: OffloadedRows,
        tree: DocumentRadixCache,
        segments: SegmentedPrefill | None,
    ) -> None:
        """``tree``: SGLang's prefix cache, ours. ``segments``: None where prompts must fit the pool."""
        self._planner = planner
        self._backend = backend
        self._offloaded = offloaded
        self._tree = tree
        self.segments = segments
        self._prefixes = HostPrefixes(offloaded)
        self._admission = HostAdmission(offloaded, tree)

    def give_back(self, req: Any, state: DecodeState) -> None:
        """Free the host pages and resident blocks of a request that ends.

        One that is retracted keeps its KV on the host if there is room for what follows the prompt. The KV
        of its newest token is what its next pass writes: that of the others has been written."""
        row = state.offload.leave()
        place = self._planner.place(state)
        self._planner.forget(state)
        if row is not None and (req.finished() or req.to_finish is not None or not req.output_ids):
            self._offloaded.release(row)
        elif row is not None:
            tokens = len(req.origin_input_ids) + len(req.output_ids) - 1
            state.offload.wait(self._prefixes.retract(row, tokens))
            if state.offload.prefix is not None and state.options.chooses_by_window and place >= 0:
                state.queries.show(self._backend.observed(place), state.queries.count)
        req.ragserve_on_host = state.offload.prefix is not None

    def admit(self, adder: Any, req: Any, add: Callable[[], Any]) -> Any:
        """Admit a request whose KV is on the host, or is to be brought there because the pool cannot take it.
        ``add`` runs SGLang's admission.

        Return SGLang's result; None for other requests, and where this one is to be prefilled after all."""
        from sglang.srt.managers.schedule_policy import AddReqResult

        if self.segments is not None and (begun := self.segments.admit(adder, req, add)) is not None:
            return begun
        state: DecodeState = self._planner.state(req)
        if state.offload.prefix is None:
            return None
        result, hits = None, adder.log_hit_tokens
        if req.to_finish is None:
            failed = stages.ending([req])
            result = stages.run_alike("offloading", failed, self._admit, adder, state, add)
        alone = not adder.can_run_list and adder.running_batch.is_empty()
        if result is None or (alone and result is AddReqResult.NO_TOKEN and state.offload.row is None):
            if state.prompt.segmented and self.segments is not None and self.segments.exceeds_pool(req):
                return self.segments.give_up(req, add)
            self._prefill(req, state)
            return None
        if state.offload.row is not None:
            adder.log_hit_tokens = hits  # what SGLang takes for a prefix is none of its cache
        return result

    def _admit(self, adder: Any, state: DecodeState, add: Callable[[], Any]) -> Any:
        if state.offload.prefix is None:
            return None
        result, row = self._admission.admit(adder, state.offload.prefix, add)
        state.offload.admit(row)
        return result

    def _prefill(self, req: Any, state: DecodeState) -> None:
        """Let a request that waits with its KV on the host be prefilled: nothing will make room for it, or it
        only ends."""
        prefix = state.offload.prefix
        if prefix is not None and state.offload.row is None:
            self._prefixes.forget(prefix)
        state.offload.wait(None)
        state.forget_selection()
        req.ragserve_on_host = False
        req.init_next_round_input(self._tree)

    # composed contexts that are never on the device as a whole

    def reserve(
        self,
        req: Any,
        tokens: int,
        *,
        full: bool,
        find: Callable[[HostDocuments, int], ContextPages | None],
    ) -> bool:
        """Take host pages for a composed context of ``tokens`` tokens that is to be offloaded from the start.

        Return False if it is not asked for or not possible: the context is composed on the device then.
        ``full``: the device has no room for it, which is what requests with ``offloaded`` "auto" wait for.
        ``find``: finds it in its documents' host pages, as pages of so many tokens; called on all ranks or on
        none."""
        state = self._planner.state(req)
        options = state.options
        if not (options.offloaded is True or (full and options.offloaded)):
            return False
        if not self._offloaded.ready or not self._planner.is_lagging(req, len(req.full_untruncated_fill_ids)):
            return False
        selection = options.budget // self._offloaded.page_size
        shared, counts = options.mode == "progressive", state.counts
        documents, found = self._offloaded.documents, None
        if documents is not None:
            found = partial(find, documents, self._offloaded.page_size)
        if found is not None and shared:
            table = self._offloaded.contexts
            found = None if table is None or not table.is_open else partial(_in_table, table, found)
        prefix = self._prefixes.reserve(
            *(req, tokens, selection, options.resident_blocks, counts), shared=shared, find=found
        )
        state.offload.wait(prefix)
        return prefix is not None

    def may_find_room(self, req: Any, tokens: int) -> bool:
        """Whether others that are in no batch hold the host pages that a context of ``tokens`` tokens lacks:
        they free them when they have run."""
        fits = tokens // self._offloaded.page_size <= self._offloaded.pages.numbers
        held = any(prefix.req is not req for prefix in self._offloaded.waiting.values())
        return bool(self._planner.state(req).options.offloaded and fits and held)

    def compose(self, adder: Any, req: Any, add: Callable[[], Any]) -> tuple[Any, HostTarget | None]:
        """Admit a request with host pages from `reserve`; where that fails, they are free again.

        Return SGLang's result, and where its context is to be written if it has been admitted."""
        state = self._planner.state(req)
        try:
            result = self._admit(adder, state, add)
        finally:
            if state.offload.row is None and state.offload.prefix is not None:
                self._prefixes.forget(state.offload.prefix)
                state.offload.wait(None)
        if state.offload.row is None:
            return result, None
        page, shape = self._offloaded.page_size, self._offloaded.pages.shape
        piece = max(1, PIECE_BYTES // shape.page_bytes) * page
        return result, HostTarget(self._prefixes, state.offload.row, page, piece)

    def before_schedule(self, queued: Sequence[Any]) -> bool:
        """Free the host pages of requests that have left SGLang's queues, and go on with prompts that are
        prefilled by segments. ``queued``: the requests in the queues.

        Return True if one is complete, so that its request may be admitted."""
        complete = self.segments is not None and self.segments.before_schedule(queued)
        self._admission.drop_gone(queued)
        return complete


def _in_table(table: ContextTable, find: Callable[[], ContextPages | None]) -> ContextPages | None:
    """A context that ``find`` finds, with what a progressive request needs to read it; None without room."""
    context = find()
    if context is None or table.take(context):
        return context
    context.release()
    return None
