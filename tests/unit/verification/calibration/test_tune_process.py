"""Following the worker: its progress, a second start with the profile that it found, and its failure."""

from __future__ import annotations

import errno
import json
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ragserve.config import Settings
from ragserve.errors import EngineError
from ragserve.verification.calibration import tune_worker
from ragserve.verification.calibration.tune_process import tune
from ragserve.verification.calibration.tune_worker import RESTART, TuneJob

WORKER = f"""
import json, pathlib, sys, time
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
folder = pathlib.Path(job["folder"])
if not (folder / "profile").exists():
    (folder / "profile").touch()
    sys.exit({RESTART})
(folder / "new").write_text(json.dumps({{"phase": "comparing", "done": 7}}))
(folder / "new").rename(folder / "progress.json")
while not pathlib.Path(__file__).with_name("seen").exists():
    time.sleep(0.01)
(folder / "result.json").write_text(json.dumps({{"job": job}}))
"""


def run(tmp_path: Path, script: str, seen: list[tuple[str, int]], **settings: Any) -> dict[str, Any]:
    worker = tmp_path / "worker.py"
    worker.write_text(script)

    def see(phase: str, done: int) -> None:
        seen.append((phase, done))
        if done == 7:
            worker.with_name("seen").touch()

    return tune(
        Settings(data_dir=tmp_path / "data", api_key="secret", **settings),
        "notes",
        ["concat"],
        seconds=60,
        most=9,
        at_once=1,
        questions=None,
        on_progress=see,
        command=(sys.executable, str(worker)),
    )


def test_a_worker_is_started_again_with_the_profile_that_it_found(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    job = run(tmp_path, WORKER, seen)["job"]
    assert ("comparing", 7) in seen
    assert (job["namespace"], job["strategies"], job["most"]) == ("notes", ["concat"], 9)
    assert job["until"] - job["began"] == pytest.approx(60)
    assert job["state"] == str(tmp_path / "data" / "tune")
    assert "secret" not in str(job)


def test_a_wall_clock_that_is_set_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", count(step=86_400).__next__)
    assert run(tmp_path, WORKER, [])["phases"]["comparing"] < 3600


def test_a_worker_gets_the_url_of_the_registry_from_its_environment_only(tmp_path: Path) -> None:
    script = """
import json, os, pathlib, sys
job = pathlib.Path(sys.argv[1])
result = {"url": os.environ["RAGSERVE_REGISTRY_URL"], "job": job.read_text()}
job.with_name("result.json").write_text(json.dumps(result))
"""
    url = "postgresql://a:hunter2@db/registry"
    result = run(tmp_path, script, [], registry_url=url)
    assert result["url"] == url
    assert "registry_url" not in result["job"]
    assert "hunter2" not in result["job"]


def test_a_worker_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"(?s)ended with 3.*no such namespace"):
        run(tmp_path, "import sys; print('no such namespace'); sys.exit(3)", [])
    with pytest.raises(EngineError, match="ended with 0"):
        run(tmp_path, "", [])
    with pytest.raises(EngineError, match=f"ended with {RESTART}"):
        run(tmp_path, f"import sys; sys.exit({RESTART})", [])


def test_a_worker_that_says_why_it_failed_shows_that_and_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_job: TuneJob) -> int:
        raise EngineError("The engine has died.", hint="Give it less memory.")

    monkeypatch.setattr(tune_worker, "run", fails)
    job = TuneJob("notes", ["concat"], str(tmp_path), str(tmp_path), 0, 1, 1, 1)
    assert tune_worker.main(job) == 1
    said = (tmp_path / "failure.json").read_text()
    script = f"""
import json, pathlib, sys
folder = pathlib.Path(json.loads(pathlib.Path(sys.argv[1]).read_text())["folder"])
(folder / "failure.json").write_text({said!r})
sys.exit("Traceback")
"""
    with pytest.raises(EngineError) as failed:
        run(tmp_path, script, [])
    assert failed.value.message == "The engine has died."
    assert failed.value.hint.startswith("Give it less memory. What was compared is kept")


def test_a_worker_without_room_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_job: TuneJob) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "rows-0.jsonl")

    monkeypatch.setattr(tune_worker, "run", fails)
    job = TuneJob("notes", ["concat"], str(tmp_path), str(tmp_path), 0, 1, 1, 1)
    assert tune_worker.main(job) == 1
    said = json.loads((tmp_path / "failure.json").read_text())
    assert said["message"] == "rows-0.jsonl: No space left on device."
    assert said["hint"].startswith("Free some space")
