"""Requests with sparse prefill: their options, the plan of each extend, and what was computed. Host only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.attention.config import AttentionConfig
from sglang_ext.prefill_options import PrefillOptions, exact_key
from sglang_ext.protocol import FULL_KEY, PREFILL_FIELD, PlanError, PrefillReport


@dataclass(slots=True)
class PrefillState:
    """A request whose prefill is sparse, and what its passes have computed so far.

    ``tokens``: prefilled sparsely; ``blocks``: (query block, key block) pairs computed, summed over layers
    and query heads of this rank, out of ``possible`` ones."""

    options: PrefillOptions
    tokens: int = 0
    blocks: float = 0.0
    possible: float = 0.0

    def report(self) -> PrefillReport:
        """Return the account so far."""
        share = self.blocks / self.possible if self.possible else 1.0
        return PrefillReport(self.options.mode, self.options.alpha, self.tokens, share)


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """A request of an extend batch: its row of the request table, tokens that were there before, and new
    ones; ``state`` is None for one that is dense in this batch."""

    req: Any
    row: int
    prefix: int
    new: int
    state: PrefillState | None


@dataclass(frozen=True, slots=True)
class _BlockCounts:
    """Blocks computed by query block, in flight from the device; ``event`` is None if they have arrived."""

    event: Any
    blocks: Any  # float [sparse requests]
    states: tuple[PrefillState, ...]


class PrefillPlanner:
    """Reads requests' prefill options and keeps their accounts. Scheduler thread only."""

    def __init__(self, config: AttentionConfig) -> None:
        self._config = config
        self._pending: deque[_BlockCounts] = deque()
        self._check(config.prefill)

    def admit(self, req: Any) -> None:
        """Give a new request its state, and one with sparse prefill a cache key of its own kind.

        Raises:
            PlanError: options that cannot be served, or a key that only requests with sparse prefill have.
        """
        req.ragserve_prefill = None
        key = str(req.extra_key or "")
        if exact_key(key) != key:
            raise PlanError(
                f"the extra key {key[:80]!r} is one of sparse prefill: leave out what follows '|'"
            )
        params = req.sampling_params.custom_params
        text = params.get(PREFILL_FIELD) if isinstance(params, dict) else None
        options = self._config.prefill if text is None else self._config.prefill.from_request(str(text))
        by_default = text is None and key.startswith(FULL_KEY)  # the reference of other strategies
        if options.mode == "dense" or by_default:
            return
        if getattr(req, "ragserve", None) is not None:  # a document, or composed of documents
            if text is not None:
                raise PlanError(
                    f"prefill mode {options.mode!r} is for exact strategies, and documents are prefilled "
                    "densely: leave prefill out, or ask for strategy 'prefix' or 'full'"
                )
            return
        self._check(options)
        if len(req.origin_input_ids) > options.dense_below:
            req.ragserve_prefill = PrefillState(options)
            req.extra_key = options.sparse_key(req.extra_key)

    def _check(self, options: PrefillOptions) -> None:
        if options.mode != "dense" and self._config.kv_bits != 16:
            raise PlanError(
                f"prefill mode {options.mode!r} reads keys of 16 bits, and this server's have "
                f"{self._config.kv_bits}: leave prefill out, or start it with kv_bits=16"
            )

    def plan(self, reqs: Sequence[Any], spans: Sequence[tuple[int, int, int]]) -> tuple[ExtendRow, ...]:
        """Return the rows of an extend in which some request is sparse; none otherwise.

        ``spans``: per request its row of the request table, tokens that were there before, and its end."""
        sparse = [_sparse_state(req, prefix, end) for req, (_, prefix, end) in zip(reqs, spans, strict=True)]
        if all(state is None for state in sparse):
            return ()
        return tuple(
            ExtendRow(req, row, prefix, end - prefix, state)
            for req, state, (row, prefix, end) in zip(reqs, sparse, spans, strict=True)
        )

    def count(self, rows: Sequence[ExtendRow], blocks: Any, possible: Sequence[float]) -> None:
        """Note what a pass has computed for its sparse rows, once it has arrived from the device.

        ``blocks``: float ``[sparse rows]`` on the device; ``possible``: what dense attention computes."""
        states = tuple(row.state for row in rows if row.state is not None)
        for row in rows:
            if row.state is not None:
                row.state.tokens += row.new
        for state, most in zip(states, possible, strict=True):
            state.possible += most
        event = None
        if blocks.is_cuda:
            import torch

            blocks = blocks.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending.append(_BlockCounts(event, blocks, states))

    def finished(self, req: Any) -> PrefillReport | None:
        """Return the report of a request that ends; None if nothing of it was prefilled sparsely."""
        state: PrefillState | None = getattr(req, "ragserve_prefill", None)
        if state is None or not state.tokens:
            return None
        while self._pending:
            first = self._pending[0]
            if first.event is not None and not first.event.query():
                if all(other is not state for other in first.states):
                    break  # a later pass, under way
                first.event.synchronize()  # SGLang has its result already
            self._pending.popleft()
            for other, blocks in zip(first.states, first.blocks.tolist(), strict=True):
                other.blocks += blocks
        return state.report()


def _sparse_state(req: Any, prefix: int, end: int) -> PrefillState | None:
    """Return the state of a request that is sparse in an extend. A row that decodes in a batch of prompts,
    with one new token behind its own, is dense."""
    state: PrefillState | None = getattr(req, "ragserve_prefill", None)
    decodes = end - prefix == 1 and prefix >= len(req.origin_input_ids) if state is not None else True
    return None if decodes else state
