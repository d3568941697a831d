"""Leading a context along an answer, with an engine that answers from a table; distances worked out by
hand."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from ragserve.engine.base import EngineTimings, EngineUsage, GenerateChunk, GenerateRequest, Sampling
from ragserve.errors import EngineError
from ragserve.verification.distribution import ReferenceAnswer, answer_of, decode, forced_along, kl
from sglang_ext.wire.protocol import MAX_TRACED

TABLES = {  # by strategy, before each token
    "full": [(0.5, 0.25, 0.25), (0.25, 0.5, 0.25), (0.25, 0.25, 0.5)],
    "concat": [(0.5, 0.25, 0.25), (0.5, 0.25, 0.25), (0.25, 0.25, 0.5)],
}


def sent(probabilities: Sequence[float]) -> str:
    return base64.b64encode(np.log(np.asarray(probabilities)).astype("<f4").tobytes()).decode()


class Tables:
    """Says the likeliest token of each distribution, or what it is forced to say."""

    def __init__(self, *, silent: bool = False) -> None:
        self.silent = silent
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.asked.append(request)
        rows = TABLES[request.strategy][: request.sampling.max_new_tokens]
        ids = list(request.forced) or [int(np.argmax(row)) for row in rows]
        count = 0 if self.silent else min(len(ids), request.distributions)
        yield GenerateChunk(
            "".join("abc"[token] for token in ids),
            EngineUsage(),
            EngineTimings(),
            "stop",
            distributions=[sent(row) for row in rows[:count]],
            output_ids=ids,
        )


def request(strategy: str, tokens: int = 8) -> GenerateRequest:
    return GenerateRequest("r", [1, 2], "n", strategy, Sampling(max_new_tokens=tokens, stop=("b",)))


def reference(engine: Tables, tokens: int = 8) -> ReferenceAnswer:
    return asyncio.run(answer_of(engine, request("full", tokens)))  # type: ignore[arg-type]


def test_a_context_is_compared_at_every_token_of_the_other_ones_answer() -> None:
    engine = Tables()
    answer = reference(engine)
    assert answer.ids == (0, 1, 2)
    close, timed = asyncio.run(forced_along(engine, request("concat"), answer))  # type: ignore[arg-type]
    led = engine.asked[-1]
    assert (led.strategy, tuple(led.forced), led.sampling.max_new_tokens) == ("concat", (0, 1, 2), 3)
    assert (led.sampling.stop, led.sampling.ignore_eos) == ((), True), "nothing ends it before"
    assert timed.text == "abc"
    assert close.agrees == (True, False, True)
    assert close.kl[1] == pytest.approx(0.25 * math.log(0.5) + 0.5 * math.log(2), rel=1e-5)
    assert close.kl[0] == close.kl[2] == 0.0
    assert (close.agreement, close.same_answer) == (pytest.approx(2 / 3), False)
    assert close.mean_kl == pytest.approx(close.kl[1] / 3)


def test_a_context_is_the_same_as_itself() -> None:
    engine = Tables()
    close, _ = asyncio.run(forced_along(engine, request("full"), reference(engine)))  # type: ignore[arg-type]
    assert (close.mean_kl, close.agreement, close.same_answer) == (0.0, 1.0, True)


def test_only_so_many_tokens_are_traced() -> None:
    engine = Tables()
    reference(engine, tokens=10 * MAX_TRACED)
    assert engine.asked[0].distributions == engine.asked[0].sampling.max_new_tokens == MAX_TRACED


def test_an_engine_that_sends_no_distribution_is_named() -> None:
    with pytest.raises(EngineError, match="0 distributions instead of 1"):
        reference(Tables(silent=True))
    with pytest.raises(EngineError, match="0 distributions instead of 3"):
        asyncio.run(forced_along(Tables(silent=True), request("concat"), reference(Tables())))  # type: ignore[arg-type]


def test_distances_by_hand() -> None:
    p = decode(sent((0.5, 0.5)))
    assert kl(p, p) == 0.0
    assert kl(p, decode(sent((0.9, 0.1)))) == pytest.approx(
        0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), rel=1e-5
    )
