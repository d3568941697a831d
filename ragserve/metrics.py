"""Prometheus metrics of the product, ``ragserve_*``, served beside SGLang's on ``/metrics``.

They are created on first use, not at import: SGLang sets prometheus_client's multi-process directory when its
server starts, and metrics created before that would not be collected.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The metrics of a process; get them from `metrics`."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.requests = Counter(
            "ragserve_requests", "Requests by route and HTTP status.", ["route", "status"]
        )
        self.query_stage = Histogram(
            "ragserve_query_stage_seconds",
            "Seconds per stage: rewrite, embed, search, prompt, documents, ttft, total.",
            ["stage"],
            buckets=_SECONDS,
        )
        self.tokens = Counter(
            "ragserve_tokens",
            "Tokens by kind: prompt, cached, completion, retrieved, kept, recomputed, computed.",
            ["kind"],
        )
        self.aborted = Counter("ragserve_queries_aborted", "Queries whose client went away before the end.")
        self.in_flight = Gauge(
            "ragserve_queries_in_flight", "Queries being answered.", multiprocess_mode="livesum"
        )
        self.ingested = Counter(
            "ragserve_ingested_files", "Files by outcome: indexed, unchanged, failed, removed.", ["outcome"]
        )
        self.ingested_chunks = Counter("ragserve_ingested_chunks", "Chunks indexed.")
        self.synced = Counter(
            "ragserve_syncs", "Runs of `ragserve sync` over a source: done, partly, failed.", ["outcome"]
        )
        self.synced_at = Gauge(
            "ragserve_synced_timestamp_seconds",
            "When all files of a source were last indexed or unchanged, in Unix seconds.",
            ["namespace", "source"],
            multiprocess_mode="max",
        )
        self.warm_left = Gauge(
            "ragserve_warm_documents_left",
            "Documents of the running warm-up that are not done yet.",
            multiprocess_mode="livesum",
        )

        def worker(name: str, what: str) -> Gauge:
            return Gauge(f"ragserve_worker_{name}", what, ["worker"], multiprocess_mode="livesum")

        self.worker_serving = worker("serving", "1: the worker takes requests.")
        self.worker_in_flight = worker("in_flight", "Requests that the worker is answering.")
        self.worker_unconfirmed = worker(
            "unconfirmed_deletions", "Deletions that the worker has not confirmed, and is fenced off for."
        )
        self.worker_requests = Counter("ragserve_worker_requests", "Requests sent to the worker.", ["worker"])
        self.worker_resent = Counter(
            "ragserve_worker_resent", "Of these, requests sent on to another before a token came.", ["worker"]
        )

        self.of_namespaces = CollectorRegistry()
        own = own_gauge()

        def in_use(name: str, what: str) -> Gauge:
            return own(f"ragserve_use_{name}", what, ["namespace", "strategy"], registry=self.of_namespaces)

        self.use_compared = in_use("compared", "Answered requests that were compared with full prefill.")
        self.use_different = in_use("different_percent", "Of these, those that differ from full prefill's.")
        self.use_recorded = in_use("recorded_percent", "Those that differed when the strategy was verified.")
        self.use_unsupported = in_use(
            "unsupported_percent", "Of those compared, those in no passage though full prefill's are."
        )
        self.use_taken_out = in_use("taken_out", "1: strategy auto does not take it in this namespace.")
        self.use_dropped = in_use("dropped", "Answered requests that could not be compared since the start.")
        self.tuning_compared = own(
            "ragserve_tuning_compared",
            "Questions that the idle server has compared strategies on.",
            ["namespace"],
            registry=self.of_namespaces,
        )
        self.job_seconds = Histogram(
            "ragserve_ingest_job_seconds", "Seconds per ingestion job.", buckets=(*_SECONDS, 300, 1800)
        )

    def forget_namespace(self, namespace: str) -> None:
        """Remove the series of a namespace that was removed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files that processes share, where these gauges are not
            rates = (self.use_different, self.use_recorded, self.use_unsupported)
            others = (self.use_taken_out, self.use_dropped, self.tuning_compared)
            for gauge in (self.use_compared, *rates, *others):
                gauge.remove_by_labels({"namespace": namespace})


def own_gauge() -> Any:
    """Return a class of gauges in this process's memory. prometheus_client keeps others in files where
    processes share them, as SGLang's do, and removes no series from those."""
    from prometheus_client import Gauge
    from prometheus_client.values import MutexValue

    class OwnGauge(Gauge):
        def _metric_init(self) -> None:
            self._value = MutexValue(
                self._type, self._name, self._name, self._labelnames, self._labelvalues, self._documentation
            )

    return OwnGauge


@lru_cache(maxsize=1)
def metrics() -> Metrics:
    """The process's metrics."""
    return Metrics()


def exposition() -> tuple[bytes, str]:
    """(body, content type) of ``/metrics``: SGLang's, too, where its processes are ours."""
    import os

    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry: Any = REGISTRY
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
    own = metrics().of_namespaces
    return generate_latest(registry) + generate_latest(own), CONTENT_TYPE_LATEST
