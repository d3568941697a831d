"""kill -9 of `ragserve docs warm`: of the command or a process of its engine.

What has reached the disk is whole and is not computed again, no process is left, and a run that is let
through has every document."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from pathlib import Path

from ragserve.cache import folder as cache_folder
from tests.campaigns.kill_tune import LETS_THROUGH_S, kill_one, prepare, wait_for
from tests.unit.commands.test_ingest import start
from tests.unit.documents.document_samples import files_of

KILLS_OF_A_RUN = 5  # before a warm-up is let through
NOTES = 400  # more than are computed at a time
_SYSTEM = 1  # the system text is a document, too


def warm_up(folder: Path, chance: random.Random) -> None:
    work = folder / "warm-up"
    killed = work / "killed"
    if not killed.exists():
        prepare(work, NOTES)
        killed.write_text("")
    before = _pages(work)
    process = _begun(work)
    wait_for(lambda: len(_pages(work)), chance.randint(len(before), NOTES), process)
    time.sleep(chance.uniform(0, 0.3))
    finished = kill_one(process, chance)
    after = _pages(work)
    assert not finished or len(after) == NOTES + _SYSTEM, "it ended with 0, and documents are missing"
    _assert_kept(work, before)
    killed.write_text(killed.read_text() + "x")
    if len(killed.read_text()) == KILLS_OF_A_RUN or len(after) >= NOTES:
        _assert_finishes(work, after)
        shutil.rmtree(work)


def _assert_finishes(work: Path, before: dict[str, int]) -> None:
    process = _begun(work)
    said, errors = process.communicate(timeout=LETS_THROUGH_S)
    assert process.returncode == 0, errors.decode()[-2000:]
    files = json.loads(said)["files"]
    assert files["warmed"] + files["unchanged"] == NOTES, files
    assert files["unchanged"] >= len(before) - _SYSTEM, f"computed again: {files}, {len(before)} were there"
    assert len(_pages(work)) == NOTES + _SYSTEM
    _assert_kept(work, before)


def _begun(work: Path) -> subprocess.Popen[bytes]:
    return start("docs", "warm", "--json", cwd=work)


def _pages(work: Path) -> dict[str, int]:
    """Inode of each document's file; one of them is the system text's."""
    return {path.name: path.stat().st_ino for path in files_of(work / "ragserve-data" / "kv")}


def _assert_kept(work: Path, before: dict[str, int]) -> None:
    now = _pages(work)
    lost = {name for name, inode in before.items() if now.get(name) != inode}
    assert not lost, f"lost or written again: {sorted(lost)}"
    bad = cache_folder.verify(work / "ragserve-data" / "kv").bad if now else []
    assert bad == [], f"half a document: {bad}"
