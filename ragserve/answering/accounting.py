"""Accounting of an answer: tokens kept, recomputed and reused, milliseconds per stage, and metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ragserve import tracing
from ragserve.answering.auto import StrategyChoice
from ragserve.answering.prompt import Prompt
from ragserve.answering.query import Query
from ragserve.answering.results import Answer, ContextUse, RetrievalTimings, SessionUse, Timings
from ragserve.engine.base import GenerateChunk
from ragserve.metrics import metrics


def context_use(
    strategy: str,
    prompt: Prompt,
    last: GenerateChunk,
    retrieved: int,
    choice: StrategyChoice | None = None,
    session: SessionUse | None = None,
    sparse: bool = False,
    doubt: str | None = None,
    search_notes: Sequence[str] = (),
) -> ContextUse:
    """Account for the document tokens of an answer. ``sparse``: the request asked for sparse prefill.
    ``doubt``: what speaks against an answer in the documents. ``search_notes``: what a search left undone.

    Composed contexts are reported by the engine. For exact strategies, document tokens within the cached
    prefix count as reused. ``choice`` is the decision of strategy ``auto``."""
    report, cached = last.context, last.usage.cached
    spans = [(segment.start, segment.end) for segment in prompt.segments if segment.kind == "document"]
    reused = sum(max(0, min(cached, end) - start) for start, end in spans)
    notes = list(search_notes)
    if doubt is not None:
        notes.append(f"The documents may not answer this: {doubt}.")
    tiers = {"device": reused, "computed": prompt.tokens_kept - reused}
    if report:
        tiers = dict(report.by_tier)
    known = 0
    if session is not None:
        known = session.documents_known
        tiers["session"] = session.tokens_held
    if prompt.left_out:
        notes.append(
            f"{prompt.left_out} of {retrieved} passages were left out: the best others fill the strategy's "
            "token budget."
        )
    dropped = retrieved - known - prompt.documents_kept - prompt.left_out
    if dropped:
        notes.append(
            f"{dropped} of {retrieved} passages did not fit into the model's context and were left out, "
            "the last ones first."
        )
    if prompt.cut_to is not None:
        notes.append(f"Passage {prompt.documents_kept} was cut to its first {prompt.cut_to:,} characters.")
    if report and report.keep_reason:
        share = report.kept / max(1, report.document_tokens)
        notes.append(f"{share:.0%} of the document tokens were kept: {report.keep_reason}.")
    if report and report.recompute_reason:
        share = report.recomputed / max(1, report.kept)
        notes.append(
            f"{share:.0%} of the kept document tokens were computed again: {report.recompute_reason}."
        )
    if report and report.unknown_sensitivity:
        notes.append(
            f"{len(report.unknown_sensitivity)} of {prompt.documents_kept} passages were not fully analysed "
            "yet: what to compute again of them was chosen by the question's attention alone. The server "
            "analyses them while it is idle (kv_analysis)."
        )
    if last.fallback:
        strategy = "prefix"
        notes.append(f"Answered by strategy prefix: {last.fallback}.")
    if sparse and last.prefill is None:
        notes.append(
            "Nothing was prefilled sparsely: the prompt has no more tokens than prefill.dense_below, which "
            "ragserve calibrate --part prefill measures, or they were cached."
        )
    return ContextUse(
        strategy=strategy,
        documents_retrieved=retrieved,
        documents_kept=known + prompt.documents_kept,
        tokens_retrieved=prompt.tokens_retrieved,
        tokens_kept=report.kept if report else prompt.tokens_kept,
        tokens_recomputed=report.recomputed if report else prompt.tokens_kept - reused,
        tokens_by_tier=tiers,
        choice=f"{choice.spec.label}: {choice.reason}" if choice else None,
        notes=notes,
    )


def no_context(query: Query, doubt: str, search_notes: Sequence[str]) -> ContextUse:
    """Account for an answer without a model: ``doubt`` is why; ``search_notes``: what a search left
    undone."""
    notes = [*search_notes, f"{doubt[0].upper()}{doubt[1:]}: the model was not asked."]
    if query.session is not None:
        notes.append("No session was begun: there is no answer to go on from.")
    return ContextUse(
        strategy=query.request.strategy,
        documents_retrieved=0,
        documents_kept=0,
        tokens_retrieved=0,
        tokens_kept=0,
        tokens_recomputed=0,
        tokens_by_tier={},
        notes=notes,
    )


class Clock:
    """Measures a query from its arrival."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._engine_start = self._engine_end = self._start
        self._first: float | None = None

    def engine_starts(self) -> None:
        self._engine_start = time.perf_counter()

    def token(self) -> None:
        if self._first is None:
            self._first = time.perf_counter()

    def engine_ends(self) -> None:
        self._engine_end = time.perf_counter()

    def timings(
        self, retrieval: RetrievalTimings, prompt_ms: float | None, last: GenerateChunk | None
    ) -> Timings:
        """The stages of an answer; ``last`` is None where the model was not asked."""
        engine, report = (None, None) if last is None else (last.timings, last.context)
        return Timings(
            **retrieval.model_dump(),
            prompt_ms=prompt_ms,
            documents_ms=engine.documents_ms if engine else None,
            documents_tokens=engine.documents_tokens if engine else None,
            load_ms=report.load_ms if report else None,
            compose_ms=report.compose_ms if report else None,
            recompute_ms=report.recompute_ms if report else None,
            queue_ms=engine.queue_ms if engine else None,
            prefill_ms=engine.prefill_ms if engine else None,
            ttft_ms=None if self._first is None else (self._first - self._start) * 1e3,
            engine_ms=(self._engine_end - self._engine_start) * 1e3 if engine else None,
            total_ms=(time.perf_counter() - self._start) * 1e3,
        )

    def trace(self, last: GenerateChunk) -> None:
        """Add spans of the engine's stages below the current one. The engine reports durations: stages that
        wait end where the prefill begins, and the others follow each other from there."""
        report, prefill, queue = last.context, last.timings.prefill_ms, last.timings.queue_ms
        if not tracing.is_on() or self._first is None or prefill is None:
            return
        begin = self._first - prefill / 1e3
        sent = begin - (queue or 0.0) / 1e3
        stages = [
            ("queue", sent, begin),
            ("prefill", begin, self._first),
            ("decode", self._first, self._engine_end),
        ]
        if last.timings.documents_ms is not None:
            stages.insert(0, ("documents", sent - last.timings.documents_ms / 1e3, sent))
        if report is not None:
            waits = {name: getattr(report, f"{name}_ms") for name in ("load", "analysis", "query", "select")}
            work = {name: getattr(report, f"{name}_ms") for name in ("compose", "recompute", "extend")}
            at = begin - sum(waits.values()) / 1e3
            for name, milliseconds in {**waits, **work}.items():
                if milliseconds:
                    stages.append((name, at, at + milliseconds / 1e3))
                at += milliseconds / 1e3
        wall = time.time_ns() - time.perf_counter_ns()
        tracing.add((name, wall + int(start * 1e9), wall + int(end * 1e9)) for name, start, end in stages)


def observe(answer: Answer) -> None:
    """Record an answer's times and tokens as metrics."""
    recorded = metrics()
    for stage in ("rewrite", "embed", "search", "rerank", "prompt", "documents", "ttft", "total"):
        milliseconds = getattr(answer.timings, f"{stage}_ms")
        if milliseconds is not None:
            recorded.query_stage.labels(stage).observe(milliseconds / 1e3)
    for kind, count in answer.usage.model_dump().items():
        recorded.tokens.labels(kind).inc(count)
    for kind in ("retrieved", "kept", "recomputed"):
        recorded.tokens.labels(kind).inc(getattr(answer.context, f"tokens_{kind}"))
    recorded.tokens.labels("computed").inc(answer.context.tokens_by_tier.get("computed", 0))
