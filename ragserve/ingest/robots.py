"""robots.txt: which URLs of a site may be fetched, and how often."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit
from urllib.robotparser import RobotFileParser

from ragserve.errors import Forbidden, RagserveError, Unavailable

AGENT = "ragserve"
_LARGEST = 512 * 1024  # bytes that are read of a robots.txt, as RFC 9309 says
_LONGEST_DELAY_S = 60.0
_STEP_S = 0.2
_HINT = "For a site of your own: RAGSERVE_ROBOTS=ignore."


@dataclass(slots=True)
class _Site:
    rules: RobotFileParser
    delay_s: float
    next_at: float = 0.0  # of time.monotonic(), for the next request


class Robots:
    """The rules of the sites that one job fetches from, each read once.

    Args:
        read: Returns status and body (cut at a number of bytes) of a URL. Raises ``RagserveError``.
        should_stop: Ends a wait.
    """

    def __init__(
        self, read: Callable[[str, int], tuple[int, bytes]], should_stop: Callable[[], bool]
    ) -> None:
        self._read = read
        self._should_stop = should_stop
        self._sites: dict[str, _Site | RagserveError] = {}

    def admit(self, url: str) -> None:
        """Wait until the site takes another request. Raises ``Forbidden`` (code ``robots``) if its rules
        exclude the URL, and ``Unavailable`` if they cannot be read."""
        site = self._site(url)
        if not site.rules.can_fetch(AGENT, url):
            raise Forbidden(f"{_robots_url(url)} forbids it.", hint=_HINT, code="robots")
        if site.delay_s > _LONGEST_DELAY_S:
            message = f"{_robots_url(url)} asks for {site.delay_s:g} s between requests."
            raise Forbidden(message, hint=_HINT, code="robots")
        while (left := site.next_at - time.monotonic()) > 0:
            if self._should_stop():
                raise Unavailable("stopped while waiting for the site", code="interrupted")
            time.sleep(min(left, _STEP_S))
        site.next_at = time.monotonic() + site.delay_s

    def sitemaps(self, url: str) -> list[str]:
        """The sitemaps that the site's robots.txt names."""
        return self._site(url).rules.site_maps() or []

    def _site(self, url: str) -> _Site:
        where = _robots_url(url)
        if where not in self._sites:
            self._sites[where] = self._load(where)
        site = self._sites[where]
        if isinstance(site, RagserveError):
            raise site.with_traceback(None)  # it grows with each time
        return site

    def _load(self, where: str) -> _Site | RagserveError:
        try:
            status, body = self._read(where, _LARGEST)
        except RagserveError as error:
            return error
        rules = RobotFileParser(where)
        # RFC 9309: without the file all is allowed; while it cannot be read, nothing is
        if status >= 500:
            return Unavailable(f"HTTP {status} from {where}: without it nothing may be fetched.", hint=_HINT)
        lines = body.decode("utf-8", "replace").splitlines() if status == 200 else []
        rules.parse([line for line in lines if _is_usable(line)])
        return _Site(rules, _delay_s(rules))


def _delay_s(rules: RobotFileParser) -> float:
    """Seconds between requests that the rules ask for."""
    rate = rules.request_rate(AGENT)
    return max(float(rules.crawl_delay(AGENT) or 0), rate.seconds / rate.requests if rate else 0.0)


def _is_usable(line: str) -> bool:
    """Return whether the parser can take a line: it raises for some figures and addresses, and a line that
    nobody can read must not cost the others."""
    alone = RobotFileParser()
    try:
        alone.parse(["User-agent: *", line])
        _delay_s(alone)
    except (ValueError, ArithmeticError):
        return False
    return True


def _robots_url(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, "/robots.txt", "", ""))
