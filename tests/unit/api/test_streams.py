"""Clients that leave, wait or come in crowds: generation stops, slots come free, idle streams stay open."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragserve.api.sse import EventStream, Pump
from ragserve.metrics import metrics
from tests.unit.api.scripted_server import Live, eventually, raw_request

BODY = {"query": "Who built the lighthouse?", "namespace": "docs"}
CHAT = {"model": "ragserve/docs", "messages": [{"role": "user", "content": "Who built the lighthouse?"}]}


def is_idle(live: Live) -> bool:
    return not live.engine.running and live.services.limiter.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/rag/query", BODY), ("/v1/chat/completions", CHAT)], ids=["query", "chat"]
)
def test_a_client_that_leaves_aborts_its_generation(
    live: Live, docs: str, stream: bool, path: str, body: dict[str, object]
) -> None:
    aborted = metrics().aborted._value.get()
    live.engine.hold.clear()
    with raw_request(live, path, {**body, "stream": stream}) as connection:
        eventually(lambda: bool(live.engine.running), "generation")
        (query,) = live.services.limiter.queries
        assert query.namespace == docs
        text = live.engine.requests[-1]
        assert query.documents == [text.input_ids[span.start : span.end] for span in text.spans[1:]] != []
        if stream:
            assert b"event-stream" in connection.recv(4096)
    eventually(lambda: is_idle(live), "the end of the abandoned generation")
    assert len(live.engine.aborted) == 1
    assert metrics().aborted._value.get() == aborted + 1
    assert metrics().in_flight._value.get() == 0


def test_a_client_that_leaves_while_its_question_is_embedded(live: Live, docs: str) -> None:
    embedding, go_on = threading.Event(), threading.Event()
    encode = live.embedder.encode

    def slow(texts: list[str]) -> object:
        embedding.set()
        go_on.wait(240)
        return encode(texts)

    live.embedder.encode = slow  # type: ignore[method-assign, assignment]
    try:
        with raw_request(live, "/rag/query", BODY):
            assert embedding.wait(240)
        eventually(lambda: is_idle(live), "the end of the abandoned query")
    finally:
        go_on.set()
        live.embedder.encode = encode  # type: ignore[method-assign]
    assert live.engine.requests == []
    with live.client() as client:
        assert client.post("/rag/query", json=BODY).status_code == 200


def test_too_many_queries_are_refused_at_once(live: Live, docs: str) -> None:
    limit = live.settings.max_concurrent_queries
    live.engine.hold.clear()
    with live.client() as client, ThreadPoolExecutor(limit) as pool:
        waiting = [pool.submit(client.post, "/rag/query", json=BODY) for _ in range(limit)]
        eventually(lambda: live.services.limiter.in_flight == limit, "a full house")
        for path, body in (
            ("/rag/query", BODY),
            ("/rag/query", {**BODY, "stream": True}),
            ("/rag/retrieve", BODY),
            ("/v1/chat/completions", CHAT),
        ):
            refused = client.post(path, json=body)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "too_many_requests"
        assert client.get("/ready").status_code == 200
        live.engine.hold.set()
        assert [one.result().status_code for one in waiting] == [200] * limit
        eventually(lambda: is_idle(live), "an empty house")
        assert client.post("/rag/query", json=BODY).status_code == 200


def test_fifty_clients_of_which_half_leave(live: Live, docs: str) -> None:
    """The half that stays is answered, however the others go."""
    answers: list[int] = []

    def stay(stream: bool) -> None:
        with live.client() as client:
            while True:
                response = client.post("/rag/query", json={**BODY, "stream": stream})
                if response.status_code != 429:  # more come than may be in flight
                    answers.append(response.status_code)
                    assert "Alan Stevenson" in response.text
                    return

    def leave(stream: bool) -> None:
        with raw_request(live, "/rag/query", {**BODY, "stream": stream}) as connection:
            connection.recv(1 if stream else 0)

    with ThreadPoolExecutor(50) as pool:
        done = [pool.submit(leave if i % 2 else stay, i % 4 < 2) for i in range(50)]
        for one in done:
            one.result()
    assert answers == [200] * 25
    eventually(lambda: is_idle(live), "an idle engine")
    with live.client() as client:
        assert client.get("/ready").status_code == 200


class Sent:
    """An ASGI connection whose client leaves when told to."""

    def __init__(self) -> None:
        self.messages: list[dict[str, object]] = []
        self.left = asyncio.Event()

    async def send(self, message: dict[str, object]) -> None:
        self.messages.append(message)

    async def receive(self) -> dict[str, object]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)  # type: ignore[misc]


async def stream_of(events: AsyncGenerator[str, None], keepalive_s: float) -> EventStream[str]:
    pump = Pump(events)
    return EventStream(
        "id",
        await pump.next(),
        pump,
        encode=lambda event: [event.encode()],
        encode_error=lambda error: error.code.encode(),
        end=b"END",
        keepalive_s=keepalive_s,
    )


def test_an_idle_stream_is_kept_alive() -> None:
    async def run() -> bytes:
        sent, go_on = Sent(), asyncio.Event()

        async def events() -> AsyncGenerator[str, None]:
            yield "first"
            await go_on.wait()
            yield "second"

        stream = await stream_of(events(), 0.01)
        task = asyncio.create_task(stream({}, sent.receive, sent.send))  # type: ignore[arg-type]
        while b": ping\n\n: ping\n\n" not in sent.body:
            await asyncio.sleep(0.005)
        go_on.set()
        await task
        return sent.body

    body = asyncio.run(run())
    assert body.startswith(b"first: ping\n\n")
    assert body.endswith(b"secondEND")


def test_a_stream_is_read_and_closed_by_one_task() -> None:
    """Time-outs and cancel scopes inside the engine's stream belong to the task that entered them."""

    async def run() -> set[object]:
        tasks: set[object] = set()
        sent = Sent()

        async def events() -> AsyncGenerator[str, None]:
            try:
                for _ in range(3):
                    tasks.add(asyncio.current_task())
                    yield "x"
                await asyncio.Event().wait()
            finally:
                tasks.add(asyncio.current_task())

        stream = await stream_of(events(), 60)
        task = asyncio.create_task(stream({}, sent.receive, sent.send))  # type: ignore[arg-type]
        while sent.body != b"xxx":
            await asyncio.sleep(0.005)
        sent.left.set()
        await task
        return tasks

    assert len(asyncio.run(run())) == 1
