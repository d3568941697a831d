"""Brings host pages into a step's slots layer by layer, on a stream beside that of the forward pass.

SGLang's pool asks a counter before it hands out a layer's K or V. The counter serves SGLang's own host cache,
which is off here. With ours in its place the first layers are computed while the last ones still arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class LayerLoads:
    """Loads under way. Per rank; scheduler thread only. Everything that reads the pool between a load and its
    end must run on one stream.
    """

    def __init__(self, pool: Any, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        # (n, event): layers below n are there once the event has passed
        self._waiting: deque[tuple[int, Any]] = deque()
        self._arrived = 0  # layers that the reader has waited for
        self._reader: Any = None  # the stream that waits
        pool.register_layer_transfer_counter(self)

    def __bool__(self) -> bool:
        """True while a load is under way that nobody has waited for."""
        return bool(self._waiting)

    @contextmanager
    def stream_behind(self, *used: torch.Tensor) -> Iterator[None]:
        """Work on the loads' stream, behind all work of the current one, whose tensors ``used`` it reads."""
        self.finish()
        self._arrived, self._reader = 0, torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(self._reader)
        for tensor in used:
            tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            yield

    def launched(self, layers: int) -> None:
        """Record that the loads of all layers below this number have been launched."""
        event = torch.cuda.Event()
        event.record(self.stream)
        self._waiting.append((layers, event))

    def wait_until(self, layer: int) -> None:
        """Make the reader's stream wait for this layer. SGLang's pool calls it at every access; the host
        never waits.
        """
        while self._waiting and self._arrived <= layer:
            self._arrived, event = self._waiting.popleft()
            self._reader.wait_event(event)

    def finish(self) -> None:
        """Make the reader's stream wait for all layers."""
        while self._waiting:
            self._arrived, event = self._waiting.popleft()
            self._reader.wait_event(event)
