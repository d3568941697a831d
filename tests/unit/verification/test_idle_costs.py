"""Costs that a server measures: before which warm-ups, on which documents, and what that leaves in its cache:
nothing of its own, and all that is users'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ragserve.cache.warm import Warmer, submit_warm
from ragserve.engine import warm_up
from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.errors import EngineError
from ragserve.profiles.costs import COSTS
from ragserve.profiles.costs import FILE_NAME as COSTS_FILE
from ragserve.profiles.gate import FILE_NAME, record
from ragserve.verification.costs import CostSchedule
from sglang_ext.wire.own_names import own_name
from tests.unit.verification.idle_engine import FINGERPRINT, IdleEngine, entry, fill
from tests.unit.verification.tuned_server import LABELS, Tuned


@pytest.fixture
def forgotten(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The namespaces whose KV is removed while costs are measured."""
    found: list[str] = []

    async def forget(namespace: str, documents: Any) -> None:
        found.append(namespace)

    monkeypatch.setattr(tuned.engine, "forget", forget)
    fill(tuned.store, "notes", 3)
    record(tuned.folder / FILE_NAME, FINGERPRINT, {label: entry() for label in LABELS})
    return found


def test_costs_are_measured_in_a_namespace_that_no_user_can_have(tuned: Tuned, forgotten: list[str]) -> None:
    assert tuned.run()[-1]["state"] == "waiting"
    assert set(forgotten) == {one.namespace for one in tuned.engine.asked if one.rid == "calibrate"}
    assert "calibration" not in forgotten
    assert warm_up.NAMESPACE != "ragserve-warm-up"
    assert own_name("calibration") != own_name("calibration"), "nobody can guess it"


def test_a_measurement_that_fails_leaves_no_documents(
    tuned: Tuned, forgotten: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = tuned.engine.generate

    def generate(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if request.strategy == "concat":
            raise EngineError("it broke")
        return answer(request)

    monkeypatch.setattr(tuned.engine, "generate", generate)
    tuned.run(4)
    assert set(forgotten) == {one.namespace for one in tuned.engine.warmed}


def test_documents_that_a_case_has_left_in_a_tier_are_not_computed_again(tuned: Tuned) -> None:
    fill(tuned.store, "notes", 3)
    record(tuned.folder / FILE_NAME, FINGERPRINT, {LABELS[0]: entry()})
    tuned.run()
    computed = [tuple(one.input_ids[one.spans[0].start : one.spans[0].end]) for one in tuned.engine.warmed]
    assert len(computed) == len(set(computed)) > 3
    costs = COSTS.load(tuned.folder / COSTS_FILE, FINGERPRINT)
    assert costs is not None
    assert set(costs.composed[LABELS[0]]) == {"device", "host", "disk", "absent"}


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [
        (2560, [256, 512, 1024, 2560]),
        (3072, [256, 512, 1024, 2048, 3072]),
        (1024, [256, 512, 1024]),
        (1100, [256, 512, 1100]),
        (600, [150, 300, 600]),
    ],
)
def test_no_two_of_the_longest_contexts_are_nearly_alike(longest: int, lengths: list[int]) -> None:
    engine: Any = IdleEngine()
    assert CostSchedule(max_tokens=longest).lengths(engine) == lengths


def test_only_the_first_costs_are_measured_before_a_warm_up_in_the_background(tuned: Tuned) -> None:
    fill(tuned.store, "notes", 3)
    record(tuned.folder / FILE_NAME, FINGERPRINT, {label: entry() for label in LABELS})

    def priced() -> list[str]:
        tuned.run()
        costs = COSTS.load(tuned.folder / COSTS_FILE, FINGERPRINT)
        return [] if costs is None else list(costs.composed)

    tuned.warm_up = tuned.job = True
    assert priced() == []
    tuned.job = False
    assert priced() == LABELS[:1]
    tuned.warm_up = False
    assert priced() == LABELS


def test_a_case_waits_for_the_documents_that_are_being_warmed(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tuned.store, "notes", 3)
    engine: Any = tuned.engine
    alone = list[bool]()

    async def warm(request: GenerateRequest) -> None:
        engine.warmed.append(request)
        alone.append(tuned.timing.locked())

    async def run() -> None:
        loop = asyncio.get_running_loop()
        warmer = Warmer(tuned.store, engine, tuned.builder, loop, timing=tuned.timing)
        async with tuned.timing:
            assert warmer.busy(), "those in the background do not even begin"
        assert not warmer.busy()
        report = await asyncio.to_thread(warmer.run, submit_warm(tuned.store, "notes").job_id)
        assert report.progress.warmed == 3

    monkeypatch.setattr(engine, "warm", warm)
    asyncio.run(run())
    assert alone
    assert all(alone)
    assert not tuned.timing.locked()
