"""kill -9 of `ragserve tune`: of the command, its worker or a process of the worker's engine.

What was compared stays and is not computed again, no process is left, and a run that is let through has a row
of every usable question under every strategy."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from ragserve.verification import rows
from ragserve.verification.verdicts import FOLDER
from tests.integration.models import small_models
from tests.integration.processes import assert_gone
from tests.unit.commands.test_ingest import many, start

KILLS_OF_A_RUN = 5  # before a tuning is let through
QUESTIONS = 6
STRATEGIES = ("concat", "epic:first=4")
_ROWS = QUESTIONS * (1 + len(STRATEGIES))
_ENDS_WITHIN_S = 10.0
LETS_THROUGH_S = 600.0


def tune(folder: Path, chance: random.Random) -> None:
    work = folder / "tune"
    killed = work / "killed"
    if not killed.exists():
        prepare(work, QUESTIONS)
        (work / "questions.txt").write_text("".join(f"What is note {i} about?\n" for i in range(QUESTIONS)))
        killed.write_text("")
    before = _compared(work)
    process = _begun(work)
    wait_for(lambda: len(_compared(work)), chance.randint(len(before), _ROWS), process)
    time.sleep(chance.uniform(0, 0.3))
    finished = kill_one(process, chance)
    after = _compared(work)
    assert not finished or len(after) == _ROWS, "it ended with 0, and rows are missing"
    lost = {key for key, row in before.items() if key[2] != "full" and after.get(key) != row}
    lost |= before.keys() - after.keys()
    assert not lost, f"lost or computed again: {sorted(lost)}"
    killed.write_text(killed.read_text() + "x")
    if len(killed.read_text()) == KILLS_OF_A_RUN:
        killed.unlink()
        _assert_finishes(work)


def prepare(work: Path, notes: int) -> None:
    """Make small models, and ingest some notes. Commands that run in the folder use both."""
    shutil.rmtree(work, ignore_errors=True)
    (work / "docs").mkdir(parents=True)
    many(work / "docs", notes)
    models = small_models(work)
    (work / "ragserve.toml").write_text("".join(f'{name} = "{path}"\n' for name, path in models.items()))
    done = start("ingest", "docs", "--json", cwd=work)
    _, said = done.communicate()
    assert done.returncode == 0, said.decode()[-2000:]


def _begun(work: Path) -> subprocess.Popen[bytes]:
    options = ["--questions", "questions.txt", "--strategies", ",".join(STRATEGIES)]
    return start("tune", *options, "--minutes", "60", "--max-new-tokens", "4", cwd=work)


def wait_for(done: Callable[[], int], n: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until ``n`` of its results are on disk, or the process has ended."""
    deadline = time.monotonic() + LETS_THROUGH_S
    while process.poll() is None and done() < n:
        assert time.monotonic() < deadline, f"no {n} results after {LETS_THROUGH_S:.0f} s"
        time.sleep(0.02)


def kill_one(process: subprocess.Popen[bytes], chance: random.Random) -> bool:
    """Kill a process that the command cannot do without; all of them end. Return whether it had finished."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
        command = psutil.Process(process.pid)
        family = [command, *command.children(recursive=True)]
        chance.choice([each for each in family if _is_needed(each, command)]).kill()
    try:
        _, said = process.communicate(timeout=_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise AssertionError(f"it still ran {_ENDS_WITHIN_S:.0f} s after the kill") from None
    assert process.returncode in (0, -signal.SIGKILL) or b"Traceback" not in said, said.decode()[-2000:]
    assert_gone(family, _ENDS_WITHIN_S)
    return process.returncode == 0


def _is_needed(process: psutil.Process, command: psutil.Process) -> bool:
    """The command, its worker, and the scheduler and the detokenizer of the worker's engine."""
    worker = "ragserve.verification.calibration.tune_worker" in process.cmdline()
    return process == command or worker or process.name().startswith("sglang::")


def _compared(work: Path) -> dict[rows.Key, rows.Row]:
    """The rows that are no failures, of every run so far."""
    found: dict[rows.Key, rows.Row] = {}
    for folder in (work / "ragserve-data" / FOLDER).glob("*/"):
        found |= {key: row for key, row in rows.read(folder).items() if not row["error"]}
    return found


def _assert_finishes(work: Path) -> None:
    process = _begun(work)
    _, said = process.communicate(timeout=LETS_THROUGH_S)
    assert process.returncode == 0, said.decode()[-2000:]
    found = _compared(work)
    usable = sum(bool(row.get("usable")) for row in found.values())
    full = sum(row["strategy"] == "full" for row in found.values())
    assert (full, len(found)) == (QUESTIONS, QUESTIONS + usable * len(STRATEGIES)), sorted(found)
    for file in (work / "ragserve-data" / FOLDER).glob("*/rows-*.jsonl"):
        lines = map(json.loads, file.read_text().splitlines())
        times = Counter(rows.key(row) for row in lines if not row["error"] and row["strategy"] != "full")
        assert max(times.values(), default=1) == 1, f"computed again: {times.most_common(3)}"
