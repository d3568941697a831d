"""Strategies of a session: those that keep documents whole, at costs without the namespace's prefix cache."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.answering.auto import Chooser, StrategyChoice
from ragserve.answering.prompt import Prompt, Segment
from ragserve.engine.base import EngineInfo
from ragserve.profiles.costs import COSTS, Costs
from ragserve.strategy_spec import keeps_whole, parse
from tests.unit.api.scripted_server import ScriptedEngine

PROMPT = Prompt(
    list(range(500)),
    (Segment("system", 0, 20), Segment("document", 20, 480), Segment("question", 480, 500)),
    1,
    460,
    460,
)


class CachedEngine(ScriptedEngine):
    """Has every document on the device, and all of the prompt in the namespace's prefix cache."""

    warm = control = ScriptedEngine.close

    async def where(self, namespace: str, documents: Any) -> Any:
        return SimpleNamespace(fastest=lambda: ["device"] * len(documents))

    async def prefix(self, namespace: str, input_ids: Any) -> int:
        return len(input_ids)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("prefix", True),
        ("concat:recompute=sentences,share=0.1", True),
        ("epic:keep=1.0", True),
        ("epic:keep=0.5", False),
        ("concat:kept_positions=compact", False),
        ("concat:experimental.rotate=false", False),
        ("samkv", False),
        ("samkv:keep=1.0", False),
    ],
)
def test_what_keeps_documents_whole(text: str, whole: bool) -> None:
    assert keeps_whole(parse(text)[0]) == whole


def chosen(tmp_path: Path, verified: list[str], *, whole: bool) -> StrategyChoice:
    engine = CachedEngine(Path("none"))
    info: EngineInfo = engine.info
    composed = {label: {"device": (1.0, 0.0, 0.0)} for label in ("samkv", "epic:first=4")}
    costs = Costs(
        (0.0, 1.0, 0.0), {**composed, "epic:first=4": {"device": (100.0, 0.0, 0.0)}}, 0.0, "m", "", "d"
    )
    COSTS.save(tmp_path / "costs.json", info.fingerprint, costs)
    gate: Any = SimpleNamespace(
        verified=lambda namespace: verified, basis=lambda label, namespace: "", good=lambda labels, _: labels
    )
    chooser = Chooser(engine, gate, tmp_path / "costs.json")
    return asyncio.run(chooser.choose(PROMPT, "n", whole=whole, shared=not whole))


def test_auto_leaves_out_what_keeps_a_part_of_the_documents(tmp_path: Path) -> None:
    both = ["samkv", "epic:first=4"]
    assert chosen(tmp_path, both, whole=True).spec.label == "epic:first=4"
    assert chosen(tmp_path, both, whole=False).spec.label == "prefix", "all of the prompt is cached"
    only = chosen(tmp_path, ["samkv"], whole=True)
    assert (only.spec.label, only.reason) == (
        "prefix",
        "no verified strategy keeps documents whole, as sessions and given documents need",
    )
