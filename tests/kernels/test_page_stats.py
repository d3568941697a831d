"""page_stats: statistics of chosen pages against the keys themselves, and nothing else touched."""

from __future__ import annotations

import math

import pytest
import torch

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.page_stats import PageStats, page_stats

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make(
    device: torch.device, dtype: torch.dtype, pages: int, page_size: int, layers: int = 2, kv_heads: int = 2
) -> KVLayers:
    shape = (pages * page_size, kv_heads, 64)
    return KVLayers(*([torch.randn(shape, device=device).to(dtype) for _ in range(layers)] for _ in "kv"))


def assert_one_step(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal on a GPU; Triton's interpreter cuts bfloat16 off where hardware rounds."""
    step = torch.finfo(want.dtype).eps if want.dtype == torch.bfloat16 and not want.is_cuda else 0.0
    torch.testing.assert_close(got, want, rtol=step, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page_size", "logical"), [(16, 16), (16, 4), (64, 16), (64, 64), (128, 1)])
def test_against_the_keys(device: torch.device, dtype: torch.dtype, page_size: int, logical: int) -> None:
    kv = make(device, dtype, 5, page_size)
    stats = PageStats.zeros(kv, page_size, logical)
    for table in (stats.k_min, stats.k_max, stats.k_center):
        table.fill_(math.nan)
    page_stats(kv, torch.tensor([3, -1, 0], dtype=torch.int32, device=device), stats, page_size=page_size)
    per = page_size // logical
    assert stats.per_page == per
    for layer in range(kv.layers):
        for page in (0, 3):
            keys = kv.k[layer][page * page_size : (page + 1) * page_size]
            for run in range(per):
                part = keys[run * logical : (run + 1) * logical]
                assert torch.equal(stats.k_min[layer, page * per + run], part.amin(0))
                assert torch.equal(stats.k_max[layer, page * per + run], part.amax(0))
            center = ((keys.amin(0).float() + keys.amax(0).float()) / 2).to(dtype)
            assert_one_step(stats.k_center[layer, page], center)
    untouched = [1, 2, 4]
    assert stats.k_center[:, untouched].isnan().all()
    assert stats.k_min.view(2, 5, per, 2, 64)[:, untouched].isnan().all()


def test_forced_naive_gives_the_same(device: torch.device) -> None:
    kv = make(device, torch.bfloat16, 4, 32)
    pages = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    got = [PageStats.zeros(kv, 32, 8) for _ in range(2)]
    page_stats(kv, pages, got[0], page_size=32)
    with forced_naive():
        page_stats(kv, pages, got[1], page_size=32)
    assert torch.equal(got[0].k_min, got[1].k_min)
    assert torch.equal(got[0].k_max, got[1].k_max)
    assert_one_step(got[0].k_center, got[1].k_center)


def test_no_pages(device: torch.device) -> None:
    kv = make(device, torch.float32, 2, 16)
    stats = PageStats.zeros(kv, 16, 16)
    page_stats(kv, torch.empty(0, dtype=torch.int32, device=device), stats, page_size=16)
    assert not stats.k_max.any()


def test_statistics_kept_behind_those_of_the_pool(device: torch.device) -> None:
    """They stay while pages of the pool are made again, and can be copied there."""
    kv = make(device, torch.float32, 2, 16)
    plain, wider = PageStats.zeros(kv, 16, 4), PageStats.zeros(kv, 16, 4, more=3)
    pages = torch.tensor([1, 0], dtype=torch.int32, device=device)
    for stats in (plain, wider):
        page_stats(kv, pages, stats, page_size=16)
    behind = kv.slots // 16 + torch.tensor([2, 0], device=device)
    wider.copy(pages, behind)
    page_stats(kv, pages[:1], wider, page_size=16)
    for name in ("k_min", "k_max", "k_center"):
        own, more = getattr(plain, name), getattr(wider, name)
        assert torch.equal(more[:, : own.shape[1]], own)
        found, wanted = (
            (behind.long(), pages.long()) if name == "k_center" else (wider.rows(behind), plain.rows(pages))
        )
        assert torch.equal(more[:, found], own[:, wanted])


def test_bad_arguments(device: torch.device) -> None:
    kv = make(device, torch.float32, 2, 16)
    stats = PageStats.zeros(kv, 16, 8)
    pages = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="logical page has 32"):
        PageStats.zeros(kv, 16, 32)
    with pytest.raises(ValueError, match="Page size 24"):
        page_stats(kv, pages, stats, page_size=24)
    with pytest.raises(TypeError, match="pages"):
        page_stats(kv, pages.long(), stats, page_size=16)
    with pytest.raises(ValueError, match="k_center"):
        page_stats(kv, pages, stats, page_size=32)
