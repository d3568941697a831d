"""Commands that make temporary files keep them in one folder, which the next one removes after a kill."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragserve.commands import bench, calibrate, calibrate_decode, evaluate, ingest, serve, sync, tune
from ragserve.config import Settings


@pytest.mark.parametrize(
    "command",
    [
        bench.bench,
        calibrate.calibrate,
        calibrate_decode.calibrate_decode,
        evaluate.evaluate,
        ingest.ingest,
        sync.run,
        tune.tune,
    ],
    ids=lambda command: command.__module__.rpartition(".")[2],
)
def test_a_commands_folder_is_made_first(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = tempfile.mkdtemp

    def noted(**how: Any) -> str:
        made.append(make(**how))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    with pytest.raises(TypeError, match="argument"):
        command()  # without any: it ends as soon as its folder is there
    assert len(made) == 1
    assert not Path(made[0]).exists()


@pytest.mark.parametrize("elsewhere", ["engine_url", "workers"])
def test_a_server_whose_engine_is_elsewhere_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: str
) -> None:
    places = []

    def note(*_: Any) -> None:
        places.append(Path(tempfile.gettempdir()))

    for name in ("_serve_remote", "_serve_workers"):
        monkeypatch.setattr(serve, name, note)
    monkeypatch.setattr(serve, "check_start", lambda *_args, **_options: None)
    where: dict[str, Any] = {elsewhere: "http://127.0.0.1:9"}
    serve.serve(Settings(port=0, data_dir=tmp_path, **where))
    [place] = places
    assert place.name.startswith("ragserve-run-")
    assert not place.exists()
