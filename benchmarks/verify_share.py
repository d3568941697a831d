"""What verification in use costs those who ask: the same arrivals at a server that compares none of its
answers with full prefill and at one that compares a share of them (``verify_share``).

    python -m benchmarks.verify_share [--queries N] [--strategy SPEC] [--out FOLDER] [--quick]

Both servers run, and are asked in turns, round by round: at a light load, which leaves time to compare every
answer, and at a busy one, which leaves none. A round begins when no answer waits to be compared, so that
neither server works during the other's round. Each arrival is a pair, one answer of either server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.places import RESULTS
from ragserve.api.views import MessageEvent
from ragserve.bench.api import example_corpus, example_questions
from ragserve.bench.open_loop import SEED, arrival_times
from ragserve.client import AsyncClient, Client
from ragserve.engine.running_server import running_server
from ragserve.errors import RagserveError, Unavailable
from ragserve.strategy_spec import StrategySpec, parse
from ragserve.verification import report
from ragserve.verification.idle_worker import QUIET_S

SHARES = (0.0, 1.0)
STRATEGY = "concat:recompute=sentences,share=0.3"  # verified for the embedded model
_FILES, _QUICK_FILES = 8, 2  # of the example corpus
_K = 5
_MAX_NEW_TOKENS = 16
_ROUNDS = 5
_TIMED = 5  # questions that the rates follow from
_BLOCK = 3  # consecutive arrivals, drawn together: they share a queue
_DRAWS = 2000  # of the bootstrap
_SETTLED_S = 600.0
_POLL_S = 0.25
_NOTE = (
    "The same Poisson arrivals at two servers that run side by side and are asked in turns, documents warm. "
    "Times from the arrival on, as the client sees them. delay: to the first token with verify_share less "
    "that without, of the same arrival; the median, and its 95 % interval by a bootstrap over blocks of "
    f"{_BLOCK} consecutive arrivals. compared: answers that were compared with full prefill before the last "
    "answer of their round; those left over are compared between the rounds. light: an arrival leaves time "
    "for its answer and twice for a comparison with the quiet second before it, in the mean; busy: half of "
    "the time an answer is being given."
)


@dataclass(frozen=True, slots=True)
class Load:
    """A load and its arrivals a second."""

    name: str
    rate: float


@dataclass
class ServerRounds:
    """What one server's rounds under one load have shown: seconds to the first token by round and number of
    the arrival, failed ones left out, and answers compared during the rounds."""

    share: float
    ttft_s: dict[tuple[int, int], float] = field(default_factory=dict)
    compared: int = 0
    errors: list[str] = field(default_factory=list)


def run(
    out_dir: Path | None = None,
    *,
    quick: bool = False,
    urls: Sequence[str] = (),
    strategies: str = STRATEGY,
    n_queries: int = 120,
    **flags: Any,
) -> dict[str, Any]:
    """Measure two servers started for it with the settings ``flags``, or those at ``urls``, whose
    ``verify_share`` are `SHARES`, on ``n_queries`` arrivals each, light and busy.

    Raises InvalidRequest if the strategy is not verified there, and RagserveError if a server compares
    nothing."""
    (spec,) = parse(strategies)
    rounds, each = (1, min(n_queries, 6)) if quick else (_ROUNDS, -(-n_queries // _ROUNDS))
    key = os.environ.get("RAGSERVE_API_KEY")
    with contextlib.ExitStack() as stack:
        if not urls:
            urls = [
                stack.enter_context(running_server(warm_ingested=False, verify_share=share, **flags)).url
                for share in SHARES
            ]
        spaces = []
        for url in urls:
            api = stack.enter_context(Client(url, api_key=key, no_store=True))
            spaces.append(stack.enter_context(example_corpus(api, _QUICK_FILES if quick else _FILES)))
            questions = example_questions(api, spaces[-1])
        measured = _Measured(urls, spaces, questions, spec, key)
        rows, info = asyncio.run(measured.run(rounds, each))
    workload = {
        "model": Path(info["model"]).name,
        "device": info["device"],
        "strategy": spec.label,
        "k": _K,
        "max_new_tokens": _MAX_NEW_TOKENS,
        "rounds": rounds,
        "drawn with seed": SEED,
    }
    out = out_dir / "verify-share.json" if out_dir else None
    return report.write("verify-share", workload, rows, out=out, note=_NOTE)


def median_delay(pairs: Sequence[float], *, block: int = _BLOCK) -> tuple[float, float, float]:
    """The median of differences, of which there must be some, and its 95 % interval: a moving-block
    bootstrap over ``block`` consecutive ones, drawn with a fixed seed."""
    import numpy as np

    values = np.asarray(pairs, dtype=np.float64)
    block = min(block, len(values))
    generator = np.random.default_rng(SEED)
    starts = generator.integers(len(values) - block + 1, size=(_DRAWS, -(-len(values) // block)))
    drawn = (starts[:, :, None] + np.arange(block)).reshape(_DRAWS, -1)[:, : len(values)]
    low, high = np.percentile(np.median(values[drawn], axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


class _Measured:
    """Asks the servers in turns."""

    def __init__(
        self,
        urls: Sequence[str],
        spaces: Sequence[str],
        questions: Sequence[str],
        spec: StrategySpec,
        key: str | None,
    ) -> None:
        self._urls, self._spaces, self._questions = urls, spaces, questions
        self._spec, self._key = spec, key

    async def run(self, rounds: int, each: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Measure; return a row of each load and the engine's description."""
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(url, api_key=self._key, no_store=True))
                for url in self._urls
            ]
            servers = list(zip(SHARES, clients, self._spaces, strict=True))
            rows = []
            for load in await self._loads(servers, each):
                found = [ServerRounds(share) for share in SHARES]
                for number in range(rounds):
                    turns = list(zip(found, servers, strict=True))
                    for into, (_, client, space) in turns[:: -1 if number % 2 else 1]:
                        await self._all_settled(servers)
                        await self._round(into, client, space, load.rate, each, number)
                rows.append(_row(load, *found))
            for share, compared in zip(SHARES, await self._all_settled(servers), strict=True):
                if share and not compared:
                    raise RagserveError(f"The server with verify_share={share:g} compared no answer.")
            return rows, (await clients[0].info()).engine

    async def _loads(self, servers: Sequence[_Server], each: int) -> tuple[Load, Load]:
        """Compute the documents, and find both loads' rates."""
        answer, compare = [], []
        for share, client, space in servers:
            for question in self._questions[:each]:
                await self._ask(client, space, question)  # its documents are computed
            await self._settled(client, space)
            for question in self._questions[: min(each, _TIMED)]:
                answer.append((await self._ask(client, space, question))[1])
                if share:
                    started = time.perf_counter()
                    await self._settled(client, space)
                    compare.append(time.perf_counter() - started)  # the quiet second included
        took = statistics.median(answer)
        idle = max(QUIET_S, statistics.median(compare))
        return Load("light", 1 / (took + 2 * idle)), Load("busy", 0.5 / took)

    async def _round(
        self, into: ServerRounds, client: AsyncClient, space: str, rate: float, each: int, number: int
    ) -> None:
        times = arrival_times(rate, 10 * each / rate, seed=SEED + number)[:each]
        before = (await self._state(client, space))[1]
        clock = time.perf_counter
        started = clock()

        async def one(index: int, at: float) -> None:
            await asyncio.sleep(max(0.0, started + at - clock()))
            question = self._questions[(number + index) % len(self._questions)]
            try:
                into.ttft_s[number, index] = (await self._ask(client, space, question, started + at))[0]
            except RagserveError as error:
                into.errors.append(str(error))

        await asyncio.gather(*(one(index, at) for index, at in enumerate(times)))
        into.compared += (await self._state(client, space))[1] - before

    async def _all_settled(self, servers: Sequence[_Server]) -> list[int]:
        return [await self._settled(client, space) for _, client, space in servers]

    async def _ask(
        self, client: AsyncClient, space: str, question: str, since: float | None = None
    ) -> tuple[float, float]:
        """Seconds to the first piece of the answer, and to its end. Raises InvalidRequest if the strategy is
        not verified."""
        since = time.perf_counter() if since is None else since
        first: float | None = None
        stream = client.stream(
            question,
            namespace=space,
            k=_K,
            max_new_tokens=_MAX_NEW_TOKENS,
            strategy=self._spec.name,  # type: ignore[arg-type]
            strategy_options=self._spec.options,
        )
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                if first is None and isinstance(event, MessageEvent):
                    first = time.perf_counter() - since
        whole = time.perf_counter() - since
        return whole if first is None else first, whole

    async def _state(self, client: AsyncClient, space: str) -> tuple[int, int]:
        """Answers that wait to be compared, and those that have been."""
        state = (await client.info()).verification
        found = [each["compared"] for each in state["in_use"] if each["namespace"] == space]
        return int(state["waiting"]), sum(found)

    async def _settled(self, client: AsyncClient, space: str) -> int:
        """Wait until no answer waits, and return how many have been compared. Raises Unavailable after
        `_SETTLED_S` seconds."""
        until = time.perf_counter() + _SETTLED_S
        while (state := await self._state(client, space))[0]:
            if time.perf_counter() > until:
                raise Unavailable(
                    f"{client.url} has compared no answer for {_SETTLED_S:g} s.",
                    hint="Let no other client ask it meanwhile.",
                )
            await asyncio.sleep(_POLL_S)
        return state[1]


