"""Download URLs within limits on size, time, redirects and addresses, as their sites' robots.txt allows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ragserve.errors import TooLarge, Unavailable, UnsupportedDocument
from ragserve.ingest.robots import AGENT, Robots
from ragserve.version import __version__

if TYPE_CHECKING:
    import httpx

    from ragserve.ingest.guarded_transport import Allows

_MAX_REDIRECTS = 5
_CONNECT_S, _READ_S, _TOTAL_S = 10.0, 30.0, 300.0
_POLITE = "ragserve.robots"  # extension of a request that robots.txt decides on
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
        should_stop: Ends a wait that a robots.txt asks for.
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
        self._robots = Robots(self._robots_txt, should_stop)
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
            with open(path, "wb") as file:
                for block in _blocks(response):
                    if file.tell() + len(block) > self._max_bytes:
                        limit = f"{self._max_bytes:,} bytes (RAGSERVE_MAX_UPLOAD_BYTES)"
                        raise TooLarge(f"too large: more than {limit}")
                    file.write(block)
            final = str(response.url)
            mime = response.headers.get("content-type", "").split(";")[0].strip().lower()
            charset = response.charset_encoding
        name = unquote(os.path.basename(urlsplit(final).path)) or urlsplit(final).netloc
        ext = os.path.splitext(name)[1].lower()
        return Downloaded(path, final, name, _EXTENSIONS.get(mime, ext), charset)

    def read(self, url: str, max_bytes: int) -> bytes:
        """The body of ``url``. Raises as `fetch`."""
        with self._response(url) as response:
            _require_ok(response)
            body = _first_bytes(response, max_bytes + 1)
        if len(body) > max_bytes:
            raise TooLarge(f"{url} has more than {max_bytes:,} bytes.")
        return body

    def sitemaps(self, url: str) -> list[str]:
        """The sitemaps that the robots.txt of the URL's site names. Raises ``Unavailable``, ``Forbidden``."""
        return self._robots.sitemaps(url)

    def _robots_txt(self, url: str, max_bytes: int) -> tuple[int, bytes]:
        with self._response(url, polite=False) as response:
            return response.status_code, _first_bytes(response, max_bytes)

    @contextmanager
    def _response(self, url: str, *, polite: bool = True) -> Iterator[httpx.Response]:
        import httpx

        self._client = self._client or self._open()
        try:
            with self._client.stream("GET", url, extensions={_POLITE: polite and self._polite}) as response:
                yield response
        except httpx.TooManyRedirects as error:
            raise Unavailable(f"more than {_MAX_REDIRECTS} redirects") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise Unavailable(f"not reachable: {type(error).__name__}: {error}") from error

    def _open(self) -> httpx.Client:
        import httpx

        from ragserve.ingest.guarded_transport import GuardedTransport

        def admit(request: httpx.Request) -> None:
            if request.extensions[_POLITE]:
                self._robots.admit(str(request.url))

        return httpx.Client(
            follow_redirects=True,
            max_redirects=_MAX_REDIRECTS,
            timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
            headers={
                "User-Agent": f"{AGENT}/{__version__}",
                "Accept": "text/html, text/*;q=0.9, application/pdf;q=0.9, */*;q=0.5",
            },
            event_hooks={"request": [admit]},  # called for redirects too, with the same extensions
            transport=None if self._allows is None else GuardedTransport(self._allows),
        )


def _require_ok(response: httpx.Response) -> None:
    if response.status_code != 200:
        answer = f"HTTP {response.status_code} {response.reason_phrase}"
        raise UnsupportedDocument(f"{answer} from {response.url}")


def _blocks(response: httpx.Response) -> Iterator[bytes]:
    deadline = time.monotonic() + _TOTAL_S
    for block in response.iter_bytes():
        if time.monotonic() > deadline:
            raise Unavailable(f"the download took longer than {_TOTAL_S:g} s")
        yield block


def _first_bytes(response: httpx.Response, most: int) -> bytes:
    body = bytearray()
    for block in _blocks(response):
        body += block
        if len(body) >= most:
            break
    return bytes(body[:most])
