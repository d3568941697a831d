"""Rows of a running evaluation, written to disk at once, so that an interrupted run continues where it
stopped."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragserve.errors import InvalidRequest
from ragserve.files import naming, write_all, write_json

log = logging.getLogger(__name__)
Row = dict[str, Any]
Key = tuple[str, str, str]  # set, question, strategy


def key(row: Mapping[str, Any]) -> Key:
    return str(row["set"]), str(row["id"]), str(row["strategy"])


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Row], None]]:
    """Yield a function that appends a row to a file, one JSON object per line and write.

    Cuts off a line that a killed process, or a full disk, left unfinished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, text.rfind(b"\n") + 1)
    with path.open("ab", buffering=0) as file:  # what a buffer keeps of a failed write fails again at the end

        def append(row: Row) -> None:
            with naming(path):
                write_all(file.fileno(), json.dumps(row, ensure_ascii=False).encode() + b"\n")

        yield append


def read(folder: Path) -> dict[Key, Row]:
    """Read all rows of a folder (``rows-*.jsonl``); of several with one key, the last one that did not
    fail. Lines that are no rows, as a crash of the machine may leave them, are left out, and logged."""
    found: dict[Key, Row] = {}
    for path in sorted(folder.glob("rows-*.jsonl")):
        *lines, _ = path.read_bytes().split(b"\n")  # the rest is still being written, or cut off
        damaged = 0
        for line in lines:
            try:
                row = json.loads(line)
                own = key(row)
            except (ValueError, KeyError, TypeError):
                damaged += 1
                continue
            if not row.get("error") or own not in found:
                found[own] = row
        if damaged:
            log.warning("%s: lines that are damaged and left out: %d", path, damaged)
    return found


def count(folder: Path) -> int:
    """Count the lines written so far, without parsing them."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("rows-*.jsonl"))


def claim(folder: Path, what: Mapping[str, Any]) -> None:
    """Record in a folder what its rows measure. Raises InvalidRequest if it holds rows of something else."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    wanted = json.loads(json.dumps(what))
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        sets = before.get("sets", {}) | wanted.get("sets", {})
        differing = [name for name in wanted if name != "sets" and before.get(name) != wanted[name]]
        differing += [
            f"set {name}" for name, digest in before.get("sets", {}).items() if sets[name] != digest
        ]
        if differing:
            raise InvalidRequest(
                f"{folder} holds rows of another run: {', '.join(differing)} differ.",
                hint="Give another folder, or remove it.",
            )
        wanted["sets"] = sets
    write_json(path, wanted)
