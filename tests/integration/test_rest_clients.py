"""Fifty clients on the real engine, half of which leave: the others are answered, and nothing leaks."""

from __future__ import annotations

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.engines import Server

CLIENTS = 50
TEXT = (
    "The lighthouse of Skerryvore was built by Alan Stevenson between 1838 and 1844, "
    "on a reef far out in the Atlantic. "
)


@pytest.fixture(scope="module")
def server(quick_server: Server) -> Server:
    """None of these answers need be right."""
    return quick_server


def body(client: int, stream: bool) -> dict[str, Any]:
    """A request whose prompt differs for each client, so that none is answered from another's prefix."""
    documents = [
        {"title": f"Log {client}", "text": f"Entry {client}. " + TEXT * 8},
        {"title": "Other", "text": TEXT},
    ]
    return {
        "query": f"Who built the lighthouse of log {client}?",
        "documents": documents,
        "max_new_tokens": 32,
        "stream": stream,
    }


def gauge(metrics: str, name: str) -> float:
    return sum(
        float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", metrics, re.M)
    )


def is_idle(client: httpx.Client) -> bool:
    metrics = client.get("/metrics").text
    names = ("ragserve_queries_in_flight", "sglang:num_running_reqs", "sglang:num_queue_reqs")
    assert all(name in metrics for name in names), "the gauges that are to be zero must be there"
    return all(gauge(metrics, name) == 0 for name in names)


def test_fifty_clients_of_which_half_leave(server: Any) -> None:
    aborted = gauge(server.client.get("/metrics").text, "ragserve_queries_aborted_total")
    port = int(server.url.rsplit(":", 1)[1])

    def stay(number: int) -> tuple[int, str]:
        with httpx.Client(base_url=server.url, timeout=250) as client:
            response = client.post("/rag/query", json=body(number, stream=number % 4 == 0))
            return response.status_code, response.text

    def leave(number: int) -> None:
        stream = number % 4 == 1
        data = json.dumps(body(number, stream)).encode()
        head = (
            "POST /rag/query HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", port), timeout=240) as connection:
            connection.sendall(head.encode() + data)
            if stream:
                assert b"200 OK" in connection.recv(64)
            else:
                time.sleep(0.05)  # let the request be read before the connection goes

    with ThreadPoolExecutor(CLIENTS) as pool:
        leaving = [pool.submit(leave, number) for number in range(1, CLIENTS, 2)]
        staying = [pool.submit(stay, number) for number in range(0, CLIENTS, 2)]
        for one in leaving:
            one.result()
        answers = [one.result() for one in staying]
    for status, text in answers:
        assert status == 200, text
        final = text.split("event: final_answer\ndata: ", 1)[-1].split("\n", 1)[0]
        answer = json.loads(final)
        assert answer["finish_reason"] in ("stop", "length")
        assert answer["usage"]["completion"] > 0
    deadline = time.monotonic() + 240
    while not is_idle(server.client):
        assert time.monotonic() < deadline, server.client.get("/metrics").text
        time.sleep(0.2)
    assert gauge(server.client.get("/metrics").text, "ragserve_queries_aborted_total") > aborted
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").json()["ready"] is True
    assert stay(0)[0] == 200
