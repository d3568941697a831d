"""Releases host pages once the device has read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class ReleaseQueue:
    """Calls back, in order, when the device has passed an event. Scheduler thread only."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Any, Callable[[], None]]] = deque()

    def add(self, event: Any, release: Callable[[], None]) -> None:
        """``event``: a recorded torch.cuda.Event, later than those before it."""
        self._waiting.append((event, release))

    def poll(self) -> None:
        """Release what the device has finished."""
        while self._waiting and self._waiting[0][0].query():
            self._waiting.popleft()[1]()

    def wait(self) -> None:
        """Wait for the device and release everything."""
        while self._waiting:
            event, release = self._waiting.popleft()
            event.synchronize()
            release()
