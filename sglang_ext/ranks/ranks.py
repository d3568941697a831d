"""Collectives over the tensor-parallel ranks of one engine."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from sglang_ext.ranks.shared_ballots import LARGEST, SharedBallots

T = TypeVar("T")


class Ranks:
    """The ranks that share a model. Every collective is a no-op on a single rank.

    With several ranks all of them must make the same calls in the same order: a rank that skips one leaves
    the others waiting for ever.
    """

    def __init__(self, group: Any = None) -> None:
        """``group``: SGLang's GroupCoordinator (`ModelRunner.tp_group`); None stands for a single rank."""
        self._group = group
        self._ballots: SharedBallots | None = None
        self.world = 1 if group is None else int(group.world_size)

    @classmethod
    def voting(cls, group: Any = None) -> Ranks:
        """Make ranks that vote at every step: through shared memory if they are on one host. All ranks must
        call it together, and their votes are those of this object alone.
        """
        ranks = cls(group)
        if not ranks.alone:
            ranks._ballots = ranks._opened()
        return ranks

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
        """Return every rank's picklable ``value``, by rank; nothing is sent if all have the same. Runs on the
        host.
        """
        if self.alone:
            return [value]
        if self._same([pickle.dumps(value)])[0]:
            return [value] * self.world
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

    def min_votes(self, votes: Sequence[int]) -> list[int]:
        """Return the lowest vote of any rank, from 0 to `LARGEST`, on each of several questions; nothing is
        sent where nothing is asked. Runs on the host.
        """
        if self.alone or not votes:
            return list(votes)
        if self._ballots is not None:
            return self._ballots.lowest(votes)
        ballot = torch.tensor(votes)
        torch.distributed.all_reduce(ballot, op=torch.distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return [int(vote) for vote in ballot.tolist()]

    def all_agree(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on every rank."""
        return bool(self.min_votes([int(flag)])[0])

    def first_each(self, values: Sequence[T], content: Callable[[T], bytes]) -> list[T]:
        """Return the first rank's ``values`` on every rank. Those whose ``content`` is the same everywhere
        are not sent.
        """
        if self.alone or not values:
            return list(values)
        same = self._same([content(value) for value in values])
        return [value if alike else self.first(value) for value, alike in zip(values, same, strict=True)]

    def _same(self, contents: Sequence[bytes]) -> list[bool]:
        """Return which contents are the same on every rank, by one vote on digests."""
        digests = [struct.unpack("<II", hashlib.blake2b(each, digest_size=8).digest()) for each in contents]
        parts = [part for digest in digests for part in digest]
        lowest = self.min_votes([*parts, *(LARGEST - part for part in parts)])
        alike = [low == LARGEST - high for low, high in zip(lowest, lowest[len(parts) :], strict=False)]
        return [first and second for first, second in zip(alike[::2], alike[1::2], strict=True)]

    def _opened(self) -> SharedBallots | None:
        """Memory for votes; None unless every rank is on this host."""
        path: Path | None = None
        if not self.rank:
            with contextlib.suppress(OSError):
                path = SharedBallots.create(self.world)
        shared = self.first(path)
        ballots = None
        if shared is not None:
            with contextlib.suppress(OSError):
                ballots = SharedBallots(shared, self.rank, self.world)
        everywhere = self.all_agree(ballots is not None)
        if path is not None:
            path.unlink()
        return ballots if everywhere else None
