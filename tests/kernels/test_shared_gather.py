"""shared_gather: pages of single heads from host pages into shared blocks of other layers and heads, bit for
bit.
"""

from __future__ import annotations

import pytest
import torch

from ragserve_kernels.shared_gather import shared_gather, shared_gather_naive
from tests.kernels.test_resident_gather import host_pages, pool

LISTS = 4  # layers times KV heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("page", "n", "count"), [(16, 9, 7), (16, 40, 40), (128, 3, 2), (64, 5, 0)])
def test_pages_arrive_in_their_shared_blocks(
    device: torch.device, page: int, n: int, count: int, dtype: torch.dtype
) -> None:
    host = host_pages(7, page, dtype)
    source = torch.randint(7 * LISTS, (n,), dtype=torch.int32)
    target = torch.randperm((n + 3) * LISTS)[:n].int()
    source[count:], target[count:] = -(2**30), 2**30  # junk
    want = pool(device, n + 3, page, dtype)
    for taken, shared_block in zip(source[:count].tolist(), target[:count].tolist(), strict=True):
        rows, values = (
            slice(shared_block // LISTS * page, (shared_block // LISTS + 1) * page),
            host[taken // LISTS],
        )
        for half, buffers in enumerate((want.k, want.v)):
            buffers[shared_block // 2 % 2][rows, shared_block % 2] = values[
                half, taken // 2 % 2, taken % 2
            ].to(device)
    used = torch.tensor([count], dtype=torch.int32, device=device)
    for gather in (shared_gather, shared_gather_naive):
        got = pool(device, n + 3, page, dtype)
        gather(host, got, source.to(device), target.to(device), used)
        for g, w in zip((*got.k, *got.v), (*want.k, *want.v), strict=True):
            assert torch.equal(torch.isnan(g), torch.isnan(w)), "wrote another page, or left one out"
            assert torch.equal(g.nan_to_num(), w.nan_to_num())


def test_arguments_are_checked(device: torch.device) -> None:
    host, dst = host_pages(3, 16), pool(device, 4, 16)
    source, target = (torch.arange(2, dtype=torch.int32, device=device) for _ in range(2))
    count = source[1:]
    with pytest.raises(ValueError, match="host has shape"):
        shared_gather(host[:, :1], dst, source, target, count)
    with pytest.raises(TypeError, match="host has dtype"):
        shared_gather(host.half(), dst, source, target, count)
    with pytest.raises(ValueError, match="target has shape"):
        shared_gather(host, dst, source, target[:1], count)
    with pytest.raises(ValueError, match="count has shape"):
        shared_gather(host, dst, source, target, source)
    with pytest.raises(ValueError, match="programs is 0"):
        shared_gather(host, dst, source, target, count, programs=0)
