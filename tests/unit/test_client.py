"""The REST client against a server that answers what it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ragserve import errors
from ragserve.api.errors import UnsupportedMediaType
from ragserve.client import Client


class Scripted:
    """(status, body) for each coming request; ``seen`` holds (method, path, authorization, body)."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.seen: list[tuple[str, str, str | None, Any]] = []
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                scripted.seen.append(
                    (
                        self.command,
                        self.path,
                        self.headers.get("Authorization"),
                        json.loads(data) if data else None,
                    )
                )
                status, body = scripted.answers.pop(0)
                payload = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_GET = do_POST = do_DELETE = _answer

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    stub = Scripted()
    thread = threading.Thread(target=stub.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield stub
    stub.server.shutdown()
    stub.server.server_close()
    thread.join()


@pytest.mark.parametrize(
    "sent",
    [
        errors.InvalidRequest("No.", hint="Try k=1.", param="k"),
        errors.Unauthorized("Wrong key."),
        errors.NotFound("No namespace 'x'.", code="namespace_not_found"),
        errors.Conflict("Other embedder."),
        errors.TooManyRequests("Full.", hint="Later."),
        errors.Unavailable("Starting."),
        errors.UnsupportedDocument("An image."),
        errors.PromptTooLong("Too long."),
        errors.DocumentsTooLong("Too long."),
        errors.Forbidden("Another page."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_servers_errors_come_back_whole(scripted: Scripted, sent: errors.RagserveError) -> None:
    scripted.answers.append((sent.status, sent.body("r1")))
    with Client(scripted.url) as client, pytest.raises(type(sent)) as raised:
        client.retrieve("q", k=1)
    got = raised.value
    assert (got.message, got.hint, got.code, got.param) == (sent.message, sent.hint, sent.code, sent.param)


def test_a_wrong_content_type_is_not_a_wrong_document(scripted: Scripted) -> None:
    """Both are 415; only the code tells them apart."""
    wrong = UnsupportedMediaType("This route takes JSON.")
    scripted.answers += [(wrong.status, wrong.body("r1")), (415, b"<html>no</html>")]
    with Client(scripted.url) as client:
        for _ in range(2):
            with pytest.raises(errors.InvalidRequest) as raised:
                client.info()
            assert not isinstance(raised.value, errors.UnsupportedDocument)


def test_errors_of_other_servers(scripted: Scripted) -> None:
    scripted.answers += [(404, b"<html>nothing</html>"), (500, b"oops"), (200, b"<html>hello</html>")]
    with Client(scripted.url) as client:
        with pytest.raises(errors.NotFound, match="answered 404"):
            client.info()
        with pytest.raises(errors.RagserveError, match="oops"):
            client.info()
        with pytest.raises(errors.Unavailable, match="ragserve server"):
            client.info()


def test_no_server(scripted: Scripted) -> None:
    url = scripted.url
    scripted.server.socket.close()
    with Client(url) as client, pytest.raises(errors.Unavailable, match="running there"):
        client.info()
    with pytest.raises(errors.InvalidRequest, match="not a URL"), Client("http://127.0.0.1:port") as client:
        client.info()


def test_fields_left_out_are_the_servers_to_choose(scripted: Scripted) -> None:
    scripted.answers.append(
        (200, {"results": [{"index": 1, "title": "t", "text": "x", "metadata": {"lang": "en"}}]})
    )
    with Client(scripted.url + "/", api_key="secret") as client:
        [passage] = client.retrieve("why?", namespace="n", k=None, filter=None)
    assert scripted.seen == [("POST", "/rag/retrieve", "Bearer secret", {"query": "why?", "namespace": "n"})]
    assert (passage.text, passage.metadata) == ("x", {"lang": "en"})


def test_waiting_for_a_job(scripted: Scripted) -> None:
    job = {"job_id": "j", "counts": {"indexed": 1}, "error": None}
    scripted.answers += [(200, {**job, "state": "running"}), (200, {**job, "state": "done"})]
    seen: list[str] = []
    with Client(scripted.url) as client:
        assert client.wait("j", on_progress=lambda now: seen.append(now["state"]))["counts"] == {"indexed": 1}
        assert seen == ["running", "done"]
        scripted.answers.append((200, {**job, "state": "failed", "error": "disk full"}))
        with pytest.raises(errors.Unavailable, match="disk full"):
            client.wait("j")
        scripted.answers.append((200, {**job, "state": "queued"}))
        with pytest.raises(errors.Unavailable, match="still queued"):
            client.wait("j", timeout_s=-1)
