"""Requests' decode options and accounts, and the plan of each decode step. Host only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sglang_ext.attention.config import AttentionConfig
from sglang_ext.protocol import DECODE_FIELD, DecodeOptions, DecodeReport, PlanError

FORCED_PAGES = 2  # the first and the newest page, attended to whatever their score


class Variant(Enum):
    """Kind of attention in a decode step. The value labels its CUDA graph, where graphs are on."""

    DENSE = None  # the wrapped backend, for every row
    SELECTED = (
        "ragserve-selected"  # pages within a budget; some rows choose theirs in this step, layer by layer
    )
    REUSED = "ragserve-reused"  # the same, all rows with pages of an earlier step
    # as REUSED; at its end pages are chosen for later steps, in all layers at once
    REFRESHED = "ragserve-refreshed"
    PROGRESSIVE = "ragserve-progressive"  # some rows by threshold; others dense or by budget


@dataclass(slots=True)
class DecodeState:
    """A request's options and what its steps have read so far.

    Page counts are means over layers and KV heads, summed over steps.

    Attributes:
        serves_from: the request's tokens in the first step that reads the pages chosen for it.
        newest: the latest page among those.
        widened: that page began after they were chosen, and is one more than the budget.
    """

    options: DecodeOptions
    serves_from: int = 0
    newest: int = -1
    widened: bool = False
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
        )


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
    def progressive(self) -> bool:
        return self.sparse and self.state.options.mode == "progressive"

    @property
    def streaming(self) -> bool:
        return self.sparse and self.state.options.streaming


@dataclass(frozen=True, slots=True)
class Step:
    """Plan of the next forward pass; the backend gets one per pass.

    Attributes:
        variant: of a decode step.
        rows: the requests of a decode step.
        active: per row, whether it chooses its pages in this step.
        opened: per row, whether its newest page is new and joins those chosen for it.
        changed: the rows differ from those of the step before.
        kept: per row, its place in the step before if its pages stay, else -1.
        prefixes: of an extend: per request its row of the request table, and how many of its tokens are in
            the pool.
    """

    variant: Variant = Variant.DENSE
    rows: tuple[Row, ...] = ()
    active: tuple[bool, ...] = ()
    opened: tuple[bool, ...] = ()
    changed: bool = False
    kept: tuple[int, ...] = ()
    prefixes: tuple[tuple[int, int], ...] = ()


IDLE = Step()
"""The plan while no forward pass of ours is under way."""


class StepPlanner:
    """Plans decode steps on the host, from lengths that it knows anyway: nothing waits for the device.

    A row's pages serve ``reuse`` steps and stay with it when others join or leave the batch. A page that
    begins meanwhile joins them; when a second one begins, or if the row has none yet, its pages are chosen at
    once. Otherwise they are chosen at the end of the step before, by its queries, for all layers in one
    launch. Rows in the last three quarters of their interval come along, so that the rows of a batch end up
    choosing together. With ``reuse`` 1 every step chooses at once, by its own queries."""

    def __init__(self, config: AttentionConfig, page_size: int, context_length: int) -> None:
        self._config = config
        self._page = page_size
        self._context_length = context_length
        self._before: tuple[Row, ...] = ()  # of the step before
        self._in_graph: bool | None = None  # whose tables the step before used
        self.check(config.options)

    def admit(self, req: Any) -> None:
        """Give a new request its state.

        Raises:
            PlanError: options that cannot be served; the request then has the server's default ones.
        """
        req.ragserve_decode = DecodeState(self._config.options)
        params = req.sampling_params.custom_params
        text = params.get(DECODE_FIELD) if isinstance(params, dict) else None
        if text is not None:
            options = self._config.options.from_request(str(text))
            self.check(options)
            req.ragserve_decode = DecodeState(options)

    def check(self, options: DecodeOptions) -> None:
        """Check options against this server.

        Raises:
            PlanError: a budget smaller than the pages that are always read or wider than the tables, or
                streaming heads without a pattern.
        """
        if options.mode == "hierarchical":
            smallest = FORCED_PAGES * self._page
            if options.budget < smallest:
                raise PlanError(
                    f"a budget of {options.budget} tokens: the first and the newest page alone take "
                    f"{smallest}, of {self._page} tokens each"
                )
            if self._config.max_budget < options.budget < self._context_length:
                raise PlanError(
                    f"a budget of {options.budget} tokens: this server's largest is {self._config.max_budget}"
                )
        if options.streaming and self._config.heads is None:
            raise PlanError("streaming heads: this server was started without a pattern file of them")

    def step(self, reqs: Sequence[Any], lengths: Sequence[int], *, in_graph: bool = False) -> Step:
        """Plan the decode step of these requests.

        Args:
            reqs: the batch.
            lengths: tokens of each request, the newest included.
            in_graph: the step uses the tables of the CUDA graphs. If the step before used others, no page is
                chosen yet.
        """
        rows = tuple(self._row(req, tokens) for req, tokens in zip(reqs, lengths, strict=True))
        before = self._before if in_graph is self._in_graph else ()
        self._before, self._in_graph = rows, in_graph
        changed = [(id(row.state), row.sparse) for row in rows] != [
            (id(row.state), row.sparse) for row in before
        ]
        places = {id(row.state): place for place, row in enumerate(before) if row.hierarchical}
        kept = tuple(places.get(id(row.state), -1) if row.hierarchical else -1 for row in rows)
        active = tuple(
            row.hierarchical and (place < 0 or self._is_due(row))
            for row, place in zip(rows, kept, strict=True)
        )
        opened = tuple(
            row.hierarchical and not chosen and self._newest(row) != row.state.newest
            for row, chosen in zip(rows, active, strict=True)
        )
        for row, chosen, new in zip(rows, active, opened, strict=True):
            if chosen:
                self._choose(row, row.tokens)
            elif new:
                row.state.newest, row.state.widened = self._newest(row), True
        if any(row.progressive for row in rows):
            variant = Variant.PROGRESSIVE
        elif any(active):
            variant = Variant.SELECTED
        elif any(self._age(row) + 1 == row.state.options.reuse for row in rows if row.hierarchical):
            variant = Variant.REFRESHED
            active = tuple(
                row.hierarchical and 4 * (self._age(row) + 1) >= row.state.options.reuse for row in rows
            )
        elif any(row.sparse for row in rows):
            variant = Variant.REUSED
        else:
            variant = Variant.DENSE
        return Step(variant, rows, active, opened, changed, kept)

    def after(self, step: Step) -> None:
        """Note that the step has been launched: pages that it chose for later steps hold from now on."""
        if step.variant is Variant.REFRESHED:
            for row, chosen in zip(step.rows, step.active, strict=True):
                if chosen:
                    self._choose(row, row.tokens + 1)

    def state(self, req: Any) -> DecodeState:
        """Return a request's state; a request that SGLang made for itself is dense."""
        state: DecodeState | None = getattr(req, "ragserve_decode", None)
        if state is None:
            state = req.ragserve_decode = DecodeState(DecodeOptions())
        return state

    def _newest(self, row: Row) -> int:
        return (row.tokens - 1) // self._page

    @staticmethod
    def _age(row: Row) -> int:
        """Return how many steps the row's pages have served."""
        return row.tokens - row.state.serves_from

    def _is_due(self, row: Row) -> bool:
        """Return True if pages must be chosen before this step: too old, or more than one page behind."""
        ahead = self._newest(row) - row.state.newest
        return self._age(row) >= row.state.options.reuse or ahead > 1 or (ahead == 1 and row.state.widened)

    def _choose(self, row: Row, serves_from: int) -> None:
        row.state.serves_from, row.state.newest, row.state.widened = serves_from, self._newest(row), False

    def _row(self, req: Any, tokens: int) -> Row:
        state = self.state(req)
        options = state.options
        dense_up_to = max(options.dense_below, options.budget if options.mode == "hierarchical" else 0)
        return Row(state, tokens, options.mode != "dense" and tokens > dense_up_to)
