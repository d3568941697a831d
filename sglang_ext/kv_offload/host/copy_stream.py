"""A stream for copies beside the forward passes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

COPIES_VARIABLE = "RAGSERVE_OFFLOAD_COPIES"
"""Where ``in-step``, copies wait for the steps and steps for them: what others do, to measure against it."""


class CopyStream:
    """Copies between host and pool, in order, behind what the current stream has launched.

    On a CPU they happen at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._in_step = os.environ.get(COPIES_VARIABLE) == "in-step"
        self._stream = None if self._device is None else torch.cuda.Stream(device)
        self._passes: Any = None  # the stream of the forward passes

    @contextmanager
    def behind(self, *used: torch.Tensor) -> Iterator[None]:
        """Work on this stream; ``used``: tensors of the current one that the work reads."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        for tensor in used:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield
        if self._in_step:
            current.wait_stream(self._stream)

    def event(self) -> Any:
        """Return an event after the copies so far, within `behind`, which knows its time; None on a CPU."""
        if self._device is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def await_on_current(self, event: Any, *made: torch.Tensor) -> None:
        """Let the current stream wait for an event before what it launches next, which reads ``made``.

        ``event``: None if there is nothing to wait for."""
        if self._device is None:
            return
        current = torch.cuda.current_stream(self._device)
        if event is not None:
            current.wait_event(event)
        for tensor in made:
            tensor.record_stream(current)

    def follow(self) -> None:
        """Note the current stream, that of the forward passes."""
        if self._device is not None:
            self._passes = torch.cuda.current_stream(self._device)

    def all_so_far(self) -> Any:
        """Return an event after the copies and forward passes launched so far; None on a CPU."""
        if self._stream is None:
            return None
        if self._passes is not None:
            self._stream.wait_stream(self._passes)
        return self._stream.record_event()

    def join(self) -> None:
        """Let the current stream follow all copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Wait for all copies and forward passes, before a check."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)
