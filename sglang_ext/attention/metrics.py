"""Prometheus metrics of sparse decoding, in the registry that SGLang exposes; made on first use."""

from __future__ import annotations

from functools import lru_cache

from sglang_ext.protocol import DecodeReport


class DecodeMetrics:
    """Counters per mode, and a histogram of the estimated weight."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram

        self.steps = Counter(
            "ragserve_decode_steps",
            "Decode steps by the request's mode and whether they were sparse.",
            ["mode", "sparse"],
        )
        self.pages = Counter(
            "ragserve_decode_pages",
            "KV pages, means over layers and heads, by mode: held by the context, or read.",
            ["mode", "kind"],
        )
        self.weight = Histogram(
            "ragserve_decode_weight",
            "Estimated share of the attention weight that progressive requests read.",
            buckets=(0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0),
        )

    def observe(self, report: DecodeReport) -> None:
        """Count a request that ends."""
        self.steps.labels(report.mode, "yes").inc(report.sparse_steps)
        self.steps.labels(report.mode, "no").inc(report.steps - report.sparse_steps)
        self.pages.labels(report.mode, "read").inc(report.pages * report.steps)
        self.pages.labels(report.mode, "held").inc(report.pages_held * report.steps)
        if report.weight is not None:
            self.weight.observe(report.weight)


@lru_cache(maxsize=1)
def decode_metrics() -> DecodeMetrics:
    """Return the metrics of this process."""
    return DecodeMetrics()
