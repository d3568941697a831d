"""Serve one handler over HTTP, from a thread of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_POLL_S = 0.05


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that does not write requests to standard error."""

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Serve until the block ends, at a port of 127.0.0.1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
