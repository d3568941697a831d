"""The server of a campaign, over REST: its own one, which can be stopped and started again, or one that tests
share."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ragserve.engine.running_server import RunningServer, running_server
from ragserve.errors import Unavailable

WAIT_S = 300.0
_LEAVES_S = 60.0
_WARMED_S = 600.0
ENDED = ("done", "failed", "cancelled")


@dataclass(frozen=True)
class Asked:
    """A query's answer. ``passages``: (source, text) of what was found, best first; the first ``kept`` were
    in the prompt."""

    passages: list[tuple[str, str]]
    kept: int
    answer: dict[str, Any]

    def exact(self, strategy: str, options: Mapping[str, Any]) -> bool:
        """Whether it was answered without documents' KV. Of composed strategies only samkv without options
        may be: over few tokens prefix answers for it.
        """
        context = self.answer["context"]
        exact = context["strategy"] in ("full", "prefix")
        may_be = strategy in ("full", "prefix") or (strategy, options) == ("samkv", {})
        assert may_be or not exact, f"{strategy} {options} was answered exactly: {context}"
        return exact


class Site:
    """A server and its client. ``down`` and ``up`` need a server of our own (``folder`` given)."""

    def __init__(
        self, running: RunningServer | None = None, *, folder: Path | None = None, **flags: Any
    ) -> None:
        self._folder, self._flags = folder, flags
        self._stack = contextlib.ExitStack()
        if running is None:
            self._begin()
        else:
            self._attach(running)

    @property
    def own(self) -> bool:
        return self._folder is not None

    @property
    def url(self) -> str:
        return self.running.url

    def _attach(self, running: RunningServer) -> None:
        self.running = running
        self.client = self._stack.enter_context(running.client())

    def _begin(self) -> None:
        """Start it for the first time. A killed campaign's server takes a moment to leave the folder."""
        deadline = time.monotonic() + _LEAVES_S
        while True:
            try:
                return self.up()
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
            time.sleep(1.0)

    def up(self) -> None:
        self._attach(
            self._stack.enter_context(
                running_server(data_dir=self._folder, log_level="warning", **self._flags)
            )
        )

    @property
    def is_up(self) -> bool:
        return self.running.process.poll() is None

    def ensure_up(self) -> None:
        """Start it again if it has ended."""
        if not self.is_up:
            self.down()
            self.up()

    def down(self) -> None:
        """End it as a user would, by SIGTERM; nothing to do if it has ended."""
        self._stack.close()

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def call(self, method: str, path: str, **options: Any) -> Any:
        """The JSON of a request that must succeed."""
        response = self.client.request(method, path, **options)
        assert response.is_success, f"{method} {path} answered {response.status_code}: {response.text[:500]}"
        return response.json() if response.content else None

    def finished(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for a job."""
        for last in looks():
            now = dict(self.call("GET", f"/rag/jobs/{job['job_id']}"))
            if now["state"] in ENDED:
                return now
            assert not last, f"a job does not end: {now}"
        raise AssertionError

    def put(self, space: str, texts: Mapping[str, str], **fields: Any) -> dict[str, Any]:
        """Add or replace documents and wait; every one must be indexed or unchanged."""
        rows = [{"name": name, "text": text} for name, text in texts.items()]
        job = self.call("POST", "/rag/ingest", json={"namespace": space, "texts": rows, **fields})
        job = self.finished(job)
        counts = job["counts"]
        assert job["state"] == "done", job
        assert counts.get("indexed", 0) + counts.get("unchanged", 0) == len(texts), job
        return job

    def warm(self, space: str) -> dict[str, Any]:
        return self.finished(self.call("POST", "/rag/cache/warm", json={"namespace": space}))

    def documents(self, space: str) -> dict[str, str]:
        """doc_id of each source; nothing for a namespace that does not exist."""
        response = self.client.get("/rag/documents", params={"namespace": space, "limit": 1000})
        if response.status_code == httpx.codes.NOT_FOUND:
            return {}
        assert response.is_success, response.text
        return {row["source"]: row["doc_id"] for row in response.json()["documents"]}

    def remove(self, space: str, name: str) -> None:
        doc_id = self.documents(space)[name]
        self.call("DELETE", f"/rag/documents/{doc_id}", params={"namespace": space})

    def ask(self, **body: Any) -> Asked:
        """A streamed query, read to its end."""
        response = self.client.post("/rag/query", json={**body, "stream": True})
        assert response.is_success, f"{body} answered {response.status_code}: {response.text[:500]}"
        events = events_of(response.text)
        names = [name for name, _ in events]
        assert names[:1] == ["search_results"], f"{body} answered {response.text[-500:]}"
        assert names[-2:] == ["final_answer", "done"], f"{body} answered {response.text[-500:]}"
        found, final = events[0][1], events[-2][1]
        passages = [(row["source"], row["text"]) for row in found["results"]]
        return Asked(passages, found["documents_kept"], final)

    def leave(
        self, after_s: float, path: str = "/rag/query", headers: Mapping[str, str] | None = None, **body: Any
    ) -> None:
        """Send a query and close the connection after a time, whatever has come."""
        host, port = self.url.removeprefix("http://").split(":")
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            time.sleep(after_s)

    def warmed(self) -> None:
        """Wait until no warm-up is left: they wait while queries are answered, and then fill the cache."""
        for last in looks(_WARMED_S):
            left = self.call("GET", "/info")["warming"]
            if not left["jobs"]:
                return
            assert not last, f"warm-ups do not end: {left}"

    def analysed(self) -> None:
        """Wait for the analyses that an idle server computes, which fill the cache, too."""
        for last in looks(_WARMED_S):
            waiting = self.call("GET", "/rag/cache")["analyses"]["waiting"]
            if not waiting:
                return
            assert not last, f"{waiting} documents wait for their analysis"

    def settled(self) -> dict[str, Any]:
        """Wait until no request holds a slot or a page, check the accounts of all tiers and every page on
        disk, and return the cache's figures."""
        for last in looks():
            figures = dict(self.call("GET", "/rag/cache"))
            held = figures["device"]["locked_tokens"], figures["host"]["pinned_documents"]
            if held == (0, 0):
                break
            assert not last, f"{held[0]} slots stay locked, {held[1]} documents pinned"
        bad = self.call("POST", "/rag/cache/verify", json={})["bad"]
        assert bad == [], f"damaged pages: {bad}"
        return figures


def looks(seconds: float = WAIT_S) -> Iterator[bool]:
    """Wait before all but the first of several looks at something, longer each time: a look costs as much as
    a small query. True for the last one."""
    deadline, wait = time.monotonic() + seconds, 0.005
    while time.monotonic() < deadline:
        yield False
        time.sleep(wait)
        wait = min(1.5 * wait, 0.1)
    yield True


def events_of(text: str) -> list[tuple[str, Any]]:
    """Server-sent events: name and data."""
    blocks = [
        dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        for block in text.strip().split("\n\n")
    ]
    return [(block["event"], json.loads(block["data"])) for block in blocks if block]
