"""key_scores: one query per head over scattered slots, against float64."""

from __future__ import annotations

import pytest
import torch

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.key_scores import key_scores
from tests.kernels.reference import assert_close, poisoned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim", "n"), [((6, 2), 64, 300), ((2, 2), 128, 1), ((5, 1), 256, 128)]
)
def test_scores_are_those_of_float64(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, n: int
) -> None:
    q = torch.randn(3, heads[0], head_dim, device=device).to(dtype)[1]
    wide = poisoned(n + 9, heads[1], 2 * head_dim, dtype=dtype, device=device)
    k = wide[..., :head_dim]  # rows lie apart, as in a pool of K and V
    slots = torch.randperm(n + 9, device=device)[:n]
    k[slots] = torch.randn(n, heads[1], head_dim, device=device).to(dtype)
    keys = k[slots].double().repeat_interleave(heads[0] // heads[1], 1)
    want = torch.einsum("hd,nhd->hn", q.double(), keys) * 0.3
    for naive in (False, True):
        with forced_naive(naive):
            out = poisoned(heads[0], n, dtype=torch.float32, device=device)
            assert key_scores(q, k, slots, scale=0.3, out=out) is out
        assert_close(out, want, dtype)


def test_no_keys_have_no_scores(device: torch.device) -> None:
    q, k = torch.randn(2, 64, device=device), torch.randn(4, 1, 64, device=device)
    assert key_scores(q, k, torch.empty(0, dtype=torch.int64, device=device)).shape == (2, 0)


def test_bad_arguments_are_named(device: torch.device) -> None:
    q, k = torch.randn(3, 64, device=device), torch.randn(4, 2, 64, device=device)
    slots = torch.arange(2, device=device)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        key_scores(q, k, slots)
    with pytest.raises(TypeError, match=r"slots has dtype torch\.int32"):
        key_scores(q[:2], k, slots.int())
    with pytest.raises(ValueError, match=r"out has shape \[2, 3\]"):
        key_scores(q[:2], k, slots, out=torch.empty(2, 3, device=device))