_Server = tuple[float, AsyncClient, str]
"""``verify_share``, a client, and the namespace there."""


def _row(load: Load, plain: ServerRounds, compared: ServerRounds) -> dict[str, Any]:
    both = sorted(plain.ttft_s.keys() & compared.ttft_s.keys())
    if not both:
        raise RagserveError(
            f"No arrival was answered by both servers: {(plain.errors + compared.errors)[:1]}"
        )
    delay, low, high = median_delay([compared.ttft_s[key] - plain.ttft_s[key] for key in both])
    row: dict[str, Any] = {
        "load": load.name,
        "arrivals/s": round(load.rate, 3),
        "pairs": len(both),
        "failed": len(plain.errors) + len(compared.errors),
        "compared": compared.compared,
        "delay ms p50": round(1e3 * delay, 1),
        "at least": round(1e3 * low, 1),
        "at most": round(1e3 * high, 1),
    }
    for name, server in (("without", plain), ("with", compared)):
        times = list(server.ttft_s.values())
        row[f"{name}: ttft ms p50"] = round(1e3 * report.percentile(times, 50), 1)
        row[f"{name}: ttft ms p99"] = round(1e3 * report.percentile(times, 99), 1)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queries", type=int, default=120, help="arrivals under each load")
    parser.add_argument("--strategy", default=STRATEGY, help="verified for the model")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes; the figures prove nothing")
    given = parser.parse_args()
    run(given.out, quick=given.quick, n_queries=given.queries, strategies=given.strategy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
