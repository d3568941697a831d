"""Commands that make temporary files keep them in one folder, which the next one removes after a kill."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragserve import files
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
def test_a_commands_folder_is_made_first_and_removed(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = tempfile.mkdtemp

    def noted(**how: Any) -> str:
        made.append(make(**how))
        return made[-1]

    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    with pytest.raises(TypeError, match="argument"):
        command()  # without any: it ends as soon as its folder is there
    [folder] = made
    own = Path(folder).name.removeprefix(files._UNLOCKED)
    assert not [path for path in Path("/tmp").iterdir() if path.name.endswith(own)]


@pytest.mark.parametrize("command", [ingest.ingest, sync.run], ids=["ingest", "sync"])
def test_without_an_engine_a_long_name_of_the_temporary_folder_is_kept(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ("x" * 100)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    within = []
    make = tempfile.mkdtemp

    def noted(**how: Any) -> str:
        within.append(how["dir"])
        return make(**how)

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    with pytest.raises(TypeError, match="argument"):
        command()
    assert within == [place]
    assert not list(place.iterdir())


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
