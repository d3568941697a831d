"""An HTTP server that answers what it is told to."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOST, SILENT = "lost", "silent"


class ScriptedHttp:
    """(status, body) or (status, body, headers) for each coming request; or `LOST`: the connection is closed,
    or `SILENT`: no answer comes. ``seen`` holds (method, path, authorization, body)."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.seen: list[tuple[str, str, str | None, Any]] = []
        self.end = threading.Event()
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                is_json = self.headers.get("Content-Type") == "application/json"
                body = json.loads(data) if data and is_json else data or None
                scripted.seen.append((self.command, self.path, self.headers.get("Authorization"), body))
                answer = scripted.answers.pop(0)
                if answer == SILENT:
                    scripted.end.wait(60)
                if answer in (LOST, SILENT):
                    self.close_connection = True
                    return
                status, payload, *more = answer
                payload = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(payload)), **(more[0] if more else {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)

            do_GET = do_POST = do_DELETE = _answer

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.end.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()
