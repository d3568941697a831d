"""The part of a request in a recompute pass: its rows, the slots they see, and queries watched on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.tensors.buffers import PADDING_SLOT, Ints, upload, upload_all


class QueryObserver(Protocol):
    """Sees the queries of a pass."""

    def __call__(self, layer: int, q: torch.Tensor, scaling: float, first: int | None = None) -> None:
        """Called in each layer with its number, queries q [rows, heads, head_dim] and the scale of their
        scores. ``first``: the number of their first row; None if they are those of all rows.
        """


def question_job(ids: torch.Tensor, start: int, slots: torch.Tensor, own: torch.Tensor) -> RecomputeJob:
    """Make tokens ``ids`` [q] at positions from ``start`` on the rows of a pass over the context in ``slots``
    and themselves in ``own`` [q]; all int64.
    """
    within = torch.arange(len(ids), device=ids.device)
    return RecomputeJob(
        ids=ids,
        positions=start + within,
        slots=torch.cat((slots, own)),
        seen=(len(slots) + 1 + within)[None],
        targets=own[None],
        alone=None,
        recomputed=0,
    )


class LastQueries:
    """Watches a pass and keeps every layer's queries of some rows, [rows, heads, head_dim], and the scale of
    their scores.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        """``rows``: int32 or int64, read while the pass runs."""
        self.queries: list[tuple[torch.Tensor, float]] = []
        self._rows = rows

    def __call__(self, layer: int, q: torch.Tensor, scaling: float, first: int | None = None) -> None:
        """See `QueryObserver`. A captured pass writes to the same memory at each replay."""
        rows = self._rows if first is None else (self._rows - first).clamp(0, len(q) - 1)
        if layer == len(self.queries):
            self.queries.append((q.index_select(0, rows), scaling))
        elif first is None:
            torch.index_select(q, 0, rows, out=self.queries[layer][0])
        else:  # the last slice that a row is clamped to at its end is its own or one before
            later = (self._rows >= first)[:, None, None]
            found = self.queries[layer][0]
            found.copy_(torch.where(later, q.index_select(0, rows), found))


@dataclass(slots=True)
class RecomputeJob:
    """R rows over S slots. Tensors are int64 on the model's device, by layer or once for all layers.

    Attributes:
        ids, positions: [R], the rows, ascending.
        slots: [S], those of the context, by position.
        seen: [layers or 1, R], the number of slots that a row attends to: those of positions up to its own.
        targets: [layers or 1, R], the slots that the rows' new K and V go to.
        alone: bool [layers or 1, R], rows that a layer does not keep and that attend to themselves besides;
            None if every layer keeps every row.
        recomputed: number of document tokens computed again.
        choose: number of rows among ``candidates`` that continue after layer 1, those whose values differ
            most from the cached ones; None if all do.
        candidates: [C], rows.
        fuse: new KV is blended with the cached.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seen: torch.Tensor
    targets: torch.Tensor
    alone: torch.Tensor | None
    recomputed: int
    choose: int | None = None
    candidates: torch.Tensor | None = None
    fuse: bool = False

    @classmethod
    def plan(
        cls,
        ids: Ints,
        positions: Ints,
        kept: Ints,
        slots: torch.Tensor,
        *,
        first_document: int,
        deviation_share: float | None = None,
        fuse: bool = False,
    ) -> RecomputeJob:
        """Plan rows ``ids`` at ``positions`` [R] over ``kept`` [S] or [layers, S], on the host. Documents
        begin at position ``first_document``.

        With ``deviation_share`` the pass chooses that share of the document rows which layer 1 keeps.
        """
        device = slots.device
        kept = np.atleast_2d(kept)
        place = np.stack([np.searchsorted(row, positions) for row in kept])
        clipped = np.minimum(place, kept.shape[1] - 1)
        found: npt.NDArray[np.bool_] = (place < kept.shape[1]) & (
            np.take_along_axis(kept, clipped, 1) == positions
        )
        documents = positions >= first_document
        candidates = np.flatnonzero(documents & found[min(1, len(found) - 1)])
        choose = (
            None
            if deviation_share is None
            else min(len(candidates), max(1, round(deviation_share * len(candidates))))
        )
        own_ids, own_positions, own_places, seen = upload_all(
            (ids, positions, clipped, place + found), device
        )
        targets = slots[own_places]
        absent = None if found.all() else upload(~found, device)
        if absent is not None:
            targets = targets.masked_fill(absent, PADDING_SLOT)
        return cls(
            ids=own_ids,
            positions=own_positions,
            slots=slots,
            seen=seen,
            targets=targets,
            alone=absent,
            recomputed=int(documents.sum()) if choose is None else choose,
            choose=choose,
            candidates=None if choose is None else upload(candidates, device),
            fuse=fuse,
        )

    @property
    def uniform(self) -> bool:
        """True if every layer treats every row alike: none is chosen, left out or blended on the way."""
        return self.choose is None and self.alone is None and not self.fuse and len(self.seen) == 1

    def behind(self, job: RecomputeJob | None) -> RecomputeJob:
        """Join these rows behind those of ``job``. Both must be uniform, and these slots begin with that
        job's.
        """
        if job is None:
            return self
        return replace(
            self,
            ids=torch.cat((job.ids, self.ids)),
            positions=torch.cat((job.positions, self.positions)),
            seen=torch.cat((job.seen, self.seen), dim=1),
            targets=torch.cat((job.targets, self.targets), dim=1),
            recomputed=job.recomputed + self.recomputed,
        )

    def rows(self, which: slice) -> RecomputeJob:
        """Some of the rows, over the same slots. Rows attend to rows before them, so run these in order."""
        return replace(
            self,
            ids=self.ids[which],
            positions=self.positions[which],
            seen=self.seen[:, which],
            targets=self.targets[:, which],
            alone=None if self.alone is None else self.alone[:, which],
        )

    def narrow(self, rows: torch.Tensor, layers: int) -> None:
        """Keep only these rows, int64 ascending, of a pass through ``layers`` layers. All rows have written
        to layer 0, so these do not write there again.
        """
        self.ids, self.positions, self.choose = self.ids[rows], self.positions[rows], None
        self.seen = self.seen[:, rows].expand(layers, -1)
        self.targets = self.targets[:, rows].repeat(layers // len(self.targets), 1)
        self.targets[0] = PADDING_SLOT
        self.alone = None if self.alone is None else self.alone[:, rows].expand(layers, -1)


def slices(jobs: Sequence[RecomputeJob], most: int) -> Iterator[list[RecomputeJob]]:
    """Cut the jobs' rows, in their order, into parts of at most ``most`` rows."""
    part: list[RecomputeJob] = []
    room = most
    for job in jobs:
        at, count = 0, len(job.ids)
        while at < count:
            end = min(at + room, count)
            part.append(job if end - at == count else job.rows(slice(at, end)))
            at, room = end, room - (end - at)
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part


class Passed(NamedTuple):
    """Result of a pass. ``hidden`` [rows, hidden size]: states of the rows that were to be kept, after the
    model's last norm; None without jobs. ``by_graph``: a CUDA graph ran it.
    """

    hidden: torch.Tensor | None
    by_graph: bool
