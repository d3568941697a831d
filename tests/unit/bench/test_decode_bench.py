"""Decode benchmark: which points are measured in the time that there is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.bench import decode, model_shapes

POINTS = [(64, 1), (64, 2), (128, 1)]


class Prefilled(Exception):
    """A point is measured."""


def test_points_are_left_out_once_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def prefill(*_: Any) -> None:
        raise Prefilled

    def run_engine(_shape: str, work: Callable[[Any], Awaitable[None]], **_: Any) -> None:
        info = SimpleNamespace(device="d", attention_backend="a", version="v")
        asyncio.run(work(SimpleNamespace(info=info)))  # type: ignore[arg-type]

    def measured(until: float) -> dict[str, Any]:
        return decode.run("triton", POINTS, write=lambda _: None, shape="embedded", until=until)

    monkeypatch.setattr(decode, "prefill", prefill)
    monkeypatch.setattr(model_shapes, "run_engine", run_engine)
    with pytest.raises(Prefilled):
        measured(time.monotonic() + 1e6)
    assert measured(time.monotonic() - 1)["left out"] == [list(point) for point in POINTS]
