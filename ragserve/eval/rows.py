"""Rows of a running evaluation, on disk as soon as they are known, so that a run that was cut short continues
where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ragserve.errors import InvalidRequest

Row = dict[str, Any]
Key = tuple[str, str, str]  # set, question, strategy


def key(row: Mapping[str, Any]) -> Key:
    return str(row["set"]), str(row["id"]), str(row["strategy"])


class RowFile:
    """Appends rows to a file, one JSON object a line, each line in one write. A line that a killed process
    left unfinished is cut off.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            text = path.read_bytes()
            if not text.endswith(b"\n"):
                with path.open("r+b") as file:
                    file.truncate(text.rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read(folder: Path) -> dict[Key, Row]:
    """All rows of a folder (``rows-*.jsonl``); of several with one key the one that did not fail, or the
    latest.
    """
    found: dict[Key, Row] = {}
    for path in sorted(folder.glob("rows-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # being written, or cut off
            row = json.loads(line)
            if not row.get("error") or key(row) not in found:
                found[key(row)] = row
    return found


def count(folder: Path) -> int:
    """Lines written so far, without reading them as rows."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("rows-*.jsonl"))


def claim(folder: Path, what: Mapping[str, Any]) -> None:
    """Note in a folder what its rows are measurements of. Raises InvalidRequest where it holds rows of
    something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    wanted = json.loads(json.dumps(what))
    if path.exists():
        held = json.loads(path.read_text(encoding="utf-8"))
        sets = held.get("sets", {}) | wanted.get("sets", {})
        differing = [name for name in wanted if name != "sets" and held.get(name) != wanted[name]]
        differing += [
            f"set {name}"
            for name in wanted.get("sets", {})
            if held.get("sets", {}).get(name, wanted["sets"][name]) != sets[name]
        ]
        if differing:
            raise InvalidRequest(
                f"{folder} holds rows of another run: {', '.join(differing)} differ.",
                hint="Give another folder, or remove it.",
            )
        wanted["sets"] = sets
    path.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
