"""Replays over scripted workers: what is found and counted, by each way to choose the worker."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from pydantic import SecretStr

from ragserve.bench import fleet_replay
from ragserve.bench.retrieval_trace import Trace, TraceQuery
from ragserve.bench.running_router import running_router
from ragserve.config import load
from ragserve.engine.ports import LOOPBACK, hold_port, port_of
from sglang_ext.wire.protocol import Span
from tests.unit.fleet.fake_worker import KEY, workers

SYSTEM = list(range(1, 5))
DOCUMENTS = {str(n): list(range(100 * n, 100 * n + 16)) for n in range(1, 6)}


def trace_of(queries: list[list[str]]) -> Trace:
    made = []
    for names in queries:
        ids, spans = list(SYSTEM), [Span(0, len(SYSTEM))]
        for name in names:
            spans.append(Span(len(ids), len(ids) + 16))
            ids += DOCUMENTS[name]
        made.append(TraceQuery([*ids, 7, 8], tuple(spans), names))
    return Trace("t", made, DOCUMENTS)


def test_each_policy_begins_anew_and_the_second_half_counts(tmp_path: Path) -> None:
    trace = trace_of([[name] for name in DOCUMENTS] * 4)  # five documents, which two workers take in turns
    with workers(tmp_path, 2) as made:
        urls = [each.url for each in made]
        settings = load(data_dir=tmp_path / "front", workers=",".join(urls), engine_api_key=SecretStr(KEY))

        def row(policy: str, router: str = "") -> dict[str, float]:
            replayed = fleet_replay.replayed(trace, settings, urls, policy, router, at_once=1)
            return asyncio.run(asyncio.wait_for(replayed, 240))

        ours = row(fleet_replay.OURS)
        assert (ours["device + host %"], ours["absent %"]) == (100, 0)
        assert sum(len(each.ledger.documents) for each in made) == len(DOCUMENTS) + 2, "and the system text"
        assert ours["first token ms p50"] <= ours["first token ms p99"]
        assert ours["queries/s"] > 0
        assert "CPU ms a query" not in ours
        turns = row("round robin")
        assert turns["device + host %"] == 100
        assert sum(len(each.ledger.documents) for each in made) == 2 * len(DOCUMENTS) + 2, "each has all"
        assert sum(each.ledger.operations.count("clear") for each in made) == 4
        if fleet_replay.CACHE_AWARE not in fleet_replay.policies():
            return
        with hold_port() as held:
            port = port_of(held)
        log = tmp_path / "router.log"
        with running_router(urls, log, KEY, port=port, policy="cache_aware"):
            aware = row(fleet_replay.CACHE_AWARE, f"http://{LOOPBACK}:{port}")
        assert aware["absent %"] == 0, "the same prompt goes where it went"


def test_documents_may_be_warmed_by_their_owners_first(tmp_path: Path) -> None:
    trace = trace_of([[name] for name in DOCUMENTS] * 2)
    spent = [0.0, 0.0]

    def used(worker: int) -> float:
        spent[worker] += 1 + 2 * worker  # seconds since it was asked last
        return spent[worker]

    with workers(tmp_path, 2) as made:
        urls = [each.url for each in made]
        settings = load(data_dir=tmp_path / "front", workers=",".join(urls), engine_api_key=SecretStr(KEY))
        replayed = fleet_replay.replayed(
            trace,
            settings,
            urls,
            "round robin",
            "",
            at_once=1,
            warm=True,
            cpu=[partial(used, worker) for worker in range(2)],
        )
        row = asyncio.run(asyncio.wait_for(replayed, 240))
        prefilled = [set(each.ledger.prefilled) for each in made]
    assert sum("flush" in each.ledger.operations for each in made) == 2
    assert sum(map(len, prefilled)) >= len(DOCUMENTS)
    assert (row["CPU ms a query"], row["busiest / mean"]) == (800.0, 1.5), "four seconds for five queries"
    assert row["remote %"] == 0
