"""Answers for a server that starts: 503 with the reason, on the socket that the server will take over.

Loading a model and compiling kernels take minutes. A load balancer that asks `/ready` meanwhile should read
why, and not have its connection refused.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from contextlib import suppress
from html import escape

from ragserve.errors import Unavailable

BACKLOG = 2048  # as uvicorn's
_CLIENT_S = 1.0  # for a client to send its request and leave; others wait meanwhile
_REQUEST_BYTES = 2**16  # of a request that are read before it is answered
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>ragserve starts</title>
<p>ragserve starts: {reason}. This page looks again every two seconds.</p></html>
"""


def _is_browser(request: bytes) -> bool:
    """Whether it gets a page and accepts HTML: only the head says so."""
    first, *fields = request.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
    accepted = [field for field in fields if field.startswith(b"accept:")]
    return first.startswith(b"get ") and any(b"text/html" in field for field in accepted)


class StartingAnswers:
    """Answers every request on ``listener``, a bound socket, as `/ready` does, from ``start`` to ``stop``."""

    def __init__(self, listener: socket.socket, reason: str) -> None:
        self.reason = reason  # may be replaced at any time
        self._listener = listener
        self._wake: socket.socket | None = None  # closed to end the thread
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen and answer, on a thread."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._wake, woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, args=(woken,), name="starting", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer no more: whoever connects from now on waits for who takes the socket over. May be called
        again, and without ``start``.
        """
        if self._wake is None or self._thread is None:
            return
        self._wake.close()
        self._thread.join()
        self._wake = self._thread = None

    def _run(self, woken: socket.socket) -> None:
        with woken, selectors.DefaultSelector() as selector:
            for one in (self._listener, woken):
                selector.register(one, selectors.EVENT_READ)
            while woken not in [key.fileobj for key, _ in selector.select()]:
                with suppress(OSError):  # the client has left, or is too slow
                    self._answer(self._listener.accept()[0])

    def _answer(self, connection: socket.socket) -> None:
        until = time.monotonic() + _CLIENT_S

        def read() -> bytes:
            connection.settimeout(max(0.001, until - time.monotonic()))
            return connection.recv(_REQUEST_BYTES)

        with connection:
            request = b""
            while b"\r\n\r\n" not in request and len(request) < _REQUEST_BYTES:
                if not (part := read()):
                    return
                request += part
            connection.sendall(self._response(browser=_is_browser(request)))
            connection.shutdown(socket.SHUT_WR)
            while read():  # closing with unread bytes would take the answer back
                pass

    def _response(self, *, browser: bool) -> bytes:
        """The answer; for a browser a page that looks again by itself."""
        error = Unavailable(
            f"Not ready: {self.reason}.", hint="Retry in a moment; see the server's log.", code="not_ready"
        )
        kind, text = (
            "application/json",
            json.dumps({"ready": False, "missing": [self.reason], **error.body()}),
        )
        if browser:
            kind, text = "text/html; charset=utf-8", _PAGE.format(reason=escape(self.reason))
        body = text.encode()
        head = (
            "HTTP/1.1 503 Service Unavailable",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
            *("Retry-After: 1", "Connection: close", "", ""),
        )
        return "\r\n".join(head).encode() + body
