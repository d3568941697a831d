"""Prometheus metrics of the document tiers, `ragserve_kv_*`, labelled by tier: device, host, disk
or remote.

Created on first use, because SGLang sets prometheus_client's multi-process folder at server start."""

from __future__ import annotations

from functools import lru_cache

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class KvMetrics:
    """Metrics of one process; use `kv_metrics`.

    ``own``: share of the documents that the process counts. Every tensor-parallel rank has its heads of every
    document, and the first one counts them; bytes and faults are sums over ranks.
    """

    own = 1

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self.hits = Counter(
            "ragserve_kv_hits", "Documents found, by the fastest tier that has all of their KV.", ["tier"]
        )
        self.misses = Counter("ragserve_kv_misses", "Documents asked for whose KV is in no tier.")
        self.evictions = Counter(
            "ragserve_kv_evictions", "Documents evicted to stay within a tier's budget.", ["tier"]
        )
        self.bytes = Gauge(
            "ragserve_kv_bytes", "Bytes of documents in a tier.", ["tier"], multiprocess_mode="livesum"
        )
        self.page_bits = Gauge(
            "ragserve_kv_page_bits",
            "Bits per value of documents below the device; 16: as the KV pool has them.",
            multiprocess_mode="livemax",
        )
        self.moved = Counter(
            "ragserve_kv_moved_bytes",
            "Bytes moved: to_host, to_disk, from_disk, to_remote, from_remote.",
            ["direction"],
        )
        self.load_seconds = Histogram(
            "ragserve_kv_load_seconds",
            "Seconds to bring blocks of a document from disk, or from the shared store, to host.",
            buckets=_SECONDS,
        )
        self.faults = Counter(
            "ragserve_kv_faults", "What turned a hit into a miss or kept a document off the disk.", ["reason"]
        )


@lru_cache(maxsize=1)
def kv_metrics() -> KvMetrics:
    """The process's metrics."""
    return KvMetrics()


class RemoteMetrics:
    """Metrics of the shared store, which only a process that has one shows; use `remote_metrics`."""

    def __init__(self) -> None:
        from prometheus_client import Gauge

        self.up = Gauge(
            "ragserve_kv_remote_up", "1 while the shared store answers.", multiprocess_mode="livemin"
        )
        self.unconfirmed = Gauge(
            "ragserve_kv_remote_unconfirmed_deletions",
            "Deletions that the shared store has not confirmed.",
            multiprocess_mode="livesum",
        )


@lru_cache(maxsize=1)
def remote_metrics() -> RemoteMetrics:
    """The process's metrics of the shared store."""
    return RemoteMetrics()
