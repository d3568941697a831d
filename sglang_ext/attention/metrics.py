"""Prometheus metrics of sparse decoding and sparse prefill, in the registry that SGLang exposes; made on
first use.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sglang_ext.wire.protocol import DecodeReport, PrefillReport


class DecodeMetrics:
    """Counters per mode, and a histogram of the estimated weight."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

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

        self.offloaded = Counter(
            "ragserve_decode_offloaded_pages",
            "Pages of KV heads of offloaded requests that selections named: hit, or miss and loaded from the "
            "host; read: by progressive steps from the host, being in no resident block; fill: those of them "
            "that steps wrote to one.",
            ["kind"],
        )
        self.loaded = Counter(
            "ragserve_decode_loaded_bytes", "Bytes loaded from the host for selections of offloaded requests."
        )
        self.lag = Histogram(
            "ragserve_decode_lag",
            "Steps between a selection of pages and its use, of requests with a lag, at their end.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
        )
        self.resumed = Counter(
            "ragserve_decode_resumed",
            "Offloaded requests that were retracted for want of room and went on from their host pages.",
        )
        self.segmented = Counter(
            "ragserve_decode_segmented_tokens",
            "Prompt tokens that were prefilled layer by layer onto host pages.",
        )
        self.requests = Gauge(
            "ragserve_decode_requests",
            "Requests of the latest decode step: offloaded, copying to the host, or resident.",
            ["kind"],
            multiprocess_mode="mostrecent",
        )
        self.waiting = Gauge(
            "ragserve_decode_offload_waits",
            "Requests of the latest decode step that are not offloaded for want of: device slots for "
            "resident blocks, host pages, or a link that others leave free.",
            ["bound"],
            multiprocess_mode="mostrecent",
        )
        self.resident_blocks = Gauge(
            "ragserve_decode_resident_blocks",
            "Pages of the KV pool that are resident blocks of offloaded requests, or kept free for them.",
            ["state"],
            multiprocess_mode="mostrecent",
        )
        self.host_pages = Gauge(
            "ragserve_decode_host_pages",
            "Pages on the host at the latest decode step: own ones of offloaded requests, those of contexts "
            "that are read in documents, and pages, of 16 tokens, of the documents that are kept for that.",
            ["kind"],
            multiprocess_mode="mostrecent",
        )
        self.link = Gauge(
            "ragserve_decode_link_share",
            "Bytes that offloaded requests load a step, by those that the link moves in a step's time.",
            multiprocess_mode="mostrecent",
        )

    def observe(self, report: DecodeReport) -> None:
        """Count a request that ends."""
        self.steps.labels(report.mode, "yes").inc(report.sparse_steps)
        self.steps.labels(report.mode, "no").inc(report.steps - report.sparse_steps)
        self.pages.labels(report.mode, "read").inc(report.pages * report.steps)
        self.pages.labels(report.mode, "held").inc(report.pages_held * report.steps)
        if report.weight is not None:
            self.weight.observe(report.weight)
        self.segmented.inc(report.segmented_tokens)
        if report.lag:
            self.lag.observe(report.lag)
        if report.offloaded_steps or report.misses:
            self.offloaded.labels("hit").inc(report.hits)
            self.offloaded.labels("miss").inc(report.misses)
            self.offloaded.labels("fill").inc(report.fills)
            self.offloaded.labels("read").inc(report.host_reads)
            self.loaded.inc(report.loaded_bytes)
        self.resumed.inc(report.resumed)

    def hold(self, offloaded: int, copying: int, resident: int) -> None:
        """Set the requests of a decode step."""
        for kind, count in (("offloaded", offloaded), ("copying", copying), ("resident", resident)):
            self.requests.labels(kind).set(count)

    def bound(self, offloaded: dict[str, Any]) -> None:
        """Set what bounds offloading, as `OffloadedRows.describe` tells it; empty where nothing is
        offloaded.
        """
        if not offloaded:
            return
        for bound, count in offloaded["waiting"].items():
            self.waiting.labels(bound).set(count)
        self.resident_blocks.labels("held").set(offloaded["resident_blocks"])
        self.resident_blocks.labels("due").set(offloaded["resident_blocks_due"])
        self.host_pages.labels("own").set(offloaded["used"])
        self.host_pages.labels("context").set(offloaded["in_documents"])
        self.host_pages.labels("document").set(offloaded["document_pages"])
        self.link.set(offloaded["link_share"])


class PrefillMetrics:
    """Counters of sparse prefill per mode."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram

        self.tokens = Counter(
            "ragserve_prefill_sparse_tokens", "Prompt tokens prefilled sparsely, by mode.", ["mode"]
        )
        self.share = Histogram(
            "ragserve_prefill_block_share",
            "Share of the blocks of attention that the sparse prefill of a request computed, by mode.",
            ["mode"],
            buckets=(0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0),
        )
        self.lines = Counter(
            "ragserve_prefill_lines",
            "Lines that the sparse prefill of a request attended to, means by query head and 1,024 tokens: "
            "reused from an earlier turn, or new.",
            ["origin"],
        )

    def observe(self, report: PrefillReport) -> None:
        """Count a request that ends."""
        self.tokens.labels(report.mode).inc(report.tokens)
        self.share.labels(report.mode).observe(report.share)
        self.lines.labels("reused").inc(report.reused_lines)
        self.lines.labels("new").inc(report.new_lines)


@lru_cache(maxsize=1)
def prefill_metrics() -> PrefillMetrics:
    """Return the metrics of this process."""
    return PrefillMetrics()


@lru_cache(maxsize=1)
def decode_metrics() -> DecodeMetrics:
    """Return the metrics of this process."""
    return DecodeMetrics()
