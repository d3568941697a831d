"""Requests with sparse prefill: their options, the plan of each extend, and what was computed. Host only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.attention.prefill.kept_lines import KeptLines
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.prefill_options import PrefillOptions, exact_key
from sglang_ext.wire.protocol import FULL_KEY, PREFILL_FIELD, PlanError, PrefillReport


@dataclass(slots=True)
class PrefillState:
    """A request whose prefill is sparse, and what its passes have computed so far.

    ``tokens``: prefilled sparsely; ``blocks``: (query block, key block) pairs computed, summed over layers
    and query heads of this rank, out of ``possible`` ones. ``reused_lines``, ``new_lines``: those taken of
    ``given`` ones and others, summed over ``segments``, layers and query heads.

    ``given``: lines of an earlier turn, that its lines begin from, and ``lines`` its own, once its prompt has
    been prefilled and until they are kept: uint8 tensors, as `KeptLines` has them."""

    options: PrefillOptions
    tokens: int = 0
    blocks: float = 0.0
    possible: float = 0.0
    reused_lines: float = 0.0
    new_lines: float = 0.0
    segments: float = 0.0
    given: Any = None
    lines: Any = None

    def report(self) -> PrefillReport:
        """Return the account so far."""
        share = self.blocks / self.possible if self.possible else 1.0
        of = self.segments or 1.0
        reused, new = self.reused_lines / of, self.new_lines / of
        return PrefillReport(self.options.mode, self.options.alpha, self.tokens, share, reused, new)


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """A request of an extend batch: its row of the request table, tokens that were there before, and new
    ones; ``state`` is None for one that is dense in this batch."""

    req: Any
    row: int
    prefix: int
    new: int
    state: PrefillState | None

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.req.origin_input_ids)

    @property
    def ends_prompt(self) -> bool:
        """True in the last pass of the prompt."""
        return self.prefix + self.new >= self.prompt


@dataclass(frozen=True, eq=False, slots=True)
class Computed:
    """What a pass has computed for its sparse requests, summed over layers and query heads of this rank.

    ``counts``: float64 ``[requests, 3]`` on the device: (query block, key block) pairs, and lines taken of an
    earlier turn and others. ``possible``: pairs of dense attention; ``segments``: those that lines were
    chosen for. ``lines``: of prompts that end in this pass, uint8 tensors; None otherwise."""

    counts: Any
    possible: tuple[float, ...]
    segments: tuple[float, ...]
    lines: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts of a pass, in flight from the device; ``event`` is None if they have arrived."""

    event: Any
    counts: Any  # float [sparse requests, 3]
    states: tuple[PrefillState, ...]


class PrefillPlanner:
    """Reads requests' prefill options and keeps their accounts. Scheduler thread only."""

    def __init__(self, config: AttentionConfig) -> None:
        self._config = config
        self._pending: deque[_Counts] = deque()
        self.kept = KeptLines()
        self._check(config.prefill)

    def admit(self, req: Any) -> None:
        """Give a new request its state, and one with sparse prefill a cache key of its own kind.

        Raises:
            PlanError: options that cannot be served, or a key that only requests with sparse prefill have.
        """
        req.ragserve_prefill = None
        key = str(req.extra_key or "")
        if exact_key(key) != key:
            raise PlanError(f"the extra key {key[:80]!r} is one of sparse prefill: omit what follows '|'")
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
                    "densely: omit prefill, or ask for strategy 'prefix' or 'full'"
                )
            return
        self._check(options)
        if len(req.origin_input_ids) > options.dense_up_to:
            req.ragserve_prefill = PrefillState(options)
            req.extra_key = options.sparse_key(req.extra_key)

    def _check(self, options: PrefillOptions) -> None:
        if options.mode != "dense" and self._config.kv_bits != 16:
            raise PlanError(
                f"prefill mode {options.mode!r} reads keys of 16 bits, and this server's have "
                f"{self._config.kv_bits}: omit prefill, or start it with kv_bits=16"
            )
        if options.mode == "block_sparse" and options.streaming and self._config.heads is None:
            raise PlanError("streaming heads: this server was started without a pattern file of them")

    def plan(self, reqs: Sequence[Any], spans: Sequence[tuple[int, int, int]]) -> tuple[ExtendRow, ...]:
        """Return the rows of an extend in which some request is sparse; none otherwise.

        ``spans``: per request its row of the request table, tokens that were there before, and its end. A
        request in its first pass gets the lines of the longest prompt whose KV it goes on from."""
        sparse = [_sparse_state(req, prefix, end) for req, (_, prefix, end) in zip(reqs, spans, strict=True)]
        if all(state is None for state in sparse):
            return ()
        for req, state in zip(reqs, sparse, strict=True):
            if state is not None and state.options.mode == "vertical_slash" and not state.tokens:
                state.given = self.kept.of(req.last_node)
        return tuple(
            ExtendRow(req, row, prefix, end - prefix, state)
            for req, state, (row, prefix, end) in zip(reqs, sparse, spans, strict=True)
        )

    def count(self, rows: Sequence[ExtendRow], computed: Computed) -> None:
        """Note what a pass has computed for its sparse rows, once it has arrived from the device."""
        states = tuple(row.state for row in rows if row.state is not None)
        for row in rows:
            if row.state is not None:
                row.state.tokens += row.new
        account = zip(states, computed.possible, computed.segments, computed.lines, strict=True)
        for state, possible, segments, lines in account:
            state.possible += possible
            state.segments += segments
            if lines is not None:
                state.given, state.lines = None, lines
        event, counts = None, computed.counts
        if counts.is_cuda:
            import torch

            counts = counts.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending.append(_Counts(event, counts, states))

    def cached(self, req: Any, node: Any) -> None:
        """Keep the lines of a request whose KV is in the prefix cache, up to this node."""
        state: PrefillState | None = getattr(req, "ragserve_prefill", None)
        if state is not None and state.lines is not None:
            self.kept.keep(node, state.lines)
            state.lines = None

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
            for other, (blocks, reused, new) in zip(first.states, first.counts.tolist(), strict=True):
                other.blocks += blocks
                other.reused_lines += reused
                other.new_lines += new
        return state.report()


def _sparse_state(req: Any, prefix: int, end: int) -> PrefillState | None:
    """Return the state of a request that is sparse in an extend. A row that decodes in a batch of prompts,
    with one new token behind its own, is dense."""
    state: PrefillState | None = getattr(req, "ragserve_prefill", None)
    decodes = end - prefix == 1 and prefix >= len(req.origin_input_ids) if state is not None else True
    return None if decodes else state
