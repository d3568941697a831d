"""The part of a request in a recompute pass: its rows, the slots they see, and queries watched on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.context.buffers import PADDING_SLOT, Ints, upload

Watch = Callable[[int, torch.Tensor, float], None]
"""Called in each layer with its number, the queries of all rows, [rows, heads, head_dim], and the scale of
their scores.
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
        """``rows``: int64, read while the pass runs."""
        self.queries: list[tuple[torch.Tensor, float]] = []
        self._rows = rows

    def __call__(self, layer: int, q: torch.Tensor, scaling: float) -> None:
        """q [rows of the pass, heads, head_dim]. A captured pass writes to the same memory at each replay."""
        if layer == len(self.queries):
            self.queries.append((q.index_select(0, self._rows), scaling))
        else:
            torch.index_select(q, 0, self._rows, out=self.queries[layer][0])


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

    def narrow(self, rows: torch.Tensor) -> None:
        """Keep only these rows, int64 ascending."""
        self.ids, self.positions, self.choose = self.ids[rows], self.positions[rows], None
        self.seen, self.targets = self.seen[:, rows], self.targets[:, rows]
        self.alone = None if self.alone is None else self.alone[:, rows]


class Passed(NamedTuple):
    """Result of a pass. ``hidden`` [rows, hidden size]: states after the model's last norm, in the jobs'
    order; None if rows were chosen on the way. ``by_graph``: a CUDA graph ran it, and the next pass
    overwrites them.
    """

    hidden: torch.Tensor | None
    by_graph: bool
