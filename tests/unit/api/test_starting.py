"""What a server answers while it starts, and who answers then."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from ragserve.api import starting
from ragserve.api.starting import StartingAnswers
from ragserve.engine.ports import hold_port, port_of
from tests.unit.api.scripted_server import eventually


@contextmanager
def answering() -> Iterator[tuple[StartingAnswers, socket.socket, str]]:
    with hold_port() as listener:
        answers = StartingAnswers(listener, "the engine loads its model")
        answers.start()
        try:
            yield answers, listener, f"http://127.0.0.1:{port_of(listener)}"
        finally:
            answers.stop()


def test_every_request_is_answered_with_the_reason() -> None:
    with answering() as (answers, _, url):
        for method, path, body in (("GET", "/ready", b""), ("POST", "/rag/query", b"x" * 300_000)):
            answer = httpx.request(method, url + path, content=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["ready"] is False
            assert answer.json()["missing"] == ["the engine loads its model"]
            assert answer.json()["error"]["code"] == "not_ready"
        answers.reason = "the engine warms up"
        assert httpx.get(f"{url}/health").json()["missing"] == ["the engine warms up"]


def test_a_browser_is_shown_a_page_that_looks_again() -> None:
    with answering() as (answers, _, url):
        answers.reason = "the engine loads <its> model"
        page = httpx.get(f"{url}/playground", headers={"Accept": "text/html,application/xhtml+xml"})
        assert (page.status_code, page.headers["content-type"]) == (503, "text/html; charset=utf-8")
        assert "the engine loads &lt;its&gt; model" in page.text
        assert 'http-equiv="refresh"' in page.text


def test_only_what_a_browser_gets_is_a_page() -> None:
    html = {"Accept": "text/html"}
    with answering() as (_, _, url):
        others: list[tuple[str, str, dict[str, str], str]] = [
            ("POST", "/rag/ingest", {}, "From: a\r\nAccept: text/html\r\n"),
            ("POST", "/rag/ingest", html, ""),
            ("GET", "/rag/documents?type=text/html", {}, ""),
            ("GET", "/ready", {"Content-Type": "text/html"}, ""),
            ("GET", "/ready", {}, "\r\nAccept: text/html\r\n"),
        ]
        for method, path, headers, body in others:
            answer = httpx.request(method, url + path, headers=headers, content=body.encode())
            assert answer.headers["content-type"] == "application/json", (method, path, headers, body)
        page = httpx.get(f"{url}/", headers={"Accept": "*/*;q=0.1, Text/HTML"})
        assert page.headers["content-type"] == "text/html; charset=utf-8"


def test_who_connects_after_the_start_is_answered_by_the_server() -> None:
    with answering() as (answers, listener, _):
        answers.stop()
        with socket.create_connection(("127.0.0.1", port_of(listener))) as client:
            listener.setblocking(True)  # as the server takes it over
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"served")
            assert client.recv(10) == b"served"


def is_answered(url: str) -> bool:
    """On a busy machine a client may be taken for one that sends nothing."""
    try:
        return httpx.get(url).status_code == 503
    except httpx.TransportError:
        return False


def test_a_client_that_sends_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_CLIENT_S", 0.05)
    with answering() as (answers, listener, url):
        with socket.create_connection(("127.0.0.1", port_of(listener))):
            eventually(lambda: is_answered(f"{url}/ready"), "an answer")
        with socket.create_connection(("127.0.0.1", port_of(listener))) as silent:
            stopped = threading.Thread(target=answers.stop)
            stopped.start()
            stopped.join(240)
            assert not stopped.is_alive()
            assert silent.fileno() >= 0
    assert not any(thread.name == "starting" for thread in threading.enumerate())


def test_one_that_was_never_started_may_be_stopped() -> None:
    with hold_port() as listener:
        StartingAnswers(listener, "").stop()
