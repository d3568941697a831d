"""Sparse prefill by FlashAttention 4: what it is given, who else attends, and on Hopper GPUs its results."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest
import torch

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.sparse_prefill import BlockLists, SplitLists, all_blocks, sparse_prefill
from sglang_ext.attention.prefill import hopper_prefill
from sglang_ext.attention.prefill.hopper_prefill import HopperPrefill, is_hopper
from tests.kernels.extend_cases import Case, make, random_lists
from tests.kernels.reference import assert_close, poisoned

CPU = torch.device("cpu")
ROWS = [(0, 40), (333, 1100), (128, 1024), (7, 0), (20, 9), (500, 3)]  # prefix and new tokens


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    split: SplitLists,
    block: tuple[int, int],
    scale: float,
    out: torch.Tensor,
) -> None:
    """As FlashAttention 4 is asked for it: query blocks from the first row, K and V in one piece."""
    group, before = q.shape[1] // k.shape[1], len(k) - len(q)
    assert before % block[0] == 0
    for head in range(q.shape[1]):
        keys, values = k[:, head // group].float(), v[:, head // group].float()
        for i, rows in enumerate(torch.arange(len(q)).split(block[0])):
            full = split.full[head, i, : split.full_counts[head, i]].tolist()
            own = split.masked[head, i, : split.masked_counts[head, i]].tolist()
            seen = torch.zeros(len(rows), len(k), dtype=torch.bool)
            for entry in full:
                seen[:, entry * block[1] : (entry + 1) * block[1]] = True
            for entry in own:
                seen[:, entry * block[1] : (entry + 1) * block[1]] = True
            if own:
                seen &= torch.arange(len(k)) <= before + rows[:, None]
            scores = (q[rows, head].float() @ keys.T * scale).masked_fill(~seen, -math.inf)
            out[rows, head] = (scores.softmax(-1).nan_to_num(0.0) @ values).to(out.dtype)


def case_of(device: torch.device, heads: tuple[int, int] = (2, 1), dim: int = 64, block_k: int = 64) -> Case:
    blocks = (128, block_k)
    return make(device, ROWS, heads=heads, head_dim=dim, dtype=torch.bfloat16, page=64, blocks=blocks)


def attended(by: Callable[..., torch.Tensor], case: Case, lists: BlockLists) -> torch.Tensor:
    out = poisoned(*case.q.shape, dtype=case.q.dtype, device=case.q.device)
    assert by(case.q, case.k, case.v, case.batch, lists, scale=0.2, out=out) is out
    return out


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_long_requests_are_its_own_and_the_others_ours(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    torch.manual_seed(3)
    case, asked = case_of(CPU), []

    def noted(q: torch.Tensor, *rest: object) -> None:
        asked.append(len(q))
        plain(q, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(hopper_prefill, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper_prefill, "_load", lambda: noted)
    lists = random_lists(case, 2, share) if share < 1 else all_blocks(case.batch, 1)
    got = attended(HopperPrefill(CPU), case, lists)
    assert asked == [1100 + 333 % 128, 1024], "from a query block's first position"
    assert_close(got, attended(sparse_prefill, case, lists), torch.bfloat16)


def test_our_kernel_does_it_where_flash_attention_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case, tries = case_of(CPU), []

    def fail(q: torch.Tensor, *rest: object) -> None:
        tries.append(len(q))
        raise torch.cuda.OutOfMemoryError if len(tries) < 3 else RuntimeError("no such tile")

    monkeypatch.setattr(hopper_prefill, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper_prefill, "_load", lambda: fail)
    lists, by = random_lists(case, 2, 0.4), HopperPrefill(CPU)
    want = attended(sparse_prefill, case, lists)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(attended(by, case, lists), want)
    assert len(tries) == 3, "one for want of memory is tried again, another failure is not"
    assert caplog.messages == [
        "sparse prefill runs by the slower kernel: FlashAttention 4 failed: no such tile"
    ]


def test_elsewhere_nothing_of_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_prefill, "_load", lambda: pytest.fail("imported"))
    case = case_of(CPU)
    lists = random_lists(case, 2, 0.4)
    assert torch.equal(attended(HopperPrefill(CPU), case, lists), attended(sparse_prefill, case, lists))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("block_k", [64, 128])
@pytest.mark.parametrize(("heads", "dim"), [((32, 8), 128), ((6, 2), 64)])
def test_it_is_attention_over_the_listed_blocks(
    heads: tuple[int, int], dim: int, block_k: int, caplog: pytest.LogCaptureFixture
) -> None:
    case = case_of(torch.device("cuda"), heads, dim, block_k)
    by = HopperPrefill(case.q.device)
    for lists in (
        random_lists(case, heads[0], 0.3),
        random_lists(case, heads[1], 0.02),  # many without any
        all_blocks(case.batch, heads[1]),
    ):
        got = attended(by, case, lists)
        with forced_naive():
            assert_close(got, attended(sparse_prefill, case, lists), torch.bfloat16)
    assert not caplog.records, "it did not fail"
