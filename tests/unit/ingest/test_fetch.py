"""Downloads from a real HTTP server on loopback, within limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ragserve.errors import RagserveError, TooLarge, Unavailable, UnsupportedDocument
from ragserve.ingest.fetch import Downloaded, Fetcher


def fetch(url: str, folder: Path, *, max_bytes: int) -> Downloaded:
    with Fetcher(max_bytes=max_bytes) as fetcher:
        return fetcher.fetch(url, folder)


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/robots.txt":
            self.send_response(404)
        elif self.path.startswith("/loop"):
            self.send_response(302)
            self.send_header("Location", self.path + "x")
        elif self.path == "/moved":
            self.send_response(301)
            self.send_header("Location", "/page")
        elif self.path == "/missing":
            self.send_response(404)
        else:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=iso-8859-1")
        self.end_headers()
        if self.path == "/endless":
            try:
                while True:
                    self.wfile.write(bytes(65536))
            except (BrokenPipeError, ConnectionResetError):
                return
        self.wfile.write("<p>café</p>".encode("latin-1"))

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_page_comes_with_its_charset_and_final_address(site: str, tmp_path: Path) -> None:
    got = fetch(f"{site}/moved", tmp_path, max_bytes=1000)
    assert (got.url, got.filename, got.ext, got.charset) == (f"{site}/page", "page", ".html", "iso-8859-1")
    assert got.path.read_bytes() == "<p>café</p>".encode("latin-1")


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("/missing", UnsupportedDocument, "HTTP 404"),
        ("/loop", Unavailable, "redirects"),
        ("/endless", TooLarge, "too large"),
    ],
)
def test_limits(path: str, error: type[RagserveError], words: str, site: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        fetch(site + path, tmp_path, max_bytes=1_000_000)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/", "http://", "http://[bad/"], ids=["refused", "no-host", "malformed"]
)
def test_unreachable(url: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="not reachable"):
        fetch(url, tmp_path, max_bytes=1000)
