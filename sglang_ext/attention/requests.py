"""The scheduler's side of sparse decoding: what each request asks for, which rows of a batch are sparse in a step, and what was read."""

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
    SELECTED = "ragserve-selected"  # pages within a budget, chosen in this step for some
    REUSED = "ragserve-reused"  # the same, all with the pages of an earlier step
    PROGRESSIVE = "ragserve-progressive"  # some by threshold; others dense or by budget


@dataclass(slots=True)
class DecodeState:
    """A request's wish and what its steps read so far; pages are means over layers and KV heads, summed over steps."""

    options: DecodeOptions
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
    """A decode step: ``active`` says which rows choose their pages anew; ``changed``: the rows are not those of the step before."""

    variant: Variant
    rows: tuple[Row, ...]
    active: tuple[bool, ...]
    changed: bool


class Planner:
    """Decides on the host, from lengths that it knows anyway, so that nothing waits for the device.

    A row selects anew when its batch has changed (tables are kept by row), every ``reuse`` steps, and whenever its newest page is a new
    one: so a reused selection always holds the newest page.
    """

    def __init__(self, config: AttentionConfig, page_size: int, context_length: int) -> None:
        self.config = config
        self.page_size = page_size
        self._context_length = context_length
        self._key: tuple[tuple[str, bool], ...] | None = None
        self._step = 0

    def admit(self, req: Any) -> None:
        """Give a new request its state. Raises PlanError for options that cannot be served; the request has the server's then."""
        req.ragserve_decode = DecodeState(self.config.options)
        params = req.sampling_params.custom_params
        text = params.get(DECODE_FIELD) if isinstance(params, dict) else None
        if text is not None:
            options = self.config.options.from_request(str(text))
            self.check(options)
            req.ragserve_decode = DecodeState(options)

    def check(self, options: DecodeOptions) -> None:
        """Raise PlanError for a budget too small for the pages that are always read, or wider than the tables."""
        least = FORCED_PAGES * self.page_size
        if options.mode == "hierarchical" and options.budget < least:
            raise PlanError(
                f"a budget of {options.budget} tokens: the first and the newest page alone take {least}, of {self.page_size} tokens each"
            )
        if options.mode == "hierarchical" and self.config.max_budget < options.budget < self._context_length:
            raise PlanError(f"a budget of {options.budget} tokens: this server's largest is {self.config.max_budget}")
        if options.streaming and self.config.heads is None:
            raise PlanError("streaming heads: this server was started without a pattern file of them")

    def forget(self) -> None:
        """Other forwards ran in between: the next step selects anew."""
        self._key = None

    def step(self, reqs: Sequence[Any], lengths: Sequence[int]) -> Step:
        """The decode step of these requests, whose lengths count the newest token."""
        rows = tuple(self._row(req, tokens) for req, tokens in zip(reqs, lengths, strict=True))
        key = tuple((req.rid, row.sparse) for req, row in zip(reqs, rows, strict=True))
        changed = key != self._key
        self._key, self._step = key, 0 if changed else self._step + 1
        active = tuple(
            row.hierarchical and (self._step % row.state.options.reuse == 0 or (row.tokens - 1) % self.page_size == 0) for row in rows
        )
        if any(row.progressive for row in rows):
            variant = Variant.PROGRESSIVE
        elif any(row.sparse for row in rows):
            variant = Variant.SELECTED if any(active) else Variant.REUSED
        else:
            variant = Variant.DENSE
        return Step(variant, rows, active, changed)

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
