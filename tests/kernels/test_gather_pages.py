"""gather_pages: K and V of any slots, page by page, against indexing; zeros where there is no slot."""

from __future__ import annotations

import pytest
import torch

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.gather_pages import gather_pages
from ragserve_kernels.kv import KVLayers

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make(
    device: torch.device, dtype: torch.dtype, slots: int, layers: int, kv_heads: int, head_dim: int
) -> KVLayers:
    shape = (slots, kv_heads, head_dim)
    return KVLayers(*([torch.randn(shape, device=device).to(dtype) for _ in range(layers)] for _ in "kv"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "page", "pages"),
    [(1, 1, 64, 16, 1), (3, 2, 64, 16, 5), (2, 3, 128, 64, 3), (2, 1, 256, 32, 2)],
)
def test_pages_have_their_slots(
    device: torch.device, dtype: torch.dtype, layers: int, kv_heads: int, head_dim: int, page: int, pages: int
) -> None:
    kv = make(device, dtype, 2 * pages * page + 7, layers, kv_heads, head_dim)
    slots = torch.randperm(kv.slots, device=device)[: pages * page]
    absent = torch.rand(len(slots), device=device) < 0.2
    absent[-page // 2 :] = True  # behind a document's end
    got = gather_pages(kv, torch.where(absent, -1, slots), page_size=page)
    assert got.shape == (pages, 2, layers, kv_heads, page, head_dim)
    for half, each in enumerate((kv.k, kv.v)):
        for layer, buffer in enumerate(each):
            rows = got[:, half, layer].transpose(1, 2).reshape(-1, kv_heads, head_dim)
            assert torch.equal(rows[~absent], buffer[slots[~absent]])
            assert not rows[absent].any()


def test_forced_naive_gives_the_same(device: torch.device) -> None:
    kv = make(device, torch.bfloat16, 100, 2, 2, 64)
    slots = torch.randint(-3, 100, (48,), device=device)
    got = gather_pages(kv, slots, page_size=16)
    with forced_naive():
        assert torch.equal(gather_pages(kv, slots, page_size=16), got)


def test_no_pages(device: torch.device) -> None:
    kv = make(device, torch.float32, 10, 2, 1, 64)
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert gather_pages(kv, none, page_size=16).shape == (0, 2, 2, 1, 16, 64)


def test_bad_arguments(device: torch.device) -> None:
    kv = make(device, torch.float32, 40, 1, 1, 64)
    slots = torch.arange(32, device=device)
    with pytest.raises(ValueError, match="whole pages of 64"):
        gather_pages(kv, slots, page_size=64)
    with pytest.raises(ValueError, match="Page size 24"):
        gather_pages(kv, slots, page_size=24)
    with pytest.raises(TypeError, match="slots"):
        gather_pages(kv, slots.int(), page_size=16)
    with pytest.raises(ValueError, match="Head size 32"):
        gather_pages(make(device, torch.float32, 40, 1, 1, 32), slots, page_size=16)
