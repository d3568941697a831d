"""One worker over HTTP: what the in-process engine does, with a key, and while it drains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from pydantic import SecretStr

from ragserve.config import load
from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.engine.document_cache import CachingEngine
from ragserve.engine.stream import payload
from ragserve.errors import EngineError, InvalidRequest, Unavailable
from ragserve.fleet.plain_generate import plain_fields
from ragserve.fleet.worker_about import differences, identity
from ragserve.fleet.worker_engine import WorkerEngine
from sglang_ext.wire.protocol import Span
from tests.unit.fleet.fake_worker import KEY, FakeWorker, answer_to, run_on, workers

T = TypeVar("T")
IDS = list(range(1, 41))
SPANS = (Span(0, 4), Span(4, 20), Span(20, 36))


@pytest.fixture(scope="module")
def _worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeWorker]:
    with workers(tmp_path_factory.mktemp("worker"), 1) as (one,):
        yield one


@pytest.fixture
def worker(_worker: FakeWorker) -> FakeWorker:
    _worker.ledger.documents.clear()
    _worker.ledger.prefilled.clear()
    return _worker


def on(worker: FakeWorker, work: Callable[[WorkerEngine], Awaitable[T]], key: str = KEY) -> T:
    return run_on(lambda: WorkerEngine(load(engine_api_key=SecretStr(key)), worker.url), work)


def request(strategy: str = "concat", **fields: Any) -> GenerateRequest:
    return GenerateRequest("asked", IDS, "n", strategy, spans=SPANS, **fields)


async def answered(engine: Any, asked: GenerateRequest) -> list[GenerateChunk]:
    return [chunk async for chunk in engine.generate(asked)]


def test_a_composed_request_computes_what_is_missing_once(worker: FakeWorker) -> None:
    async def work(engine: WorkerEngine) -> list[list[GenerateChunk]]:
        assert isinstance(engine, CachingEngine)
        return [await answered(engine, request()) for _ in range(2)]

    for chunks in on(worker, work):
        assert "".join(chunk.text for chunk in chunks) == answer_to(IDS, "concat")
        assert len(chunks) == 4, "streamed"
        assert chunks[-1].context is not None
        assert chunks[-1].context.document_tokens == 32
    assert len(worker.ledger.prefilled) == len(SPANS)


def test_documents_are_warmed_located_and_forgotten(worker: FakeWorker) -> None:
    pieces = [IDS[span.start : span.end] for span in SPANS]

    async def work(engine: WorkerEngine) -> list[list[str]]:
        found = [(await engine.where("n", pieces)).fastest()]
        await engine.warm(request())
        found.append((await engine.where("n", pieces)).fastest())
        await engine.forget("n", pieces[1:2])
        found.append((await engine.where("n", pieces)).fastest())
        return found

    assert on(worker, work) == [["absent"] * 3, ["device"] * 3, ["device", "absent", "device"]]


def test_of_several_documents_the_one_that_fails_is_told(worker: FakeWorker) -> None:
    worker.ledger.bad.append(IDS[4:20])

    async def work(engine: WorkerEngine) -> None:
        with pytest.raises(EngineError, match=r"no \[5, 6"):
            await engine.warm(request())
        found = await engine.where("n", [IDS[span.start : span.end] for span in SPANS])
        assert found.on_device == (True, False, True)
        await engine.warm(replace(request(), spans=(SPANS[0], SPANS[2])))

    try:
        on(worker, work)
    finally:
        worker.ledger.bad.clear()


def test_what_is_removed_is_not_analysed_later(worker: FakeWorker) -> None:
    async def work(engine: WorkerEngine) -> list[int]:
        await engine.start()
        engine._documents._later.begin()  # nothing is analysed meanwhile
        left = []
        for forgotten in ([IDS[4:20]], None):
            engine._documents._later.add(request(), [1, 2])
            await engine.forget("n", forgotten)
            left.append(len(engine._documents._later))
        return left

    assert on(worker, work) == [1, 0]


def test_leaving_early_aborts(worker: FakeWorker) -> None:
    worker.ledger.after_first.clear()

    async def work(engine: WorkerEngine) -> None:
        chunks = engine.generate(request("prefix"))
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(240):
            while not worker.ledger.aborted:
                await asyncio.sleep(0.01)

    try:
        on(worker, work)
    finally:
        worker.ledger.after_first.set()
    assert worker.ledger.aborted[-1].startswith("asked-")


def test_a_reader_that_only_hangs_up_ends_its_request(worker: FakeWorker) -> None:
    async def work(engine: WorkerEngine) -> None:
        fields = payload(request("prefix"), "hangs-up")
        async with engine._request("POST", "/generate", fields) as response:
            await response.content.readline()
            response.close()
        async with asyncio.timeout(240):
            while "hangs-up" not in worker.ledger.left:
                await asyncio.sleep(0.01)

    worker.ledger.after_first.clear()
    try:
        on(worker, work)
    finally:
        worker.ledger.after_first.set()


@pytest.mark.parametrize(
    "more",
    [
        {"stream": False},
        {"input_ids": [IDS]},
        {"input_ids": [1, True]},
        {"input_ids": []},
        {"sampling_params": {"n": 2}},
        {"rid": ["asked-once"]},
        {"extra_key": 1},
        {"return_logprob": True},
    ],
)
def test_all_other_requests_are_sglangs(more: dict[str, Any]) -> None:
    fields = payload(request("prefix"), "asked-once")
    assert plain_fields(json.dumps(fields).encode()) == fields
    assert plain_fields(json.dumps(fields | more).encode()) is None


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'"x"', '{"rid": "\ud800"}'.encode("utf-8", "surrogatepass")]
)
def test_a_body_that_is_no_request_is_sglangs_to_refuse(body: bytes) -> None:
    assert plain_fields(body) is None


def test_one_prompt_is_answered_as_by_sglangs_own_route(worker: FakeWorker) -> None:
    fields = payload(request("prefix"), "asked-twice")
    headers = {"Authorization": f"Bearer {KEY}"}
    answers = [
        httpx.post(f"{worker.url}/generate", headers=headers, json=fields | more)
        for more in ({}, {"return_logprob": False})
    ]
    events = [[json.loads(line[6:]) for line in each.text.split("\n\n")[:-2]] for each in answers]
    assert events[0] == events[1]
    assert len(events[0]) == 4
    assert [each.text.split("\n\n")[-2] for each in answers] == ["data: [DONE]"] * 2


@pytest.mark.parametrize(
    ("refusal", "expected"), [(ValueError("too long"), InvalidRequest), (RuntimeError("lost"), EngineError)]
)
def test_what_the_engine_raises_arrives(
    worker: FakeWorker, refusal: Exception, expected: type[Exception]
) -> None:
    worker.ledger.refusal = refusal
    try:
        with pytest.raises(expected, match=str(refusal)):
            on(worker, lambda engine: answered(engine, request("prefix")))
    finally:
        worker.ledger.refusal = None


def test_requests_that_follow_each_other_share_a_connection(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragserve.engine.remote._IDLE_S", 60.0)

    async def work(engine: WorkerEngine) -> None:
        for _ in range(3):
            await answered(engine, request("prefix"))
            await asyncio.sleep(0.05)

    worker.ledger.peers.clear()
    on(worker, work)
    assert len(worker.ledger.peers) == 3
    assert len(set(worker.ledger.peers)) == 1


def test_a_control_operation_that_fails_says_why(worker: FakeWorker) -> None:
    async def work(engine: WorkerEngine) -> None:
        await engine.control("nonsense")

    with pytest.raises(EngineError, match="no operation 'nonsense'"):
        on(worker, work)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/worker"), ("POST", "/worker/control"), ("POST", "/worker/drain"), ("POST", "/generate")],
)
def test_every_route_needs_the_key(worker: FakeWorker, method: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = httpx.request(method, worker.url + path, headers=headers, json={"operation": "clear"})
        assert answer.status_code == 401, answer.text


def test_a_wrong_key(worker: FakeWorker) -> None:
    async def nothing(engine: WorkerEngine) -> None: ...

    with pytest.raises(EngineError, match="refuses our key"):
        on(worker, nothing, "wrong")


def test_draining_lets_running_requests_end_and_takes_no_new_ones(worker: FakeWorker) -> None:
    worker.ledger.after_first.clear()

    def drain(on: bool) -> dict[str, Any]:
        answer = httpx.post(
            f"{worker.url}/worker/drain", headers={"Authorization": f"Bearer {KEY}"}, json={"draining": on}
        )
        return dict(answer.json())

    async def work(engine: WorkerEngine) -> str:
        chunks = engine.generate(request("prefix"))
        text = (await anext(chunks)).text
        assert await asyncio.to_thread(drain, True) == {"draining": True, "in_flight": 1}
        assert not await engine.ready()
        with pytest.raises(Unavailable, match="drained"):
            await answered(engine, request("prefix"))
        worker.ledger.after_first.set()
        return text + "".join([chunk.text async for chunk in chunks])

    try:
        assert on(worker, work) == answer_to(IDS, "exact")
    finally:
        worker.ledger.after_first.set()
        assert drain(False)["in_flight"] == 0


def test_what_workers_must_have_in_common(worker: FakeWorker, tmp_path: Path) -> None:
    with workers(tmp_path, 1, dtype="bfloat16", max_total_tokens=99) as (other,):
        mine, theirs = (on(each, WorkerEngine.about) for each in (worker, other))
    assert mine.id != theirs.id
    assert differences(mine, theirs) == "dtype 'float32' and 'bfloat16'", "sizes may differ"
    again = FakeWorker(other.ledger.data_dir, dtype="bfloat16", max_total_tokens=99)
    again.start()
    try:
        found = on(again, WorkerEngine.about)
    finally:
        again.stop()
    assert found.id == theirs.id, "a worker is its data folder"
    assert found.boot != theirs.boot


def test_a_worker_makes_its_name_once(tmp_path: Path) -> None:
    first = identity(tmp_path)
    assert first == identity(tmp_path) != identity(tmp_path / "another")


@pytest.mark.parametrize("text", ["{", "", "[]", "{}", '{"id": null}', '{"id": ""}', "\x00" * 40])
def test_a_worker_whose_name_is_damaged_does_not_start(tmp_path: Path, text: str) -> None:
    """Under another name it would never hear of the deletions that servers have noted for it."""
    path = tmp_path / "worker.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"worker\.json is damaged") as caught:
        identity(tmp_path)
    assert "backup" in str(caught.value.hint)
    assert path.read_text() == text
