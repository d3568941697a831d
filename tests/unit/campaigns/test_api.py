"""The short form of campaign `api`, on a server whose model and embedder are scripted."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import schemathesis
from requests.exceptions import ChunkedEncodingError
from schemathesis.engine import events

from tests.campaigns import api
from tests.campaigns.progress import Progress
from tests.unit.api.scripted_server import Live

pytestmark = pytest.mark.filterwarnings("default")  # schemathesis's own


def test_every_answer_to_generated_requests_is_described(live: Live) -> None:
    for space in ("default", "docs"):
        live.index(space, api.TEXTS)
    rounds = list(api.failures(live.url, 1, ("examples", "fuzzing", "stateful"), examples=1))
    assert [each for asked in rounds for each in asked.wrong] == []
    assert {asked.phase for asked in rounds} == {"examples", "fuzzing", "stateful"}
    assert sum(asked.requests for asked in rounds) > 100


@pytest.mark.parametrize(
    ("phases", "said"),
    [(api.PHASES, []), (("examples", "coverage"), ["fuzzing, stateful, stateful, by a link"])],
)
def test_a_run_that_leaves_a_phase_out_is_a_violation(
    phases: tuple[str, ...], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def scripted(url: str, seed: int, *, seconds: float, **_: Any) -> Generator[api.Asked, None, None]:
        given.append(seconds)
        for phase in phases:
            yield api.Asked(phase, "GET /info", api.MANY // len(phases), int(phase == "stateful"), [])

    monkeypatch.setattr(api, "failures", scripted)
    progress = Progress(tmp_path, "api", seed=1, target=api.MANY, minutes=20)
    api.run(progress, "http://nowhere")
    assert [each.partition("no request of ")[2] for each in progress.violations] == said
    assert given == [pytest.approx(1200, abs=60)]  # a round is told how long it may take


@pytest.mark.parametrize(("chars", "violations"), [(60_000, 0), (100, 1)])
def test_an_answer_that_breaks_off_is_found_unless_the_request_is_no_http(
    live: Live, chars: int, violations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def events_of(schema: Any) -> Any:
        error = ChunkedEncodingError("Connection broken")
        line = f"curl -X GET 'http://nowhere/rag/documents?filter={'x' * chars}'"
        label = "GET /rag/documents"
        event = events.NonFatalError(
            error=error, phase=None, label=label, related_to_operation=True, code_sample=line
        )
        return SimpleNamespace(execute=lambda: iter([event]))

    monkeypatch.setattr("schemathesis.engine.from_schema", events_of)
    wrong = [each for asked in api.failures(live.url, 1) for each in asked.wrong]
    assert len(wrong) == violations
    assert all("Connection broken" in each and "/rag/documents?filter=x" in each for each in wrong)


def test_an_answer_that_is_not_described_is_found(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    described = schemathesis.openapi.from_url
    monkeypatch.setattr(
        schemathesis.openapi,
        "from_url",
        lambda *args, **named: described(*args, **named).include(path="/rag/query"),
    )
    monkeypatch.setattr(live.engine, "error", RuntimeError("secret detail"))
    with closing(api.failures(live.url, 1, ("examples",), 1)) as rounds:
        wrong = (each for asked in rounds for each in asked.wrong)
        assert any(each.startswith("not_a_server_error") and "/rag/query" in each for each in wrong)
