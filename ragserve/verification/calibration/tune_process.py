"""Run `tune_worker` for a command: start it, follow its progress, and start it again with a profile that it
has found."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragserve.config import SECRETS, Settings
from ragserve.engine.running_server import kill_session, spawn
from ragserve.errors import EngineError
from ragserve.files import write_json
from ragserve.verification.calibration.tune_worker import FAILURE, PROGRESS, RESTART, RESULT, TuneJob
from ragserve.verification.verdicts import FOLDER

_POLL_S = 0.2
_GRACE_S = 600.0  # for what was begun when the time was up
_TAIL = 4000  # bytes of the log in an error
_KEPT = "What was compared is kept: run the same command again to go on."
OnTuning = Callable[[str, int], None]
"""Called with the phase, and the number of questions that have been compared."""


def tune(
    settings: Settings,
    namespace: str,
    strategies: Sequence[str],
    *,
    seconds: float,
    most: int,
    at_once: int,
    questions: Path | None,
    on_progress: OnTuning,
    command: Sequence[str] = (sys.executable, "-m", "ragserve.verification.calibration.tune_worker"),
) -> dict[str, Any]:
    """Tune for ``seconds``, engine start included, on ``most`` questions at most, ``at_once`` of them in
    flight, and return the worker's result, with the seconds of its ``phases``. What was compared stays in the
    data folder, and the next run goes on from there.

    Raises EngineError if the worker fails: with what it says, or else with the end of its log."""
    began = last = time.monotonic()
    phases: dict[str, float] = {}

    def noted(phase: str, done: int) -> None:
        nonlocal last
        now, name = time.monotonic(), phase.split()[0].rstrip(":,")
        phases[name] = phases.get(name, 0.0) + now - last
        last = now
        on_progress(phase, done)

    with tempfile.TemporaryDirectory(prefix="ragserve-tune-") as name:
        folder = Path(name)
        job = TuneJob(
            namespace,
            list(strategies),
            str(folder),
            str(settings.data_dir / FOLDER),
            began,
            began + seconds,
            most,
            at_once,
            settings.model_dump(mode="json", exclude=set(SECRETS)),
            None if questions is None else str(questions.resolve()),
        )
        write_json(folder / "job.json", asdict(job))
        environment = {"PYTHONUNBUFFERED": "1"}
        environment |= settings.secrets("registry_url", "embedder_api_key", "rerank_api_key")
        for _ in range(2):  # the second one has the profile that the first one found
            status = _followed([*command, str(folder / "job.json")], environment, folder, job.until, noted)
            if status != RESTART:
                break
        if (folder / FAILURE).exists():
            failure = json.loads((folder / FAILURE).read_text(encoding="utf-8"))
            raise EngineError(failure["message"], hint=f"{failure['hint']} {_KEPT}".strip())
        if status != 0 or not (folder / RESULT).exists():
            end = (folder / "log").read_bytes()[-_TAIL:].decode("utf-8", "replace")
            raise EngineError(f"Tuning ended with {status}:\n{end}", hint=_KEPT)
        result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        return result | {"phases": {name: round(seconds) for name, seconds in phases.items()}}


def _followed(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    until: float,
    on_progress: OnTuning,
) -> int:
    with (folder / "log").open("ab") as output:
        process = spawn(command, output, environment)
    try:
        while process.poll() is None:
            time.sleep(_POLL_S)
            with contextlib.suppress(FileNotFoundError):
                now = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
                on_progress(str(now["phase"]), int(now["done"]))
            if time.monotonic() > until + _GRACE_S:
                raise EngineError(
                    f"Tuning did not end {_GRACE_S:.0f} s after its time was up.",
                    hint="Give it a smaller --context-length, or fewer --strategies.",
                )
        return process.returncode
    finally:
        kill_session(process)
