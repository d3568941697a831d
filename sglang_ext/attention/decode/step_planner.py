"""The plan of each decode step. Host only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang_ext.attention.decode.decode_state import DecodeState, Row
from sglang_ext.attention.decode.observed_queries import ObservedQueries
from sglang_ext.attention.prefill.planner import ExtendRow
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.decode_fields import decided_scores
from sglang_ext.wire.protocol import DECODE_FIELD, DecodeOptions, PlanError

FORCED_PAGES = 2  # the first and the newest page, attended to whatever their score
_FIRST_WINDOW = 16  # steps until a window of decoded queries chooses for the first time (LoopServe 5.2)


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


class Selects(Enum):
    """When a request selects pages, and which steps read them. `StepPlanner` alone decides it."""

    NO = "no"  # it reads those that it has
    NOW = "now"  # in this step, which reads them
    NEXT = "next"  # at the end of this pass, for the next step
    LATER = "later"  # at the end of this pass, for the steps after its lag


@dataclass(frozen=True, slots=True)
class Step:
    """Plan of the next forward pass; the backend gets one per pass.

    Attributes:
        variant: of a decode step.
        rows: the requests of a decode step.
        selects: per row, when it selects pages.
        opened: per row, whether its newest page is new and joins those chosen for it.
        changed: the rows differ from those of the step before.
        kept: per row, its place in the step before if its pages stay, else -1.
        prefixes: of an extend: per request its row of the request table, and how many of its tokens are in
            the pool.
        asked: of an extend: per request whose last new queries may choose pages, where they are noted, the
            place of the first of them in the batch, and their number.
        apart: of an extend: what attends apart from the wrapped backend, `offloaded_extends.SparseToken` or
            the like.
        shares: per row, the share of this step's query in the mean that its pages are chosen by.
        swapped: per row, whether it reads its pending selection from this step on.
        prefill: of an extend with sparse prefill: its requests.
    """

    variant: Variant = Variant.DENSE
    rows: tuple[Row, ...] = ()
    selects: tuple[Selects, ...] = ()
    opened: tuple[bool, ...] = ()
    changed: bool = False
    kept: tuple[int, ...] = ()
    prefixes: tuple[tuple[int, int], ...] = ()
    asked: tuple[tuple[ObservedQueries, int, int], ...] = ()
    apart: tuple[Any, ...] = ()
    shares: tuple[float, ...] = ()
    swapped: tuple[bool, ...] = ()
    prefill: tuple[ExtendRow, ...] = ()

    @property
    def active(self) -> tuple[bool, ...]:
        """Per row, whether it selects pages by a budget for this step or the next one."""
        at_once = (Selects.NOW, Selects.NEXT)
        return tuple(
            row.hierarchical and when in at_once for row, when in zip(self.rows, self.selects, strict=True)
        )

    @property
    def lagged(self) -> tuple[bool, ...]:
        """Per row, whether it selects pages for steps after its lag."""
        return tuple(when is Selects.LATER for when in self.selects)


IDLE = Step()
"""The plan while no forward pass of ours is under way."""


class StepPlanner:
    """Plans decode steps on the host, from lengths that it knows anyway: nothing waits for the device.

    A row's selected pages serve ``reuse`` steps and stay with it when others join or leave the batch. If
    decoding opens a new page, it is added to the selection; a second new page, or a missing selection, forces
    re-selection in this step. Otherwise pages are selected at the end of the step before, by its queries, for
    all layers in one launch. Rows in the last three quarters of their interval come along, so that the rows
    of a batch end up selecting together. With ``reuse`` 1 every step selects by its own queries.

    A row with a lag chooses by the last query of its prompt, then at the ends of steps, by its own clock:
    what it reads does not depend on its batch. If its prompt was short, or is a session's, it begins in its
    first step. An interval is short enough that at most one page begins while a selection serves. A
    progressive row that is offloaded chooses like this what its resident blocks are to hold; it attends to
    what it ranks highest, wherever that is.

    Pages are chosen by the last query, or by the running mean of a window of decoded ones, 16 steps after the
    first selection at the latest (LoopServe 5.2), or by queries of the prompt's end for the whole answer."""

    def __init__(self, config: AttentionConfig, page_size: int, context_length: int) -> None:
        self._config = config
        self._page = page_size
        self._context_length = context_length
        self._before: tuple[Row, ...] = ()  # of the step before
        self._in_graph: bool | None = None  # whose tables the step before used
        self.check(config.options)
        self._options = self._with_scores(config.options)  # of requests that ask for none

    def admit(self, req: Any) -> None:
        """Give a new request its state.

        Raises:
            PlanError: options that cannot be served; the request then has the server's default ones.
        """
        req.ragserve_decode = DecodeState(self._options)
        params = req.sampling_params.custom_params
        text = params.get(DECODE_FIELD) if isinstance(params, dict) else None
        if text is not None:
            options = self._config.options.from_request(str(text))
            self.check(options)
            req.ragserve_decode = DecodeState(self._with_scores(options))

    def _with_scores(self, options: DecodeOptions) -> DecodeOptions:
        """Options whose scores are not left open."""
        on_device = options.mode == "hierarchical" and not options.lag_steps
        scores = decided_scores(options.scores, kv_bits=self._config.kv_bits, on_device=on_device)
        return options.model_copy(update={"scores": scores})

    def check(self, options: DecodeOptions) -> None:
        """Check options against this server.

        Raises:
            PlanError: a budget smaller than the pages that are always read or wider than the tables, or
                streaming heads without a pattern.
        """
        if options.mode == "hierarchical" or options.lag_steps:
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
        if options.mode == "hierarchical" and options.scores == "exact" and self._config.kv_bits != 16:
            raise PlanError("exact scores need plain keys: ask for scores=bound, or start it with kv_bits=16")
        by_keys = options.observe == "recent" or options.scores == "exact"
        if options.mode == "hierarchical" and options.lag_steps and by_keys:
            raise PlanError(
                "offloaded or lagging decoding chooses by bounds, for the keys may be on the host: ask for "
                "scores=bound and another observe than recent"
            )
        if options.streaming and self._config.heads is None:
            raise PlanError("streaming heads: this server was started without a pattern file of them")
        if options.lag_steps and self._config.kv_bits != 16:
            raise PlanError(
                f"offloaded or lagging decoding needs a KV pool of 16 bits, and this server's has "
                f"{self._config.kv_bits}: start it with kv_bits=16 and kv_offload_bytes"
            )
        if options.lag_steps and not self._config.offload_bytes:
            raise PlanError(
                "offloaded or lagging decoding: this server keeps no KV of requests on the host: start it "
                "with kv_offload_bytes"
            )
        if self._config.dense_layers and (options.streaming or options.lag_steps):
            raise PlanError("dense_layers are for measuring budgets: omit streaming, offloaded and lag")
        if options.offloaded and options.streaming and options.lag_steps:
            raise PlanError(
                "offloaded decoding with streaming heads, whose pages are not on the device: ask for "
                "streaming=false"
            )

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
        swapped = tuple(self._swap(row) for row in rows)
        shares = tuple(self._observe(row, place) for row, place in zip(rows, kept, strict=True))
        selects = [self._selects(row, place) for row, place in zip(rows, kept, strict=True)]
        opened = tuple(
            row.hierarchical and when is not Selects.NOW and self._newest(row) != row.state.selection.newest
            for row, when in zip(rows, selects, strict=True)
        )
        for row, when, new in zip(rows, selects, opened, strict=True):
            if when is Selects.NOW:
                self._choose(row, row.tokens)
            elif new:
                self._widen(row)
        if any(row.progressive for row in rows):
            variant = Variant.PROGRESSIVE
        elif Selects.NOW in selects:
            variant = Variant.SELECTED
        elif Selects.LATER in selects or any(self._left(row) == 1 for row in rows):
            variant = Variant.REFRESHED
            selects = [
                Selects.NEXT if self._comes_along(row) else when
                for row, when in zip(rows, selects, strict=True)
            ]
        elif any(row.sparse for row in rows):
            variant = Variant.REUSED
        else:
            variant = Variant.DENSE
        return Step(variant, rows, tuple(selects), opened, changed, kept, shares=shares, swapped=swapped)

    def _selects(self, row: Row, place: int) -> Selects:
        """Say when a row selects, whatever the others do. ``place``: see `Step.kept`."""
        if row.lag:
            if not row.state.selection.chosen_at:
                return Selects.NOW
            return Selects.LATER if self._is_time(row) else Selects.NO
        is_now = row.hierarchical and (place < 0 or self._is_due(row))
        return Selects.NOW if is_now else Selects.NO

    def _left(self, row: Row) -> int | None:
        """Return the steps that a row's pages still serve, this one included; None: no such rows."""
        if not row.hierarchical or row.lag or row.recent:
            return None
        return self._interval(row) - self._age(row)

    def _comes_along(self, row: Row) -> bool:
        """Return True if a row selects for the next step when others do."""
        left = self._left(row)
        return left is not None and 4 * (self._interval(row) - left + 1) >= self._interval(row)

    def after(self, step: Step) -> None:
        """Note that the step has been launched: pages that it chose for later steps hold from now on."""
        for row, when in zip(step.rows, step.selects, strict=True):
            if when is Selects.NEXT:
                self._choose(row, row.tokens + 1)
            if row.lag:
                row.state.selection.tokens = row.tokens
            if when is Selects.LATER:
                self._select_lagged(row)
            if row.state.options.observe == "window":
                row.state.queries.hand_over()

    def place(self, state: DecodeState) -> int:
        """Return a request's place in the latest decode step; -1: it had none."""
        return next((i for i, row in enumerate(self._before) if row.state is state), -1)

    def forget(self, state: DecodeState) -> None:
        """Let a request that leaves its batch have no place in the next step's tables, if it is back then."""
        gone = Row(DecodeState(state.options), 0, sparse=False)
        self._before = tuple(gone if row.state is state else row for row in self._before)

    def again(self, req: Any, tokens: int) -> tuple[bool, Selects, bool]:
        """Plan the step of an offloaded request that was retracted before it, and now has it as an extend by
        one token.

        Return whether it reads its pending selection from this step on, when it selects, and whether its
        query is new. With the overlap scheduler the step was planned and launched, and its result
        is not used: then none of these."""
        row = self._row(req, tokens)
        is_new = row.state.selection.tokens < tokens
        swapped = self._swap(row)
        if self._newest(row) != row.state.selection.newest:
            self._widen(row)
        selects = Selects.LATER if self._is_time(row) else Selects.NO
        row.state.selection.tokens = tokens
        if selects is Selects.LATER:
            self._select_lagged(row)
        return swapped, selects, is_new

    def selects_early(self, req: Any, end: int) -> Selects:
        """Say when a request selects in an extend up to token ``end``: for the next step if it completes a
        prompt whose last query selects its first pages.

        Those are prompts of requests with a lag, which may be on the host by then. Requests of sessions
        select in their first decode step."""
        state = self.state(req)
        context = getattr(req, "ragserve", None)
        if context is not None:
            plan = getattr(context, "plan", None)  # a document has none
            if plan is None or plan.session is not None:
                return Selects.NO
        if state.selection.chosen_at or not self.is_lagging(req, end):
            return Selects.NO
        return Selects.NEXT if end == len(req.origin_input_ids) + len(req.output_ids) else Selects.NO

    def is_lagging(self, req: Any, tokens: int) -> bool:
        """Return True if a request has a lag in its decode step behind ``tokens`` tokens."""
        return self._row(req, tokens + 1).lag > 0

    def chosen_early(self, req: Any, end: int) -> None:
        """Note that pages have been chosen at the end of that extend, for the steps that follow it."""
        state = self.state(req)
        self._choose(self._row(req, end), end)
        selection = state.selection
        selection.chosen_at, selection.first_tokens, selection.tokens = end, end + 1, end

    def _select_lagged(self, row: Row) -> None:
        selection = row.state.selection
        selection.chosen_at = row.tokens
        selection.pending_from, selection.pending_newest = row.tokens + 1 + row.lag, self._newest(row)

    def asked(
        self, reqs: Sequence[Any], spans: Sequence[tuple[int, int]]
    ) -> tuple[tuple[ObservedQueries, int, int], ...]:
        """Return `Step.asked` of an extend. ``spans``: of each request the first new token and the end."""
        found, place = [], 0
        for req, (start, end) in zip(reqs, spans, strict=True):
            place += end - start
            row = self._row(req, end + 1)
            goes_on = row.state.kept is not None  # its prompt was observed before it was retracted
            if row.hierarchical and row.state.options.observe == "prompt" and not goes_on:
                count = min(end - start, row.state.options.window)
                found.append((row.state.queries, place - count, count))
        return tuple(found)

    def state(self, req: Any) -> DecodeState:
        """Return a request's state; a request that SGLang made for itself is dense."""
        state: DecodeState | None = getattr(req, "ragserve_decode", None)
        if state is None:
            state = req.ragserve_decode = DecodeState(DecodeOptions(mode="dense"))
        return state

    def _newest(self, row: Row) -> int:
        return (row.tokens - 1) // self._page

    @staticmethod
    def _age(row: Row) -> int:
        """Return how many steps the row's pages have served."""
        return row.tokens - row.state.selection.serves_from

    def _is_due(self, row: Row) -> bool:
        """Return True if pages must be chosen before this step: too old, or more than one page behind."""
        selection = row.state.selection
        ahead = self._newest(row) - selection.newest
        if row.recent:
            return ahead > 0
        return self._age(row) >= self._interval(row) or ahead > 1 or (ahead == 1 and selection.widened)

    @staticmethod
    def _interval(row: Row) -> int:
        """Return the steps that the row's pages serve."""
        options = row.state.options
        if options.observe == "prompt":
            return sys.maxsize
        is_first = options.observe == "window" and row.state.selection.count == 1
        return min(options.reuse, _FIRST_WINDOW) if is_first else options.reuse

    @staticmethod
    def _observe(row: Row, place: int) -> float:
        """Return the share of this step's query in the mean that chooses. ``place``: see `Step.kept`."""
        state = row.state
        if not row.hierarchical or state.options.observe in ("last", "recent"):
            return 1.0
        if place < 0:  # the tables begin with the queries of the prompt's end, if there are any
            state.queries.restart()
        if state.options.observe == "prompt" and state.queries.count:
            return 0.0
        return state.queries.add(state.options.window)

    def _choose(self, row: Row, serves_from: int) -> None:
        selection = row.state.selection
        selection.serves_from, selection.newest, selection.widened = serves_from, self._newest(row), False
        selection.count += 1
        if row.lag:
            selection.first_tokens = selection.chosen_at = row.tokens

    def _widen(self, row: Row) -> None:
        """Let a row read a page more than its budget: the one that begins."""
        row.state.selection.newest, row.state.selection.widened = self._newest(row), True

    @staticmethod
    def _swap(row: Row) -> bool:
        """Let a row read its pending selection from this step on, if it is time; return whether it is."""
        selection = row.state.selection
        if not row.lag or not selection.pending_from or row.tokens < selection.pending_from:
            return False
        selection.serves_from, selection.newest = row.tokens, selection.pending_newest
        selection.pending_from, selection.widened = 0, False
        return True

    def _is_time(self, row: Row) -> bool:
        """Return True if a row with a lag chooses at the end of this step."""
        if not row.lag or row.state.selection.pending_from:
            return False
        interval = max(row.lag + 1, min(row.state.options.reuse, self._page - row.lag))
        return row.tokens - row.state.selection.chosen_at >= interval

    def _row(self, req: Any, tokens: int) -> Row:
        state = self.state(req)
        options = state.options
        dense_up_to = max(options.dense_below, options.budget if options.mode == "hierarchical" else 0)
        return Row(state, tokens, options.mode != "dense" and tokens > dense_up_to)
