"""The runner of sparse attention's answers, with an engine that says what it was asked."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sparse_answers
from benchmarks.lib.sparse_engines import MINFERENCE, PLAIN
from ragserve.config import Settings
from ragserve.engine import server_args
from ragserve.engine.base import EngineInfo, EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.verification import rows
from sglang_ext.wire.attention_config import AttentionConfig
from tests.conftest import MODEL


class Echo:
    """Answers with its request's decode mode."""

    def __init__(self) -> None:
        self.info = EngineInfo("local", str(MODEL), str(MODEL), "0", "cpu", "", 8192, 8192, ())
        self.checked = False

    async def warm(self, request: GenerateRequest) -> None:
        pass

    async def control(self, operation: str) -> dict[str, Any]:
        self.checked |= operation == "check"
        return {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        usage = EngineUsage(len(request.input_ids), 0, 1)
        yield GenerateChunk(str(request.decode["mode"]), usage, EngineTimings(), "stop")


@pytest.fixture
def given(tmp_path: Path) -> argparse.Namespace:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    out.mkdir()
    question = {
        "docs": [["France", "The capital is Paris."]],
        "question": "The capital?",
        "answers": ["Paris"],
    }
    for name in ("one", "two"):
        (data / f"{name}.jsonl").write_text(
            "".join(json.dumps({"id": str(i), **question}) + "\n" for i in range(4))
        )
    heads = tmp_path / "heads.json"
    heads.write_text(json.dumps({"gates": [[0.0, 1.0]] * 15}))
    return argparse.Namespace(
        out=out,
        model=MODEL,
        data=data,
        sets=["one", "two"],
        only=["*"],
        budgets=[512, 1024],
        thresholds=[0.9],
        heads=heads,
        limit=None,
        half=None,
        in_flight=2,
        prompts=None,
        pool=8192,
        set={},
        engine=PLAIN,
        shard=[0, 1],
        until=float("inf"),
    )


def test_every_engine_has_settings_that_a_server_would_start_with(
    given: argparse.Namespace, tmp_path: Path
) -> None:
    for engine in sparse_answers.engines_of(given):
        settings = sparse_answers.settings_of(given, engine, tmp_path)
        fields = server_args._attention_config(settings) | dict(engine.attention)
        config = AttentionConfig.model_validate_json(json.dumps(fields))  # as the scheduler reads it
        assert config.max_budget == 1024
        assert (config.lines_by == "prompt_end") == (engine.name == MINFERENCE)
        assert (config.heads is not None) == (engine.streaming is not None)
    given.heads = None
    assert all(engine.streaming is None for engine in sparse_answers.engines_of(given))


def test_sets_are_mixed_and_rows_go_on_where_they_stopped(
    given: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Echo()

    def run_once(settings: Settings, work: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        assert settings.sparse_attention == "on"
        asyncio.run(work(engine))

    monkeypatch.setattr(sparse_answers, "run_once", run_once)
    given.only = [f"{PLAIN}/budget 512"]
    given.shard = [1, 2]
    sparse_answers.work(given)
    assert engine.checked
    first = rows.read(given.out)
    assert len(first) == 8, "half of each set, densely and under a budget"
    assert {name for name, _, _ in first} == {"one", "two"}
    assert {row["answer"] for row in first.values()} == {"dense", "hierarchical"}
    given.shard = [0, 1]
    sparse_answers.work(given)
    assert rows.count(given.out) == len(rows.read(given.out)) == 16, "nothing is asked twice"
    assert json.loads((given.out / "engine-pages-of-64.json").read_text())["engine"]["kind"] == "local"
