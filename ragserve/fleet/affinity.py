"""Which worker answers a request: the one that holds most of its document tokens, unless it is overloaded.

Documents have owners by rendezvous hashing (Thaler and Ravishankar, 1998): worker w owns document d if
``mix(d ^ seed(w))`` is the highest of all workers. A worker that joins or leaves moves only the documents
that it gets or had. Owners warm documents. A document that workers have answered from is held by these
(`Holders`) and no longer by its owner, so documents that are retrieved together gather on one worker. Tokens
that wait to be computed there count against it. Load is bounded (Mirrokni et al., 2018): no worker gets a
request while it runs more than ``BOUND`` times the mean.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

BOUND = 1.25
HELD = 250_000  # documents whose holders are remembered, about 50 MB
COPIES = 8  # holders of a document that are remembered
WAITING = 0.5
"""Tokens found that a token in front of the request is worth. Simulated, the first token comes soonest with
it; with 0 up to a seventh more is found, and p99 of the first token is 1.7 to 2.7 times as long.
"""

_Words = NDArray[np.uint64]


def owners(documents: Sequence[int] | _Words, workers: Sequence[str]) -> NDArray[np.int64]:
    """Return the number of each document's owner. ``documents`` are 64-bit hashes."""
    hashes = np.asarray(documents, dtype=np.uint64)
    return np.argmax(_mix(hashes[:, None] ^ _seeds(tuple(workers))[None, :]), axis=1)


class Holders:
    """The workers that have answered from each document, of the ``most`` last used ones."""

    def __init__(self, most: int = HELD) -> None:
        self._most = most
        self._by_document: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def note(self, worker: str, documents: Iterable[int]) -> None:
        """Note that a worker has these documents now."""
        for document in documents:
            known = self._by_document.get(document, ())
            if worker not in known:
                self._by_document[document] = (*known, worker)[-COPIES:]
            self._by_document.move_to_end(document)
        while len(self._by_document) > self._most:
            self._by_document.popitem(last=False)

    def of(self, document: int) -> tuple[str, ...]:
        """The workers that have a document, the latest last."""
        return self._by_document.get(document, ())


def tokens_held(
    documents: Sequence[tuple[int, int]],
    workers: Sequence[str],
    *,
    holders: Holders | None = None,
    held: Mapping[str, int] | None = None,
) -> list[int]:
    """Return how many tokens of a request each worker holds.

    Args:
        documents: (64-bit hash, tokens) of each document.
        workers: Their names.
        holders: What workers have answered from; a document that is not there is its owner's.
        held: Further tokens of the request that a worker holds, such as a session's."""
    hashes = [document for document, _ in documents]
    owned = owners(hashes, workers).tolist() if documents else []
    numbers = {name: number for number, name in enumerate(workers)}
    tokens = [0] * len(workers)
    for (document, size), owner in zip(documents, owned, strict=True):
        there = {numbers[name] for name in (holders.of(document) if holders else ()) if name in numbers}
        for number in there or {owner}:
            tokens[number] += size
    for name, size in (held or {}).items():
        if name in numbers:
            tokens[numbers[name]] += size
    return tokens


def ranked(
    tokens: Sequence[int], loads: Sequence[int], waiting: Sequence[float], bound: float = BOUND
) -> list[int]:
    """Return the numbers of workers, the best first: those with room by the tokens that need not be computed,
    less those that wait to be, then the others by load.

    Args:
        tokens: Tokens of the request that each holds.
        loads: Requests that each is running.
        waiting: Tokens that each has yet to compute before it begins.
        bound: A worker has room until it runs this many times the mean, the new request counted."""
    room = capacity(loads, bound)

    def order(worker: int) -> tuple[float, ...]:
        gain = tokens[worker] - WAITING * waiting[worker]
        if loads[worker] < room:
            return (0, -gain, loads[worker], worker)
        return (1, loads[worker], -gain, worker)

    return sorted(range(len(tokens)), key=order)


def capacity(loads: Sequence[int], bound: float = BOUND) -> int:
    """Return how many requests a worker may run when one more is given out."""
    return math.ceil(bound * (sum(loads) + 1) / max(1, len(loads)))


def document_hash(key: str) -> int:
    """Return 64 bits of a document's cache key, which is a hash in hexadecimal."""
    return int(key[:16], 16)


@lru_cache(maxsize=64)
def _seeds(workers: tuple[str, ...]) -> _Words:
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in workers)
    return np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.uint64)


def _mix(words: _Words) -> _Words:
    """The finaliser of SplitMix64: each bit of the result depends on all bits of the word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
