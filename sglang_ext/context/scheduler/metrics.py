"""Prometheus metrics of composed contexts, in the registry that SGLang exposes. Created on first use: see
`ragserve.metrics`.
"""

from __future__ import annotations

from functools import lru_cache

from sglang_ext.wire.protocol import ContextReport

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ContextMetrics:
    """Counters and stage times of composed requests."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram

        self.stage = Histogram(
            "ragserve_context_stage_seconds",
            "Seconds per stage: load, compose, recompute, extend.",
            ["stage"],
            buckets=_SECONDS,
        )
        self.requests = Counter("ragserve_contexts", "Composed requests by strategy.", ["strategy"])
        self.tokens = Counter(
            "ragserve_context_tokens",
            "Document tokens by strategy and kind: whole, kept, recomputed, computed (in no tier before).",
            ["strategy", "kind"],
        )

    def observe(self, report: ContextReport) -> None:
        """Count one composition."""
        self.requests.labels(report.strategy).inc()
        for kind, n in (
            ("whole", report.document_tokens),
            ("kept", report.kept),
            ("recomputed", report.recomputed),
            ("computed", report.by_tier.get("computed", 0)),
        ):
            self.tokens.labels(report.strategy, kind).inc(n)
        for stage in ("load", "compose", "recompute", "extend"):
            self.stage.labels(stage).observe(getattr(report, f"{stage}_ms") / 1e3)


@lru_cache(maxsize=1)
def context_metrics() -> ContextMetrics:
    """Return the process's metrics."""
    return ContextMetrics()
