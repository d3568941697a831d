"""Which requests are worked on together, filled up to the longest of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def alike(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Numbers of the ``lengths``, ascending, that go together: filled up to the longest, each takes at most
    twice its own, and all at most ``most``, unless it is one alone."""
    group: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        longest = lengths[group[0]] if group else 0
        if group and (longest > 2 * lengths[number] or longest * (len(group) + 1) > most):
            yield sorted(group)
            group = []
        group.append(number)
    if group:
        yield sorted(group)
