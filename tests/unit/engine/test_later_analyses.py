"""Analyses that questions did without: when, and of what, they are computed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from ragserve.engine import later_analyses
from sglang_ext.wire.protocol import PLAN_FIELD, document_key
from tests.unit.engine.keeping_engine import Engine, answer, request


def test_what_a_question_did_without_is_analysed_when_nothing_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(later_analyses, "QUIET_S", 0.02)

    async def work() -> None:
        engine = Engine()
        asked = replace(request([1, 1], [2], [3, 3], [4] * 5000), unregistered=[2])
        await answer(engine, asked)
        engine.unknown = (1, 2, 3)
        await answer(engine, asked)
        busy = engine.documents.generate(replace(request([1, 1]), strategy="full"))
        await anext(busy)
        await asyncio.sleep(0.1)
        assert engine.analysed == [False] * 4, "not while a request is being answered"
        await busy.aclose()
        assert engine.documents.counted({"analyses": {}}) == {"analyses": {"waiting": 2}}
        async with asyncio.timeout(240):
            while len(engine.messages) < 3:
                await asyncio.sleep(0.01)
        assert engine.prefilled[1:] == [[[3, 3]], [[2]]], "the newest first, and none that takes long"
        assert engine.analysed[4:] == [True, True]
        plans = (each[0]["sampling_params"]["custom_params"][PLAN_FIELD] for each in engine.messages[1:])
        assert [json.loads(plan)["options"]["lasting"] for plan in plans] == [False, True]
        assert engine.documents.counted({"analyses": {}}) == {"analyses": {"waiting": 0}}
        await answer(engine, asked)
        await engine.documents.close()
        await asyncio.sleep(0.1)
        assert len(engine.messages) == 3, "a server that stops analyses nothing more"

    asyncio.run(work())


@pytest.mark.parametrize(
    ("operation", "arguments", "left"),
    [
        ("remove", {"namespace": "n", "keys": [document_key("n", "print", [2])]}, [[[3, 3]]]),
        ("remove", {"namespace": "other", "keys": [document_key("n", "print", [2])]}, [[[3, 3]], [[2]]]),
        ("remove_namespace", {"namespace": "n"}, []),
        ("remove_namespace", {"namespace": "other"}, [[[3, 3]], [[2]]]),
        ("clear", {}, []),
        ("evict", {"tiers": ["device"]}, [[[3, 3]], [[2]]]),
    ],
)
def test_what_is_removed_is_not_analysed_later(
    monkeypatch: pytest.MonkeyPatch, operation: str, arguments: dict[str, Any], left: list[list[list[int]]]
) -> None:
    """Its KV would be computed again, and written to disk, after its removal."""
    monkeypatch.setattr(later_analyses, "QUIET_S", 0.01)

    async def work() -> None:
        engine = Engine()
        asked = request([1, 1], [2], [3, 3])
        await answer(engine, asked)
        engine.unknown = (1, 2)
        await answer(engine, asked)
        engine.documents.controlled(operation, arguments, "print")
        assert engine.documents.counted({"analyses": {}}) == {"analyses": {"waiting": sum(map(len, left))}}
        async with asyncio.timeout(240):
            while engine.documents.counted({"analyses": {}})["analyses"]["waiting"]:
                await asyncio.sleep(0.01)
        assert engine.prefilled[1:] == left
        await engine.documents.close()

    asyncio.run(work())
