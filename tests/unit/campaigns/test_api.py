"""The short form of campaign `api`, on a server whose model and embedder are scripted."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.campaigns import api
from tests.unit.api.scripted_server import Live

pytestmark = pytest.mark.filterwarnings("default")  # schemathesis's own


def test_every_answer_to_generated_requests_is_described(live: Live) -> None:
    for space in ("default", "docs"):
        live.index(space, api.TEXTS)
    rounds = list(api.failures(live.url, 1, ("examples", "fuzzing", "stateful"), examples=1))
    assert [each for _, _, wrong in rounds for each in wrong] == []
    assert {label.split()[0] for label, _, _ in rounds} == {"examples", "fuzzing", "stateful"}
    assert sum(requests for _, requests, _ in rounds) > 100


def test_an_answer_that_is_not_described_is_found(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.engine, "error", RuntimeError("secret detail"))
    with closing(api.failures(live.url, 1, ("examples",), 1)) as rounds:
        wrong = (each for _, _, found in rounds for each in found)
        assert any(each.startswith("not_a_server_error") and "/rag/query" in each for each in wrong)
