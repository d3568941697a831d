"""Decode profile: the context length from which sparse decode steps are faster than dense ones, found by
`ragserve calibrate --part decode`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragserve.config import Settings
from ragserve.errors import InvalidRequest
from ragserve.profiles.file import ProfileFile
from sglang_ext.wire.decode_fields import decided_scores

FILE_NAME = "ragserve-decode.json"
VERSION = 1
MIN_GAIN = 0.05  # of a dense step's time; sparse decoding is approximate, so a smaller gain is not worth it


@dataclass(frozen=True, slots=True)
class Point:
    """Milliseconds per decode step at a context of ``tokens`` tokens."""

    tokens: int
    dense_ms: float
    sparse_ms: float


@dataclass(frozen=True, slots=True)
class DecodeProfile:
    """Requests with contexts up to ``dense_below`` tokens should decode densely; measured with ``options``
    and ``batch`` requests at once."""

    dense_below: int
    options: dict[str, Any]
    batch: int
    points: tuple[Point, ...]
    model: str
    hardware: str
    date: str


def options_of(settings: Settings) -> dict[str, Any]:
    """The request options that determine the cost of a sparse step. Raises InvalidRequest for dense
    decoding."""
    if settings.decode_mode == "dense":
        raise InvalidRequest(
            "Dense decoding has no length to calibrate.",
            hint="Set --decode-mode to hierarchical or progressive.",
        )
    if settings.decode_mode == "progressive":
        return {"mode": "progressive", "threshold": settings.decode_threshold}
    found = {"mode": "hierarchical", "budget": settings.decode_budget, "reuse": settings.decode_reuse}
    return found | {"scores": scores_of(settings)}


def scores_of(settings: Settings) -> str:
    """What pages are chosen by: ``decode_scores``, decided where it is auto."""
    return decided_scores(
        settings.decode_scores, kv_bits=settings.kv_bits, on_device=settings.decode_offload == "off"
    )


def crossover(points: Sequence[Point]) -> int:
    """The context length in tokens above which sparse steps take at most ``1 - MIN_GAIN`` of dense ones'
    time, at all measured lengths.

    Interpolates linearly between two lengths. If sparse always gains: the shortest length; if it does not at
    the longest length: the longest."""
    ordered = sorted(points, key=lambda point: point.tokens)
    losses = [point.sparse_ms - (1 - MIN_GAIN) * point.dense_ms for point in ordered]
    losing = [i for i, loss in enumerate(losses) if loss > 0]
    if not losing:
        return ordered[0].tokens
    last = losing[-1]
    if last == len(ordered) - 1:
        return ordered[-1].tokens
    here, there = ordered[last], ordered[last + 1]
    return round(
        here.tokens + (there.tokens - here.tokens) * losses[last] / (losses[last] - losses[last + 1])
    )


DECODE: ProfileFile[DecodeProfile] = ProfileFile(
    VERSION, "decode profile", "ragserve calibrate --part decode", DecodeProfile
)
