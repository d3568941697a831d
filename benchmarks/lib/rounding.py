"""How far two answers to one prompt are from each other, and what rounding explains of it."""

from __future__ import annotations

from typing import Any

BFLOAT16 = 0.15  # difference of log-probabilities that rounding explains


def apart(a: tuple[list[int], list[float], Any], b: tuple[list[int], list[float], Any]) -> tuple[bool, float]:
    """Compare two answers: whether the tokens are the same, and the largest difference of log-probabilities
    up to the first token that differs."""
    same = 0
    while same < len(a[0]) and a[0][same] == b[0][same]:
        same += 1
    return same == len(a[0]), max(
        (abs(x - y) for x, y in zip(a[1][: same + 1], b[1][: same + 1], strict=True)), default=0.0
    )
