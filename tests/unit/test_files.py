"""File helpers: whole writes, locks that exclude, and the project's data in a checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragserve.files import bundled, locked, write_json, write_text


@pytest.mark.parametrize("durable", [False, True])
def test_a_write_replaces_the_whole_file(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "made" / "report.json"
    for value in ({"a": 1}, ["ä"]):
        write_json(path, value, durable=durable)
        assert json.loads(path.read_text(encoding="utf-8")) == value
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_locks_exclude_and_shared_ones_do_not(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(FileNotFoundError), locked(path, create=False):
        pass
    with locked(path, shared=True) as first, locked(path, shared=True) as second, locked(path) as alone:
        assert (first, second, alone) == (True, True, False)
    with locked(path) as alone, locked(path, shared=True, wait_s=0.1) as late:
        assert (alone, late) == (True, False)


def test_data_of_the_project_is_found_in_a_checkout() -> None:
    assert (bundled("examples/models/ragserve-tiny") / "config.json").is_file()
    assert (bundled("requirements") / "cpu.txt").is_file()
    assert bundled("requirements").is_dir()
