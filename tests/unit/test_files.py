"""File helpers: whole writes, locks that exclude, and the project's data in a checkout."""

from __future__ import annotations

import json
import socket
import tempfile
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

from ragserve.files import bundled, locked, scratch_folder, temporary_folder, write_json, write_text


@pytest.mark.parametrize("durable", [False, True])
def test_a_write_replaces_the_whole_file(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "made" / "report.json"
    for value in ({"a": 1}, ["ä"]):
        write_json(path, value, durable=durable)
        assert json.loads(path.read_text(encoding="utf-8")) == value
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]


def test_a_write_keeps_a_link(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    link, target = tmp_path / "here" / "link", tmp_path / "there" / "file"
    link.symlink_to(Path("../there/file"))
    for text in ("made", "replaced"):
        write_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert [entry.name for folder in ("here", "there") for entry in (tmp_path / folder).iterdir()] == [
        *("link", "file")
    ]


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


def test_temporary_files_are_in_one_folder_that_goes_with_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        with temporary_folder() as folder:
            assert Path(tempfile.mkdtemp()).parent == folder
            tempfile.NamedTemporaryFile(delete=False).close()  # as SGLang leaves them
            assert list(Path(place).iterdir()) == [folder]
        assert (tempfile.tempdir, list(Path(place).iterdir())) == (place, [])


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left, used, other, alike = (tmp_path / name for name in (".new-killed", ".new-used", ".new-other", "new"))
    for folder in (left, used, other, alike):
        folder.mkdir()
        (folder / "data").touch()
    for folder in (left, used, alike):
        (folder / "lock").touch()
    with locked(used / "lock"), scratch_folder(tmp_path, ".new-") as made:
        assert [folder.exists() for folder in (left, used, other, alike)] == [False, True, True, True]
        with scratch_folder(tmp_path, ".new-"):
            assert made.is_dir(), "it is in use"
    assert {path.name for path in tmp_path.iterdir()} == {".new-used", ".new-other", "new"}


def test_sockets_get_a_name_below_a_long_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with temporary_folder(), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{get_temp_dir()}/listener-12345678")  # as multiprocessing names it


def test_data_of_the_project_is_found_in_a_checkout() -> None:
    assert (bundled("examples/models/ragserve-tiny") / "config.json").is_file()
    assert (bundled("requirements") / "cpu.txt").is_file()
    assert bundled("requirements").is_dir()
