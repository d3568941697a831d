"""Download URLs within limits on size, time, redirects and addresses, as their sites' robots.txt allows."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ragserve.errors import TooLarge, Unavailable, UnsupportedDocument
from ragserve.files import naming
from ragserve.ingest.fetch_watch import FetchWatch
from ragserve.ingest.parsers.base import one_line
from ragserve.ingest.robots import AGENT, Robots
from ragserve.version import __version__

if TYPE_CHECKING:
    import httpx

    from ragserve.ingest.guarded_transport import Allows

_MAX_REDIRECTS = 5
_CONNECT_S, _READ_S, _TOTAL_S = 10.0, 30.0, 300.0
_INFLATED_BYTES = 1 << 20  # decoded at a time, whatever a server makes of few bytes
_EXTENSIONS = {
    "text/html": ".html",
    "application/xhtml+xml": ".html",
    "application/pdf": ".pdf",
    "text/markdown": ".md",
    "text/csv": ".csv",
    "text/tab-separated-values": ".tsv",
    "application/jsonl": ".jsonl",
    "application/x-ndjson": ".jsonl",
    "message/rfc822": ".eml",
    "application/mbox": ".mbox",
    "application/epub+zip": ".epub",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": ".docx",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": ".xlsx",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation": ".pptx",
}


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A downloaded file. ``url`` is the one after redirects; ``charset`` is what the server declared."""

    path: Path
    url: str
    filename: str
    ext: str
    charset: str | None


class Fetcher:
    """Fetches the URLs of one job, one at a time. Close it, or use it in a ``with`` block.

    Args:
        max_bytes: Largest file.
        allows: Decides on the addresses to connect to; None: all are allowed.
        robots: Keep to the robots.txt of sites.
        should_stop: Ends a download, and a wait that a robots.txt asks for (``Unavailable``, code
            ``interrupted``).
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        allows: Allows | None = None,
        robots: bool = True,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._max_bytes = max_bytes
        self._allows = allows
        self._watch = FetchWatch(should_stop)
        self._robots = Robots(self._robots_txt, lambda: should_stop() or self._watch.is_over())
        self._polite = robots
        self._client: httpx.Client | None = None

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()

    def fetch(self, url: str, folder: Path) -> Downloaded:
        """Write the body of ``url`` to a file in ``folder``, which the caller removes.

        Raises ``UnsupportedDocument`` (an HTTP error status), ``TooLarge``, ``Forbidden`` (by address or
        robots.txt), or ``Unavailable`` (no connection, too slow, too many redirects).
        """
        with self._response(url) as response:
            _require_ok(response)
            path = folder / "download"
            with naming(path), open(path, "wb") as file:
                for block in self._body(response):
                    if file.tell() + len(block) > self._max_bytes:
                        limit = f"{self._max_bytes:,} bytes (RAGSERVE_MAX_UPLOAD_BYTES)"
                        raise TooLarge(f"too large: more than {limit}")
                    file.write(block)
            final = str(response.url)
            mime = response.headers.get("content-type", "").split(";")[0].strip().lower()
            charset = response.charset_encoding
        name = one_line(unquote(os.path.basename(urlsplit(final).path))) or urlsplit(final).netloc
        ext = os.path.splitext(name)[1].lower()
        return Downloaded(path, final, name, _EXTENSIONS.get(mime, ext), charset)

    def read(self, url: str, max_bytes: int) -> bytes:
        """The body of ``url``. Raises as `fetch`."""
        with self._response(url) as response:
            _require_ok(response)
            body = self._first_bytes(response, max_bytes + 1)
        if len(body) > max_bytes:
            raise TooLarge(f"{url} has more than {max_bytes:,} bytes.")
        return body

    def sitemaps(self, url: str) -> list[str]:
        """The sitemaps that the robots.txt of the URL's site names. Raises ``Unavailable``, ``Forbidden``."""
        return self._robots.sitemaps(url)

    def _robots_txt(self, url: str, max_bytes: int) -> tuple[int, bytes]:
        with self._response(url, polite=False) as response:
            return response.status_code, self._first_bytes(response, max_bytes)

    @contextmanager
    def _response(self, url: str, *, polite: bool = True) -> Iterator[httpx.Response]:
        """The answer after redirects, whose own bodies are never read."""
        import httpx

        self._client = self._client or self._open()
        try:
            request = self._client.build_request("GET", url, extensions={"trace": self._watch.trace})
        except (httpx.InvalidURL, ValueError) as error:
            raise _unreachable(error) from error
        polite = polite and self._polite
        if polite:
            self._robots.admit(str(request.url))  # the site's wait is no part of the download's time
        # a robots.txt that a redirect asks for shares the time of the download
        with nullcontext() if self._watch.running else self._watch.limit(_TOTAL_S):
            try:
                for hop in range(_MAX_REDIRECTS + 1):
                    if hop and polite:
                        self._robots.admit(str(request.url))
                    response = self._client.send(request, stream=True)
                    with closing(response):
                        if response.next_request is None:
                            yield response
                            return
                        request = response.next_request
            except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
                self._watch.check()
                raise _unreachable(error) from error
        raise Unavailable(f"more than {_MAX_REDIRECTS} redirects")

    def _body(self, response: httpx.Response) -> Iterator[bytes]:
        """The body, decoded in bounded blocks. httpx's own decoders make a block of whatever size a read
        inflates to."""
        encoding = response.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip"):
            raise UnsupportedDocument(f"sent as {encoding[:40]!r}, which was not asked for: {response.url}")
        blocks = self._received(response)
        yield from _inflated(blocks) if encoding.endswith("gzip") else blocks

    def _received(self, response: httpx.Response) -> Iterator[bytes]:
        for block in response.iter_raw():
            self._watch.check()
            yield block
        self._watch.check()  # a connection that was cut may look like the end of the body

    def _first_bytes(self, response: httpx.Response, most: int) -> bytes:
        body = bytearray()
        for block in self._body(response):
            body += block
            if len(body) >= most:
                break
        return bytes(body[:most])

    def _open(self) -> httpx.Client:
        import httpx

        from ragserve.ingest.guarded_transport import GuardedTransport

        return httpx.Client(
            timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
            headers={
                "User-Agent": f"{AGENT}/{__version__}",
                "Accept": "text/html, text/*;q=0.9, application/pdf;q=0.9, */*;q=0.5",
                "Accept-Encoding": "identity",
            },
            transport=None if self._allows is None else GuardedTransport(self._allows),
        )


def _unreachable(error: Exception) -> Unavailable:
    return Unavailable(f"not reachable: {type(error).__name__}: {error}")


def _require_ok(response: httpx.Response) -> None:
    if response.status_code != 200:
        answer = f"HTTP {response.status_code} {response.reason_phrase}"
        raise UnsupportedDocument(f"{answer} from {response.url}")


def _inflated(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Decode gzip, which some servers send to everybody."""
    unzip, begun = zlib.decompressobj(wbits=31), False
    try:
        for block in blocks:
            while block:
                begun = True
                yield unzip.decompress(block, _INFLATED_BYTES)
                block = unzip.unconsumed_tail
                if unzip.eof:  # another member may follow
                    block, unzip, begun = unzip.unused_data, zlib.decompressobj(wbits=31), False
        yield unzip.flush()
    except zlib.error as error:
        raise UnsupportedDocument(f"sent as gzip, but not readable as that ({error})") from error
    if begun and not unzip.eof:
        raise UnsupportedDocument("sent as gzip, which breaks off")
