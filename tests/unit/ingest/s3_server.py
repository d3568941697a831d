"""An S3 server on loopback, moto's, behind a proxy that records what is asked for and breaks it."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.http_server import QuietHandler, served

Breaks = Callable[[str, str], str]
_HOP = {"transfer-encoding", "connection", "content-length", "date", "server"}


@dataclass
class S3Server:
    """``asked``: method and path, with its query, of each request, in order.

    ``breaks(path, query)`` names what becomes of a request: ``403``, ``404``, ``503``, ``slow`` (half a
    second), ``cut`` (half of the body), ``no-token`` (a listing that says it goes on, but not where), or
    empty. ``before`` is called with each key before it is read. ``page``: keys of a page of a listing."""

    endpoint: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    breaks: Breaks = lambda _path, _query: ""
    before: Callable[[str], object] = lambda _key: None
    page: int = 1000
    objects: Any = None

    def make(self, bucket: str, **contents: str | bytes) -> None:
        from moto.s3.models import s3_backends

        self.objects = s3_backends["123456789012"]["aws"]
        if bucket not in self.objects.buckets:
            self.objects.create_bucket(bucket, "us-east-1")
        for key, content in contents.items():
            self.put(bucket, key, content)

    def put(self, bucket: str, key: str, content: str | bytes) -> None:
        self.objects.put_object(bucket, key, content.encode() if isinstance(content, str) else content)

    def remove(self, bucket: str, key: str) -> None:
        self.objects.delete_object(bucket, key)

    def read(self) -> list[str]:
        """The keys that were read since the last call, in order; listings have none."""
        keys = [unquote(path.split("?")[0].split("/", 2)[2]) for _, path in self.asked if path.count("/") > 1]
        listed = [key for key in keys if key]
        self.asked.clear()
        return listed

    def reset(self) -> None:
        self.asked.clear()
        self.breaks = lambda _path, _query: ""
        self.before = lambda _key: None
        self.page = 1000


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Serve until the block ends."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    _, port = moto.get_host_and_port()
    s3 = S3Server()

    class Proxy(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            s3.asked.append((self.command, self.path))
            url = urlsplit(self.path)
            key = unquote(url.path.split("/", 2)[2]) if url.path.count("/") > 1 else ""
            if key:
                s3.before(key)
            what = s3.breaks(unquote(url.path), url.query)
            if what == "slow":
                time.sleep(0.5)
            if what.isdigit():
                code = {"403": "AccessDenied", "404": "NoSuchKey", "503": "SlowDown"}[what]
                body = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode()
                self._answer(int(what), [("Content-Type", "application/xml")], body, len(body))
                return
            upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            kept = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            pages = f"&max-keys={s3.page}" if "list-type" in url.query else ""
            upstream.request(self.command, self.path + pages, headers=kept)
            answer = upstream.getresponse()
            body = answer.read()
            upstream.close()
            if what == "no-token":
                body = body.replace(b"<IsTruncated>false", b"<IsTruncated>true")
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP]
            sent = body[: len(body) // 2] if what == "cut" else body
            self._answer(answer.status, headers, sent, len(body))
            if what == "cut":
                self.close_connection = True

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, length: int) -> None:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

    try:
        with served(Proxy) as own:
            s3.endpoint = f"http://127.0.0.1:{own}"
            yield s3
    finally:
        moto.stop()
