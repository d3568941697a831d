"""What verification in use costs those who ask: the same arrivals at a server that compares none of its
answers with full prefill and at one that compares a share of them (``verify_share``).

Both servers run, and are asked in turns, round by round. A round begins when no answer waits to be compared,
so that neither server works during the other's round."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragserve.api.views import MessageEvent
from ragserve.bench.api import example_corpus, example_questions
from ragserve.bench.open_loop import SEED, arrival_times
from ragserve.client import AsyncClient, Client
from ragserve.errors import RagserveError, Unavailable
from ragserve.measuring import report
from ragserve.measuring.server import running_server
from ragserve.strategy_spec import StrategySpec, parse
from ragserve.verification.idle_worker import QUIET_S

SHARES = (0.0, 1.0)
STRATEGY = "concat:recompute=sentences,share=0.3"  # verified for the embedded model
_FILES, _QUICK_FILES = 8, 2  # of the example corpus
_K = 5
_MAX_NEW_TOKENS = 16
_ROUNDS = 3
_TIMED = 5  # questions that the rate follows from
_SETTLED_S = 600.0
_POLL_S = 0.25
_NOTE = (
    "The same Poisson arrivals at two servers that run side by side and are asked in turns, documents warm. "
    "Times from the arrival on, as the client sees them; answers/s: from the first arrival to the last "
    "answer. compared: answers that were compared with full prefill, of them `between arrivals` before the "
    "last answer of their round. A server compares when it has had no request for a second, and stops when "
    "one arrives: half of the mean gap is idle."
)


@dataclass
class VerifiedLoad:
    """What one server's rounds have shown, in seconds. ``between``: answers compared during the rounds."""

    url: str
    share: float
    ttft_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    lasted_s: float = 0.0
    between: int = 0
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
    ``verify_share`` are `SHARES`, on ``n_queries`` arrivals each.

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
        loads = [VerifiedLoad(url, share) for url, share in zip(urls, SHARES, strict=True)]
        spaces = []
        for load in loads:
            api = stack.enter_context(Client(load.url, api_key=key, no_store=True))
            spaces.append(stack.enter_context(example_corpus(api, _QUICK_FILES if quick else _FILES)))
            questions = example_questions(api, spaces[-1])
        measured = _Measured(loads, spaces, questions, spec, key)
        rate, info = asyncio.run(measured.run(rounds, each))
    workload = {
        "model": Path(info["model"]).name,
        "device": info["device"],
        "strategy": spec.label,
        "k": _K,
        "max_new_tokens": _MAX_NEW_TOKENS,
        "arrivals a second": round(rate, 3),
        "rounds": rounds,
        "drawn with seed": SEED,
    }
    out = out_dir / "verify-share.json" if out_dir else None
    return report.write("verify-share", workload, measured.rows(), out=out, note=_NOTE)


class _Measured:
    """Asks the servers in turns."""

    def __init__(
        self,
        loads: Sequence[VerifiedLoad],
        spaces: Sequence[str],
        questions: Sequence[str],
        spec: StrategySpec,
        key: str | None,
    ) -> None:
        self._loads, self._spaces, self._questions = loads, spaces, questions
        self._spec, self._key = spec, key
        self._compared = [0] * len(loads)

    async def run(self, rounds: int, each: int) -> tuple[float, dict[str, Any]]:
        """Measure; return the arrivals a second, and the engine's description."""
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(load.url, api_key=self._key, no_store=True))
                for load in self._loads
            ]
            took = []
            for client, space in zip(clients, self._spaces, strict=True):
                for question in self._questions[:each]:
                    await self._ask(client, space, question)  # its documents are computed
                await self._settled(client, space)
                for question in self._questions[: min(each, _TIMED)]:
                    took.append((await self._ask(client, space, question))[1])
            rate = 0.5 / (statistics.median(took) + QUIET_S)
            for number in range(rounds):
                turns = list(zip(self._loads, clients, self._spaces, strict=True))
                for load, client, space in turns[:: -1 if number % 2 else 1]:
                    for other, its in zip(clients, self._spaces, strict=True):
                        await self._settled(other, its)
                    await self._round(load, client, space, rate, each, number)
            self._compared = [
                await self._settled(client, space)
                for client, space in zip(clients, self._spaces, strict=True)
            ]
            info = (await clients[0].info()).engine
        for load, compared in zip(self._loads, self._compared, strict=True):
            if load.share and not compared:
                raise RagserveError(f"The server with verify_share={load.share:g} compared no answer.")
        return rate, info

    def rows(self) -> list[dict[str, Any]]:
        """A row of each server."""
        return [
            {
                "verify_share": load.share,
                "answers": len(load.ttft_s),
                "failed": len(load.errors),
                "compared": compared,
                "between arrivals": load.between,
                "ttft ms p50": round(1e3 * report.percentile(load.ttft_s, 50), 1),
                "ttft ms p99": round(1e3 * report.percentile(load.ttft_s, 99), 1),
                "answer ms p50": round(1e3 * report.percentile(load.whole_s, 50), 1),
                "answer ms p99": round(1e3 * report.percentile(load.whole_s, 99), 1),
                "answers/s": round(len(load.ttft_s) / load.lasted_s, 3),
            }
            for load, compared in zip(self._loads, self._compared, strict=True)
        ]

    async def _round(
        self, load: VerifiedLoad, client: AsyncClient, space: str, rate: float, each: int, number: int
    ) -> None:
        times = arrival_times(rate, 10 * each / rate, seed=SEED + number)[:each]
        before = (await self._state(client, space))[1]
        clock = time.perf_counter
        started = clock()

        async def one(index: int, at: float) -> None:
            await asyncio.sleep(max(0.0, started + at - clock()))
            question = self._questions[(number + index) % len(self._questions)]
            try:
                ttft, whole = await self._ask(client, space, question, started + at)
            except RagserveError as error:
                load.errors.append(str(error))
                return
            load.ttft_s.append(ttft)
            load.whole_s.append(whole)

        await asyncio.gather(*(one(index, at) for index, at in enumerate(times)))
        load.lasted_s += clock() - started - times[0]
        load.between += (await self._state(client, space))[1] - before

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
