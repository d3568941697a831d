"""What a measurement of costs computes, and what it leaves in the cache of a server: nothing of its own, and all
that is users'."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from ragserve.engine import warm_up
from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.engine.own_names import own_name
from ragserve.errors import EngineError
from ragserve.profiles.costs import COSTS
from ragserve.profiles.costs import FILE_NAME as COSTS_FILE
from ragserve.profiles.gate import FILE_NAME, record
from ragserve.verification.costs import CostSchedule
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
