"""resident_gather: pages of single heads from host pages into a pool, bit for bit."""

from __future__ import annotations

import pytest
import torch

from ragserve_kernels.kv import KVLayers
from ragserve_kernels.paged import PagedBatch, PageSelection
from ragserve_kernels.resident_gather import resident_gather, resident_gather_naive
from ragserve_kernels.sparse_decode import sparse_decode
from tests.kernels.paged import make_batch, random_index
from tests.kernels.reference import assert_close, poisoned

GPU = torch.cuda.is_available()


def pool(device: torch.device, pages: int, page: int, dtype: torch.dtype = torch.float32) -> KVLayers:
    def layers() -> list[torch.Tensor]:
        return [poisoned(pages * page, 2, 64, dtype=dtype, device=device) for _ in range(2)]

    return KVLayers(layers(), layers())


def host_pages(pages: int, page: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    host = torch.randn(pages, 2, 2, 2, page, 64).to(dtype)
    return host.pin_memory() if GPU else host


def lists(device: torch.device, n: int, host: int, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries -1 are skipped; a page may be wanted by several heads."""
    source = torch.randint(-1, host, (2, 2, n), dtype=torch.int32)
    target = torch.stack([torch.randperm(pages)[:n] for _ in range(4)]).view(2, 2, n).int()
    return source.to(device), target.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("page", "n"), [(16, 5), (16, 40), (16, 70), (128, 3)])
def test_pages_arrive_in_their_resident_blocks(
    device: torch.device, page: int, n: int, dtype: torch.dtype
) -> None:
    host = host_pages(7, page, dtype)
    source, target = lists(device, n, 7, n + 3)
    got, want = pool(device, n + 3, page, dtype), pool(device, n + 3, page, dtype)
    resident_gather(host, got, source, target)
    for layer in range(2):
        for head in range(2):
            for i in range(n):
                taken, place = int(source[layer, head, i]), int(target[layer, head, i])
                if taken >= 0:
                    rows = slice(place * page, (place + 1) * page)
                    want.k[layer][rows, head] = host[taken, 0, layer, head].to(device)
                    want.v[layer][rows, head] = host[taken, 1, layer, head].to(device)
    for g, w in zip((*got.k, *got.v), (*want.k, *want.v), strict=True):
        assert torch.equal(torch.isnan(g), torch.isnan(w)), "wrote another page, or left one out"
        assert torch.equal(g.nan_to_num(), w.nan_to_num())
    plain = pool(device, n + 3, page, dtype)
    resident_gather_naive(host, plain, source, target)
    for g, w in zip((*plain.k, *plain.v), (*want.k, *want.v), strict=True):
        assert torch.equal(g.nan_to_num(), w.nan_to_num())


def test_arguments_are_checked(device: torch.device) -> None:
    host, dst = host_pages(3, 16), pool(device, 4, 16)
    source, target = lists(device, 2, 3, 4)
    with pytest.raises(ValueError, match="host has shape"):
        resident_gather(host[:, :1], dst, source, target)
    with pytest.raises(TypeError, match="host has dtype"):
        resident_gather(host.half(), dst, source, target)
    with pytest.raises(ValueError, match="source has shape"):
        resident_gather(host, dst, source[:1], target)
    with pytest.raises(ValueError, match="target has shape"):
        resident_gather(host, dst, source, target[..., :1])
    with pytest.raises(ValueError, match="programs is 0"):
        resident_gather(host, dst, source, target, programs=0)


@pytest.mark.parametrize(
    ("page", "dtype"), [(16, torch.float32), (64, torch.bfloat16)], ids=["16", "64, bfloat16"]
)
def test_decode_reads_resident_blocks_as_the_pages_that_they_hold(
    device: torch.device, page: int, dtype: torch.dtype
) -> None:
    """Each head's chosen pages come from the host into resident blocks of its own; the rest of the pool is
    NaN.
    """
    lens, spare = [5 * page, 2 * page], 2  # entries that name no page
    batch = make_batch(lens, device=device, page_size=page, dtype=dtype)
    chosen = random_index(batch, page, 0.5)
    want = sparse_decode(*batch.inputs(), selection=chosen)
    pages = len(batch.k) // page
    host = torch.stack([each.view(pages, page, 2, 64) for each in (batch.k, batch.v)], 1).cpu()
    host = host.permute(0, 1, 3, 2, 4)[:, :, None].contiguous()  # [pages, 2, 1 layer, heads, page, 64]
    there = KVLayers(*([poisoned(2 * pages * page, 2, 64, dtype=dtype, device=device)] for _ in range(2)))
    n = chosen.blocks.shape[2] + spare
    source = torch.full((1, 2, len(lens) * n), -1, dtype=torch.int32)
    target = torch.stack([torch.randperm(2 * pages)[: len(lens) * n] for _ in range(2)])[None].int()
    names = torch.full_like(chosen.blocks, 2**30)
    table = torch.arange(2 * pages, dtype=torch.int32).expand(len(lens), -1).contiguous()
    for row in range(len(lens)):
        for head in range(2):
            for i in range(int(chosen.counts[row, head])):
                number = int(chosen.blocks[row, head, i])
                source[0, head, row * n + i] = batch.page_table[row, number]
                names[row, head, i] = target[0, head, row * n + i]
    resident_gather(host.pin_memory() if GPU else host, there, source.to(device), target.to(device))
    whole = torch.full_like(batch.seq_lens, 2 * pages * page)
    resident_blocks = PagedBatch(table.to(device), whole, page, page)
    kv = there.k[0], there.v[0]
    got = sparse_decode(batch.q, kv, resident_blocks, selection=PageSelection(names, chosen.counts))
    assert_close(got, want, dtype)
