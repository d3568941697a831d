"""Git repositories made in a test, and git's own HTTP server for them on loopback."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tests.http_server import QuietHandler, served

_OWN = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.com",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.com",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


class Repository:
    """A repository with the branch ``main``, written without a work tree's detours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "uploadpack.allowFilter", "true")
        self.git("config", "uploadpack.allowAnySHA1InWant", "true")

    def git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=self.path, env=os.environ | _OWN, capture_output=True, check=True
        )
        return done.stdout.decode().strip()

    def write(self, **files: str) -> None:
        self.write_all(files)

    def write_all(self, files: dict[str, str | bytes]) -> None:
        for name, content in files.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.commit()

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "m")
        return self.git("rev-parse", "HEAD")

    @property
    def address(self) -> str:
        return f"git+file://{self.path}"


@dataclass
class GitServer:
    """``asked``: what clients asked for, in order; ``sent``: bytes of answers. ``status`` other than 200 is
    the answer to all; ``login`` is required if given."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    sent: int = 0
    status: int = 200
    location: str = ""
    login: str = ""


@contextmanager
def git_server(root: Path) -> Iterator[GitServer]:
    """Serve the repositories below a folder until the block ends."""
    server = GitServer()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self._body())

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _answer(self, body: bytes) -> None:
            server.asked.append(self.path)
            wanted = "Basic " + base64.b64encode(server.login.encode()).decode()
            if server.login and self.headers.get("Authorization") != wanted:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="git"')
                self.end_headers()
                return
            if server.status != 200:
                self.send_response(server.status)
                self.send_header("Location", server.location)
                self.end_headers()
                return
            url = urlsplit(self.path)
            environment = os.environ | {
                "GIT_PROJECT_ROOT": str(root),
                "GIT_HTTP_EXPORT_ALL": "1",
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                "PATH_INFO": url.path,
                "QUERY_STRING": url.query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            }
            done = subprocess.run(["git", "http-backend"], input=body, env=environment, capture_output=True)
            head, _, content = done.stdout.partition(b"\r\n\r\n")
            headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if line)
            self.send_response(int(headers.pop("Status", "200").split()[0]))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
            server.sent += len(content)

    with served(Handler) as port:
        server.url = f"git+http://127.0.0.1:{port}"
        yield server
