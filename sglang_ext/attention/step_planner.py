"""The scheduler's side of sparse decoding: what each request asks for, which rows of a batch are sparse in a
step, and what was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sglang_ext.attention.config import AttentionConfig
from sglang_ext.protocol import DECODE_FIELD, DecodeOptions, DecodeReport, PlanError

FORCED_PAGES = 2  # the first and the newest page, attended to whatever their score


class Variant(Enum):
    """What a decode step runs; with CUDA graphs, which of the captured ones. The value labels the graph."""

    DENSE = None  # every request: the wrapped backend
    SELECTED = "ragserve-selected"  # pages within a budget, chosen in this step, layer by layer, for some
    REUSED = "ragserve-reused"  # the same, all with the pages of an earlier step
    # as reused; then, in one go for all layers, pages are chosen for the steps that follow
    REFRESHED = "ragserve-refreshed"
    PROGRESSIVE = "ragserve-progressive"  # some by threshold; others dense or by budget


@dataclass(slots=True)
class DecodeState:
    """A request's wish and what its steps read so far; pages are means over layers and KV heads, summed over
    steps.

    Of the pages chosen for it: ``serves_from``, its tokens in the first step that reads them; ``newest``, the
    latest page among them; ``widened``: that page began after they were chosen, and is one more than the
    budget."""

    options: DecodeOptions
    serves_from: int = 0
    newest: int = -1
    widened: bool = False
    steps: int = 0
    sparse_steps: int = 0
    pages: float = 0.0
    held: float = 0.0
    weights: list[float] = field(default_factory=lambda: [0.0, 0.0])  # sum of the estimates, their number

    def report(self) -> DecodeReport:
        steps = max(1, self.steps)
        return DecodeReport(
            mode=self.options.mode,
            steps=self.steps,
            sparse_steps=self.sparse_steps,
            pages=self.pages / steps,
            pages_held=self.held / steps,
            share=self.pages / self.held if self.held else 1.0,
            weight=self.weights[0] / self.weights[1] if self.weights[1] else None,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One request in a decode step of ``tokens`` tokens, the newest included."""

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
    """A decode step: ``active`` says which rows choose their pages anew; ``opened``: whose newest page is new
    and joins those they have; ``changed``: the rows are not those of the step before; ``kept``: where in that
    one a row was whose pages stay, else -1."""

    variant: Variant
    rows: tuple[Row, ...]
    active: tuple[bool, ...]
    opened: tuple[bool, ...]
    changed: bool
    kept: tuple[int, ...]


class StepPlanner:
    """Decides on the host, from lengths that it knows anyway, so that nothing waits for the device.

    A row's pages serve ``reuse`` steps and stay with it when others join or leave the batch. A page that
    begins meanwhile joins them; when a second one begins, and where a row has none yet, they are chosen at
    once. Otherwise they are chosen at the end of the step before, by its queries, for all layers in one
    launch; rows in the last three quarters of their interval come along, so that rows of a batch end up
    choosing together. With ``reuse`` 1 every step chooses at once, by its own queries."""

    def __init__(self, config: AttentionConfig, page_size: int, context_length: int) -> None:
        self.config = config
        self.page_size = page_size
        self._context_length = context_length
        self._rows: tuple[Row, ...] | None = None  # of the step before

    def admit(self, req: Any) -> None:
        """Give a new request its state. Raises PlanError for options that cannot be served; the request has
        the server's then.
        """
        req.ragserve_decode = DecodeState(self.config.options)
        params = req.sampling_params.custom_params
        text = params.get(DECODE_FIELD) if isinstance(params, dict) else None
        if text is not None:
            options = self.config.options.from_request(str(text))
            self.check(options)
            req.ragserve_decode = DecodeState(options)

    def check(self, options: DecodeOptions) -> None:
        """Raise PlanError for a budget too small for the pages that are always read, or wider than the
        tables.
        """
        least = FORCED_PAGES * self.page_size
        if options.mode == "hierarchical" and options.budget < least:
            raise PlanError(
                f"a budget of {options.budget} tokens: the first and the newest page alone take {least}, of {self.page_size} tokens each"
            )
        if options.mode == "hierarchical" and self.config.max_budget < options.budget < self._context_length:
            raise PlanError(
                f"a budget of {options.budget} tokens: this server's largest is {self.config.max_budget}"
            )
        if options.streaming and self.config.heads is None:
            raise PlanError("streaming heads: this server was started without a pattern file of them")

    def forget(self) -> None:
        """The tables of the step before are gone: the next one chooses anew."""
        self._rows = None

    def step(self, reqs: Sequence[Any], lengths: Sequence[int]) -> Step:
        """The decode step of these requests, whose lengths count the newest token."""
        rows = tuple(self._row(req, tokens) for req, tokens in zip(reqs, lengths, strict=True))
        before, self._rows = self._rows or (), rows
        changed = not before or [(id(row.state), row.sparse) for row in rows] != [
            (id(row.state), row.sparse) for row in before
        ]
        places = {id(row.state): place for place, row in enumerate(before) if row.hierarchical}
        kept = tuple(places.get(id(row.state), -1) if row.hierarchical else -1 for row in rows)
        active = tuple(
            row.hierarchical and (place < 0 or self._is_due(row))
            for row, place in zip(rows, kept, strict=True)
        )
        opened = tuple(
            row.hierarchical and not now and self._newest(row) != row.state.newest
            for row, now in zip(rows, active, strict=True)
        )
        for row, now, new in zip(rows, active, opened, strict=True):
            if now:
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
        """The step has been launched: what it chose for those that follow holds from now on."""
        if step.variant is Variant.REFRESHED:
            for row, chosen in zip(step.rows, step.active, strict=True):
                if chosen:
                    self._choose(row, row.tokens + 1)

    def _newest(self, row: Row) -> int:
        return (row.tokens - 1) // self.page_size

    @staticmethod
    def _age(row: Row) -> int:
        """Steps for which the row's pages have served."""
        return row.tokens - row.state.serves_from

    def _is_due(self, row: Row) -> bool:
        """Whether pages must be chosen before this step: they are too old, or lack more than the page that
        may join them.
        """
        ahead = self._newest(row) - row.state.newest
        return self._age(row) >= row.state.options.reuse or ahead > 1 or (ahead == 1 and row.state.widened)

    def _choose(self, row: Row, serves_from: int) -> None:
        row.state.serves_from, row.state.newest, row.state.widened = serves_from, self._newest(row), False

    def state(self, req: Any) -> DecodeState:
        """A request's; one that SGLang made for itself is dense."""
        state: DecodeState | None = getattr(req, "ragserve_decode", None)
        if state is None:
            state = req.ragserve_decode = DecodeState(DecodeOptions())
        return state

    def _row(self, req: Any, tokens: int) -> Row:
        state = self.state(req)
        options = state.options
        least = max(options.dense_below, options.budget if options.mode == "hierarchical" else 0)
        return Row(state, tokens, options.mode != "dense" and tokens > least)
