"""key_scores: one query per head and request over scattered slots, against float64."""

from __future__ import annotations

import pytest
import torch

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.key_scores import key_scores
from tests.kernels.reference import assert_close, poisoned


def starts_of(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim", "lengths", "more"),
    [((6, 2), 64, [300], 0), ((2, 2), 128, [1, 0, 130], 7), ((5, 1), 256, [128, 3], 0)],
)
def test_scores_are_those_of_float64(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    lengths: list[int],
    more: int,
) -> None:
    n, width = sum(lengths), max(lengths) + more
    q = torch.randn(len(lengths), 3, heads[0], head_dim, device=device).to(dtype)[:, 1]
    wide = poisoned(n + 9, heads[1], 2 * head_dim, dtype=dtype, device=device)
    k = wide[..., :head_dim]  # rows lie apart, as in a pool of K and V
    slots = torch.randperm(n + 9, device=device)[:n]
    k[slots] = torch.randn(n, heads[1], head_dim, device=device).to(dtype)
    starts = starts_of(lengths, device)
    for naive in (False, True):
        with forced_naive(naive):
            out = poisoned(len(lengths), heads[0], width, dtype=torch.float32, device=device)
            assert key_scores(q, k, slots, starts, width, scale=0.3, out=out) is out
        for own, query, taken in zip(out, q, slots.split(lengths), strict=True):
            keys = k[taken].double().repeat_interleave(heads[0] // heads[1], 1)
            assert_close(own[:, : len(taken)], torch.einsum("hd,nhd->hn", query.double(), keys) * 0.3, dtype)
            assert bool((own[:, len(taken) :] == -torch.inf).all())


def test_no_keys_have_no_scores(device: torch.device) -> None:
    q, k = torch.randn(1, 2, 64, device=device), torch.randn(4, 1, 64, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert key_scores(q, k, none, starts_of([0], device), 0).shape == (1, 2, 0)


def test_bad_arguments_are_named(device: torch.device) -> None:
    q, k = torch.randn(1, 3, 64, device=device), torch.randn(4, 2, 64, device=device)
    slots, starts = torch.arange(2, device=device), starts_of([2], device)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        key_scores(q, k, slots, starts, 2)
    with pytest.raises(TypeError, match=r"slots has dtype torch\.int32"):
        key_scores(q[:, :2], k, slots.int(), starts, 2)
    with pytest.raises(ValueError, match=r"starts has shape \[3\]"):
        key_scores(q[:, :2], k, slots, starts_of([1, 1], device), 2)
    with pytest.raises(ValueError, match=r"out has shape \[1, 2, 3\]"):
        key_scores(q[:, :2], k, slots, starts, 2, out=torch.empty(1, 2, 3, device=device))
