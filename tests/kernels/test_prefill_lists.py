"""Block lists of a sparse prefill: scores in the interpreter, greedy choices against loops, chunks."""

from __future__ import annotations

import math

import pytest
import torch

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.prefill_lists import (
    LinePlan,
    Lines,
    LineShape,
    block_lse,
    choose_blocks,
    choose_lines,
    greedy_blocks,
    greedy_blocks_naive,
    greedy_lines,
    greedy_lines_naive,
    list_blocks,
    list_lines,
)
from ragserve_kernels.sparse_prefill import PrefillBatch, all_blocks, list_room, mask_of
from tests.kernels.reference import assert_close, attention64
from tests.kernels.test_sparse_prefill import Case, make


def keys(case: Case, request: int) -> torch.Tensor:
    batch = case.batch
    token = torch.arange(batch.prefix[request] + batch.new[request])
    slots = batch.page_table[request].cpu()[token // batch.page_size].long() * batch.page_size
    return case.k[(slots + token % batch.page_size).to(case.k.device)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_block_scores_are_shares_of_the_attention(device: torch.device, dtype: torch.dtype) -> None:
    case = make(device, [(40, 9), (77, 70)], heads=(6, 2), dtype=dtype)
    positions = torch.tensor([77, 90, 146, 100], dtype=torch.int32, device=device)
    k = keys(case, 1)
    causal = torch.arange(147) <= positions.cpu()[:, None]
    weights = attention64(case.q[9 + positions.long().cpu() - 77], k, k, causal)[1]
    want = torch.nn.functional.pad(weights, (0, 13)).unflatten(-1, (10, 16)).sum(-1)
    for naive in (False, True):
        with forced_naive(naive):
            lse = block_lse(case.q, case.k, case.batch, 1, positions)
        assert lse.shape == (6, 4, 10)
        assert (lse[:, 0, 5:] == -math.inf).all(), "beyond position 77"
        assert_close((lse - lse.logsumexp(-1, keepdim=True)).exp(), want, dtype)


@pytest.mark.parametrize("given", [False, True])
# 0.31 of at most 96 blocks is never a whole number, which float32 and float64 would reach differently
@pytest.mark.parametrize(("alpha", "share"), [(0.3, None), (0.955, None), (1.0, None), (1.0, 0.31)])
def test_greedy_lines_are_those_of_the_loop(alpha: float, share: float | None, given: bool) -> None:
    own = torch.randint(0, 12, (2, 7)).sort().values
    mass = torch.rand(2, 3, 7, 12) ** 8 * (torch.arange(12) <= own[:, None, :, None])
    mass /= mass.sum(-1, keepdim=True)
    mass[1, :, 5:] = 0.0  # fewer samples
    shape = LineShape(own, torch.randint(0, 9, (2, 12)).float(), torch.randint(1, 17, (2, 12)).float())
    before = Lines(torch.rand(3, 12) < 0.4, torch.rand(3, 12) < 0.4) if given else None
    got = greedy_lines(mass, shape, alpha, before, share)
    want = greedy_lines_naive(mass, shape, alpha, before, share)
    assert torch.equal(got.vertical, want.vertical)
    assert torch.equal(got.slash, want.slash)


def test_lines_of_an_earlier_turn_come_first_and_others_where_they_do_not_hold_alpha(
    device: torch.device,
) -> None:
    case = make(device, [(0, 30), (0, 200)])
    case.q *= 4
    plan = LinePlan.of(case.batch, 4, observe=8, segment=64)
    first = choose_lines(case.q, case.k, plan, alpha=0.6)
    assert first.last[1] is not None
    assert (first.counts[:, 0] == 0).all(), "nothing was given"
    again = choose_lines(case.q, case.k, plan, alpha=0.6, given=(None, first.last[1]))
    assert torch.equal(again.mask[:1], first.mask[:1]), "the first request has no lines of before"
    assert again.counts[0].tolist() == first.counts[0].tolist()
    assert again.counts[1, 0] > 0, "lines of before are taken"
    sink = Lines(*(torch.zeros_like(kind) for kind in first.last[1]))
    sink.vertical[:, 0] = True
    few = choose_lines(case.q, case.k, plan, alpha=0.6, given=(None, sink))
    assert (few.counts[1] > 0).all(), "one line of 13 is taken, and does not hold alpha everywhere"
    whole = Lines(*(torch.ones_like(kind) for kind in first.last[1]))
    enough = choose_lines(case.q, case.k, plan, alpha=0.6, given=(None, whole))
    assert enough.counts[1, 1] == 0
    assert torch.equal(enough.mask, first.mask), "of enough lines the heaviest are taken, and no more"
    shortened = choose_lines(case.q, case.k, plan, alpha=0.6, given=(None, sink.resized(1)))
    assert torch.equal(shortened.mask, few.mask), "an earlier turn's lines may be of fewer blocks"
    with pytest.raises(ValueError, match="lines of 1 requests are given; the batch has 2"):
        choose_lines(case.q, case.k, plan, alpha=0.6, given=(None,))


def test_the_newest_queries_alone_choose_where_that_is_asked(device: torch.device) -> None:
    """One segment as long as the prompt, in one pass: MInference's estimate."""
    case = make(device, [(0, 200)])
    case.q *= 4
    plan = LinePlan.of(case.batch, 4, observe=8, segment=1024, newest=True)
    assert [group.positions.tolist() for group in plan.groups] == [[list(range(192, 200))]]
    chosen = choose_lines(case.q, case.k, plan, alpha=0.6)
    other = case.q.clone()
    other[:-8] = torch.randn_like(other[:-8])
    assert torch.equal(choose_lines(other, case.k, plan, alpha=0.6).mask, chosen.mask)
    few = LinePlan.of(make(device, [(0, 3)]).batch, 4, observe=8, segment=1024, newest=True)
    assert few.groups[0].weight.sum() == 3, "no more queries than there are"


@pytest.mark.parametrize("width", [1, 8, 13])
def test_lines_are_packed_into_bits(width: int) -> None:
    lines = Lines(torch.rand(3, width) < 0.5, torch.rand(3, width) < 0.5)
    bits = lines.packed()
    assert bits.shape == (2, 3, -(-width // 8))
    assert all(map(torch.equal, Lines.unpacked(bits, width), lines))
    longer = Lines.unpacked(bits, width + 9)
    assert torch.equal(longer.slash[:, :width], lines.slash)
    assert not longer.slash[:, width:].any()


@pytest.mark.parametrize(("alpha", "share"), [(0.3, None), (0.955, None), (1.0, None), (1.0, 0.3)])
def test_greedy_blocks_are_those_of_the_loop(alpha: float, share: float | None) -> None:
    reach = torch.tensor([3, 5, 11, 12], dtype=torch.int32)
    possible = torch.arange(12) < reach[:, None]
    score = torch.rand(4, 3, 12).log() * 6
    forced = (torch.rand(4, 12) < 0.2) & possible
    got = greedy_blocks(score, reach, forced, alpha, share)
    assert torch.equal(got, greedy_blocks_naive(score, reach, forced, alpha, share))


RAGGED = [(0, 40), (77, 20), (128, 0), (64, 1)]


@pytest.mark.parametrize(
    ("blocks", "page", "heads", "alpha", "share"),
    [
        ((32, 16), 16, (2, 1), 0.8, None),
        ((32, 16), 32, (2, 2), 1.0, None),
        ((64, 64), 1, (1, 1), 1.0, 0.3),
    ],
)
def test_lists_of_blocks_are_those_of_the_choice(
    device: torch.device,
    blocks: tuple[int, int],
    page: int,
    heads: tuple[int, int],
    alpha: float,
    share: float | None,
) -> None:
    case = make(device, RAGGED, heads=heads, page=page, blocks=blocks)
    case.q *= 4
    chosen = {"alpha": alpha, "share": share, "sink": 1, "local": 1}
    if heads[1] > 1:  # the last head streams
        chosen["streaming"] = torch.arange(heads[1], device=device) == heads[1] - 1
    want = choose_blocks(case.q, case.k, case.batch, **chosen)
    assert heads[1] == 1 or (want[2, -1].sum() < want[2, 0].sum()), "77 + 20 tokens: not all are forced"
    for naive in (False, True):
        lists = list_room(case.batch, heads[0])
        assert torch.equal(lists.counts, all_blocks(case.batch, heads[0]).counts), "all blocks at first"
        with forced_naive(naive):
            list_blocks(case.q, case.k, case.batch, lists, **chosen)
        got = mask_of(lists, want.shape[2])
        assert torch.equal(got.sum(-1).int(), lists.counts)
        # means are added up in another order: a block whose score is next to another's may change places
        assert (got != want).sum() <= (0 if naive or (alpha == 1 and share is None) else 2)
        for block, head in ((0, 0), (2, heads[0] - 1)):
            start, count = int(lists.starts[block, head]), int(lists.counts[block, head])
            listed = lists.blocks[start : start + count]
            assert torch.equal(listed, listed.sort().values), "ascending"


@pytest.mark.parametrize(
    ("alpha", "share", "ties"), [(0.5, None, False), (0.955, None, True), (1.0, 0.1, True)]
)
def test_the_best_of_given_scores_are_found_without_a_sort(
    device: torch.device, alpha: float, share: float | None, ties: bool
) -> None:
    """1,100 key blocks, more than are looked at at once; the same scores give the same lists, and of equal
    ones the first are taken."""
    from ragserve_kernels.prefill_lists.blocks_triton import write_best

    table = torch.zeros(1, 1100, dtype=torch.int32, device=device)
    batch = PrefillBatch.of(table, 16, [1096 * 16], [3 * 16 + 5], block_q=128, block_k=16)
    rows, width = batch.query_blocks, 1100
    scores = torch.randn(2, rows, width, device=device) * 3
    if ties:
        scores = scores.round()
    lists = list_room(batch, 2)
    streaming = torch.tensor([False, True], device=device)
    write_best(scores, batch, 0, slice(0, rows), lists, alpha, share, 2, 5, streaming, 1.0)
    size = torch.full((width,), math.log(16), device=device)
    size[-1] = math.log(5)
    score = scores.transpose(0, 1) + size
    reach = all_blocks(batch, 1).counts[:, 0]
    step = torch.arange(width, device=device)
    own = batch.places[:, 1, None] * 8
    forced = ((step < 2) | (step >= own - 5)) & (step < reach[:, None])
    want = greedy_blocks(score, reach, forced, alpha, share)
    want[:, 1] = forced
    got = mask_of(lists, width)
    if share is not None:
        assert torch.equal(got, want)
        return
    # the weight that is held is added up in another order: a list may end one block sooner or later
    assert (got.sum(-1) - want.sum(-1)).abs().max() <= 1
    assert (
        (got | want) == torch.where(got.sum(-1, keepdim=True) > want.sum(-1, keepdim=True), got, want)
    ).all()


@pytest.mark.parametrize(
    ("alpha", "share", "given"), [(0.8, None, True), (1.0, None, False), (1.0, 0.3, True)]
)
def test_lists_of_lines_are_those_of_the_choice(
    device: torch.device, alpha: float, share: float | None, given: bool
) -> None:
    case = make(device, RAGGED, heads=(2, 1))
    case.q *= 4
    plan = LinePlan.of(case.batch, 2, observe=2, segment=64)
    before = [Lines(*(torch.rand(2, 3, device=device) < 0.5 for _ in "vs")) if given else None] * len(RAGGED)
    chosen = {"alpha": alpha, "share": share, "given": before}
    want = choose_lines(case.q, case.k, plan, **chosen)
    for naive in (False, True):
        lists = list_room(case.batch, 2)
        counts = torch.full_like(want.counts, 5)
        with forced_naive(naive):
            last = list_lines(case.q, case.k, plan, lists, **chosen, counts=counts)
        # sums are added up in another order: a line whose weight is next to another's may change places
        assert (mask_of(lists, want.mask.shape[2]) != want.mask).sum() <= (0 if naive else 4)
        assert (counts - 5 - want.counts).abs().sum() <= (0 if naive else 2)
        for got, right in zip(last, want.last, strict=True):
            assert (got is None) == (right is None)
            if got is not None and right is not None:
                assert sum(int((a != b).sum()) for a, b in zip(got, right, strict=True)) <= (
                    0 if naive else 2
                )


@pytest.mark.parametrize(
    ("alpha", "share", "given"), [(0.5, None, True), (0.955, None, False), (1.0, 0.1, True)]
)
def test_lines_of_given_masses_are_found_without_a_sort(
    device: torch.device, alpha: float, share: float | None, given: bool
) -> None:
    """525 key blocks, more than are looked at at once. Sums of these numbers are exact in any order, and many
    lines weigh the same: not one line may be another."""
    from ragserve_kernels.prefill_lists.lines_triton import pick_lines

    width, observe = 525, 3
    own = torch.tensor([[500, 504, 508], [517, 524, 524]], device=device)
    mass = torch.randint(0, 2, (2, 1, observe, width), device=device).float()
    mass[..., :80] *= 8.0
    mass *= torch.arange(width, device=device) <= own[:, None, :, None]
    mass[1, :, -1] = 0.0  # fewer samples
    length = (2 ** torch.randint(0, 3, (2, 2, width), device=device)).float()
    before = Lines(*(torch.rand(1, width, device=device) < 0.1 for _ in "vs")) if given else None
    want = greedy_lines(mass, LineShape(own, *length), alpha, before, share)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    taken = pick_lines(
        mass.transpose(0, 1).flatten(1, 2).contiguous(),
        (own * 16 + 7).int().flatten(),
        *length,
        None if before is None else torch.stack(tuple(before)),
        counts,
        alpha,
        share,
        16,
    )
    assert torch.equal(taken[0], want.vertical)
    assert torch.equal(taken[1], want.slash)
    reused = 0 if before is None else int((taken & torch.stack(tuple(before))[:, None]).sum())
    assert counts.tolist() == [reused, int(taken.sum()) - reused]


def lines(case: Case, alpha: float) -> torch.Tensor:
    plan = LinePlan.of(case.batch, case.q.shape[1], observe=8, segment=64)
    return choose_lines(case.q, case.k, plan, alpha=alpha).mask


def blocks(case: Case, alpha: float) -> torch.Tensor:
    return choose_blocks(case.q, case.k, case.batch, alpha=alpha, sink=1, local=1)


@pytest.mark.parametrize("choose", [lines, blocks])
def test_choices_hold_alpha_and_chunks_choose_as_the_whole(device: torch.device, choose: object) -> None:
    assert callable(choose)
    case = make(device, [(0, 30), (0, 200)])
    case.q *= 4  # attention that is worth a choice
    few, whole = choose(case, 0.6), choose(case, 1.0)
    possible = mask_of(all_blocks(case.batch, 4), 13)
    assert torch.equal(whole, possible)
    assert (few <= possible).all()
    assert few[:, :, 0].all(), "the first block"
    last = possible.long().sum(-1, keepdim=True) - 1
    assert few.gather(-1, last).all(), "the newest block"
    assert few.sum() < 0.9 * possible.sum()
    for first, end in ((0, 64), (64, 192), (192, 200)):
        batch = PrefillBatch.of(case.batch.page_table[1:], 16, [first], [end - first], block_q=32, block_k=16)
        part = choose(Case(case.q[30 + first : 30 + end], case.k, case.v, batch), 0.6)
        of_whole = few[1 + first // 32 : 1 + -(-end // 32)]  # the first request has one query block
        assert torch.equal(part, of_whole[:, :, : part.shape[2]])


def test_a_share_says_how_many_blocks_are_computed(device: torch.device) -> None:
    case = make(device, [(0, 30), (0, 600)])
    possible = all_blocks(case.batch, 4).counts
    for share in (0.2, 0.5):
        few = choose_blocks(case.q, case.k, case.batch, alpha=1.0, share=share, sink=1, local=1)
        # forced: the first, the one before the query block's own two, and these
        least = possible.clamp_max(4)
        assert torch.equal(few.sum(-1), (possible * share).ceil().long().maximum(least))
        plan = LinePlan.of(case.batch, 4, observe=8, segment=64)
        found = choose_lines(case.q, case.k, plan, alpha=1.0, share=share).mask.sum() / possible.sum()
        assert 0.4 * share < found < share + 0.15, "lines cross, and the last one goes beyond"
    with pytest.raises(ValueError, match=r"share 1\.5 must be above 0"):
        choose_blocks(case.q, case.k, case.batch, alpha=1.0, share=1.5)


def test_bad_arguments_are_named(device: torch.device) -> None:
    case = make(device, [(0, 30)])
    with pytest.raises(ValueError, match="alpha 0 must be above 0"):
        choose_blocks(case.q, case.k, case.batch, alpha=0)
    with pytest.raises(ValueError, match=r"alpha 1\.5 must be above 0"):
        choose_lines(case.q, case.k, LinePlan.of(case.batch, 4), alpha=1.5)
    with pytest.raises(ValueError, match="observe is 65; expected 1 to 64"):
        LinePlan.of(case.batch, 4, observe=65, segment=64)
    with pytest.raises(ValueError, match="must divide block_q 32, and that segment 48"):
        LinePlan.of(case.batch, 4, segment=48)
