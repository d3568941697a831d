"""A router between the server and its workers: keys, rings that move, routers that die, and wrong ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from pydantic import SecretStr

from ragserve.config import load
from ragserve.errors import InvalidRequest, TooManyRequests, Unavailable
from ragserve.fleet import fleet_engine, routed_app, router_probe, worker_link
from ragserve.fleet.fleet_engine import FleetEngine
from ragserve.fleet.router import ROUTER_LOST, Router
from tests.unit.fleet.fake_worker import KEY, FakeWorker, answered, request, run_on, until
from tests.unit.fleet.scripted_router import ScriptedRouter, workers_of

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "PROBE_S", 0.05)
    monkeypatch.setattr(fleet_engine, "PROBE_S", 0.05)


@pytest.fixture
def router(two: list[FakeWorker]) -> Iterator[ScriptedRouter]:
    router = ScriptedRouter([each.url for each in two])
    router.start()
    yield router
    router.stop()


def on(
    made: list[FakeWorker],
    router: ScriptedRouter,
    work: Callable[[FleetEngine], Awaitable[T]],
    key: str = KEY,
) -> T:
    urls = [each.url for each in made]
    settings = load(
        engine_api_key=SecretStr(KEY),
        data_dir=made[0].ledger.data_dir.parent / "front",
        workers=",".join(urls),
        router_url=router.url,
    )
    return run_on(lambda: FleetEngine(settings, urls, start_s=0, others_s=0), work)


def answers(made: list[FakeWorker]) -> list[int]:
    return [len(each.ledger.answered) for each in made]


@pytest.mark.parametrize(
    "url",
    [
        *("smg:30000", "ftp://smg:30000", "http://", "http://:30000", "http://[::1", "http://s\x00mg"),
        *(f"http://{host}:{port}" for host in ("smg", "127.0.0.1") for port in ("3000O", "99999", "0", "-1")),
    ],
)
def test_an_address_that_is_none_is_refused_at_once(tmp_path: Path, url: str) -> None:
    settings = load(data_dir=tmp_path)
    with pytest.raises(InvalidRequest, match="no address of a router"):
        Router(settings, url, 1)
    with pytest.raises(InvalidRequest, match="no address of a worker"):
        worker_link.checked(["http://worker:30000", url])


def test_addresses_with_a_port_or_without_are_taken() -> None:
    urls = ["http://worker", "https://worker:443/base", "http://[::1]:30000", "http://10.0.0.1:65535"]
    assert worker_link.checked(urls) == urls


def test_each_request_takes_its_workers_key(two: list[FakeWorker], router: ScriptedRouter) -> None:
    async def work(engine: FleetEngine) -> None:
        assert router.carried == [], "questions alone have found the keys"
        owners = [engine.answering("n", [[1, 2, 3, 4], request(n).input_ids[4:20]]) for n in range(1, 9)]
        for number in range(1, 9):
            await answered(engine, number)
        expected = [sum(one.url == each.url for one in owners) for each in two]  # type: ignore[attr-defined]
        assert answers(two) == expected, "the server chooses, not the router"
        assert min(expected) >= 1

    on(two, router, work)
    assert workers_of(router.carried) == ["0 worker-0", "0 worker-1"]
    assert len(set(router.carried)) == 2, "one key for each"


def test_a_ring_that_moves_costs_a_question_and_no_answer(
    two: list[FakeWorker], router: ScriptedRouter
) -> None:
    async def work(engine: FleetEngine) -> None:
        for number in range(1, 7):
            await answered(engine, number)
        before, keys = answers(two), set(router.carried)
        router.carried.clear()
        router.shift = 1  # every key is the other worker's
        for number in range(1, 7):
            await answered(engine, number)
        assert answers(two) == [2 * count for count in before], "each by its worker, once"
        assert len(router.carried) == 8, "of two keys the first request was refused"
        assert len(set(router.carried) - keys) == 2, "and new ones were found"
        assert [one["routed"] for one in engine.workers()] == [True, True]

    on(two, router, work)


def test_a_router_that_dies_and_comes_back(
    two: list[FakeWorker], router: ScriptedRouter, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(engine: FleetEngine) -> None:
        for each in two:
            each.ledger.before_first.clear()
        waiting = [asyncio.create_task(answered(engine, number, "prefix")) for number in range(1, 5)]
        async with asyncio.timeout(240):
            while len(router.carried) < 4:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(router.kill)
        for each in two:
            each.ledger.before_first.set()
        await asyncio.gather(*waiting)
        async with asyncio.timeout(240):
            while [one["routed"] for one in engine.workers()] != [False, False]:
                await answered(engine, 5)
        await answered(engine, 5)
        assert [one["state"] for one in engine.workers()] == ["serving", "serving"]
        said = [record for record in caplog.records if "directly" in record.getMessage()]
        assert 1 <= len(said) <= 2, "not with each request; while it ends it may answer once more"
        await asyncio.to_thread(router.start)
        await until(engine, True)
        carried = len(router.carried)
        await answered(engine, 5)
        assert len(router.carried) == carried + 1

    on(two, router, work)


def test_a_router_that_dies_in_the_middle_is_an_error_to_retry(
    two: list[FakeWorker], router: ScriptedRouter
) -> None:
    async def work(engine: FleetEngine) -> None:
        for each in two:
            each.ledger.after_first.clear()
        chunks = engine.generate(request(1, "prefix"))
        assert (await anext(chunks)).text
        await asyncio.to_thread(router.kill)
        with pytest.raises(Unavailable) as caught:
            await anext(chunks)
        assert caught.value.code == ROUTER_LOST
        assert [one["state"] for one in engine.workers()] == ["serving", "serving"], "not their fault"
        for each in two:
            each.ledger.after_first.set()
        await answered(engine, 1, "prefix")

    on(two, router, work)


def test_a_worker_that_dies_behind_the_router_is_replaced(
    two: list[FakeWorker], router: ScriptedRouter
) -> None:
    async def work(engine: FleetEngine) -> None:
        await asyncio.to_thread(two[0].kill)
        for number in range(1, 7):
            await answered(engine, number)
        assert answers(two) == [0, 6]
        await asyncio.to_thread(two[0].start)
        async with asyncio.timeout(240):
            while engine.workers()[0]["state"] != "serving":
                await asyncio.sleep(0.01)
        await until(engine, True)

    on(two, router, work)


@pytest.mark.parametrize("fault", ["full", "fails"])
def test_what_the_router_answers_itself(two: list[FakeWorker], router: ScriptedRouter, fault: str) -> None:
    async def work(engine: FleetEngine) -> None:
        router.fault = fault
        if fault == "fails":
            await answered(engine, 1)
            return
        with pytest.raises(TooManyRequests):
            await answered(engine, 1)
        router.fault = ""
        await answered(engine, 1)

    on(two, router, work)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("drops", "custom_params is missing"),
        ("keeps", "cannot be streamed"),
        ("stays", "answers would run on for nobody"),
        ("unsteady", "one routing key to several workers"),
    ],
)
def test_a_router_that_cannot_be_used_ends_the_start(
    two: list[FakeWorker],
    router: ScriptedRouter,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    said: str,
) -> None:
    if fault == "stays":
        monkeypatch.setattr(routed_app, "HOLD_S", 1.0)
    if fault == "keeps":
        monkeypatch.setattr(router_probe, "FIRST_S", 0.2)
    router.fault = fault
    with pytest.raises(InvalidRequest, match=said) as caught:
        on(two, router, lambda engine: asyncio.sleep(0))
    assert router.url in str(caught.value)


def test_a_router_without_a_worker_or_away(two: list[FakeWorker], router: ScriptedRouter) -> None:
    known = router.urls
    router.urls = known[:1]
    with pytest.raises(InvalidRequest, match=f"sends nothing to {two[1].url}"):
        on(two, router, lambda engine: asyncio.sleep(0))
    router.urls = known
    router.stop()
    with pytest.raises(Unavailable, match="does not answer"):
        on(two, router, lambda engine: asyncio.sleep(0))
    with pytest.raises(ValueError, match="--workers"):
        load(router_url=router.url)
