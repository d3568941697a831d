"""Collectives over the tensor-parallel ranks of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Ranks:
    """The ranks that share a model. Every collective is a no-op on a single rank.

    With several ranks all of them must make the same calls in the same order: a rank that skips one leaves
    the others waiting for ever.
    """

    def __init__(self, group: Any = None) -> None:
        """``group``: SGLang's GroupCoordinator (`ModelRunner.tp_group`); None stands for a single rank."""
        self._group = group
        self.world = 1 if group is None else int(group.world_size)

    @property
    def alone(self) -> bool:
        """True on a single rank."""
        return self.world == 1

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return 0 if self._group is None else int(self._group.rank_in_group)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, on the device; may overwrite ``part``."""
        if self.alone:
            return part
        summed: torch.Tensor = self._group.all_reduce(part)
        return summed

    def max(self, part: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over ranks, on the device; overwrites ``part``."""
        if not self.alone:
            torch.distributed.all_reduce(
                part, op=torch.distributed.ReduceOp.MAX, group=self._group.device_group
            )
        return part

    def gather_heads(self, part: torch.Tensor) -> torch.Tensor:
        """Join [n, heads, ...] of all ranks along the heads, in the order of ranks, on the device."""
        if self.alone:
            return part
        joined: torch.Tensor = self._group.all_gather(part.contiguous(), dim=1)
        return joined

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable ``value``, by rank. Runs on the host."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(values, value, group=self._group.cpu_group)
        return values

    def first(self, value: Any) -> Any:
        """Return the first rank's picklable ``value`` on every rank. Runs on the host."""
        if self.alone:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, group=self._group.cpu_group, group_src=0)
        return box[0]

    def min_votes(self, votes: list[int]) -> list[int]:
        """Return the lowest vote of any rank on each of several questions. Runs on the host."""
        if self.alone or not votes:
            return votes
        ballot = torch.tensor(votes)
        torch.distributed.all_reduce(ballot, op=torch.distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return [int(vote) for vote in ballot.tolist()]

    def all_agree(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on every rank."""
        return bool(self.min_votes([int(flag)])[0])

    def any_missing(self, missing: Sequence[int], count: int) -> list[int]:
        """Return the numbers below ``count`` that any rank reports, ascending. Runs on the host."""
        if self.alone:
            return list(missing)
        lacks = torch.zeros(count, dtype=torch.int64)
        lacks[list(missing)] = 1
        torch.distributed.all_reduce(lacks, op=torch.distributed.ReduceOp.MAX, group=self._group.cpu_group)
        return [int(number) for number in lacks.nonzero().flatten()]
