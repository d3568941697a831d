"""The demo waits for the idle server as long as that is busy with what it waits for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from examples import demo

WARMING = {"state": "waiting", "for": "ingestions and warm-ups"}
MEASURING = {"state": "measuring costs", "strategies": ["concat"]}


def waited(folder: Path, states: list[dict[str, Any]], *, written: bool) -> int:
    """Wait while the server says these states; it writes its costs with the last one, if ``written``. Returns
    how many it said."""
    costs, said = folder / "costs.json", 0

    def info(request: httpx.Request) -> httpx.Response:
        nonlocal said
        state = states[said]
        said += 1
        if written and said == len(states):
            costs.write_text("{}")
        return httpx.Response(200, json={"verification": {"idle_tuning": state}})

    with httpx.Client(transport=httpx.MockTransport(info), base_url="http://server") as client:
        demo.wait_for_costs(client, costs)
    return said


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pause take two minutes at once, which is as long as all of it may take on a slow machine."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 120.0

    monkeypatch.setattr(demo, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))


def test_it_says_what_it_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = [{"state": "waiting"}, WARMING, WARMING, MEASURING, MEASURING]
    assert waited(tmp_path, states, written=True) == 5
    assert capsys.readouterr().out.splitlines() == [
        "The idle server is waiting for ingestions and warm-ups ...",
        "The idle server is measuring costs ...",
        "The idle server knows what strategies cost here (600 s).",
    ]


@pytest.mark.parametrize("state", ["off", "verifying"])
def test_it_does_not_wait_for_what_will_not_come(tmp_path: Path, state: str) -> None:
    assert waited(tmp_path, [MEASURING, {"state": state}], written=False) == 2


def test_it_does_not_wait_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waited(tmp_path, [MEASURING] * 100, written=False)
    assert "does not know yet what strategies cost" in capsys.readouterr().out
