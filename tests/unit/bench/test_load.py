"""The load benchmark: rates that count as served, comparisons, and strategies that fail without ending it."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import math
import selectors
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.bench import load
from ragserve.bench.load import Effort
from ragserve.bench.open_loop import SEED, LoadOutcome, arrival_times, offer
from ragserve.bench.retrieval_trace import read_trace
from ragserve.config import DEFAULT_MODEL
from ragserve.engine.base import EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.engine.document_cache import Whereabouts
from ragserve.errors import EngineError, InvalidRequest
from ragserve.strategy_spec import parse
from sglang_ext.wire.protocol import ContextReport

LIMIT_S = 0.1


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time is what was waited for: nothing really waits, and nothing depends on the machine."""

    def __init__(self) -> None:
        super().__init__(_NoWait(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _NoWait(selectors.SelectSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        self._clock.now += timeout or 0.0
        return super().select(0)


def run(work: Coroutine[Any, Any, Any]) -> None:
    with asyncio.Runner(loop_factory=Clock) as runner:
        runner.run(work)


class Engine:
    """Prefills one request at a time; a composed one takes a tenth of the others, and holds half of the
    slots.
    """

    def __init__(self, seconds: float = 0.02) -> None:
        self.seconds = seconds
        self.info = SimpleNamespace(device="cpu", attention_backend="none", max_total_tokens=1000)
        self.free_at = 0.0
        self.held = self.most = 0
        self.aborted = self.kernels = 0
        self.tier = "host"
        self.fails = ""
        self.namespaces: dict[str, set[str]] = {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if request.strategy == self.fails:
            raise EngineError("cannot")
        exact = request.strategy in ("full", "prefix")
        self.namespaces.setdefault(request.strategy, set()).add(request.namespace)
        report = (
            None if exact else ContextReport(request.strategy, 100, 50, 10, {self.tier: 50}, 2.5, 0.0, 0.0)
        )
        self.held += (slots := 2 if exact else 1)
        self.most = max(self.most, self.held)
        try:
            start = max(self.free_at, now := asyncio.get_running_loop().time())
            self.free_at = start + (self.seconds if exact else self.seconds / 10)
            await asyncio.sleep(self.free_at - now)
            yield GenerateChunk("x", EngineUsage(120, 12, 1), EngineTimings(), None, report)
            new = request.sampling.max_new_tokens
            yield GenerateChunk("y", EngineUsage(120, 12, new), EngineTimings(), "length", report)
        except BaseException:
            self.aborted += 1
            raise
        finally:
            self.held -= slots

    async def warm(self, request: GenerateRequest) -> None:
        await asyncio.sleep(0)

    async def where(self, namespace: str, documents: Sequence[Sequence[int]]) -> Whereabouts:
        n = len(documents)
        return Whereabouts((False,) * n, (True,) * n, ("host",) * n, "host", None, 0, 0, 16, 1, {})

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = {
            "now": self.held,
            "most": self.most,
            "total": 1000,
            "count": self.kernels,
            "latest": [{"what": "a kernel", "seconds": 0.1}] * (self.kernels - arguments.get("since", 0)),
        }
        self.kernels += operation == "compiled" and not arguments  # one in each rate
        if operation == "slots":
            self.most = self.held
        return found


def make(number: int) -> GenerateRequest:
    return GenerateRequest(str(number), [1, 2, 3], "n", "full")


def test_arrivals_are_poisson_and_the_same_at_every_rate() -> None:
    times = arrival_times(50.0, 40.0)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert len(times) == pytest.approx(2000, rel=0.1)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.1), (
        "as an exponential's"
    )
    faster = arrival_times(100.0, 20.0)
    assert faster == pytest.approx([at / 2 for at in times])
    assert len(arrival_times(0.001, 1.0)) == 1


def test_a_rate_is_served_or_given_up() -> None:
    async def work() -> None:
        engine = Engine()
        slow = await offer(engine, make, 10.0, 1.0, LIMIT_S)
        assert slow.within(LIMIT_S)
        assert len(slow.ttft_s) == len(slow.last) == slow.arrivals
        fast = await offer(engine, make, 500.0, 1.0, LIMIT_S)
        assert fast.broken
        assert not fast.within(LIMIT_S)
        assert fast.seconds < 1.0, "it does not wait for the rest"
        assert engine.aborted > 0
        assert engine.held == 0, "what was running was aborted"
        engine.fails = "full"
        failed = await offer(engine, make, 10.0, 0.3, LIMIT_S)
        assert not failed.within(LIMIT_S)
        assert failed.errors[0] == "EngineError: cannot"

    run(work())


def test_time_to_the_first_token_counts_from_the_arrival() -> None:
    """A client that is late itself must not hide it."""

    async def work() -> None:
        async def stall() -> None:
            await asyncio.sleep(0.05)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, Clock)
            loop.now += 0.3  # it could not send what arrived meanwhile

        outcome, _ = await asyncio.gather(offer(Engine(0.0), make, 100.0, 0.5, 5.0), stall())
        assert 0.25 < max(outcome.ttft_s) <= 0.3 + 1e-6

    run(work())


@pytest.mark.parametrize(
    ("low", "high", "guess", "expected"),
    [
        (0.0, math.inf, 10.0, 8.0),
        (8.0, math.inf, 10.0, 10.8),
        (0.0, 8.0, 10.0, 5.2),
        (4.0, 8.0, 10.0, 6.0),
        (1.0, math.inf, 10.0, 8.0),
    ],
)
def test_the_next_rate(low: float, high: float, guess: float, expected: float) -> None:
    assert load._next_rate(low, high, guess, Effort()) == pytest.approx(expected)


def trace_of(folder: Path, passages: int = 0) -> Any:
    documents = [{"id": i, "text": f"Fact {i} is true."} for i in range(6)]
    (folder / "t.trace.jsonl").write_text("\n".join(json.dumps({"doc_ids": [i, i + 1]}) for i in range(5)))
    (folder / "t.docs.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, documents)).encode()))
    return read_trace(folder / "t.trace.jsonl", 9, DEFAULT_MODEL, passages=passages)


def test_a_query_may_have_the_passages_of_the_next_ones_too(tmp_path: Path) -> None:
    assert [query.documents for query in trace_of(tmp_path, 4).queries][::4] == [
        ["0", "1", "2", "3"],
        ["4", "5", "0", "1"],
    ]
    assert {len(query.documents) for query in trace_of(tmp_path, 64).queries} == {6}, "no more than there are"
    assert trace_of(tmp_path).queries[3].documents == ["3", "4"]


def measured(engine: Engine, folder: Path, strategies: str, effort: Effort) -> list[dict[str, Any]]:
    report = load._report(folder / "load.json", "embedded", effort)
    engine.free_at = 0.0

    async def work() -> None:
        await load._Load(engine, trace_of(folder), effort, effort.seconds, report).run(parse(strategies))

    run(work())
    return list(json.loads((folder / "load.json").read_text())["rows"])


def test_strategies_are_compared_at_the_rate_of_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "AT_ONCE", 4)
    engine = Engine()
    effort = Effort(arrivals_s=0.6, rates=2, probe_s=0.2, limit_s=LIMIT_S)
    full, prefix, concat = measured(engine, tmp_path, "full,prefix,concat:keep=0.5", effort)
    assert full["requests/s"] is not None
    assert concat["requests/s"] > full["requests/s"], "it takes a tenth of the time"
    assert concat["tried"].startswith(f"{full['requests/s']}/s within")
    assert (
        concat["most KV slots at full's rate"]
        <= full["most KV slots at full's rate"]
        == full["most KV slots"]
    )
    assert (full["KV slots a request"], concat["KV slots a request"], concat["of full's %"]) == (
        152,
        102,
        67.1,
    )
    assert (concat["kept %"], concat["recomputed %"], full["kept %"], prefix["prefix %"]) == (
        50.0,
        10.0,
        None,
        10.0,
    )
    longest = concat["longest"][0]
    assert longest["ttft ms"] >= longest["p50 ms"] > 0, "of every rate"
    assert 0 <= longest["arrived s"] < effort.arrivals_s
    assert (longest["compose_ms"], longest["kernels"]) == (2.5, [{"what": "a kernel", "seconds": 0.1}])
    assert "compose_ms" not in full["longest"][0]
    assert len(engine.namespaces["prefix"]) > 2, "the prefix cache begins empty at each rate"
    assert engine.namespaces["concat"] == {"load"}


def test_no_rate_may_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If full takes longer than the limit even alone, the others are tried from their own closed loop's rate
    on.
    """
    monkeypatch.setattr(load, "AT_ONCE", 4)
    full, concat = measured(
        Engine(0.5), tmp_path, "full,concat", Effort(arrivals_s=2.0, rates=3, probe_s=2.0, limit_s=LIMIT_S)
    )
    assert full["requests/s"] is None
    assert full["too many/s"] == pytest.approx(1.6 * 0.65**2, abs=0.1), "each rate a third lower"
    assert "ttft ms p99" not in full
    assert concat["requests/s"] > 1
    assert (concat["of full's %"], concat["most KV slots at full's rate"]) == (None, None)


def test_what_fails_is_a_row_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "AT_ONCE", 2)
    engine, effort = Engine(0.002), Effort(arrivals_s=0.2, rates=1, probe_s=0.05, limit_s=LIMIT_S)
    engine.fails, engine.tier = "full", "disk"
    full, concat, prefix = measured(engine, tmp_path, "full,concat,prefix", effort)
    assert full["error"] == "cannot"
    assert "not composed from host" in concat["error"]
    assert prefix["requests/s"] > 0
    late = measured(
        engine,
        tmp_path,
        "prefix",
        Effort(arrivals_s=5.0, rates=1, probe_s=0.05, limit_s=LIMIT_S, seconds=1.0),
    )
    assert "no time left" in late[0]["error"]
    monkeypatch.setattr(load, "IDLE_S", 0.1)
    engine.held = 3
    assert "3 KV slots are held" in measured(engine, tmp_path, "prefix", effort)[0]["error"]
    with pytest.raises(InvalidRequest, match="needs a trace"):
        load.run(None)


def test_a_share_of_late_requests_is_tolerated() -> None:
    outcome = LoadOutcome(1.0, 300, ttft_s=[0.1] * 298 + [9.0, 9.0], last=[])
    assert outcome.within(2.0)
    assert not LoadOutcome(1.0, 300, ttft_s=[0.1] * 296 + [9.0] * 4, last=[]).within(2.0)
    assert not LoadOutcome(1.0, 2, ttft_s=[0.1]).within(2.0), "an answer is missing"
    assert SEED == 0
