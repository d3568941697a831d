"""How much of a prompt is cached: the count is that of asking about all of it, and little is sent."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from ragserve.engine.document_cache import ControlledCache


class Pages(ControlledCache):
    """An engine whose prefix cache holds the first ``cached`` tokens of the prompt, in whole pages."""

    def __init__(self, prompt: list[int], cached: int, page: int) -> None:
        self._held, self._page = prompt[:cached], page
        self.sent: list[int] = []

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        assert operation == "prefix"
        ids = arguments["ids"]
        self.sent.append(len(ids))
        alike = 0
        while alike < min(len(ids), len(self._held)) and ids[alike] == self._held[alike]:
            alike += 1
        return {"tokens": alike // self._page * self._page}

    def counted(self, prompt: list[int]) -> int:
        """What the engine says of the whole prompt."""
        return len(self._held) // self._page * self._page if self._held == prompt[: len(self._held)] else 0


def test_the_count_is_that_of_the_whole_prompt() -> None:
    rng = random.Random(5)
    edges = [0, 1, 1791, 1792, 1793, 1920, 2047, 2048, 2049, 2176]
    for _ in range(300):
        prompt = [rng.randrange(9) for _ in range(rng.choice([1, 100, 2047, 2048, 2049, 5000]))]
        cached = min(rng.choice([*edges, rng.randrange(5001)]), len(prompt))
        engine = Pages(prompt, cached, rng.choice([1, 16, 48, 64, 112, 128]))
        assert asyncio.run(engine.prefix("n", prompt)) == engine.counted(prompt)


@pytest.mark.parametrize(
    ("tokens", "cached", "sent"),
    [(24_000, 0, [2048]), (24_000, 1100, [2048]), (24_000, 9000, [2048, 24_000]), (2048, 2048, [2048])],
    ids=["new", "first-document", "more", "short"],
)
def test_all_of_a_long_prompt_is_sent_only_where_its_beginning_is_cached(
    tokens: int, cached: int, sent: list[int]
) -> None:
    prompt = list(range(tokens))
    engine = Pages(prompt, cached, 64)
    asyncio.run(engine.prefix("n", prompt))
    assert engine.sent == sent
