"""Host pages on their way into a step's slots, layer by layer, on a stream beside that of the forward pass.

SGLang's pool asks a counter before it hands out a layer's K or V (made for its own host cache, which is off
here): what computes on the first layers runs while the last ones still come over the link."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class LayerLoads:
    """One rank's. On the scheduler's thread; everything that reads the pool between a load and its end runs
    on one stream.
    """

    def __init__(self, pool: Any, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._waiting: deque[tuple[int, Any]] = (
            deque()
        )  # layers below this number are there once the event has passed
        self._arrived = 0  # what the reader has waited for
        self._reader: Any = None  # the stream that waits
        pool.register_layer_transfer_counter(self)

    def __bool__(self) -> bool:
        """Whether there is something that nobody has waited for."""
        return bool(self._waiting)

    @contextmanager
    def stream_behind(self, *used: torch.Tensor) -> Iterator[None]:
        """Work on the loads' stream, behind all that the current one has been given; ``used``: its tensors
        that the work reads.
        """
        self.finish()
        self._arrived, self._reader = 0, torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(self._reader)
        for tensor in used:
            tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            yield

    def launched(self, layers: int) -> None:
        """The loads of all layers below this number have been launched."""
        event = torch.cuda.Event()
        event.record(self.stream)
        self._waiting.append((layers, event))

    def wait_until(self, layer: int) -> None:
        """The reader's stream goes on when this layer is there. Asked by SGLang's pool at every access; never
        waits on the host.
        """
        while self._waiting and self._arrived <= layer:
            self._arrived, event = self._waiting.popleft()
            self._reader.wait_event(event)

    def finish(self) -> None:
        """As ``wait_until`` for all layers."""
        while self._waiting:
            self._arrived, event = self._waiting.popleft()
            self._reader.wait_event(event)
