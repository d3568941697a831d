"""The kernel benchmarks refuse to measure what would mean nothing."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from ragserve.bench import kernels_compose, kernels_decode
from ragserve.bench.kernels_timing import agree, bandwidth
from ragserve.errors import InvalidRequest, RagserveError


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures on CUDA")
@pytest.mark.parametrize("bench", [kernels_compose, kernels_decode], ids=["compose", "decode"])
def test_without_a_gpu_nothing_is_measured(bench: ModuleType) -> None:
    with pytest.raises(InvalidRequest, match="found no CUDA device"):
        bench.run(None)


def test_a_wrong_result_is_not_timed() -> None:
    want = torch.randn(10)
    agree(want * 1.001, want, "scaled")
    with pytest.raises(RagserveError, match="disagrees with its reference"):
        agree(want * 1.1, want, "scaled")
    with pytest.raises(RagserveError, match="disagrees"):
        agree(want * float("nan"), want, "nan")


def test_bandwidth_is_bytes_over_time() -> None:
    row = bandwidth("case", "variant", 2.0, 4.0, 4000.0)
    assert (row["gb_per_s"], row["of_ceiling"]) == (2000.0, 0.5)
