"""Downloads from a real HTTP server on loopback, within limits."""

from __future__ import annotations

import gzip
import re
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ragserve.errors import RagserveError, TooLarge, Unavailable, UnsupportedDocument
from ragserve.ingest import fetch as fetch_module
from ragserve.ingest.fetch import Downloaded, Fetcher
from tests.unit.no_room import no_room


def fetch(url: str, folder: Path, *, max_bytes: int) -> Downloaded:
    with Fetcher(max_bytes=max_bytes) as fetcher:
        return fetcher.fetch(url, folder)


PAGE = "<p>café</p>".encode("latin-1")
TWICE = gzip.compress(gzip.compress(bytes(2**20)))
ENCODED: dict[str, tuple[str, bytes]] = {
    "/gzip": ("gzip", gzip.compress(PAGE)),
    "/gzip-members": ("gzip", gzip.compress(PAGE[:5]) + gzip.compress(PAGE[5:])),
    "/gzip-broken": ("gzip", gzip.compress(PAGE)[:-4]),
    "/gzip-false": ("gzip", PAGE),
    "/gzip-bomb": ("gzip", gzip.compress(bytes(64 * 2**20), 1)),
    "/gzip-twice": ("gzip, gzip", TWICE),
    "/zstd": ("zstd", b"(\xb5/\xfd"),
}


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/slow-headers":
            self.drip(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x")
            return
        if self.path == "/robots.txt":
            self.send_response(404)
        elif self.path.startswith("/loop"):
            self.send_response(302)
            self.send_header("Location", self.path + "x")
        elif self.path == "/moved":
            self.send_response(301)
            self.send_header("Location", "/page")
        elif self.path == "/moved-endless":
            self.send_response(302)
            self.send_header("Location", "/page")
        elif self.path == "/missing":
            self.send_response(404)
        elif self.path in ENCODED:
            encoding, body = ENCODED[self.path]
            self.send_response(200)
            self.send_header("Content-Encoding", encoding)
            self.end_headers()
            self.wfile.write(body)
            return
        else:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=iso-8859-1")
        self.end_headers()
        if self.path == "/slow-body":
            self.drip(b"<p>", b"x")
        if self.path.endswith("endless"):
            try:
                while True:
                    self.wfile.write(bytes(65536))
            except (BrokenPipeError, ConnectionResetError):
                return
        with suppress(BrokenPipeError, ConnectionResetError):  # the client may have gone by then
            self.wfile.write(PAGE)

    def drip(self, start: bytes, more: bytes) -> None:
        """Send a byte from time to time until nobody listens: no single read is ever slow."""
        try:
            self.wfile.write(start)
            while True:
                self.wfile.write(more)
                time.sleep(0.05)
        except (BrokenPipeError, ConnectionResetError):
            return

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
        ("/gzip-bomb", TooLarge, "too large"),
        ("/gzip-twice", UnsupportedDocument, "sent as 'gzip, gzip', which was not asked for"),
        ("/zstd", UnsupportedDocument, "sent as 'zstd', which was not asked for"),
        ("/gzip-broken", UnsupportedDocument, "breaks off"),
        ("/gzip-false", UnsupportedDocument, "not readable as that"),
    ],
)
def test_limits(path: str, error: type[RagserveError], words: str, site: str, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(error, match=words):
            fetch(site + path, tmp_path, max_bytes=1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20  # bytes, whatever the body unpacks to
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("path", ["/gzip", "/gzip-members"])
def test_gzip_that_was_not_asked_for_is_read(path: str, site: str, tmp_path: Path) -> None:
    assert fetch(site + path, tmp_path, max_bytes=1000).path.read_bytes() == PAGE


def test_the_body_of_a_redirect_is_not_read(site: str, tmp_path: Path) -> None:
    got = fetch(f"{site}/moved-endless", tmp_path, max_bytes=1000)
    assert (got.url, got.path.read_bytes()) == (f"{site}/page", PAGE)


@pytest.mark.parametrize("path", ["/slow-headers", "/slow-body"])
def test_a_download_has_one_time_limit_and_ends_with_its_job(
    path: str, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "_TOTAL_S", 1.0)
    with pytest.raises(Unavailable, match="the download took longer than 1 s"):
        fetch(site + path, tmp_path, max_bytes=10**9)

    monkeypatch.setattr(fetch_module, "_TOTAL_S", 600.0)
    begun = time.monotonic()
    with (
        Fetcher(max_bytes=10**9, should_stop=lambda: time.monotonic() > begun + 0.5) as fetcher,
        pytest.raises(Unavailable, match="the download was stopped") as stopped,
    ):
        fetcher.fetch(site + path, tmp_path)
    assert stopped.value.code == "interrupted"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/", "http://", "http://[bad/"], ids=["refused", "no-host", "malformed"]
)
def test_unreachable(url: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="not reachable"):
        fetch(url, tmp_path, max_bytes=1000)


def test_a_page_without_room_names_its_file(site: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "download"))), no_room():
        fetch(f"{site}/page", tmp_path, max_bytes=1000)
