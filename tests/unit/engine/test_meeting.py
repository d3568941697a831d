"""The engine's processes find each other by a file, where they are on one machine, or end with an error."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragserve.engine.crash import start_explained
from ragserve.engine.local import _MEETING, _meeting_by_file
from ragserve.errors import EngineError


def test_a_new_file_for_each_engine_that_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_MEETING, raising=False)
    args = SimpleNamespace(nnodes=1, dist_init_addr=None)
    places = []
    for _ in range(2):
        with _meeting_by_file(args):
            place = Path(os.environ[_MEETING].removeprefix("file://"))
            assert place.parent.is_dir()
            assert not place.exists(), "torch makes it"
            places.append(place)
        assert _MEETING not in os.environ
        assert not place.parent.exists()
    assert places[0] != places[1]


@pytest.mark.parametrize("given", [{"nnodes": 2}, {"dist_init_addr": "10.0.0.1:5000"}])
def test_engines_of_several_machines_meet_at_an_address(
    given: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(_MEETING, raising=False)
    with _meeting_by_file(SimpleNamespace(**{"nnodes": 1, "dist_init_addr": None} | given)):
        assert _MEETING not in os.environ


@pytest.mark.parametrize(
    "said", ["Rank 0 scheduler died during initialization (exit code: -9)", "Initialization failed"]
)
def test_a_process_that_ends_before_it_is_ready_ends_the_start_with_one_error(said: str) -> None:
    with (
        pytest.raises(EngineError, match=f"The engine did not start: {re.escape(said)}. See the log above"),
        start_explained(),
    ):
        raise RuntimeError(f"{said}. Please see elsewhere.")
    with pytest.raises(RuntimeError, match="another"), start_explained():
        raise RuntimeError("another")
