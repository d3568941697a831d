"""The folder of a run: which one may be used, and what is removed of it."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

from ragserve.adapt.checkpoints import BEST, CHECKPOINT
from ragserve.errors import Conflict, InvalidRequest

RUN, LOCK = "run.json", "lock"
_FOLDERS = re.compile(rf"{CHECKPOINT.pattern}|adapter|merged")
_FILES = re.compile(
    r"(?:run|before|refused|latest|writing)\.json(?:\.\d+\.\d+\.tmp)?|rows\.jsonl(?:\.\d+\.\d+\.tmp)?"
    rf"|{BEST.pattern}"
)
"""What a run makes, with what a killed one leaves of a file that it wrote; the lock is not among them."""
_BEGUN = re.compile(rf"{LOCK}|run\.json\.\d+\.\d+\.tmp")  # of a run that has not got to run.json


def check_work(work: Path, out: Path, *inputs: Path) -> None:
    """Raise InvalidRequest for a folder that OUT or an input is in, or that is in OUT, and Conflict for one
    with anything in it that no run has begun. Changes nothing."""
    place, target = work.resolve(), out.resolve()
    for path in (target, *(each.resolve() for each in inputs)):
        if path.is_relative_to(place):
            raise InvalidRequest(
                f"{work} cannot be the folder for the run's own files: {path} is in it.",
                hint="Give another --work.",
            )
    if place.is_relative_to(target):
        raise InvalidRequest(f"{work} is in {out}, which must not exist.", hint="Give another --work.")
    if work.exists() and not work.is_dir():
        raise InvalidRequest(f"{work} is no folder.", hint="Give another --work.")
    if not work.exists() or (work / RUN).exists():
        return
    if any(not _BEGUN.fullmatch(path.name) for path in work.iterdir()):
        raise Conflict(
            f"{work} is not empty, and no run has begun there.",
            hint="Give a --work that is empty or not there.",
            code="work_not_empty",
        )


def remove_work(work: Path) -> None:
    """Remove what a run has made, and the folder if nothing else is in it. Call it with the lock held."""
    for path in work.iterdir():
        if path.is_symlink():
            continue
        if path.is_dir() and _FOLDERS.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file() and _FILES.fullmatch(path.name):
            path.unlink(missing_ok=True)
    (work / LOCK).unlink(missing_ok=True)
    with suppress(OSError):
        work.rmdir()
