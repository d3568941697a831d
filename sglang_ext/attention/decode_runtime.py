"""Sparse decoding in the scheduler: around every forward pass, at the start and end of every request."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.attention.decode.backend import SparseDecodeBackend
from sglang_ext.attention.decode.decode_state import DecodeState, Row
from sglang_ext.attention.decode.page_stats import PageStatistics
from sglang_ext.attention.decode.step_planner import IDLE, Step, StepPlanner, Variant
from sglang_ext.attention.metrics import decode_metrics, prefill_metrics
from sglang_ext.attention.offload.extends import OffloadedExtends
from sglang_ext.attention.offload.lagged_selection import LaggedSelection
from sglang_ext.attention.offload.requests import OffloadedRequests
from sglang_ext.attention.offload.segmented_prefill import SegmentedPrefill
from sglang_ext.attention.prefill.planner import PrefillPlanner
from sglang_ext.kv_offload.documents.host_documents import HostDocuments
from sglang_ext.kv_offload.offloaded_rows import OffloadedRows
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.sglang_internals import sglang_requests
from sglang_ext.tensors.rope import Rotation
from sglang_ext.versions import row_of
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.protocol import DECODE_FIELD, PREFILL_FIELD, PlanError

if TYPE_CHECKING:
    from sglang_ext.documents.radix import DocumentRadixCache
    from sglang_ext.documents.tier_store import TierStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    """Counts of pages that progressive rows read, in flight from the device; ``event`` is None if it has
    arrived.
    """

    event: Any
    use: torch.Tensor  # float [3, rows]: pages, weight, pages read from the host
    rows: tuple[Row, ...]
    head_bytes: tuple[int, ...]  # of a page of a KV head of each row, as it is read from the host


class DecodeRuntime:
    """Owns the step planner and the page statistics, and hands the backend one step per forward pass.

    Called by `sglang_ext.process.hooks` and the control channel; one per process, scheduler thread only."""

    def __init__(
        self,
        config: AttentionConfig,
        planner: StepPlanner,
        statistics: PageStatistics,
        backend: SparseDecodeBackend,
        offloaded: OffloadedRows | None = None,
        runner: Any = None,
    ) -> None:
        """``offloaded``: None where no KV of requests is kept on the host, and no selection has a lag.
        ``runner``: SGLang's model runner, which prefills prompts that the pool cannot take; None: they are
        refused."""
        self.backend = backend
        self._config = config
        self._planner = planner
        self._prefill = PrefillPlanner(config)
        self._statistics = statistics
        self._page = statistics.page_size
        self._spans: list[tuple[int, int, int]] = []  # of the extend at hand
        self._step: Step | None = None  # the decode step at hand
        self._decoding: list[Any] = []  # requests of the latest decode step
        self._pending: deque[_Pending] = deque()
        self._offloaded = offloaded
        self._runner = runner
        self._lagged = self._extends = None
        if offloaded is not None:
            self._lagged = LaggedSelection(backend, offloaded, self._page)
            self._extends = OffloadedExtends(planner, backend, offloaded, self._lagged, statistics)
        self._requests: OffloadedRequests | None = None
        self._shown: Any = None  # of the latest step, in the metrics
        self._mixes: bool | None = None  # SGLang's setting
        log.info("page statistics take %.1f MiB", statistics.bytes / 2**20)

    def attach(self, tree: DocumentRadixCache, ranks: Ranks) -> None:
        """``tree``: SGLang's prefix cache, if it is ours; nothing is offloaded otherwise. ``ranks``: those
        that vote."""
        if self._offloaded is not None:
            self._offloaded.attach(tree, ranks)
            segments, inject = None, self._config.inject_tokens
            if self._runner is not None and inject != 0:
                segments = SegmentedPrefill(self._planner, self._offloaded, tree, self._runner, inject)
            self._requests = OffloadedRequests(self._planner, self.backend, self._offloaded, tree, segments)

    def read_documents(self, tiers: TierStore, rotation: Rotation) -> None:
        """Let offloaded requests read composed contexts in their documents' host pages, without copies.

        ``tiers``: the `TierStore`; contexts are copied where keys rotate by neighbours."""
        offloaded = self._offloaded
        if offloaded is not None and rotation.neox and tiers.shape.dtype == offloaded.kv.dtype:
            offloaded.documents = HostDocuments(tiers, rotation, offloaded.copies, offloaded.kv.device)
            if offloaded.contexts is not None and offloaded.contexts.shape == tiers.shape:
                offloaded.contexts.open(offloaded.documents.host)

    def on_request(self, req: Any) -> str | None:
        """Read a new request's options. Return the reason to refuse it, or None."""
        try:
            self._planner.admit(req)
            self._prefill.admit(req)
        except PlanError as error:
            return str(error)
        offloaded, options = self._offloaded, self._planner.state(req).options
        if offloaded is None or not options.offloaded or not self.may_lag(req):
            return None
        if not offloaded.ready:
            return "offloaded decoding: the prefix cache of this model is not ragserve's"
        tokens, most = len(req.origin_input_ids), offloaded.pages.capacity
        pages = tokens // self._page if self._planner.is_lagging(req, tokens) else 0
        # a composed prompt keeps less
        if pages > most and options.offloaded is True and getattr(req, "ragserve", None) is None:
            return (
                f"offloaded decoding: the prompt takes {pages} host pages and kv_offload_bytes holds "
                f"{most}: raise it, or ask with offloaded=false"
            )
        segments = None if self._requests is None else self._requests.segments
        return None if segments is None else segments.show_end(req)

    def may_lag(self, req: Any) -> bool:
        """Return whether a request chooses pages for later steps, as those that may be offloaded do."""
        return self._planner.state(req).options.lag_steps > 0

    def before_schedule(self, scheduler: Any, running_batch: Any) -> None:
        """Let offloaded requests change what they hold, before SGLang decides on its next batch.

        A decode row in a prefill batch would be dense: rows whose prompt is not there are not mixed."""
        if self._lagged is None:
            return
        if self._offloaded is not None and self._offloaded.ready:
            self._offloaded.slots.promised = sglang_requests.slots_to_come(scheduler.chunked_req, self._page)
        if self._requests is not None:
            queued = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
            if self._requests.before_schedule(queued):
                running_batch.batch_is_full = False
        if self._mixes is None:
            self._mixes = bool(scheduler.is_mixed_chunk)
        lagging = any(map(self.may_lag, running_batch.reqs))
        scheduler.is_mixed_chunk = self._mixes and not lagging
        # SGLang asks no further once a request found no room; more than so many it does not run anyway
        waiting = running_batch.batch_is_full and len(scheduler.waiting_queue) > 0
        short = waiting and len(running_batch.reqs) < scheduler.max_running_requests
        rows = [self._planner.state(req).offload.row for req in running_batch.reqs] if lagging else []
        if self._lagged.before_schedule(rows, short=short):
            running_batch.batch_is_full = False

    def due_tokens(self, reqs: Iterable[Any]) -> int:
        """Return the slots to keep free for the resident blocks of the next of these requests that will be
        offloaded.
        """
        offloaded = self._offloaded
        if offloaded is None or not offloaded.ready:
            return 0
        most = offloaded.due_tokens // self._page
        for req in reqs:
            state = self._planner.state(req)
            options, offload = state.options, state.offload
            if offload.row is None and offload.prefix is None and options.offloaded and options.lag_steps:
                resident_blocks = offloaded.resident_blocks_of(
                    options.budget // self._page, options.resident_blocks
                )
                if len(req.origin_input_ids) > resident_blocks * self._page:  # others are never offloaded
                    most = max(most, resident_blocks)
        return most * self._page

    def exact_tokens(self, req: Any, tokens: int) -> int:
        """Return how many of a request's first ``tokens`` have exact KV, before `give_back`."""
        state: DecodeState | None = getattr(req, "ragserve_decode", None)
        return tokens if state is None or state.sparse_from is None else min(tokens, state.sparse_from)

    def give_back(self, req: Any) -> None:
        """Free the host pages and resident blocks of a request that ends. A retracted one keeps its KV on the
        host, if there is room for what follows the prompt, and its page selection."""
        state: DecodeState | None = getattr(req, "ragserve_decode", None)
        if state is not None and self._requests is not None:
            self._requests.give_back(req, state)
        if state is not None and state.offload.prefix is None:
            state.forget_selection()

    def admit(self, adder: Any, req: Any, add: Callable[[], Any]) -> Any:
        """Admit a request whose KV is on the host: see `OffloadedRequests.admit`."""
        return None if self._requests is None else self._requests.admit(adder, req, add)

    @property
    def offloaded(self) -> OffloadedRows | None:
        """What offloaded requests have; None where there are none."""
        return self._offloaded

    @property
    def requests(self) -> OffloadedRequests | None:
        """Requests whose KV is on the host; None where there are none."""
        return self._requests

    def before_forward(self, batch: Any) -> None:
        """Plan a decode step, or note what an extend writes (before its composed slots are filled)."""
        mode = batch.forward_mode
        if self._offloaded is not None:
            self._offloaded.join()  # an extend, too, may write to resident blocks that have been given back
        if mode.is_decode():
            self._decoding = list(batch.reqs)
            lengths = batch.seq_lens_cpu.tolist()
            in_graph = len(batch.reqs) <= self.backend.graph_size
            self._step = self._planner.step(batch.reqs, lengths, in_graph=in_graph)
            self.backend.begin(self._step)
            if self._lagged is not None:
                self._lagged.before(self._step)
        elif mode.is_extend():
            self._decoding = []  # one that was retracted may be on its way in again
            ends = batch.seq_lens_cpu.tolist()
            decoding = len(batch.decoding_reqs) if mode.is_mixed() else 0
            prompts = len(ends) - decoding
            spans = list(zip(batch.prefix_lens, ends, strict=True))[:prompts]
            asked = self._planner.asked(batch.reqs[:prompts], spans)
            apart: tuple[Any, ...] = ()
            if self._extends is not None:
                self._extends.before(batch.reqs[:prompts], spans)
                asked, apart = (*asked, *self._extends.asked), self._extends.parts
            self._spans = [
                (row_of(req), self._first_written(req, prefix), end)
                for req, prefix, end in zip(batch.reqs, batch.prefix_lens, ends, strict=True)
            ]
            prefixes = tuple((row, start) for row, start, _ in self._spans)
            rows = [
                (row, prefix, end)
                for (row, _, end), prefix in zip(self._spans, batch.prefix_lens, strict=True)
            ]
            prefill = self._prefill.plan(batch.reqs, rows)
            self.backend.begin(Step(prefixes=prefixes, asked=asked, apart=apart, prefill=prefill))
            if decoding:  # decode rows of a prefill batch, its last ones, are dense
                for req, end in zip(batch.reqs[-decoding:], ends[-decoding:], strict=True):
                    self._account_dense(self._planner.state(req), end)

    def after_forward(self) -> None:
        """Let statistics of what the pass fills follow it on its stream. The pass has been launched."""
        self._statistics.follow()
        if self._spans:
            if self.backend.prefill is not None:
                self._prefill.count(self.backend.prefill.rows, self.backend.prefill.computed())
            self._statistics.after_extend(self._spans)
            self._spans = []
            if self._extends is not None:
                self._extends.after()
            self.backend.begin(IDLE)
        if self._step is not None:
            step, self._step = self._step, None
            self._account(step)
            if self._lagged is not None:
                self._lagged.after(step, self._decoding)
                self._count_requests(step)
            self._planner.after(step)
            self.backend.begin(IDLE)

    def forget_step(self) -> None:
        """Let the step at hand be dense and leave its pages without statistics: its requests have failed."""
        self._spans, self._step = [], None
        if self._extends is not None:
            self._extends.drop()
        self.backend.begin(IDLE)

    def on_cached(self, req: Any, node: Any) -> None:
        """The KV of a request is in the prefix cache, up to this node of the tree."""
        self._prefill.cached(req, node)

    def on_evicted(self, node: Any) -> None:
        """A node has left the prefix cache."""
        self._prefill.kept.forget(node)

    def on_finished(self, req: Any, tokens: int) -> None:
        """Report on a request whose KV of ``tokens`` tokens goes to the cache or is freed.

        Its last page may be just full."""
        self._statistics.after_request(row_of(req), tokens)
        if (prefilled := self._prefill.finished(req)) is not None:
            if self.backend.rank == 0:
                prefill_metrics().observe(prefilled)
            sglang_requests.tell(req, PREFILL_FIELD, prefilled.to_json())
        state: DecodeState | None = getattr(req, "ragserve_decode", None)
        if state is None or state.options.mode == "dense" or not state.account.steps:
            return
        self._collect()
        if state.offload.row is not None:
            state.offload.row.collect()
        report = state.report()
        if self.backend.rank == 0:  # the other ranks have read as much, for heads of their own
            decode_metrics().observe(report)
        sglang_requests.tell(req, DECODE_FIELD, report.to_json())

    def limit_link(self, rate: float) -> None:
        """Let loads of this rank's offloaded requests take so many bytes a second; 0: what is measured."""
        if self._offloaded is not None:
            self._offloaded.bounds.link.given = rate

    def capture(self, runner: Any, capture_one: Callable[[str], Any]) -> None:
        """Capture the other variants' graphs of a batch size, under their labels.

        SGLang has just captured its decode graph, which is the dense variant."""
        if runner.capture_forward_mode.is_decode():
            for variant in (Variant.SELECTED, Variant.REUSED, Variant.REFRESHED, Variant.PROGRESSIVE):
                self.backend.begin(Step(variant))
                try:
                    capture_one(str(variant.value))
                finally:
                    self.backend.begin(IDLE)

    def describe(self) -> dict[str, Any]:
        """Return the settings, for the control channel."""
        config = self._config
        return {
            "wraps": type(self.backend.wrapped).__name__,
            "page_size": self._page,
            "logical_page": config.logical_page,
            "default": config.options.model_dump(),
            "prefill": config.prefill.model_dump(),
            "kept_lines": {"prompts": len(self._prefill.kept), "bytes": self._prefill.kept.bytes},
            "max_budget": config.max_budget,
            "streaming_heads": self.backend.streaming_share,
            "kv_bits": config.kv_bits,
            "statistics_bytes": self._statistics.bytes,
            "offloaded": self._describe_offloaded(),
        }

    def _describe_offloaded(self) -> dict[str, Any] | None:
        if self._offloaded is None:
            return None
        segments = None if self._requests is None else self._requests.segments
        return {**self._offloaded.describe(), "prefilling": None if segments is None else segments.running}

    def check_integrity(self, tree: DocumentRadixCache) -> None:
        """Compare the statistics of pages with their keys, in the prefix cache and in decoding requests.

        Left out is each decoding request's newest full page, which the next step sees to.

        Raises:
            RuntimeError: statistics are stale.
        """
        statistics = self._statistics
        statistics.settle()
        if self._offloaded is not None:
            self._offloaded.check()
        cached = tree.cached_slots() // self._page
        decoding = [
            self._decoded_pages(req)
            for req in self._decoding
            if row_of(req) is not None and not req.finished() and not req.is_retracted
        ]
        for whose, pages in (("cached", cached), *(("decoding", pages) for pages in decoding)):
            bad = statistics.differing(pages) if len(pages) else []
            if bad:
                raise RuntimeError(f"the statistics of {len(bad)} {whose} pages are stale: {bad[:10]}")

    def _first_written(self, req: Any, prefix: int) -> int:
        """Return the first token whose KV the extend at hand writes, or brings to the device before it."""
        from sglang_ext.context.compose.request import is_composed

        offloaded = self._planner.state(req).offload.row
        if offloaded is not None and offloaded.moved:
            return offloaded.pages * self._page
        return 0 if is_composed(req) and not req.ragserve.filled else prefix

    def _count_requests(self, step: Step) -> None:
        """Show how many requests of each kind a step has, where that changes."""
        rows = [row.state.offload.row for row in step.rows]
        offloaded = sum(row is not None and row.moved for row in rows)
        copying = sum(row is not None and not row.moved for row in rows)
        kinds = offloaded, copying, len(rows) - offloaded - copying
        shown = (kinds, {} if self._offloaded is None else self._offloaded.describe())
        if self.backend.rank == 0 and shown != self._shown:
            decode_metrics().hold(*kinds)
            decode_metrics().bound(shown[1])
            self._shown = shown

    def _decoded_pages(self, req: Any) -> torch.Tensor:
        """Return the full pages of a decoding request that hold its own tokens, int32."""
        full = max(0, len(req.origin_input_ids) + len(req.output_ids) - 2) // self._page
        row = self._planner.state(req).offload.row
        first = row.pages if row is not None and row.moved else 0  # before them are resident blocks
        return self._statistics.pages_of(row_of(req), full)[first:]

    def _account(self, step: Step) -> None:
        share = self.backend.streaming_share
        dense = self.backend.dense_share
        for row in step.rows:
            if not row.sparse:
                self._account_dense(row.state, row.tokens)
                continue
            state, account, total = row.state, row.state.account, -(-row.tokens // self._page)
            if not row.progressive:  # these are counted with the pages that they have read
                account.step(total, sparse=True)
            state.note_sparse(row.tokens - 1)  # its newest token, whose KV the step writes
            offloaded = state.offload.row
            state.counts.offloaded_steps += offloaded is not None and offloaded.moved
            streaming = share if row.streaming else 0.0
            if streaming:
                account.read(streaming * self._streaming_pages(row.tokens, total))
            if row.hierarchical:
                budget = min(state.options.budget // self._page, total) + state.selection.widened
                account.read((1 - streaming) * ((1 - dense) * budget + dense * total))
        if step.variant is Variant.PROGRESSIVE:
            use = self.backend.progressive_use(len(step.rows))
            event = None
            if use.is_cuda:
                use = use.to("cpu", non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            read = (row.state.offload.row for row in step.rows)
            sizes = tuple(0 if each is None else each.head_bytes for each in read)
            self._pending.append(_Pending(event, use, step.rows, sizes))
        self._collect()

    def _account_dense(self, state: DecodeState, tokens: int) -> None:
        pages = -(-tokens // self._page)
        state.account.step(pages, sparse=False)
        state.account.read(pages)

    def _collect(self) -> None:
        while self._pending and (self._pending[0].event is None or self._pending[0].event.query()):
            arrived = self._pending.popleft()
            used = zip(arrived.rows, arrived.head_bytes, *arrived.use.tolist(), strict=True)
            for row, head_bytes, pages, weight, reads in used:
                if not row.progressive:
                    continue
                if self._offloaded is not None:
                    self._offloaded.count_reads(row.state.counts, int(reads), head_bytes)
                account = row.state.account
                account.step(-(-row.tokens // self._page), sparse=True)
                streaming = self.backend.streaming_share if row.streaming else 0.0
                account.read(pages)
                if streaming < 1:  # streaming heads estimate nothing and count as 1
                    account.estimate((weight - streaming) / (1 - streaming))

    def _streaming_pages(self, tokens: int, total: int) -> int:
        """Return the pages that a streaming head reads, as `ragserve_kernels.sparse_decode` counts them."""
        sink = min(-(-self._config.sink_tokens // self._page), total)
        local = max(max(tokens - self._config.local_tokens, 0) // self._page, sink)
        return sink + total - local
