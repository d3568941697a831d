"""Which worker answers a request: the one that holds most of its document tokens, unless others wait there.

The server follows what each worker holds (`Holders`): what it had when it was reached, what it has warmed and
what it was sent, least recently used first out, as workers evict. So documents that are retrieved
together gather on one worker. Documents have owners by rendezvous hashing (Thaler and Ravishankar, 1998):
worker w owns document d if ``mix(d ^ seed(w))`` is the highest of all workers. A worker that joins or leaves
moves only the documents that it gets or had. Owners warm documents, and decide where workers hold equally
much. Tokens that wait to be computed count against a worker. Load is bounded (Mirrokni et al., 2018): no
worker gets a request while it runs more than ``BOUND`` times the mean and ``SPARE``.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

BOUND = 2.0
SPARE = 4
"""Requests that a worker may run beyond the bound: where workers run two each, twice the mean is one topic's
chance, and each request turned away leaves a second copy of its documents.
"""
HELD = 250_000  # documents that all workers are known to hold, about 50 MB
WAITING = 0.3
"""Weight of a token that waits at a worker beyond those of the worker with fewest, relative to one that is
held, where nothing waits elsewhere. With more, first tokens come sooner and less is found.
"""
USUAL, MOST = 2.0, 2.0
"""Weight of the mean of what waits, which counts up to ``MOST`` times the request: where all workers have a
queue, one that is longer by a request stands out less. The limit keeps a queue from growing without end.
"""
BELOW = 0.6  # value of a token on disk: it saves the prefill, not the read
_OWNED = 1e-3  # of a token: decides between workers that hold equally much

_Words = NDArray[np.uint64]


def owners(documents: Sequence[int] | _Words, workers: Sequence[str]) -> NDArray[np.int64]:
    """Return the number of each document's owner. ``documents`` are 64-bit hashes."""
    hashes = np.asarray(documents, dtype=np.uint64)
    return np.argmax(_mix(hashes[:, None] ^ _seeds(tuple(workers))[None, :]), axis=1)


@dataclass
class _Shelf:
    """What a worker holds, least recently used first: tokens by document."""

    room: float = math.inf  # tokens in memory
    below_room: float = math.inf
    memory: OrderedDict[int, int] = field(default_factory=OrderedDict)
    below: OrderedDict[int, int] = field(default_factory=OrderedDict)
    tokens: int = 0  # in memory
    below_tokens: int = 0


