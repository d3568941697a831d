"""Requests' decode options and accounts, and what a decode step knows of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from ragserve_kernels.paged import PageSelection
from sglang_ext.attention.decode.observed_queries import ObservedQueries
from sglang_ext.attention.decode.offload_state import OffloadState, SegmentedPrompt
from sglang_ext.wire.protocol import DecodeOptions, DecodeReport, OffloadCounts


@dataclass(slots=True)
class Selection:
    """When a request's pages were selected, and for which steps. Written by `StepPlanner`.

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
        count: how often pages have been chosen at once or for the next step.
    """

    serves_from: int = 0
    newest: int = -1
    widened: bool = False
    chosen_at: int = 0
    pending_from: int = 0
    pending_newest: int = -1
    first_tokens: int = 0
    tokens: int = 0
    count: int = 0


@dataclass(slots=True)
class KeptSelection:
    """A row's chosen pages, in all layers: [layers, kv_heads, capacity] and [layers, kv_heads]. Written by
    `LaggedSelection`.

    ``current``: what it reads, but for a page that has begun since; ``pending``: what it will read.
    ``named``, ``pending_named``: the same, with the logical pages that were chosen in place of resident
    blocks."""

    current: PageSelection
    named: PageSelection
    pending: PageSelection | None = None
    pending_named: PageSelection | None = None


@dataclass(slots=True)
class Account:
    """What a request's steps have read so far. Changed by its methods only, which `DecodeRuntime` calls.

    Page counts are means over layers and KV heads, summed over steps.

    Attributes:
        context_pages: pages that dense steps would have read.
        weight: sum of the ``estimates`` of the attention weight in the pages read.
    """

    steps: int = 0
    sparse_steps: int = 0
    pages: float = 0.0
    context_pages: float = 0.0
    weight: float = 0.0
    estimates: int = 0

    def step(self, context_pages: int, *, sparse: bool) -> None:
        """Count a step of a context of so many pages."""
        self.steps += 1
        self.sparse_steps += sparse
        self.context_pages += context_pages

    def read(self, pages: float) -> None:
        """Count pages that a step has read, the mean over layers and KV heads."""
        self.pages += pages

    def estimate(self, weight: float) -> None:
        """Count an estimate of the attention weight in the pages that a step has read."""
        self.weight += weight
        self.estimates += 1


@dataclass(slots=True)
class DecodeState:
    """A request's options, and what its steps know of it: each part is written by one module.

    Attributes:
        kept: with a lag: the chosen pages outside of the step's tables; None: none have been chosen.
        sparse_from: the first token whose KV a sparse step has computed; None: all KV is exact.
        counts: pages and bytes moved by offloading, counted where they move.
    """

    options: DecodeOptions
    selection: Selection = field(default_factory=Selection)
    kept: KeptSelection | None = None
    sparse_from: int | None = None
    queries: ObservedQueries = field(default_factory=ObservedQueries)
    offload: OffloadState = field(default_factory=OffloadState)
    prompt: SegmentedPrompt = field(default_factory=SegmentedPrompt)
    counts: OffloadCounts = field(default_factory=OffloadCounts)
    account: Account = field(default_factory=Account)

    def report(self) -> DecodeReport:
        """Return means over the steps so far."""
        account, steps = self.account, max(1, self.account.steps)
        return DecodeReport(
            mode=self.options.mode,
            steps=account.steps,
            sparse_steps=account.sparse_steps,
            pages=account.pages / steps,
            pages_held=account.context_pages / steps,
            share=account.pages / account.context_pages if account.context_pages else 1.0,
            weight=account.weight / account.estimates if account.estimates else None,
            lag=self.options.lag_steps,
            **asdict(self.counts),
        )

    def note_sparse(self, token: int) -> None:
        """A sparse step computes the KV of ``token``."""
        if self.sparse_from is None:
            self.sparse_from = token

    def forget_selection(self) -> None:
        """The request loses its slots: it ends, or is retracted and begins anew."""
        self.selection, self.kept, self.sparse_from = Selection(), None, None
        self.queries.forget()


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
