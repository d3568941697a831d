"""Times of the stages of a composed batch."""

from __future__ import annotations

import time
from typing import Any

import torch


class StageTimer:
    """Starts when made; ``mark`` ends a stage.

    On CUDA the marks are events on the current stream, so a stage's time is that of its work, not of its
    launch. A stage that overlaps an earlier one on another stream counts only the time by which it ends
    later. ``stages`` waits for the last mark: call it when the batch's results are awaited anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def mark(self, stage: str, stream: Any = None) -> None:
        """End ``stage``, on the CUDA stream ``stream`` if that is not the current one."""
        self._marks.append((stage, self._now(stream)))

    def stages(self) -> dict[str, float]:
        """Return milliseconds by stage."""
        if self._cuda:
            self._marks[-1][1].synchronize()
        start, stages, until = self._marks[0][1], {}, 0.0
        for stage, mark in self._marks[1:]:
            ended = start.elapsed_time(mark) if self._cuda else (mark - start) * 1e3
            stages[stage] = max(0.0, ended - until)
            until = max(until, ended)
        return stages

    def _now(self, stream: Any = None) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream())
        return event
