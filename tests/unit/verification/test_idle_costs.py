"""What a measurement of costs leaves in the cache of a server: nothing of its own, and all that is users'."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from ragserve.engine import warm_up
from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.errors import EngineError
from ragserve.profiles.gate import FILE_NAME, record
from sglang_ext.wire.own_names import own_name
from tests.unit.verification.idle_engine import FINGERPRINT, entry, fill
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