class Holders:
    """The documents that workers hold, in memory (device and host) or below (disk), at most ``most`` in
    all."""

    def __init__(self, most: int = HELD) -> None:
        self._most = most
        self._shelves: dict[str, _Shelf] = {}
        self._by_document: dict[int, dict[str, float]] = {}

    def begin(self, worker: str, held: Mapping[str, Any]) -> None:
        """Replace what is known of a worker by its own account (``held`` of `sglang_ext.process.control`)."""
        for document in self._shelf_documents(worker):
            self._forget(worker, document)
        shelf = _Shelf(held["memory_tokens"], held["disk_tokens"] or math.inf)
        self._shelves[worker] = shelf
        documents = [(document_hash(key), tokens) for key, tokens in held["documents"]]
        in_memory = len(documents) - held["in_memory"]
        for document, tokens in documents[:in_memory]:
            self._lower(worker, shelf, document, tokens)
        self.note(worker, documents[in_memory:])

    def note(self, worker: str, documents: Iterable[tuple[int, int]]) -> None:
        """Note that a worker has these documents in memory now: their 64-bit hashes, and tokens."""
        shelf = self._shelves.setdefault(worker, _Shelf())
        for document, tokens in documents:
            shelf.tokens += tokens - shelf.memory.pop(document, 0)
            shelf.below_tokens -= shelf.below.pop(document, 0)
            shelf.memory[document] = tokens
            self._by_document.setdefault(document, {})[worker] = 1.0
        while shelf.tokens > shelf.room:
            document, tokens = shelf.memory.popitem(last=False)
            shelf.tokens -= tokens
            self._lower(worker, shelf, document, tokens)
        while len(shelf.memory) + len(shelf.below) > max(1, self._most // len(self._shelves)):
            self._forget(worker, next(iter(shelf.below or shelf.memory)))

    @property
    def workers(self) -> list[str]:
        """Those of which something is known."""
        return list(self._shelves)

    def of(self, document: int) -> Mapping[str, float]:
        """The workers that hold a document, and what a token of it there is worth."""
        return self._by_document.get(document, {})

    def _shelf_documents(self, worker: str) -> list[int]:
        shelf = self._shelves.get(worker, _Shelf())
        return [*shelf.memory, *shelf.below]

    def _lower(self, worker: str, shelf: _Shelf, document: int, tokens: int) -> None:
        """A document leaves memory, and the oldest ones the disk."""
        shelf.below[document] = tokens
        shelf.below_tokens += tokens
        self._by_document.setdefault(document, {})[worker] = BELOW
        while shelf.below_tokens > shelf.below_room:
            self._forget(worker, next(iter(shelf.below)))

    def _forget(self, worker: str, document: int) -> None:
        shelf = self._shelves[worker]
        shelf.tokens -= shelf.memory.pop(document, 0)
        shelf.below_tokens -= shelf.below.pop(document, 0)
        holders = self._by_document[document]
        del holders[worker]
        if not holders:
            del self._by_document[document]


def tokens_held(
    documents: Sequence[tuple[int, int]],
    workers: Sequence[str],
    *,
    holders: Holders | None = None,
    held: Mapping[str, int] | None = None,
) -> list[float]:
    """Return how many tokens of a request each worker holds, those on disk at `BELOW`.

    Args:
        documents: (64-bit hash, tokens) of each document.
        workers: Their names.
        holders: What workers hold.
        held: Further tokens of the request that a worker holds, such as a session's."""
    owned = owners([document for document, _ in documents], workers).tolist() if documents else []
    numbers = {name: number for number, name in enumerate(workers)}
    tokens = [0.0] * len(workers)
    for (document, size), owner in zip(documents, owned, strict=True):
        tokens[owner] += _OWNED * size
        for name, value in holders.of(document).items() if holders else ():
            if name in numbers:
                tokens[numbers[name]] += value * size
    for name, size in (held or {}).items():
        if name in numbers:
            tokens[numbers[name]] += size
    return tokens


def ranked(
    tokens: Sequence[float],
    loads: Sequence[int],
    waiting: Sequence[float],
    size: int,
    bound: float = BOUND,
) -> list[int]:
    """Return the numbers of workers, the best first: those with room by the tokens that need not be computed,
    less ``WAITING * excess * size / (size + USUAL * usual)``; then the others by load. The excess is that of
    the tokens that wait there over those of the worker with fewest. ``usual`` is the mean of what waits at a
    worker, at most ``MOST * size``.

    Args:
        tokens: Tokens of the request that each holds.
        loads: Requests that each is running.
        waiting: Tokens that each has yet to compute before it begins.
        size: Tokens of the request.
        bound: A worker has room until it runs this many times the mean, the new request counted, and
            `SPARE`."""
    room, least, size = capacity(loads, bound), min(waiting, default=0), max(1, size)
    usual = min(sum(waiting) / max(1, len(waiting)), MOST * size)
    weight = WAITING * size / (size + USUAL * usual)

    def order(worker: int) -> tuple[float, ...]:
        gain = tokens[worker] - weight * (waiting[worker] - least)
        if loads[worker] < room:
            return (0, -gain, loads[worker], worker)
        return (1, loads[worker], -gain, worker)

    return sorted(range(len(tokens)), key=order)


def capacity(loads: Sequence[int], bound: float = BOUND) -> int:
    """Return how many requests a worker may run when one more is given out."""
    return math.ceil(bound * (sum(loads) + 1) / max(1, len(loads))) + SPARE


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
