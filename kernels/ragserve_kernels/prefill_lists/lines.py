"""Vertical and slash lines (LoopServe, section 5.1 and algorithm 2), in units of key blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ragserve_kernels.dispatch import check, use_triton
from ragserve_kernels.prefill_lists.best_blocks import check_share
from ragserve_kernels.prefill_lists.block_scores import block_lse, held_from
from ragserve_kernels.sparse_prefill import BlockLists, PrefillBatch, lists_at
from ragserve_kernels.sparse_prefill.lists import write_lists

SEGMENT = 1024
"""Query positions that share their lines, counted from position 0."""

_CELLS = 2**24  # (head, query, key block) at once: 64 MB of float32


class Lines(NamedTuple):
    """Which lines are chosen: bool ``[segments, heads, key blocks]`` each, or without segments. Vertical line
    j is key block j, slash line o the blocks o before that of the query.
    """

    vertical: torch.Tensor
    slash: torch.Tensor

    def resized(self, width: int) -> Lines:
        """Return the lines of so many key blocks: none of the ones more, without the ones too many."""
        more = max(0, width - self.vertical.shape[-1])
        return Lines(*(pad(kind[..., :width], (0, more)) for kind in self))

    def packed(self) -> torch.Tensor:
        """Return the lines as bits: uint8 ``[2, ..., ceil(key blocks / 8)]``; see :meth:`unpacked`."""
        bits = torch.stack(tuple(self)).to(torch.uint8)
        bits = pad(bits, (0, -bits.shape[-1] % 8)).unflatten(-1, (-1, 8))
        return (bits << _places(bits)).sum(-1, dtype=torch.uint8)

    @classmethod
    def unpacked(cls, bits: torch.Tensor, width: int) -> Lines:
        """Return the lines of so many key blocks that :meth:`packed` has made ``bits`` of."""
        kinds = ((bits[..., None] >> _places(bits)) & 1).bool().flatten(-2)
        return cls(*kinds).resized(width)


class LineChoice(NamedTuple):
    """What :func:`choose_lines` has chosen.

    Attributes:
        mask: bool ``[query blocks, query_heads, key blocks]``: what is attended to.
        last: of each request, the lines of its last segments in the batch, of two at most, together: bool
            ``[query_heads, key blocks]`` each; None without new tokens.
        counts: int64 ``[requests, 2]``: lines taken, summed over segments and heads: of those that were
            given, and others.
    """

    mask: torch.Tensor
    last: tuple[Lines | None, ...]
    counts: torch.Tensor


@dataclass(frozen=True, eq=False)
class LineShape:
    """What the lines of one or more segments cross.

    Attributes:
        own: int64 ``[segments, n]``: the key block of each sampled query's position.
        vertical: float32 ``[segments, key blocks]``: the length of each vertical line: in how many query
            blocks of the segment it is computed. 0: nowhere.
        slash: the same of each slash line: how many (query block, key block) pairs it takes.
    """

    own: torch.Tensor
    vertical: torch.Tensor
    slash: torch.Tensor


@dataclass(frozen=True, eq=False)
class _SegmentGroup:
    """Segments of one request that are chosen at once.

    ``first``: the first one's number. ``blocks``: their query blocks in the batch. ``positions``, ``weight``:
    of the sampled queries, ``[segments, n]``; weight 0 for repetitions that fill the row. ``own``: the
    segment of each query block; ``rows``: its positions in key blocks, int64 ``[query blocks, rows, 1]``."""

    request: int
    first: int
    blocks: slice
    positions: torch.Tensor
    weight: torch.Tensor
    shape: LineShape
    own: torch.Tensor
    rows: torch.Tensor

    def crossed(self, lines: Lines) -> torch.Tensor:
        """Return what the lines cross, bool ``[query blocks, heads, key blocks]``."""
        width = lines.slash.shape[-1]
        back = self.rows - torch.arange(width, device=self.rows.device)  # [query blocks, rows, key blocks]
        seen = back >= 0
        slash, vertical = lines.slash[self.own], lines.vertical[self.own]
        crossed = vertical & seen.any(1)[:, None]
        for row in range(back.shape[1]):  # of a query block: one or few
            place = back[:, row, None].clamp_min(0).expand_as(slash)
            crossed |= slash.gather(-1, place) & seen[:, row, None]
        return crossed


@dataclass(frozen=True, eq=False)
class LinePlan:
    """What the choice of lines knows before it sees a layer: which queries are sampled, and what lines cross.
    Made by :meth:`of`, once for all layers of a pass."""

    batch: PrefillBatch
    observe: int
    segment: int
    groups: tuple[_SegmentGroup, ...]

    @classmethod
    def of(
        cls,
        batch: PrefillBatch,
        heads: int,
        *,
        observe: int = 64,
        segment: int = SEGMENT,
        newest: bool = False,
    ) -> LinePlan:
        """Return the plan of a batch for so many query heads; see :func:`choose_lines`.

        ``newest``: a segment samples its last queries instead of some at even distances. With a segment as
        long as the prompt, in one pass, that is MInference's estimate.

        Raises:
            ValueError: sizes that do not fit.
        """
        if segment % batch.block_q or batch.block_q % batch.block_k:
            raise ValueError(
                f"block_k {batch.block_k} must divide block_q {batch.block_q}, and that segment {segment}."
            )
        if not 1 <= observe <= segment:
            raise ValueError(f"observe is {observe}; expected 1 to {segment}.")
        groups = []
        for request, span in enumerate(batch.spans()):
            blocks = -(-(batch.prefix[request] + batch.new[request]) // batch.block_k)
            at_once = max(1, _CELLS // (heads * observe * max(1, blocks)))
            if span:
                groups += [
                    _group(batch, request, span.start, numbers, segment, observe, newest=newest)
                    for numbers in _segments(batch, request, segment, at_once)
                ]
        return cls(batch, observe, segment, tuple(groups))


def choose_lines(
    q: torch.Tensor,
    k: torch.Tensor,
    plan: LinePlan,
    *,
    alpha: float,
    share: float | None = None,
    given: Sequence[Lines | None] = (),
    scale: float | None = None,
) -> LineChoice:
    """Choose key blocks by lines that hold ``alpha`` of the sampled queries' attention, per head.

    Each segment of ``segment`` positions samples ``observe`` queries at even distances, its last one among
    them, or its last new one where the batch ends within it. So chunks that begin and end between segments
    choose what the whole prompt does in one pass.

    Args:
        q: ``[batch.rows, query_heads, head_dim]``.
        k: ``[pool slots, kv_heads, head_dim]``, with the new tokens.
        plan: of the batch. Its ``block_k`` divides ``block_q``, which divides ``segment``.
        alpha: the share, above 0 and up to 1.
        share: of a segment's pairs of query block and key block, that lines are taken for instead of as many
            as hold ``alpha``. Where they cross, they compute less.
        given: of each request, the lines of an earlier turn: bool ``[query_heads, key blocks]`` each, of any
            number of key blocks; None or nothing for a request without. They are taken before others.
        scale: of the scores; default 1 / sqrt(head_dim).

    Returns:
        The choice. The first key block and the query block's own ones are always chosen.

    Raises:
        ValueError, TypeError: sizes, shapes, dtypes or devices that do not fit.
    """
    batch = plan.batch
    given = _checked(batch, alpha, share, given)
    longest = max((a + b for a, b in zip(batch.prefix, batch.new, strict=True)), default=0)
    width = -(-longest // batch.block_k)
    mask = torch.zeros(batch.query_blocks, q.shape[1], width, dtype=torch.bool, device=q.device)
    last: list[Lines | None] = [None] * len(batch.new)
    counts = torch.zeros(len(batch.new), 2, dtype=torch.int64, device=q.device)
    for group in plan.groups:
        lse = block_lse(q, k, batch, group.request, group.positions.flatten(), scale=scale)
        mass = (lse - lse.logsumexp(-1, keepdim=True)).exp()
        mass = mass.unflatten(1, group.positions.shape).transpose(0, 1)  # [segments, heads, n, key blocks]
        before = given[group.request]
        before = None if before is None else before.resized(mass.shape[-1])
        lines = greedy_lines(mass * group.weight[:, None, :, None], group.shape, alpha, before, share)
        mask[group.blocks, :, : mass.shape[-1]] = group.crossed(lines)
        last[group.request] = Lines(*(kind[-2:].any(0) for kind in lines))
        counts[group.request] += _counted(lines, before)
    return LineChoice(mask, tuple(last), counts)


def list_lines(
    q: torch.Tensor,
    k: torch.Tensor,
    plan: LinePlan,
    lists: BlockLists,
    *,
    alpha: float,
    share: float | None = None,
    given: Sequence[Lines | None] = (),
    counts: torch.Tensor,
    last: bool = True,
    scale: float | None = None,
) -> tuple[Lines | None, ...]:
    """Write the lists of :func:`choose_lines`, in five launches for the segments that are chosen at once.

    Where rounding decides, it may take other lines than the choice in plain torch: where the weights of two
    differ by less than what sums in another order do, or a line ends on ``alpha``.

    Args:
        lists: of the batch's query blocks, each with room for all key blocks; see
            :func:`ragserve_kernels.sparse_prefill.list_room`. Written to.
        counts: int64 ``[requests, 2]``, to which the choice's ``counts`` are added.
        last: return what the choice has as ``last``; None for every request otherwise.

    The other arguments and the errors are those of :func:`choose_lines`.
    """
    batch = plan.batch
    check("lists.starts", lists.starts, torch.int32, (batch.query_blocks, q.shape[1]), like=q)
    check("counts", counts, torch.int64, (len(batch.new), 2), like=q, dense=True)
    if not use_triton(q):
        choice = choose_lines(q, k, plan, alpha=alpha, share=share, given=given, scale=scale)
        write_lists(choice.mask, lists)
        counts += choice.counts
        return choice.last if last else (None,) * len(batch.new)
    from ragserve_kernels.prefill_lists.lines_triton import pick_lines, share_mass, write_lines

    given = _checked(batch, alpha, share, given)
    newest: list[Lines | None] = [None] * len(batch.new)
    for group in plan.groups:
        positions = group.positions.flatten()
        mass = block_lse(q, k, batch, group.request, positions, scale=scale)
        share_mass(mass, positions, group.weight, batch.block_k)
        before = given[group.request]
        lines = pick_lines(
            mass,
            positions,
            group.shape.vertical,
            group.shape.slash,
            None if before is None else torch.stack(tuple(before.resized(mass.shape[-1]))),
            counts[group.request],
            alpha,
            share,
            batch.block_k,
        )
        own = lists_at(lists, group.blocks)
        write_lines(
            lines, batch.places[group.blocks], own, group.first, plan.segment, batch.block_q, batch.block_k
        )
        if last:
            newest[group.request] = Lines(*lines[:, -2:].any(1))
    return tuple(newest)


def greedy_lines(
    mass: torch.Tensor,
    shape: LineShape,
    alpha: float,
    given: Lines | None = None,
    share: float | None = None,
) -> Lines:
    """Take lines by weight per length until what they cross holds ``alpha`` of the weight, per head; all
    lines for 1. With a ``share`` until their lengths add up to that part of the segment's blocks.

    The first vertical and the first slash line come before all others, then those ``given``: others are
    added only where all of these hold less than ``alpha``. A cell that two lines cross counts once in what is
    held, and in the weights of both.

    Args:
        mass: float32 ``[segments, heads, n, key blocks]``: attention of the sampled queries, 0 beyond them.
        shape: what the lines cross.
        given: bool ``[heads, key blocks]`` each: lines of an earlier turn.
    """
    width = mass.shape[-1]
    back = shape.own[:, None, :, None] - torch.arange(width, device=mass.device)  # of cell j, and of slash o
    seen = back >= 0
    along = mass.gather(-1, back.clamp_min(0).expand_as(mass)) * seen
    density = torch.cat(
        (
            mass.sum(2) / shape.vertical[:, None].clamp_min(1),
            along.sum(2) / shape.slash[:, None].clamp_min(1),
        ),
        -1,
    )
    density[..., [0, width]] = torch.inf
    order = density.argsort(dim=-1, descending=True, stable=True)
    if given is not None:
        tier = torch.cat(tuple(given), -1).to(torch.uint8)
        tier[..., [0, width]] = 2
        of_order = tier.expand_as(density).gather(-1, order)
        order = order.gather(-1, of_order.argsort(dim=-1, descending=True, stable=True))
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(2 * width, device=mass.device).expand_as(order)
    )
    vertical, slash = rank[..., :width], rank[..., width:]
    # a cell is held from the first of its two lines on
    crossing = slash[:, :, None].expand(*mass.shape[:3], width).gather(-1, back.clamp_min(0).expand_as(mass))
    first = torch.minimum(vertical[:, :, None], crossing)
    gained = torch.zeros_like(density).scatter_add_(-1, first.flatten(2), (mass * seen).flatten(2))
    if share is None:
        wanted = held_from(mass.sum((2, 3))[..., None], alpha)
    else:
        length = torch.cat((shape.vertical, shape.slash), -1)[:, None].expand_as(order)
        gained = length.gather(-1, order)
        wanted = share * shape.vertical.sum(-1)[:, None, None]
    count = ((gained.cumsum(-1) < wanted).sum(-1, keepdim=True) + 1).clamp_min(2)
    return Lines(vertical < count, slash < count)


def _checked(
    batch: PrefillBatch, alpha: float, share: float | None, given: Sequence[Lines | None]
) -> Sequence[Lines | None]:
    """Check the arguments of a choice and return what is given to each request."""
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha {alpha} must be above 0 and up to 1.")
    check_share(share)
    given = given or (None,) * len(batch.new)
    if len(given) != len(batch.new):
        raise ValueError(f"lines of {len(given)} requests are given; the batch has {len(batch.new)}.")
    return given


def _counted(lines: Lines, given: Lines | None) -> torch.Tensor:
    """Return how many of the lines were given and how many were not, int64 ``[2]``."""
    taken = torch.stack(tuple(lines))  # [2, segments, heads, key blocks]
    if given is None:
        return torch.stack((taken.new_zeros((), dtype=torch.int64), taken.sum()))
    reused = (taken & torch.stack(tuple(given))[:, None]).sum()
    return torch.stack((reused, taken.sum() - reused))


def _places(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def _segments(batch: PrefillBatch, request: int, segment: int, at_once: int) -> Iterator[range]:
    first = batch.prefix[request] // segment
    last = -(-(batch.prefix[request] + batch.new[request]) // segment)
    for start in range(first, last, at_once):
        yield range(start, min(start + at_once, last))


def _sampled(
    batch: PrefillBatch, request: int, numbers: range, segment: int, observe: int, *, newest: bool
) -> tuple[list[list[int]], list[list[float]]]:
    """Return the sampled positions of each segment, and 1 for those, 0 for repetitions that fill the row."""
    begin, end = batch.prefix[request], batch.prefix[request] + batch.new[request]
    positions, weights = [], []
    for number in numbers:
        places = [number * segment + (i + 1) * segment // observe - 1 for i in range(observe)]
        last = min(end, (number + 1) * segment) - 1
        if newest:
            places = list(range(max(begin, number * segment, last + 1 - observe), last))
        own = sorted({place for place in places if begin <= place < end} | {last})[-observe:]
        positions.append(own + [last] * (observe - len(own)))
        weights.append([1.0] * len(own) + [0.0] * (observe - len(own)))
    return positions, weights


def _query_blocks(batch: PrefillBatch, request: int, number: int, segment: int) -> range:
    """Return the query blocks of a segment that have new tokens."""
    begin, end = batch.prefix[request], batch.prefix[request] + batch.new[request]
    first = max(begin, number * segment) // batch.block_q
    return range(first, -(-min(end, (number + 1) * segment) // batch.block_q))


def _group(
    batch: PrefillBatch,
    request: int,
    first: int,
    numbers: range,
    segment: int,
    observe: int,
    *,
    newest: bool,
) -> _SegmentGroup:
    """``first``: the request's first query block in the batch."""
    device, ratio = batch.places.device, batch.block_q // batch.block_k
    width = -(-(batch.prefix[request] + batch.new[request]) // batch.block_k)
    sampled, weight = _sampled(batch, request, numbers, segment, observe, newest=newest)
    of_segment = [_query_blocks(batch, request, number, segment) for number in numbers]
    own = [i for i, blocks in enumerate(of_segment) for _ in blocks]
    step = torch.arange(width)
    # a query block in key blocks; past the request's end they repeat the last one
    rows = torch.arange(of_segment[0].start * ratio, of_segment[-1].stop * ratio).view(-1, ratio, 1)
    is_new = rows < width
    seen = (rows.clamp_max(width - 1) >= step) & is_new  # [query blocks, rows, key blocks]
    shape = torch.zeros(2, len(numbers), width)
    shape[0].index_add_(0, torch.tensor(own), seen.any(1).float())
    shape[1].index_add_(0, torch.tensor(own), seen.sum(1).float())
    before = first - batch.prefix[request] // batch.block_q
    positions = _sent(sampled, torch.int32, device)
    vertical, slash = _to(shape, device).unbind(0)
    return _SegmentGroup(
        request,
        numbers.start,
        slice(before + of_segment[0].start, before + of_segment[-1].stop),
        positions,
        _sent(weight, torch.float32, device),
        LineShape(positions.long() // batch.block_k, vertical, slash),
        _to(torch.tensor(own), device),
        _to(rows.clamp_max(width - 1), device),
    )


def _sent(
    rows: list[list[int]] | list[list[float]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return _to(torch.tensor(rows, dtype=dtype), device)


def _to(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
