"""Download a URL to a file, within limits on size, time and redirects."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ragserve import __version__
from ragserve.errors import TooLarge, Unavailable, UnsupportedDocument

_MAX_REDIRECTS = 5
_CONNECT_S, _READ_S, _TOTAL_S = 10.0, 30.0, 300.0
_EXTENSIONS = {
    "text/html": ".html",
    "application/xhtml+xml": ".html",
    "application/pdf": ".pdf",
    "text/markdown": ".md",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": ".docx",
}


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A downloaded file. ``url`` is the one after redirects; ``charset`` is what the server declared."""

    path: Path
    url: str
    filename: str
    ext: str
    charset: str | None


def fetch(url: str, folder: Path, *, max_bytes: int) -> Downloaded:
    """Write the body of ``url`` to a file in ``folder``, which the caller removes.

    Raises ``UnsupportedDocument`` (an HTTP error status), ``TooLarge``, or ``Unavailable`` (no connection,
    too slow, too many redirects).
    """
    import httpx

    deadline = time.monotonic() + _TOTAL_S
    try:
        with (
            httpx.Client(
                follow_redirects=True,
                max_redirects=_MAX_REDIRECTS,
                timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
                headers={
                    "User-Agent": f"ragserve/{__version__}",
                    "Accept": "text/html, text/*;q=0.9, application/pdf;q=0.9, */*;q=0.5",
                },
            ) as client,
            client.stream("GET", url) as response,
        ):
            if response.status_code != 200:
                answer = f"HTTP {response.status_code} {response.reason_phrase}"
                raise UnsupportedDocument(f"{answer} from {response.url}")
            path = folder / "download"
            with open(path, "wb") as file:
                for block in response.iter_bytes():
                    if file.tell() + len(block) > max_bytes:
                        limit = f"{max_bytes:,} bytes (RAGSERVE_MAX_UPLOAD_BYTES)"
                        raise TooLarge(f"too large: more than {limit}")
                    if time.monotonic() > deadline:
                        raise Unavailable(f"the download took longer than {_TOTAL_S:g} s")
                    file.write(block)
            final = str(response.url)
            mime = response.headers.get("content-type", "").split(";")[0].strip().lower()
            charset = response.charset_encoding
    except httpx.TooManyRedirects as error:
        raise Unavailable(f"more than {_MAX_REDIRECTS} redirects") from error
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise Unavailable(f"not reachable: {type(error).__name__}: {error}") from error
    name = unquote(os.path.basename(urlsplit(final).path)) or urlsplit(final).netloc
    ext = os.path.splitext(name)[1].lower()
    return Downloaded(path, final, name, _EXTENSIONS.get(mime, ext), charset)
