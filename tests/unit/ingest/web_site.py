"""A web site on loopback, with pages that a test writes and a record of what was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.http_server import QuietHandler, served


@dataclass
class WebSite:
    """``pages``: status, or address to redirect to, and body, by path. ``types``: of their content, where it
    is declared. ``asked``: the paths, in order."""

    port: int = 0
    pages: dict[str, tuple[int | str, bytes]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def put(self, path: str, body: str | bytes, status: int | str = 200) -> str:
        self.pages[path] = status, body.encode() if isinstance(body, str) else body
        return self.url(path)

    def put_sitemap(self, path: str, *targets: str, index: bool = False) -> str:
        outer, inner = ("sitemapindex", "sitemap") if index else ("urlset", "url")
        entries = "".join(f"<{inner}><loc> {target} </loc></{inner}>" for target in targets)
        space = "http://www.sitemaps.org/schemas/sitemap/0.9"
        return self.put(path, f'<?xml version="1.0"?><{outer} xmlns="{space}">{entries}</{outer}>')


@contextmanager
def web_site() -> Iterator[WebSite]:
    """Serve a site until the block ends."""
    site = WebSite()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            site.asked.append(self.path)
            status, body = site.pages.get(self.path, (404, b""))
            self.send_response(302 if isinstance(status, str) else status)
            if isinstance(status, str):
                self.send_header("Location", status)
            if self.path in site.types:
                self.send_header("Content-Type", site.types[self.path])
            self.end_headers()
            self.wfile.write(body)

    with served(Handler) as site.port:
        yield site
