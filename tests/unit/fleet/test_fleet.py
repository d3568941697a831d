"""Several workers behind one engine: routing, death, return, deletion, and what they must have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import SecretStr

from ragserve.config import load
from ragserve.engine.base import GenerateChunk, GenerateRequest, TokenizingEngine
from ragserve.engine.document_cache import CachingEngine, ManyEngines, answering
from ragserve.engine.remote import LOST
from ragserve.errors import Conflict, EngineError, InvalidRequest, Unavailable
from ragserve.fleet import worker_link
from ragserve.fleet.fleet_engine import FleetEngine
from ragserve.fleet.unconfirmed import Unconfirmed
from ragserve.fleet.worker_engine import WorkerEngine
from sglang_ext.wire.protocol import SessionPart, Span, document_key
from tests.unit.fleet.fake_worker import KEY, PRINT, FakeWorker, answer_to, run_on, workers

T = TypeVar("T")
SYSTEM = list(range(1, 5))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "PROBE_S", 0.05)


def document(number: int) -> list[int]:
    return list(range(100 * number, 100 * number + 16))


def request(*numbers: int, strategy: str = "concat", **fields: Any) -> GenerateRequest:
    ids, spans = list(SYSTEM), [Span(0, len(SYSTEM))]
    for number in numbers:
        spans.append(Span(len(ids), len(ids) + 16))
        ids += document(number)
    return GenerateRequest("asked", [*ids, 7, 8], "n", strategy, spans=tuple(spans), **fields)


def on(made: list[FakeWorker], work: Callable[[FleetEngine], Awaitable[T]], key: str = KEY) -> T:
    settings = load(engine_api_key=SecretStr(key), data_dir=made[0].ledger.data_dir.parent / "front")
    urls = [each.url for each in made]
    return run_on(lambda: FleetEngine(settings, urls, start_s=0, others_s=0), work)


async def text_of(engine: FleetEngine, asked: GenerateRequest) -> str:
    return "".join([chunk.text async for chunk in engine.generate(asked)])


async def until(engine: FleetEngine, number: int, state: str) -> None:
    async with asyncio.timeout(240):
        while engine.workers()[number]["state"] != state:
            await asyncio.sleep(0.01)


def owner(engine: FleetEngine, made: list[FakeWorker], number: int) -> FakeWorker:
    """The worker that would answer from a document."""
    found: Any = engine.answering("n", [SYSTEM, document(number)])
    return next(each for each in made if each.url == found.url)


def with_answers(made: list[FakeWorker]) -> list[int]:
    return [len(each.ledger.answered) for each in made]


def test_a_request_goes_where_its_documents_are(two: list[FakeWorker]) -> None:
    async def work(engine: FleetEngine) -> None:
        assert isinstance(engine, CachingEngine)
        assert isinstance(engine, ManyEngines)
        everything = request(*range(1, 13))
        await engine.warm(everything)
        pieces = [document(number) for number in range(1, 13)]
        assert (await engine.where("n", pieces)).fastest() == ["device"] * 12
        for number in range(1, 13):
            asked = request(number)
            assert await text_of(engine, asked) == answer_to(asked.input_ids, "concat")
        tokens = [SYSTEM, *pieces]
        one = answering(engine, "n", tokens)
        found = (await one.where("n", pieces)).fastest()
        assert set(found) == {"device", "absent"}, "one worker does not have what the other has"
        assert await text_of(engine, request(*range(1, 13), strategy="prefix"))
        assert one.info.kind == "local", "and it is one worker's engine"

    on(two, work)
    keys = [set(each.ledger.documents) for each in two]
    documents = {document_key("n", PRINT, document(number)) for number in range(1, 13)}
    assert not keys[0] & keys[1] & documents, "each document was computed by one worker"
    assert keys[0] | keys[1] >= documents
    assert min(with_answers(two)) >= 2, "and both answer"


def test_another_server_in_front_knows_what_the_workers_hold(two: list[FakeWorker]) -> None:
    """Requests for documents of both owners gather on one worker, and stay there after a restart."""

    async def first(engine: FleetEngine) -> None:
        await text_of(engine, request(*range(1, 9)))

    async def second(engine: FleetEngine) -> None:
        for number in range(1, 9):
            await text_of(engine, request(number))

    on(two, first)
    (there,) = [number for number, count in enumerate(with_answers(two)) if count]
    on(two, second)
    assert with_answers(two)[there] == 9
    assert with_answers(two)[1 - there] == 0


def test_what_was_deleted_whole_is_no_longer_counted_as_held(two: list[FakeWorker]) -> None:
    async def work(engine: FleetEngine) -> None:
        await text_of(engine, request(*range(1, 9)))
        await engine.forget("n", None)
        until = asyncio.get_running_loop().time() + 240
        while len({owner(engine, two, number).url for number in range(1, 9)}) < 2:
            assert asyncio.get_running_loop().time() < until, "they have two owners again"
            await asyncio.sleep(0.05)

    on(two, work)


def test_a_session_goes_on_where_its_last_turn_was(two: list[FakeWorker]) -> None:
    async def work(engine: FleetEngine) -> None:
        def turn(*numbers: int, held: int) -> GenerateRequest:
            return request(*numbers, strategy="prefix", session=SessionPart("session:n:1", held))

        await text_of(engine, turn(1, held=0))
        first = with_answers(two).index(1)
        others = [number for number in range(2, 40) if owner(engine, two, number) is two[1 - first]]
        for number in range(2):
            await text_of(engine, turn(*others[3 * number : 3 * number + 3], held=100))
        assert with_answers(two)[first] == 3
        await text_of(engine, request(*others[6:9], strategy="prefix"))
        assert with_answers(two)[1 - first] == 1, "without the session they go to their owner"

    on(two, work)


def test_a_death_before_the_first_token_is_not_seen(two: list[FakeWorker]) -> None:
    async def work(engine: FleetEngine) -> None:
        asked = request(1, strategy="prefix")
        dying = owner(engine, two, 1)
        dying.ledger.before_first.clear()
        answer = asyncio.create_task(text_of(engine, asked))
        async with asyncio.timeout(240):
            while not sum(each["in_flight"] for each in engine.workers()):
                await asyncio.sleep(0.01)
        await asyncio.to_thread(dying.kill)
        assert await answer == answer_to(asked.input_ids, "exact")
        assert await engine.ready()
        for number in range(1, 6):
            assert await text_of(engine, request(number)), "the other one answers everything"
        dying.ledger.before_first.set()
        await asyncio.to_thread(dying.start)
        await until(engine, two.index(dying), "serving")

    on(two, work)


def test_a_death_in_the_middle_is_an_error_to_retry(two: list[FakeWorker]) -> None:
    async def work(engine: FleetEngine) -> None:
        asked = request(1, strategy="prefix")
        dying = owner(engine, two, 1)
        dying.ledger.after_first.clear()
        chunks = engine.generate(asked)
        assert (await anext(chunks)).text
        await asyncio.to_thread(dying.kill)
        with pytest.raises(Unavailable) as caught:
            await anext(chunks)
        assert caught.value.code == "worker_lost"
        assert caught.value.status == 503
        assert await text_of(engine, asked) == answer_to(asked.input_ids, "exact")

    on(two, work)


def test_without_any_worker_requests_are_refused_until_one_is_back(tmp_path: Path) -> None:
    async def work(engine: FleetEngine) -> None:
        made[0].kill()
        with pytest.raises(Unavailable):
            await text_of(engine, request(1))
        with pytest.raises(Unavailable, match="No worker takes requests"):
            await text_of(engine, request(1))
        assert not await engine.ready()
        await asyncio.to_thread(made[0].start)
        await until(engine, 0, "serving")
        assert await text_of(engine, request(1))

    with workers(tmp_path, 1) as made:
        on(made, work)


def test_what_a_lost_worker_owned_is_warmed_by_the_others(two: list[FakeWorker]) -> None:
    async def work(engine: FleetEngine) -> None:
        pieces = [document(number) for number in range(1, 13)]
        await asyncio.to_thread(two[0].kill)
        await engine.warm(request(*range(1, 13)))
        assert (await engine.where("n", pieces)).fastest() == ["device"] * 12
        assert len(two[1].ledger.documents) == 13, "and the system text"
        assert (await engine.control("stat"))["disk"]["documents"] == 13
        await asyncio.to_thread(two[1].kill)
        for call in (engine.where("n", pieces), engine.warm(request(1)), engine.control("stat")):
            with pytest.raises(Unavailable, match="No worker"):
                await call

    on(two, work)


def test_what_a_worker_was_warming_when_its_stream_ended_is_warmed_by_another(
    two: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = WorkerEngine.warm

    async def ending(engine: WorkerEngine, asked: GenerateRequest) -> None:
        if engine.url == two[0].url:
            await asyncio.to_thread(two[0].kill)
            raise EngineError("its stream has ended", code=LOST)
        await warm(engine, asked)

    monkeypatch.setattr(WorkerEngine, "warm", ending)
    on(two, lambda engine: engine.warm(request(*range(1, 13))))
    assert len(two[1].ledger.documents) == 13, "and the system text"


def test_deletion_reaches_every_worker_before_it_is_done(two: list[FakeWorker]) -> None:
    async def work(engine: FleetEngine) -> None:
        for each in two:  # both have it, for whatever reason
            each.ledger.documents[document_key("n", PRINT, document(1))] = 16
        await engine.forget("n", [document(1)])
        assert [each.ledger.documents for each in two] == [{}, {}]
        await engine.forget("n", None)
        await engine.control("remove_session", key="session:n:1")

    on(two, work)
    for each in two:
        assert [one.get("op", "remove") for one in each.ledger.removed] == [
            "remove",
            "remove_namespace",
            "remove_session",
        ]


def test_a_worker_that_does_not_confirm_gets_no_requests_until_it_has(
    two: list[FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    key = document_key("n", PRINT, document(1))

    async def work(engine: FleetEngine) -> None:
        two[0].ledger.documents[key] = 16
        two[0].ledger.deaf = True
        await engine.forget("n", [document(1)])
        assert [one["state"] for one in engine.workers()] == ["fenced", "serving"]
        for number in range(1, 8):
            await text_of(engine, request(number))
        assert with_answers(two) == [0, 7]
        assert key in two[0].ledger.documents
        async with asyncio.timeout(240):
            while two[0].ledger.operations.count("remove") < 5:
                await asyncio.sleep(0.01)
        said = [record for record in caplog.records if "it is deaf" in record.getMessage()]
        assert len(said) == 1, "not again with each probe"
        two[0].ledger.deaf = False
        await until(engine, 0, "serving")
        assert key not in two[0].ledger.documents

    on(two, work)


def test_a_worker_that_was_away_confirms_before_it_serves_whoever_was_started_again(
    two: list[FakeWorker],
) -> None:
    """The worker is away, the front deletes and is started again, and the worker comes back with its disk."""
    key = document_key("n", PRINT, document(1))
    away = two[0]

    async def delete(engine: FleetEngine) -> None:
        await asyncio.to_thread(away.kill)
        await until(engine, 0, "lost")
        await engine.forget("n", [document(1)])

    async def rejoin(engine: FleetEngine) -> None:
        assert [one["state"] for one in engine.workers()] == ["lost", "serving"]
        away.ledger.deaf = True
        await asyncio.to_thread(away.start)
        await until(engine, 0, "fenced")
        assert engine.workers()[0]["unconfirmed_deletions"] == 1
        away.ledger.deaf = False
        await until(engine, 0, "serving")

    away.ledger.documents[key] = 16
    on(two, delete)
    assert away.ledger.documents
    on(two, rejoin)
    assert not away.ledger.documents
    front = Unconfirmed(away.ledger.data_dir.parent / "front")
    assert [front.of(name) for name in front.workers] == [[], []]


def test_the_servers_tokenizer_must_be_the_workers(two: list[FakeWorker]) -> None:
    async def work(engine: FleetEngine) -> None:
        assert isinstance(engine, TokenizingEngine)
        await engine.check_tokenizer(lambda text: [1])  # they do not say
        for each in two:
            each.ledger.tokens = [1, 2]
        await engine.check_tokenizer(lambda text: [1, 2])
        with pytest.raises(InvalidRequest, match="--tokenizer"):
            await engine.check_tokenizer(lambda text: [1])

    on(two, work)


def test_figures_are_those_of_all_workers(two: list[FakeWorker]) -> None:
    async def work(engine: FleetEngine) -> None:
        everything = request(*range(1, 9), strategy="prefix")
        await engine.warm(everything)
        count = sum(len(each.ledger.documents) for each in two)
        stat = await engine.control("stat")
        assert stat == {"disk": {"documents": count, "bytes": 200, "budget_bytes": None}}
        assert await engine.control("verify") == {
            "pages": 6,
            "bad": [f"{each.url}: n/k: crc" for each in two if each.ledger.documents],
        }
        room = await engine.where("n", [])
        assert (room.budget_bytes, room.write_room_bytes, room.faults) == (200_000, 10_000, {"crc": 2})
        scored = await engine.control(
            "score",
            namespace="n",
            system=SYSTEM,
            question=[9],
            documents=[document(1), document(99), document(2)],
        )
        assert scored == {"scores": [16.0, None, 16.0]}, "each by its owner, in order"
        measured: Any = engine.measured()
        assert (await measured.control("info"))["fingerprint"] == PRINT
        assert measured.info.strategies == ("full", "prefix", "concat")

    on(two, work)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fingerprint": "other"}, "weights 'fingerprint' and 'other'"),
        ({"version": "0.5.16"}, "SGLang '0.5.17' and '0.5.16'"),
    ],
)
def test_workers_that_do_not_fit_together_are_refused_in_one_line(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    async def nothing(engine: FleetEngine) -> None: ...

    with workers(tmp_path / "a", 1) as first, workers(tmp_path / "b", 1, **fields) as second:
        both = [*first, *second]
        with pytest.raises(Conflict) as caught:
            on(both, nothing)
    assert "\n" not in str(caught.value)
    assert both[0].url in str(caught.value)
    assert both[1].url in str(caught.value)
    assert said in str(caught.value) or " and ".join(reversed(said.split("'")[1::2])) in str(
        caught.value
    ).replace("'", ""), "in the order in which they answered"


def test_another_version_a_wrong_key_one_worker_twice_and_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(engine: FleetEngine) -> None: ...

    with workers(tmp_path, 1) as made:
        with monkeypatch.context() as patched:
            patched.setattr("ragserve.fleet.worker_app.__version__", "0.0.1")
            with pytest.raises(InvalidRequest, match=r"runs ragserve 0\.0\.1"):
                on(made, nothing)
        with pytest.raises(EngineError, match="refuses our key"):
            on(made, nothing, "wrong")
        settings = load(data_dir=tmp_path / "front")
        with pytest.raises(InvalidRequest, match="each once"):
            FleetEngine(settings, [made[0].url, made[0].url + "/"])
        with pytest.raises(InvalidRequest, match="no address"):
            FleetEngine(settings, ["10.0.0.1:30000"])
        copy = FakeWorker(made[0].ledger.data_dir)
        copy.start()
        try:
            with pytest.raises(Conflict, match="are one worker, or use one data folder"):
                on([made[0], copy], nothing)
        finally:
            copy.stop()
    with pytest.raises(Unavailable, match="No worker answers"):
        on(made, nothing)


def test_a_start_goes_on_without_a_worker_that_is_away(two: list[FakeWorker]) -> None:
    two[1].stop()

    async def work(engine: FleetEngine) -> list[str]:
        assert await text_of(engine, request(1))
        states = [one["state"] for one in engine.workers()]
        await asyncio.to_thread(two[1].start)
        await until(engine, 1, "serving")
        return states

    assert on(two, work) == ["serving", "lost"]


def test_the_smallest_limits_count(tmp_path: Path) -> None:
    async def limits(engine: FleetEngine) -> tuple[str, int, int]:
        return engine.info.kind, engine.info.context_length, engine.info.max_total_tokens

    with (
        workers(tmp_path / "a", 1, context_length=512) as first,
        workers(tmp_path / "b", 1, max_total_tokens=300, dtype="float32") as second,
    ):
        assert on([*first, *second], limits) == ("fleet", 512, 300)


def test_a_reader_that_leaves_aborts_on_its_worker(two: list[FakeWorker]) -> None:
    for each in two:
        each.ledger.after_first.clear()

    async def work(engine: FleetEngine) -> list[GenerateChunk]:
        chunks = engine.generate(request(1, strategy="prefix"))
        found = [await anext(chunks)]
        await chunks.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(240):
            while not any(each.ledger.aborted for each in two):
                await asyncio.sleep(0.01)
        assert [one["in_flight"] for one in engine.workers()] == [0, 0]
        return found

    assert on(two, work)
