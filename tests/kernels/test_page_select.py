"""page_select: scores, the best blocks of a budget, and rankings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.page_select import KeySummary, PageSelection, page_select, summarise
from ragserve_kernels.page_select.naive import block_scores, forced_blocks
from ragserve_kernels.paged import PagedBatch
from ragserve_kernels.sparse_decode import sparse_decode
from tests.kernels.paged import make_batch

GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCORINGS = ["minmax", "center"]


class Case:
    """Summaries of random keys for a ragged batch; NaN in the rows that no block owns."""

    def __init__(
        self,
        device: torch.device,
        lens: list[int],
        *,
        block_size: int = 16,
        per_block: int = 1,
        dtype: torch.dtype = torch.float32,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 64,
        scoring: str = "minmax",
    ) -> None:
        totals = [-(-n // block_size) for n in lens]
        places = torch.randperm(sum(totals) + 2)[: sum(totals)].int()
        table = torch.full((len(lens), max(1, *totals) + 1), 2**30, dtype=torch.int32)
        keys = torch.randn(sum(totals) + 2, block_size, kv_heads, head_dim).to(dtype)
        low, high, mean, _ = summarise(keys.flatten(0, 1), block_size // per_block)
        at = 0
        owned = torch.zeros(len(keys), dtype=torch.bool)
        for i, total in enumerate(totals):
            table[i, :total] = places[at : at + total]
            owned[places[at : at + total].long()] = True
            at += total
        rows = (~owned).nonzero().flatten()[:, None] * per_block + torch.arange(per_block)
        for summary in (low, high, mean):
            summary[rows.flatten()] = math.nan
        self.q = torch.randn(len(lens), heads, head_dim).to(dtype).to(device)
        lengths = torch.tensor(lens, dtype=torch.int32, device=device)
        self.batch = PagedBatch(table.to(device), lengths, block_size)
        self.keys = KeySummary(high.to(device), low.to(device), per_block)
        if scoring == "center":
            self.keys = KeySummary(mean.to(device), None, per_block)
        self.totals = totals

    def select(self, **options: object) -> PageSelection:
        return page_select(self.q, self.batch, self.keys, **options)

    def check(self, *, budget_tokens: int | None = None, sink: int = 1, recent: int = 1) -> None:
        """The chosen blocks are the best: none left out scores higher than one chosen, but for rounding of
        the scores.
        """
        got = self.select(budget_tokens=budget_tokens, sink_blocks=sink, recent_blocks=recent)
        scores = block_scores(self.q, self.batch, self.keys)
        slack = 1e-4 * scores[scores.isfinite()].abs().amax().item() if scores.isfinite().any() else 0.0
        for b, total in enumerate(self.totals):
            take = total if budget_tokens is None else min(total, budget_tokens // self.batch.block_size)
            forced = forced_blocks(total, sink, recent)
            for h in range(got.counts.shape[1]):
                assert int(got.counts[b, h]) == take
                chosen = got.blocks[b, h, :take].cpu().long()
                assert len(chosen.unique()) == take, "blocks repeat"
                assert ((chosen >= 0) & (chosen < total)).all()
                inside = torch.zeros(total, dtype=torch.bool)
                inside[chosen] = True
                assert inside[forced].all()
                row = scores[b, h, :total].masked_fill(forced, math.inf)
                if budget_tokens is None:
                    assert torch.equal(chosen[: int(forced.sum())], forced.nonzero().flatten())
                    assert (
                        row[chosen][1:].clamp_max(1e30) <= row[chosen][:-1].clamp_max(1e30) + slack
                    ).all(), "not in falling order"
                else:
                    assert torch.equal(chosen, chosen.sort().values), "not in the order of the sequence"
                    if 0 < take < total:
                        assert row[inside].min() >= row[~inside].max() - slack


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("per_block", [1, 4])
@pytest.mark.parametrize("budget_tokens", [128, None], ids=["best", "rank"])
def test_best_blocks(device: torch.device, budget_tokens: int | None, per_block: int, scoring: str) -> None:
    Case(device, [2000, 0, 1, 111, 63], block_size=64, per_block=per_block, scoring=scoring).check(
        budget_tokens=budget_tokens
    )


@pytest.mark.parametrize("dtype", DTYPES if GPU else [torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_dtypes_and_head_sizes(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    Case(device, [500, 40], dtype=dtype, head_dim=head_dim, heads=3, kv_heads=1).check(budget_tokens=160)


@pytest.mark.parametrize("page", [128] if GPU else [64])
def test_the_keys_themselves(device: torch.device, page: int) -> None:
    """A block of as many logical pages as tokens scores its largest q . k, of tokens that are there."""
    case = Case(device, [1111, 63, 700], block_size=page, per_block=page, scoring="center")
    case.check(budget_tokens=6 * page)


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (3, 2), (0, 5)])
def test_forced_blocks(device: torch.device, sink: int, recent: int) -> None:
    case = Case(device, [700, 17], heads=5, kv_heads=1)
    case.check(budget_tokens=96, sink=sink, recent=recent)
    case.check(sink=sink, recent=recent)


@pytest.mark.parametrize("blocks", [5000, 20000, 70000] if GPU else [17000])
def test_more_blocks_than_registers_hold(device: torch.device, blocks: int) -> None:
    Case(device, [blocks, 300], block_size=1, heads=1, kv_heads=1, scoring="center").check(budget_tokens=333)


def test_ties_go_to_the_earlier_block(device: torch.device) -> None:
    case = Case(device, [320], heads=1, kv_heads=1, scoring="center")
    case.keys.high.zero_()
    case.keys.high[..., 0] = 1.0  # one term a sum: exactly equal scores, whatever the order of addition
    got = case.select(budget_tokens=96)
    assert got.blocks[0, 0].tolist() == [0, 1, 2, 3, 4, 19]
    assert case.select().blocks[0, 0, :20].tolist() == [0, 19, *range(1, 19)]


def test_min_max_score_bounds_every_key(device: torch.device) -> None:
    """Equation 2 is an upper bound of q . k over the logical page, so a block whose key is aligned with the
    query is found.
    """
    batch = make_batch([1024], device=device, heads=2, kv_heads=1, page_size=64)
    wanted = 11
    slot = batch.slots(0, torch.tensor([wanted * 64 + 37]))
    batch.k[slot, 0] = 4 * batch.q[0, 1]
    low, high, _, _ = summarise(batch.k.nan_to_num(), 16)
    got = page_select(batch.q, batch.paged(), KeySummary(high, low, 4), budget_tokens=256)
    assert wanted in got.blocks[0, 0].tolist()
    out = sparse_decode(*batch.inputs(), selection=got)
    assert torch.nn.functional.cosine_similarity(out[0, 1], batch.v[slot[0], 0], dim=0) > 0.99


@settings(
    max_examples=60 if GPU else 6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lens=st.lists(st.integers(0, 400), min_size=1, max_size=4 if GPU else 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    block_size=st.sampled_from([1, 16, 64, 128]),
    logical=st.sampled_from([1, 8, 16, 64]),
    budget_blocks=st.integers(2, 9),
    scoring=st.sampled_from(SCORINGS),
    dtype=st.sampled_from(DTYPES),
    rank=st.booleans(),
)
def test_any_shape(
    device: torch.device,
    lens: list[int],
    kv_heads: int,
    group: int,
    block_size: int,
    logical: int,
    budget_blocks: int,
    scoring: str,
    dtype: torch.dtype,
    rank: bool,
) -> None:
    per_block = min(32, max(1, block_size // logical))
    case = Case(
        device,
        lens,
        block_size=block_size,
        per_block=per_block,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        scoring=scoring,
        dtype=dtype,
    )
    case.check(budget_tokens=None if rank else budget_blocks * block_size)


def test_the_plain_forward_agrees(device: torch.device) -> None:
    case = Case(device, [900, 30])
    got = case.select(budget_tokens=160)
    with forced_naive():
        want = case.select(budget_tokens=160)
    assert torch.equal(got.counts, want.counts)
    assert torch.equal(got.blocks[0], want.blocks[0])


def test_wrong_arguments_are_named(device: torch.device) -> None:
    case = Case(device, [100])
    high, low, _ = case.keys
    with pytest.raises(ValueError, match="holds 1 blocks of 16"):
        case.select(budget_tokens=16)
    with pytest.raises(ValueError, match="not pages of 16"):
        page_select(case.q, replace(case.batch, block_size=32), case.keys)
    with pytest.raises(ValueError, match="per_block is 3"):
        page_select(case.q, case.batch, KeySummary(high, low, 3))
    with pytest.raises(ValueError, match="same shape and strides"):
        page_select(case.q, case.batch, KeySummary(high, low[1:]))
    with pytest.raises(TypeError, match="low has dtype"):
        page_select(case.q, case.batch, KeySummary(high, low.double()))


@pytest.mark.parametrize("naive", [False, True], ids=["kernel", "naive"])
def test_budgets_and_reuse_by_request(device: torch.device, naive: bool) -> None:
    """Every request has its own budget, and one that is not active keeps its selection."""
    case = Case(device, [200, 90, 333, 64], per_block=2, heads=2, kv_heads=1)
    budgets = [3, 9, 7, 2]
    with forced_naive(naive):
        alone = [case.select(budget_tokens=16 * budget) for budget in budgets]
        into = PageSelection(
            torch.full((4, 1, 9), 7, dtype=torch.int32, device=device),
            torch.full((4, 1), 5, dtype=torch.int32, device=device),
        )
        got = case.select(
            budget_tokens=16 * 9,
            budgets=torch.tensor(budgets, dtype=torch.int32, device=device),
            active=torch.tensor([1, 0, 1, 1], dtype=torch.int32, device=device),
            into=into,
        )
    assert got.blocks is into.blocks
    assert (into.blocks[1] == 7).all()
    assert (into.counts[1] == 5).all()
    for b in (0, 2, 3):
        take = min(budgets[b], case.totals[b])
        assert (into.counts[b] == take).all()
        assert torch.equal(into.blocks[b, :, :take], alone[b].blocks[b, :, :take])
        assert (into.blocks[b, :, take:] == 7).all()


@pytest.mark.parametrize("naive", [False, True], ids=["kernel", "naive"])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_layers_in_one_call_are_those_of_a_call_each(device: torch.device, scoring: str, naive: bool) -> None:
    """Into a slice of wider tables, some requests left out, budgets of their own; and ranked."""
    lens, width = [200, 90, 333], 8
    case = Case(device, lens, per_block=2, scoring=scoring, heads=2, kv_heads=1)
    q = torch.stack([case.q, -case.q, 2 * case.q.flip(0)])

    def layered(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else torch.stack([part, part.flip(-1), part * 3])

    keys = KeySummary(layered(case.keys.high), layered(case.keys.low), 2)
    options = {
        "budget_tokens": 16 * width,
        "budgets": torch.tensor([3, 8, 5], dtype=torch.int32, device=device),
        "active": torch.tensor([1, 0, 1], dtype=torch.int32, device=device),
    }
    wide = PageSelection(
        torch.full((3, 5, 1, width), 7, dtype=torch.int32, device=device),
        torch.full((3, 5, 1), 6, dtype=torch.int32, device=device),
    )
    into = PageSelection(wide.blocks[:, :3], wide.counts[:, :3])
    with forced_naive(naive):
        page_select(q, case.batch, keys, **options, into=into)
        ranked = page_select(q, case.batch, keys)
        for layer in range(3):
            own = KeySummary(keys.high[layer], None if keys.low is None else keys.low[layer], 2)
            alone = PageSelection(
                torch.full_like(into.blocks[layer], 7), torch.full_like(into.counts[layer], 6)
            )
            page_select(q[layer], case.batch, own, **options, into=alone)
            assert torch.equal(into.blocks[layer], alone.blocks)
            assert torch.equal(into.counts[layer], alone.counts)
            order = page_select(q[layer], case.batch, own)
            assert torch.equal(ranked.counts[layer], order.counts)
            for b, total in enumerate(case.totals):
                assert torch.equal(ranked.blocks[layer, b, :, :total], order.blocks[b, :, :total])
    assert (into.counts[:, 1] == 6).all()
    assert (wide.blocks[:, 3:] == 7).all()
    assert (wide.counts[:, 3:] == 6).all()


def test_reuse_needs_a_budget_and_a_place(device: torch.device) -> None:
    case = Case(device, [64])
    ones = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="need budget_tokens"):
        case.select(budgets=ones)
    with pytest.raises(ValueError, match="active goes with into"):
        case.select(budget_tokens=32, active=ones)
    wrong = PageSelection(
        torch.zeros(1, 2, 3, dtype=torch.int32, device=device),
        torch.zeros(1, 2, dtype=torch.int32, device=device),
    )
    with pytest.raises(ValueError, match="blocks has shape"):
        case.select(budget_tokens=32, into=wrong)
