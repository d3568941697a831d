"""Prefill profile: the prompt length from which sparse prefill is faster than dense, found by
`ragserve calibrate --part prefill`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragserve.config import Settings
from ragserve.profiles.decode import MIN_GAIN, Point, crossover
from ragserve.profiles.file import ProfileFile

FILE_NAME = "ragserve-prefill.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Milliseconds to the first token of a prompt of ``tokens`` tokens, and the ``share`` of the blocks of
    dense attention that the sparse prefill computed."""

    tokens: int
    dense_ms: float
    sparse_ms: float
    share: float


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """Prompts up to ``dense_below`` tokens should be prefilled densely, all of them if it is None; measured
    with ``options``."""

    dense_below: int | None
    options: dict[str, Any]
    points: tuple[PrefillPoint, ...]
    model: str
    hardware: str
    date: str


def options_of(settings: Settings) -> dict[str, Any]:
    """The prefill options that determine the cost; mode `vertical_slash` for a server whose default is
    dense.
    """
    mode = "vertical_slash" if settings.prefill_mode == "dense" else settings.prefill_mode
    found: dict[str, Any] = {
        "mode": mode,
        "alpha": settings.prefill_alpha,
        "dense_last": settings.prefill_dense_last,
    }
    if mode == "vertical_slash":
        return found | {"observe": settings.prefill_observe}
    return found | ({"streaming": True} if settings.decode_heads is not None else {})


def on_from(points: Sequence[PrefillPoint]) -> int | None:
    """The prompt length in tokens above which sparse prefill takes at most ``1 - MIN_GAIN`` of the dense
    one's time, at all measured lengths; None if it does not at the longest."""
    longest = max(points, key=lambda point: point.tokens)
    if longest.sparse_ms > (1 - MIN_GAIN) * longest.dense_ms:
        return None
    return crossover([Point(point.tokens, point.dense_ms, point.sparse_ms) for point in points])


PREFILL: ProfileFile[PrefillProfile] = ProfileFile(
    VERSION, "prefill profile", "ragserve calibrate --part prefill", PrefillProfile
)
