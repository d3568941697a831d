"""Plant one bug at a time in a copy of the source and show that the short form of the tests finds it.

    python -m tests.planted_bugs [name ...]

Each bug replaces a line of the source. The script fails when a bug survives its tests, when the tests fail
without any bug, and when the line that a bug replaces is not there exactly once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
TESTS_FAILED = 1  # pytest's exit status; higher ones mean that it could not run them


@dataclass(frozen=True)
class Bug:
    """Replace ``old``, which must occur exactly once in the Python files of ``folder``. ``tests`` find it."""

    name: str
    folder: str
    old: str
    new: str
    tests: tuple[str, ...]


BUGS = (
    Bug(
        "a host page is never unpinned",
        "sglang_ext/documents",
        "entry.pins -= 1\n",
        "pass\n",
        ("tests/unit/documents/test_states.py",),
    ),
    Bug(
        "the CRC of a page is not compared",
        "sglang_ext/documents",
        "page_crc(record.key, block, buffer) != record.crcs[block]",
        "page_crc(record.key, block, buffer) == -1",
        ("tests/unit/documents/test_faults.py", "tests/unit/documents/test_states.py"),
    ),
    Bug(
        "composed KV enters the exact prefix cache",
        "sglang_ext/documents",
        "return not self.observer.is_composed(req) and not _is_private(req)",
        "return not _is_private(req)",
        ("tests/unit/documents/test_radix.py",),
    ),
    Bug(
        "a batch is committed after each of its documents",
        "index/ragserve_index",
        "        _insert_chunks(connection, ns, version, document, first_id, cut)\n",
        "        _insert_chunks(connection, ns, version, document, first_id, cut)\n"
        '        connection.execute("COMMIT")\n'
        '        connection.execute("BEGIN IMMEDIATE")\n',
        ("tests/unit/index/test_kill.py",),
    ),
    Bug(
        "a saved index carries the version before its own",
        "index/ragserve_index",
        "structure, self.version, self._stamp, self.changed,",
        "structure, self.version - 1, self._stamp, self.changed,",
        ("tests/unit/index/test_stateful.py",),
    ),
    Bug(
        "a removed document stays in the lexical index",
        "index/ragserve_index",
        "    connection.dialect.lexical.remove(connection, ns.id, _rows_of(connection, ns, [doc_id]))\n",
        "",
        ("tests/unit/index/test_stateful.py",),
    ),
)


def copy_to(folder: Path) -> None:
    """The files that git knows, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPO / name, folder / name)


def plant(bug: Bug, folder: Path) -> Path:
    """Change the one file that has the bug's line, and return it. Exit unless the line is there once."""
    found = [(path, path.read_text(encoding="utf-8")) for path in (folder / bug.folder).rglob("*.py")]
    places = [(path, text) for path, text in found if bug.old in text]
    if len(places) != 1 or places[0][1].count(bug.old) != 1:
        where = ", ".join(str(path.relative_to(folder)) for path, _ in places) or "nowhere"
        sys.exit(f"{bug.name}: this must be in {bug.folder} exactly once, and is in {where}:\n{bug.old}")
    [(path, text)] = places
    path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    return path


def run(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """pytest's exit status, and the first test that failed or the end of the output."""
    roots = (folder, folder / "index", folder / "kernels")
    env = {name: value for name, value in os.environ.items() if name != "RAGSERVE_EXHAUSTIVE"}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, roots)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rf", "--tb=no", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    failed = re.search(r"^FAILED (?:\S*/)?(\S+)", done.stdout, re.MULTILINE)
    return done.returncode, failed.group(1) if failed else done.stdout[-2000:] + done.stderr[-2000:]


def main(names: list[str]) -> int:
    bugs = [bug for bug in BUGS if not names or bug.name in names]
    problems = []
    print("| bug | found by | seconds |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="planted-") as temporary:
        folder = Path(temporary)
        copy_to(folder)
        for bug in bugs:  # before anything runs: the lines are there
            plant(bug, folder)
            copy_to(folder)
        all_tests = tuple(dict.fromkeys(test for bug in bugs for test in bug.tests))
        for bug in (None, *bugs):
            if bug is not None:
                plant(bug, folder)
            began = time.monotonic()
            status, found = run(folder, all_tests if bug is None else bug.tests)
            seconds = time.monotonic() - began
            if status != (0 if bug is None else TESTS_FAILED):
                problems.append(f"{bug.name if bug else 'no bug'}: pytest ended with {status}: {found}")
                found = "**problem**"
            name, by = (bug.name, f"`{found}`") if bug is not None else ("none", "all tests pass")
            print(f"| {name} | {by} | {seconds:.0f} |", flush=True)
            copy_to(folder)
    print("\n".join(problems), file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
