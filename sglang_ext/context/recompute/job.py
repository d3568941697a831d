"""What the recompute pass is asked to do: rows, the slots they see, and what is watched on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.context.buffers import PADDING_SLOT, Ints, upload

if TYPE_CHECKING:
    pass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


def question_job(ids: torch.Tensor, start: int, slots: torch.Tensor, own: torch.Tensor) -> RecomputeJob:
    """Tokens ``ids`` [q] at positions from ``start`` on as rows over the context in ``slots`` and themselves
    in ``own`` [q]; int64.
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
    """Keeps, of every layer, the queries of some rows of a pass, [rows, heads, head_dim], and the scale of
    their scores.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        """``rows``: int64, read while the pass runs."""
        self.queries: list[tuple[torch.Tensor, float]] = []
        self._rows = rows

    def __call__(self, layer: int, q: torch.Tensor, scaling: float) -> None:
        """q [rows of the pass, heads, head_dim]. A pass that is captured and played again writes to the same
        memory each time.
        """
        if layer == len(self.queries):
            self.queries.append((q.index_select(0, self._rows), scaling))
        else:
            torch.index_select(q, 0, self._rows, out=self.queries[layer][0])


Watch = Callable[[int, torch.Tensor, float], None]


@dataclass(slots=True)
class RecomputeJob:
    """One request's part of a pass, R rows over S slots. Tensors on the model's device, int64; by layer, or
    once for all layers.

    ``ids`` and ``positions`` [R], ascending: the rows. ``slots`` [S]. ``seen`` [layers or 1, R]: how many
    slots a row attends to, those of positions up to its own. ``targets`` [layers or 1, R]: the slots that the
    rows' new K and V go to. ``alone`` bool [layers or 1, R]: rows that a layer does not keep, which see
    themselves besides; None where every layer keeps every row. ``choose``: from layer 1 on only so many of
    the rows ``candidates`` [C] go on, those whose values differ most from the cached ones. ``recomputed``:
    document tokens that are computed again. ``fuse``: new KV is blended with the cached."""

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
        """``ids``, ``positions`` [R] and ``kept`` [S] or [layers, S] on the host; documents begin at position
        ``first_document``.

        With ``deviation_share`` that share of the document rows which layer 1 keeps is chosen in the pass.
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
        targets = slots[upload(clipped, device)]
        absent = None if found.all() else upload(~found, device)
        if absent is not None:
            targets = targets.masked_fill(absent, PADDING_SLOT)
        return cls(
            ids=upload(ids, device),
            positions=upload(positions, device),
            slots=slots,
            seen=upload(place + found, device),
            targets=targets,
            alone=absent,
            recomputed=int(documents.sum()) if choose is None else choose,
            choose=choose,
            candidates=None if choose is None else upload(candidates, device),
            fuse=fuse,
        )

    @property
    def uniform(self) -> bool:
        """Whether every layer does the same with every row: none is chosen or left out on the way, or
        blended.
        """
        return self.choose is None and self.alone is None and not self.fuse and len(self.seen) == 1

    def behind(self, job: RecomputeJob | None) -> RecomputeJob:
        """These rows behind those of ``job``, in one job: both uniform, and this one's slots begin with that
        one's.
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

    def narrow(self, rows: torch.Tensor) -> None:
        """Go on with these rows, int64 ascending, only."""
        self.ids, self.positions, self.choose = self.ids[rows], self.positions[rows], None
        self.seen, self.targets = self.seen[:, rows], self.targets[:, rows]
        self.alone = None if self.alone is None else self.alone[:, rows]


class Passed(NamedTuple):
    """``hidden`` [rows, hidden size]: behind the model's last norm, of all rows in the jobs' order; None
    where rows were chosen on the way. ``by_graph``: whether a CUDA graph did it, and writes those of the next
    pass to the same memory."""

    hidden: torch.Tensor | None
    by_graph: bool
