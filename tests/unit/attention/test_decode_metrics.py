"""What Prometheus is told of requests that end."""

from __future__ import annotations

from prometheus_client import REGISTRY

from sglang_ext.attention.metrics import decode_metrics
from sglang_ext.wire.protocol import DecodeReport


def lags() -> tuple[float, float]:
    """The requests that had a lag so far, and the sum of their lags."""
    count, total = (REGISTRY.get_sample_value(f"ragserve_decode_lag_{kind}") for kind in ("count", "sum"))
    return count or 0.0, total or 0.0


def test_the_lag_of_a_request_counts_where_it_has_one() -> None:
    metrics, (count, total) = decode_metrics(), lags()
    for lag in (2, 0, 5):
        metrics.observe(DecodeReport("hierarchical", 9, 9, 4.0, 8.0, 0.5, None, lag=lag))
    assert lags() == (count + 2, total + 7)
