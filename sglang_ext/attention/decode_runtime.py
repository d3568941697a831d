"""Sparse decoding in the scheduler: around every forward pass, at the start and end of every request."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext.attention.backend import SparseDecodeBackend
from sglang_ext.attention.config import AttentionConfig
from sglang_ext.attention.metrics import decode_metrics
from sglang_ext.attention.page_stats import PageStatistics
from sglang_ext.attention.step_planner import IDLE, DecodeState, Row, Step, StepPlanner, Variant
from sglang_ext.protocol import DECODE_FIELD, PlanError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    """Counts of pages that progressive rows read, in flight from the device; ``event`` is None if it has
    arrived.
    """

    event: Any
    use: torch.Tensor  # float [2, rows]: pages, weight
    rows: tuple[Row, ...]


class DecodeRuntime:
    """Owns the step planner and the page statistics, and hands the backend one step per forward pass.

    Called by `sglang_ext.hooks` and the control channel; one per process, scheduler thread only."""

    def __init__(
        self,
        config: AttentionConfig,
        planner: StepPlanner,
        statistics: PageStatistics,
        backend: SparseDecodeBackend,
    ) -> None:
        self.backend = backend
        self._config = config
        self._planner = planner
        self._statistics = statistics
        self._page = statistics.page_size
        self._spans: list[tuple[int, int, int]] = []  # of the extend at hand
        self._step: Step | None = None  # the decode step at hand
        self._decoding: list[Any] = []  # requests of the latest decode step
        self._pending: deque[_Pending] = deque()
        log.info("page statistics take %.1f MiB", statistics.bytes / 2**20)

    def on_request(self, req: Any) -> str | None:
        """Read a new request's options. Return the reason to refuse it, or None."""
        try:
            self._planner.admit(req)
        except PlanError as error:
            return str(error)
        return None

    def before_forward(self, batch: Any) -> None:
        """Plan a decode step, or note what an extend writes (before its composed slots are filled)."""
        mode = batch.forward_mode
        if mode.is_decode():
            self._decoding = list(batch.reqs)
            lengths = batch.seq_lens_cpu.tolist()
            in_graph = len(batch.reqs) <= self.backend.graph_size
            self._step = self._planner.step(batch.reqs, lengths, in_graph=in_graph)
            self.backend.begin(self._step)
        elif mode.is_extend():
            self._decoding = []  # one that was retracted may be on its way in again
            ends = batch.seq_lens_cpu.tolist()
            self._spans = [
                (req.req_pool_idx, 0 if _fills(req) else prefix, end)
                for req, prefix, end in zip(batch.reqs, batch.prefix_lens, ends, strict=True)
            ]
            self.backend.begin(Step(prefixes=tuple((row, start) for row, start, _ in self._spans)))
            if mode.is_mixed():  # decode rows of a prefill batch, its last ones, are dense
                decoding = len(batch.decoding_reqs)
                for req, end in zip(batch.reqs[-decoding:], ends[-decoding:], strict=True):
                    self._account_dense(self._planner.state(req), end)

    def after_forward(self) -> None:
        """Let statistics of what the pass fills follow it on its stream. The pass has been launched."""
        self._statistics.follow()
        if self._spans:
            self._statistics.after_extend(self._spans)
            self._spans = []
            self.backend.begin(IDLE)
        if self._step is not None:
            step, self._step = self._step, None
            self._account(step)
            self._planner.after(step)
            self.backend.begin(IDLE)

    def forget_step(self) -> None:
        """Let the step at hand be dense and leave its pages without statistics: its requests have failed."""
        self._spans, self._step = [], None
        self.backend.begin(IDLE)

    def on_finished(self, req: Any, tokens: int) -> None:
        """Report on a request whose KV of ``tokens`` tokens goes to the cache or is freed.

        Its last page may be just full."""
        self._statistics.after_request(req.req_pool_idx, tokens)
        state: DecodeState | None = getattr(req, "ragserve_decode", None)
        if state is None or state.options.mode == "dense" or not state.steps:
            return
        self._collect()
        report = state.report()
        if self.backend.rank == 0:  # the other ranks have read as much, for heads of their own
            decode_metrics().observe(report)
        # SGLang sends one value per token; the report goes with the last one.
        count = len(req.output_ids_through_stop)
        if count:
            req.customized_info = (req.customized_info or {}) | {
                DECODE_FIELD: [None] * (count - 1) + [report.to_json()]
            }

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
            "max_budget": config.max_budget,
            "streaming_heads": self.backend.streaming_share,
            "kv_bits": config.kv_bits,
            "statistics_bytes": self._statistics.bytes,
        }

    def check_integrity(self, tree: Any) -> None:
        """Compare the statistics of pages with their keys, in the prefix cache and in decoding requests.

        Left out is each decoding request's newest full page, which the next step sees to.

        Raises:
            RuntimeError: statistics are stale.
        """
        statistics = self._statistics
        statistics.settle()
        cached = tree.cached_slots() // self._page
        decoding = [
            statistics.pages_of(
                req.req_pool_idx, max(0, len(req.origin_input_ids) + len(req.output_ids) - 2) // self._page
            )
            for req in self._decoding
            if req.req_pool_idx is not None and not req.finished() and not req.is_retracted
        ]
        for whose, pages in (("cached", cached), *(("decoding", pages) for pages in decoding)):
            bad = statistics.differing(pages) if len(pages) else []
            if bad:
                raise RuntimeError(f"the statistics of {len(bad)} {whose} pages are stale: {bad[:10]}")

    def _account(self, step: Step) -> None:
        share = self.backend.streaming_share
        for row in step.rows:
            if not row.sparse:
                self._account_dense(row.state, row.tokens)
                continue
            state, total = row.state, -(-row.tokens // self._page)
            state.steps += 1
            state.context_pages += total
            state.sparse_steps += 1
            streaming = share if row.streaming else 0.0
            if streaming:
                state.pages += streaming * self._streaming_pages(row.tokens, total)
            if row.hierarchical:
                state.pages += (1 - streaming) * (
                    min(state.options.budget // self._page, total) + state.widened
                )
        if step.variant is Variant.PROGRESSIVE:
            use = self.backend.progressive_use(len(step.rows))
            event = None
            if use.is_cuda:
                use = use.to("cpu", non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._pending.append(_Pending(event, use, step.rows))
        self._collect()

    def _account_dense(self, state: DecodeState, tokens: int) -> None:
        pages = -(-tokens // self._page)
        state.steps += 1
        state.context_pages += pages
        state.pages += pages

    def _collect(self) -> None:
        while self._pending and (self._pending[0].event is None or self._pending[0].event.query()):
            arrived = self._pending.popleft()
            for row, pages, weight in zip(arrived.rows, *arrived.use.tolist(), strict=True):
                if not row.progressive:
                    continue
                streaming = self.backend.streaming_share if row.streaming else 0.0
                row.state.pages += pages
                if streaming < 1:  # streaming heads estimate nothing and count as 1
                    row.state.weights[0] += (weight - streaming) / (1 - streaming)
                    row.state.weights[1] += 1

    def _streaming_pages(self, tokens: int, total: int) -> int:
        """Return the pages that a streaming head reads, as `ragserve_kernels.sparse_decode` counts them."""
        config = self._config
        sink = min(-(-config.sink_tokens // self._page), total)
        local = max(max(tokens - config.local_tokens, 0) // self._page, sink)
        return sink + total - local


def _fills(req: Any) -> bool:
    """Return True if the next forward pass also fills the request's composed context."""
    from sglang_ext.context.compose.request import is_composed

    return is_composed(req) and not req.ragserve.filled
