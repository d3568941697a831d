"""Requests' decode options and accounts, and what a decode step knows of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_ext.kv_offload.host_prefix import HostPrefix
from sglang_ext.kv_offload.resident.offloaded_row import OffloadCounts, OffloadedRow
from sglang_ext.wire.protocol import DecodeOptions, DecodeReport


@dataclass(slots=True)
class DecodeState:
    """A request's options and what its steps have read so far.

    Page counts are means over layers and KV heads, summed over steps.

    Attributes:
        serves_from: the request's tokens in the first step that reads the pages chosen for it.
        newest: the latest page among those.
        widened: that page began after they were chosen, and is one more than the budget.
        chosen_at: with a lag: the request's tokens in the step that made its latest selection; 0: none yet.
        pending_from: with a lag: its tokens in the first step that reads that selection; 0: it is read
            already.
        pending_newest: the latest page among those of the pending selection.
        first_tokens: with a lag: its tokens in its first step since it has been prefilled.
        tokens: with a lag: its tokens in its latest step.
        kept: with a lag: `lagged_selection.KeptSelection`, the chosen pages outside of the step's tables.
        offloaded: None for a request whose KV is on the device.
        prefix: KV on the host of a request that waits to be admitted with it; None for others.
        whole: the prompt, while SGLang sees its last token only: it is larger than the pool, and its prefill
            has not begun.
        segmented: the prompt is prefilled by segments, or has been.
        sparse_from: the first token whose KV a sparse step has computed; None: all KV is exact.
        selections: how often pages have been chosen at once or for the next step.
        observed: queries in the mean that pages are chosen by, at most the window.
        asked: `prompt_queries.PromptMean`; None if no pass has shown the queries of the prompt's end.
    """

    options: DecodeOptions
    serves_from: int = 0
    newest: int = -1
    widened: bool = False
    chosen_at: int = 0
    pending_from: int = 0
    pending_newest: int = -1
    first_tokens: int = 0
    tokens: int = 0
    kept: Any = None
    offloaded: OffloadedRow | None = None
    prefix: HostPrefix | None = None
    whole: Any = None
    segmented: bool = False
    sparse_from: int | None = None
    offload_counts: OffloadCounts = field(default_factory=OffloadCounts)
    selections: int = 0
    observed: int = 0
    asked: Any = None
    steps: int = 0
    sparse_steps: int = 0
    pages: float = 0.0
    context_pages: float = 0.0  # pages that a dense step would read
    weights: list[float] = field(default_factory=lambda: [0.0, 0.0])  # sum of the estimates, their number

    def report(self) -> DecodeReport:
        """Return means over the steps so far."""
        steps = max(1, self.steps)
        return DecodeReport(
            mode=self.options.mode,
            steps=self.steps,
            sparse_steps=self.sparse_steps,
            pages=self.pages / steps,
            pages_held=self.context_pages / steps,
            share=self.pages / self.context_pages if self.context_pages else 1.0,
            weight=self.weights[0] / self.weights[1] if self.weights[1] else None,
            lag=self.options.lag_steps,
            **asdict(self.offload_counts),
        )

    def forget_selection(self) -> None:
        """The request loses its slots: it ends, or is retracted and begins anew."""
        self.serves_from, self.newest, self.widened = 0, -1, False
        self.chosen_at = self.pending_from = self.selections = self.observed = 0
        self.kept = self.asked = self.sparse_from = None


@dataclass(frozen=True, slots=True)
class Row:
    """A request in a decode step of ``tokens`` tokens, the newest included."""

    state: DecodeState
    tokens: int
    sparse: bool

    @property
    def hierarchical(self) -> bool:
        return self.sparse and self.state.options.mode == "hierarchical"

    @property
    def lag(self) -> int:
        """Steps between a selection and its use; 0 for rows that choose as `StepPlanner` says of all
        others.
        """
        return self.state.options.lag_steps if self.sparse else 0

    @property
    def recent(self) -> bool:
        """It reads the first and the newest pages, which no query chooses."""
        return self.hierarchical and self.state.options.observe == "recent"

    @property
    def exact(self) -> bool:
        return self.hierarchical and self.state.options.scores == "exact"

    @property
    def progressive(self) -> bool:
        return self.sparse and self.state.options.mode == "progressive"

    @property
    def streaming(self) -> bool:
        return self.sparse and self.state.options.streaming
