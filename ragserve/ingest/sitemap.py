"""Sitemaps: the URLs that a site wants to be found, by the protocol of sitemaps.org."""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ragserve.errors import RagserveError, UnsupportedDocument
from ragserve.ingest.fetch import Fetcher
from ragserve.ingest.sources import is_url

_NAME = re.compile(r"\Asitemap[^/]*\.xml(\.gz)?", re.I)
_LARGEST = 50 * 2**20  # bytes, the protocol's own limit
_MOST_SITEMAPS = 200  # of an index: the URLs are counted, these are not
_MOST_ELEMENTS = 1_000_000  # 50,000 URLs, the protocol's limit, with pictures and languages
_MOST_URL = 2048  # characters, the protocol's limit
_BLOCK = 1 << 16  # bytes


@dataclass(slots=True)
class SitemapUrls:
    """The URLs of a site, in its order, and what was left out."""

    urls: dict[str, None] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)  # the sitemaps, unreadable ones too
    elsewhere: int = 0  # on other hosts
    over: int = 0  # behind the limit
    failed: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """What the job's report says of the sitemap."""
        parts = [f"a sitemap: {len(self.urls):,} URLs"]
        if self.elsewhere:
            parts.append(f"{self.elsewhere:,} on other hosts left out (--other-hosts)")
        if self.over:
            parts.append(f"{self.over:,} more left out (RAGSERVE_SITEMAP_URLS)")
        return "; ".join([*parts, *self.failed])


def is_sitemap(url: str) -> bool:
    """Return whether a URL has a sitemap's usual name: ``sitemap.xml``, ``sitemap-2.xml.gz``."""
    return is_url(url) and _NAME.fullmatch(urlsplit(url).path.rpartition("/")[2]) is not None


def sitemap_urls(fetcher: Fetcher, url: str, *, limit: int, other_hosts: bool = False) -> SitemapUrls:
    """Read a sitemap, or an index of them. Another URL than that of an XML file stands for its site, whose
    sitemaps are those of robots.txt, or ``/sitemap.xml``.

    URLs and sitemaps on another host than ``url`` are left out without ``other_hosts``. Raises
    ``RagserveError`` if no sitemap with a URL can be read.
    """
    host = urlsplit(url).netloc.lower()
    found = SitemapUrls()
    waiting: deque[str] = deque()
    seen: set[str] = set()
    unread = 0  # sitemaps over the limit
    errors: list[RagserveError] = []

    def add(kind: str, target: str) -> None:
        nonlocal unread
        if not other_hosts and urlsplit(target).netloc.lower() != host:
            found.elsewhere += 1
        elif kind == "sitemap":
            if len(seen) >= _MOST_SITEMAPS:
                unread += target not in seen
            elif target not in seen:
                seen.add(target)
                waiting.append(target)
        elif len(found.urls) < limit or target in found.urls:
            found.urls[target] = None
        else:
            found.over += 1

    for start in filter(_is_address, _starts(fetcher, url)):
        add("sitemap", start)
    while waiting and not found.over:
        where = waiting.popleft()
        found.read.append(where)
        try:
            for entry in _entries(_unzipped(fetcher.read(where, _LARGEST)), where):
                add(*entry)
        except RagserveError as error:
            errors.append(error)
    if errors and not found.urls:
        raise errors[0]
    found.failed += [str(error) for error in errors[:3]]
    if unread := unread + len(waiting):
        found.failed.append(f"{unread:,} sitemaps not read")
    return found


def _starts(fetcher: Fetcher, url: str) -> list[str]:
    parts = urlsplit(url)
    if parts.path.lower().endswith((".xml", ".xml.gz")):
        return [url]
    usual = [f"{parts.scheme}://{parts.netloc}/sitemap.xml"]
    try:
        return fetcher.sitemaps(url) or usual
    except RagserveError:  # reading the sitemap raises it again, unless robots.txt is ignored
        return usual


def _unzipped(data: bytes) -> bytes:
    if not data.startswith(b"\x1f\x8b"):
        return data
    unzip = zlib.decompressobj(wbits=31)
    try:
        data = unzip.decompress(data, _LARGEST)
    except zlib.error as error:
        raise UnsupportedDocument(f"a sitemap that cannot be unpacked ({error})") from error
    if unzip.unconsumed_tail:
        raise UnsupportedDocument(f"a sitemap that unpacks to more than {_LARGEST:,} bytes")
    return data


def _is_address(target: str) -> bool:
    if not is_url(target) or len(target) > _MOST_URL or not target.isprintable():
        return False
    try:
        urlsplit(target)
    except ValueError:  # "http://[x"
        return False
    return True


class _Entries:
    """lxml's events to ``("sitemap" or "url", address)``. No tree is built: the site chooses its size."""

    def __init__(self, where: str) -> None:
        self.found: list[tuple[str, str]] = []
        self._where = where
        self._path: list[str] = []
        self._elements = 0
        self._text: str | None = None  # of the ``loc`` that is open

    def start(self, tag: str, _attributes: object) -> None:
        self._elements += 1
        if self._elements > _MOST_ELEMENTS:
            raise UnsupportedDocument(f"{self._where} has more than {_MOST_ELEMENTS:,} elements")
        self._path.append(tag.rpartition("}")[2])
        self._text = "" if self._path[-1] == "loc" and self._path[-2:-1] in (["url"], ["sitemap"]) else None

    def data(self, text: str) -> None:
        if self._text is not None and len(self._text) <= 2 * _MOST_URL:  # there may be blanks around it
            self._text += text

    def end(self, _tag: str) -> None:
        self._path.pop()
        if self._text is not None:
            target = self._text.strip()
            if _is_address(target):
                self.found.append((self._path[-1], target))
            self._text = None

    def close(self) -> None:
        return


def _entries(data: bytes, where: str) -> Iterator[tuple[str, str]]:
    """Yield ``("sitemap" or "url", address)`` for each entry."""
    from lxml import etree  # type: ignore[import-untyped]

    entries = _Entries(where)
    parser = etree.XMLParser(target=entries, resolve_entities=False, no_network=True)
    try:
        for start in range(0, len(data), _BLOCK):
            parser.feed(data[start : start + _BLOCK])
            yield from entries.found
            entries.found.clear()
        parser.close()
    except etree.XMLSyntaxError as error:
        raise UnsupportedDocument(f"{where} is no sitemap ({error})") from error
    yield from entries.found
