"""The time limit of a download: one for all of its connections, redirects, headers and bytes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

from ragserve.errors import Unavailable

_POLL_S = 0.5


class FetchWatch:
    """Cuts the connections of one HTTP client when the time is over or the job is to stop.

    A client's own limits are those of one read, so a server that sends a byte from time to time would hold
    it for ever.
    """

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop
        self._streams: WeakSet[Any] = WeakSet()  # httpcore's, those of kept connections too
        self._lock = threading.Lock()
        self._limit_s = self._deadline = 0.0
        self._stopped = False  # noticed by the thread alone: what ends at once need not be stopped
        self.running = False

    def trace(self, _event: str, info: Mapping[str, Any]) -> None:
        """Note a connection; the extension ``trace`` of each request."""
        stream = info.get("return_value")
        if hasattr(stream, "get_extra_info"):
            with self._lock:
                self._streams.add(stream)

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Watch while the block lasts."""
        self._limit_s, self._deadline = seconds, time.monotonic() + seconds
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="ragserve-fetch-watch", daemon=True)
        self.running, self._stopped = True, False
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.running = False

    def is_over(self) -> bool:
        """Return whether the time of the download is over."""
        return self.running and time.monotonic() > self._deadline

    def check(self) -> None:
        """Raises ``Unavailable`` if the time is over or the job is to stop (code ``interrupted``)."""
        if self._stopped:
            raise Unavailable("the download was stopped", code="interrupted")
        if self.is_over():
            raise Unavailable(f"the download took longer than {self._limit_s:g} s")

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(_POLL_S):
            self._stopped = self._stopped or self._should_stop()
            if self._stopped or self.is_over():
                with self._lock:
                    streams = list(self._streams)
                for stream in streams:  # again at each turn: one may have been opened meanwhile
                    connection = stream.get_extra_info("socket")
                    if isinstance(connection, socket.socket):
                        with suppress(OSError):
                            # not SSLSocket's, which forgets its state while another thread reads
                            socket.socket.shutdown(connection, socket.SHUT_RDWR)
