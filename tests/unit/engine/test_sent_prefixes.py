"""What may be cached of a prompt, by the prompts that were sent."""

from __future__ import annotations

import random

import pytest

from ragserve.engine import sent_prefixes
from ragserve.engine.sent_prefixes import SentPrefixes


def alike(one: list[int], other: list[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_the_bound_is_never_below_what_is_cached_and_below_twice_as_much() -> None:
    rng = random.Random(7)
    for _ in range(40):
        root = [rng.randrange(50_000) for _ in range(rng.choice([900, 1024, 5000, 20_000]))]
        sent: dict[str, list[list[int]]] = {"a": [], "b": []}
        known = SentPrefixes()
        for _ in range(6):
            key = rng.choice("ab")
            ids = root[: rng.randrange(len(root) + 1)] + [
                rng.randrange(9) for _ in range(rng.randrange(4000))
            ]
            sent[key].append(ids)
            known.note(key, ids)
        for key in sent:
            asked = root[: rng.randrange(len(root) + 1)] + [rng.randrange(9) for _ in range(3000)]
            cached = max((alike(asked, ids) for ids in sent[key]), default=0)
            most = known.most_cached(key, asked)
            assert cached <= most <= len(asked)
            assert most < max(1024, 2 * cached)


def test_only_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_prefixes, "_MOST", 8)
    known, prompts = SentPrefixes(), [[number, *[0] * 1023] for number in range(9)]
    for ids in (*prompts[:8], prompts[0], prompts[8]):
        known.note("a", ids)
    assert [known.most_cached("a", ids) for ids in prompts] == [1024, 1023, *[1024] * 7]
