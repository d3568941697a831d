"""Rows of a running evaluation, written to disk at once, so that an interrupted run continues where it
stopped."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ragserve.errors import InvalidRequest
from ragserve.files import naming, write_all, write_json, write_text

log = logging.getLogger(__name__)
Row = dict[str, Any]
Key = tuple[str, str, str]  # set, question, strategy
_STRIPPED = "without-texts"  # marks a folder whose rows have no texts


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
    """Read all rows of a folder (``rows-*.jsonl``); of several with one key, the newest one that did not
    fail, and where they do not say when they were written, the last. Lines that are no rows, as a crash of
    the machine may leave them, are left out, and logged."""
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
            if own not in found or _rank(row) >= _rank(found[own]):
                found[own] = row
        if damaged:
            log.warning("%s: lines that are damaged and left out: %d", path, damaged)
    return found


def _rank(row: Row) -> tuple[bool, float]:
    """Greater for the row that counts."""
    return not row.get("error"), row.get("at", 0.0)


def without_texts(row: Row) -> Row:
    """The row without question, reference and answer. An empty question stays: it says that none could be
    made."""
    texts = ("answer", "question", "references")
    return {name: value for name, value in row.items() if name not in texts or not value}


def strip(folder: Path) -> None:
    """Remove the texts from rows that an earlier version wrote with them; lines that are no rows go, too.

    Marks the folder, and reads none that is marked: rows are many, and now written without texts."""
    mark = folder / _STRIPPED
    if mark.exists() or not folder.is_dir():
        return
    for path in sorted(folder.glob("rows-*.jsonl")):
        kept, has_texts = list[str](), False
        for line in path.read_bytes().split(b"\n"):
            with suppress(ValueError, AttributeError):
                row = json.loads(line)
                kept.append(json.dumps(without_texts(row), ensure_ascii=False) + "\n")
                has_texts = has_texts or without_texts(row) != row
        if has_texts:
            write_text(path, "".join(kept))
    mark.touch()


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
