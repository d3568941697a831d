"""What an engine's exact prefix caches may hold of a prompt, by the prompts that were sent to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile

_LENGTHS = tuple(2**n for n in range(10, 18))  # beginnings that are remembered, in tokens
_MOST = 65_536  # of them, the latest


class SentPrefixes:
    """Remembers the beginnings of prompts, so that an engine need not be asked how much of another it has
    cached. Prompts that came to the engine another way, as those of frontend programs, are not among them."""

    def __init__(self) -> None:
        self._sent: OrderedDict[int, None] = OrderedDict()

    def note(self, key: str, input_ids: Sequence[int]) -> None:
        """Remember a prompt that leaves its KV in the prefix cache of a `prefix_key`."""
        for _, digest in _beginnings(key, input_ids):
            self._sent[digest] = None
            self._sent.move_to_end(digest)
        while len(self._sent) > _MOST:
            self._sent.popitem(last=False)

    def most_cached(self, key: str, input_ids: Sequence[int]) -> int:
        """An upper bound of a prompt's leading tokens in the prefix cache of a `prefix_key`."""
        beginnings = _beginnings(key, input_ids)
        new = next((length for length, digest in beginnings if digest not in self._sent), None)
        return len(input_ids) if new is None else new - 1


def _beginnings(key: str, input_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each remembered length of a prompt, and a digest of so many tokens."""
    digest, start = hash(key), 0
    for length in takewhile(lambda each: each <= len(input_ids), _LENGTHS):
        digest = hash((digest, *input_ids[start:length]))
        yield length, digest
        start = length
