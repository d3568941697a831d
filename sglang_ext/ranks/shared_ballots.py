"""Votes of processes on one host, through memory that they share.

A vote through gloo wakes threads and sockets of every process, 0.1 to 2 ms each time. Here every process
writes a few integers, and reads those of the others as soon as they are there.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_VALUES = 2048  # votes in one round; more are cut into rounds
_HALF = 32  # bits: a vote lies in the lower half of its word, the number of its round in the upper
LARGEST = 2**_HALF - 1  # vote
_LOOKS = 20  # before Python's lock is let go between them: another thread may keep it for milliseconds
_SPINS = 200  # further looks before the waiting process sleeps between them
_NAP_S = 5e-5
_PATIENCE_S = 1800.0  # as gloo waits; a rank may compile kernels meanwhile
Words = np.ndarray[Any, np.dtype[np.uint64]]


class SharedBallots:
    """The lowest votes of all ranks. All ranks must call `lowest` alike, each on one thread.

    Every rank has two rows of memory, in turns. A word carries the number of its round, so the order in which
    words arrive does not matter. Nobody writes round n + 2 over round n before all have read it, because that
    takes everyone's votes of round n + 1.
    """

    def __init__(self, path: Path, rank: int, world: int) -> None:
        """Open the file that `create` has made. Raises OSError if this host does not have it."""
        self._words: Words = np.memmap(path, np.uint64, "r+", shape=(2, world, _VALUES))
        self._rank = rank
        self._round = 0

    @staticmethod
    def create(world: int) -> Path:
        """Make the file for ``world`` ranks, in memory where the host has a folder for that. The caller
        removes it when all have opened it. Raises OSError.
        """
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        handle, name = tempfile.mkstemp(prefix="ragserve-votes-", dir=folder)
        try:
            # a file with holes would end the process at its first vote if the folder is full
            os.posix_fallocate(handle, 0, 2 * world * _VALUES * np.dtype(np.uint64).itemsize)
        except OSError:
            os.unlink(name)
            raise
        finally:
            os.close(handle)
        return Path(name)

    def lowest(self, votes: Sequence[int]) -> list[int]:
        """Return the lowest vote of any rank on each question; votes are between 0 and `LARGEST`. Raises
        TimeoutError if a rank does not vote.
        """
        found: list[int] = []
        for at in range(0, len(votes), _VALUES):
            found += self._vote(votes[at : at + _VALUES])
        return found

    def _vote(self, votes: Sequence[int]) -> list[int]:
        self._round = self._round % LARGEST + 1  # never 0, which fresh memory has
        rows, number = self._words[self._round % 2, :, : len(votes)], np.uint64(self._round)
        rows[self._rank] = np.array(votes, dtype=np.uint64) | (number << np.uint64(_HALF))
        _wait(lambda: bool(((rows >> np.uint64(_HALF)) == number).all()))
        lowest: list[int] = (rows & np.uint64(LARGEST)).min(axis=0).tolist()
        return lowest


def _wait(arrived: Callable[[], bool]) -> None:
    """Wait for something that is a few microseconds away most times, and let other threads run meanwhile."""
    for look in range(_LOOKS + _SPINS):
        if arrived():
            return
        if look >= _LOOKS:
            time.sleep(0)
    until = time.monotonic() + _PATIENCE_S
    while not arrived():
        if time.monotonic() > until:
            raise TimeoutError(f"another process of the model did not vote within {_PATIENCE_S:.0f} s")
        time.sleep(_NAP_S)
