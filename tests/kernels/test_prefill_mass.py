"""What the measurement of sparse prefill's attention counts is what a sparse prefill chooses."""

from __future__ import annotations

import pytest
import torch

from benchmarks.lib.prefill_mass import SampledLines
from ragserve_kernels.prefill_lists import LinePlan, choose_lines
from tests.kernels.test_sparse_prefill import make


@pytest.mark.parametrize("new", [77, 333])
def test_lines_of_once_sampled_attention_are_those_that_are_chosen(device: torch.device, new: int) -> None:
    case = make(device, [(0, new)], heads=(6, 2))
    q, k, batch = case.q, case.k, case.batch
    once = SampledLines(q, k, batch, 16, 0.2)
    plan = LinePlan.of(batch, 6, observe=16)
    for alpha, share in ((0.955, None), (0.5, None), (1.0, 0.1), (1.0, 0.31)):
        chosen = choose_lines(q, k, plan, alpha=alpha, share=share, scale=0.2).mask
        assert torch.equal(once.mask(alpha, share), chosen), (alpha, share)
