"""Without a GPU, questions beside each other would count in each other's time to the first token."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.commands.evaluate import _in_flight
from ragserve.config import load


@pytest.mark.parametrize(("gpu", "asked"), [(False, 1), (True, 4)])
def test_by_what_computes_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, asked: int
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert _in_flight(load(data_dir=tmp_path), None, None) == asked
    elsewhere = load(data_dir=tmp_path, engine_url="http://127.0.0.1:9")
    assert _in_flight(elsewhere, None, None) == 4


@pytest.mark.parametrize(("device", "asked"), [("cpu", 1), ("cuda", 4)])
def test_by_what_a_server_computes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, asked: int
) -> None:
    class Client:
        def __init__(self, url: str, api_key: str | None) -> None:
            assert (url, api_key) == ("http://there", "key")

        def __enter__(self) -> Any:
            return SimpleNamespace(info=lambda: SimpleNamespace(engine={"device": device}))

        def __exit__(self, *raised: object) -> None:
            """Nothing is open."""

    monkeypatch.setattr("ragserve.client.Client", Client)
    assert _in_flight(load(data_dir=tmp_path), "http://there", "key") == asked
