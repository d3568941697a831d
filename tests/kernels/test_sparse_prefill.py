"""sparse_prefill: extend batches over listed key blocks, against attention in float64."""

from __future__ import annotations

import pytest
import torch

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.sparse_prefill import (
    BlockLists,
    PrefillBatch,
    all_blocks,
    lists_of,
    mask_of,
    split_lists,
)
from tests.kernels.extend_cases import Case, make, random_lists
from tests.kernels.reference import assert_close, attention64

ids = {"ids": lambda value: str(value).removeprefix("torch.")}


def truth(case: Case, lists: BlockLists) -> torch.Tensor:
    """Row by row and head by head, from the lists themselves."""
    batch, group = case.batch, case.q.shape[1] // case.k.shape[1]
    per_list = case.q.shape[1] // lists.starts.shape[1]
    want = torch.zeros(case.q.shape, dtype=torch.float64)
    row, places = 0, batch.places.tolist()
    for request, (prefix, new) in enumerate(zip(batch.prefix, batch.new, strict=True)):
        for position in range(prefix, prefix + new):
            place = places.index([request, position // batch.block_q])
            for head in range(case.q.shape[1]):
                start, count = (side[place, head // per_list].item() for side in lists[1:])
                blocks = lists.blocks[start : start + count].cpu().long()
                tokens = (blocks[:, None] * batch.block_k + torch.arange(batch.block_k)).flatten()
                tokens = tokens[tokens <= position]
                slots = batch.page_table[request].cpu()[tokens // batch.page_size].long() * batch.page_size
                slots = (slots + tokens % batch.page_size).to(case.k.device)
                kv = (side[slots, head // group][:, None] for side in (case.k, case.v))
                want[row, head] = attention64(case.q[row, head][None, None], *kv)[0][0, 0]
            row += 1
    return want


@pytest.mark.parametrize(("page", "blocks"), [(16, (32, 16)), (1, (16, 32)), (64, (64, 64))], ids=str)
def test_random_blocks_of_ragged_requests(device: torch.device, page: int, blocks: tuple[int, int]) -> None:
    case = make(device, [(37, 30), (0, 5), (70, 0), (64, 1), (0, 40)], page=page, blocks=blocks)
    lists = random_lists(case, 4, 0.5)
    want = truth(case, lists)
    assert_close(case.attend(lists), want, torch.float32)
    with forced_naive():
        assert_close(case.attend(lists), want, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], **ids)
@pytest.mark.parametrize("heads", [(6, 2), (5, 1)], ids=str)
def test_half_precision_and_lists_by_kv_head(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    case = make(device, [(19, 40), (90, 11)], heads=heads, head_dim=128, dtype=dtype, blocks=(32, 32))
    lists = random_lists(case, heads[1], 0.6)
    assert_close(case.attend(lists), truth(case, lists), dtype)


@pytest.mark.parametrize(
    ("head_dim", "requests"), [(64, [(0, 111)]), (256, [(63, 20), (130, 3)])], ids=["whole", "chunks"]
)
def test_all_blocks_are_dense_attention(
    device: torch.device, head_dim: int, requests: list[tuple[int, int]]
) -> None:
    case = make(device, requests, head_dim=head_dim, page=64, blocks=(128, 64))
    got, row = case.attend(all_blocks(case.batch, 2)), 0
    for i, (prefix, new) in enumerate(requests):
        tokens = torch.arange(prefix + new)
        slots = (case.batch.page_table[i].cpu()[tokens // 64].long() * 64 + tokens % 64).to(device)
        causal = tokens <= (prefix + torch.arange(new))[:, None]
        want = attention64(case.q[row : row + new], case.k[slots], case.v[slots], causal)[0]
        assert_close(got[row : row + new], want, torch.float32)
        row += new


def test_chunks_are_the_whole(device: torch.device) -> None:
    whole = make(device, [(0, 150)], heads=(2, 2), blocks=(32, 16))
    blocks = mask_of(random_lists(whole, 2, 0.5), 10)
    want = whole.attend(lists_of(blocks))
    table = whole.batch.page_table
    for first, last in ((0, 64), (64, 80), (80, 150)):  # the second chunk ends within a query block
        batch = PrefillBatch.of(table, 16, [first], [last - first], block_q=32, block_k=16)
        reach = mask_of(all_blocks(batch, 2), 10)
        part = Case(whole.q[first:last], whole.k, whole.v, batch)
        lists = lists_of(blocks[first // 32 : -(-last // 32)] & reach)
        assert_close(part.attend(lists), want[first:last], torch.float32)


@pytest.mark.parametrize("blocks", [(128, 64), (64, 64), (16, 32)], ids=str)
@pytest.mark.parametrize("list_heads", [4, 2])
def test_lists_are_split_at_their_queries(
    device: torch.device, blocks: tuple[int, int], list_heads: int
) -> None:
    requests = [(300, 400), (0, 0), (5, 130)]
    case = make(device, requests, blocks=blocks)
    lists = random_lists(case, list_heads, 0.6)
    for request in (0, 2):
        span, (prefix, _) = case.batch.spans()[request], requests[request]
        first = torch.arange(len(span)) + prefix // blocks[0]
        listed = (
            mask_of(lists, -(-700 // blocks[1]))[span.start : span.stop]
            .repeat_interleave(4 // list_heads, 1)
            .cpu()
        )
        for naive in (False, True):
            with forced_naive(naive):
                split = split_lists(case.batch, lists, request, 4)
            for head in range(4):
                for i, block in enumerate(first.tolist()):
                    entries = listed[i, head].nonzero().flatten().tolist()
                    before = [entry for entry in entries if (entry + 1) * blocks[1] <= block * blocks[0]]
                    own = entries[len(before) :]
                    assert split.full_counts[head, i] == len(before)
                    assert split.full[head, i, : len(before)].tolist() == before
                    assert split.masked_counts[head, i] == len(own)
                    assert split.masked[head, i, : len(own)].tolist() == own
    with pytest.raises(ValueError, match="request 1 has 0 query blocks"):
        split_lists(case.batch, lists, 1, 4)


def test_bad_arguments_are_named(device: torch.device) -> None:
    case = make(device, [(8, 24)])
    lists = all_blocks(case.batch, 2)
    with pytest.raises(ValueError, match="3 heads; expected 4 query heads or 2 KV heads"):
        case.attend(all_blocks(case.batch, 3))
    with pytest.raises(TypeError, match=r"lists\.blocks has dtype torch.int64"):
        case.attend(lists._replace(blocks=lists.blocks.long()))
    with pytest.raises(ValueError, match="48 tokens do not fit 2 pages of 16"):
        PrefillBatch.of(case.batch.page_table[:, :2].contiguous(), 16, [8], [40])
    with pytest.raises(ValueError, match="block_q is 48"):
        PrefillBatch.of(case.batch.page_table, 16, [8], [24], block_q=48)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_at_full_size(device: torch.device) -> None:
    case = make(
        device, [(1000, 777), (0, 300)], heads=(32, 8), head_dim=128, dtype=torch.bfloat16, blocks=(128, 64)
    )
    lists = random_lists(case, 32, 0.4)
    got = case.attend(lists)
    with forced_naive():
        assert_close(got, case.attend(lists), torch.bfloat16)
