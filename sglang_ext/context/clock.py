"""How long the stages of a composed batch took."""

from __future__ import annotations

import time
from typing import Any

import torch


class StageClock:
    """Starts now; ``mark`` ends a stage.

    On CUDA marks are events on the current stream, so a stage's time is that of its work and not of launching it. ``stages`` waits for
    the last mark: ask when the batch's results are waited for anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def mark(self, stage: str) -> None:
        self._marks.append((stage, self._now()))

    def stages(self) -> dict[str, float]:
        """Milliseconds by stage."""
        if self._cuda:
            self._marks[-1][1].synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return {stage: begin.elapsed_time(end) if self._cuda else (end - begin) * 1e3 for (_, begin), (stage, end) in pairs}

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
