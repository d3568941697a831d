"""Sitemaps: the URLs that a site wants to be found, by the protocol of sitemaps.org."""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from urllib.parse import urlsplit

from ragserve.errors import RagserveError, UnsupportedDocument
from ragserve.ingest.fetch import Fetcher
from ragserve.ingest.sources import is_url

_NAME = re.compile(r"sitemap[^/]*\.xml(\.gz)?", re.I)
_LARGEST = 50 * 2**20  # bytes, the protocol's own limit
_MOST_SITEMAPS = 200  # of an index: the URLs are counted, these are not


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
    errors: list[RagserveError] = []

    def add(kind: str, target: str) -> None:
        if not other_hosts and urlsplit(target).netloc.lower() != host:
            found.elsewhere += 1
        elif kind == "sitemap":
            if target not in seen:
                seen.add(target)
                waiting.append(target)
        elif len(found.urls) < limit or target in found.urls:
            found.urls[target] = None
        else:
            found.over += 1

    for start in _starts(fetcher, url):
        add("sitemap", start)
    while waiting and len(found.read) < _MOST_SITEMAPS and not found.over:
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
    if waiting:
        found.failed.append(f"{len(waiting):,} sitemaps not read")
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


def _entries(data: bytes, where: str) -> Iterator[tuple[str, str]]:
    """Yield ``("sitemap" or "url", address)`` for each entry."""
    from lxml import etree  # type: ignore[import-untyped]

    try:
        for _, element in etree.iterparse(
            BytesIO(data), tag=("{*}url", "{*}sitemap"), resolve_entities=False, no_network=True
        ):
            target = (element.findtext("{*}loc") or "").strip()
            if is_url(target):
                yield etree.QName(element).localname, target
            element.clear()
    except etree.XMLSyntaxError as error:
        raise UnsupportedDocument(f"{where} is no sitemap ({error})") from error
