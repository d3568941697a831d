"""Rows of an evaluation on disk: what was written is read, whatever its text, and what was cut off is not."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from ragserve.verification import rows
from tests.unit.no_room import no_room


def row(number: int, text: str) -> rows.Row:
    return {"set": "s", "id": str(number), "strategy": "full", "answer": text, "error": ""}


def test_rows_are_read_whatever_their_text_and_a_cut_one_is_not(tmp_path: Path) -> None:
    written = [row(0, "one\u2028two"), row(1, "\x85 \x0b \x1e \u2029")]
    with rows.appending(tmp_path / "rows-0.jsonl") as append:
        for each in written:
            append(each)
    with (tmp_path / "rows-0.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"set": "s", "id"')
    assert list(rows.read(tmp_path).values()) == written
    with rows.appending(tmp_path / "rows-0.jsonl") as append:
        append(row(2, "after it"))
    assert [key[1] for key in rows.read(tmp_path)] == ["0", "1", "2"]


def test_the_newest_row_counts_in_whichever_file_it_is(tmp_path: Path) -> None:
    """Of a question that was asked again, and one that failed then."""
    for name, at in (("rows-0.jsonl", 2.0), ("rows-idle.jsonl", 1.0)):
        with rows.appending(tmp_path / name) as append:
            append(row(0, name) | {"at": at})
            append(row(1, name) | {"at": at, "error": "x" if at == 2.0 else ""})
    assert [each["answer"] for each in rows.read(tmp_path).values()] == ["rows-0.jsonl", "rows-idle.jsonl"]


@pytest.mark.parametrize("line", [b"\0" * 40, b'{"set": ', b"[]", b"3", b"\xff\xfe", b"", b'{"set": "s"}'])
def test_lines_that_are_no_rows_are_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: bytes
) -> None:
    with rows.appending(tmp_path / "rows-0.jsonl") as append:
        append(row(0, "before"))
    with (tmp_path / "rows-0.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with rows.appending(tmp_path / "rows-0.jsonl") as append:
        append(row(1, "after"))
    assert [key[1] for key in rows.read(tmp_path)] == ["0", "1"]
    assert "rows-0.jsonl: lines that are damaged and left out: 1" in caplog.text


def test_texts_are_looked_for_once_in_a_folder(tmp_path: Path) -> None:
    rows.strip(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    path = tmp_path / "rows-0.jsonl"
    for number, texts in ((0, 0), (1, 1)):
        with rows.appending(path) as append:
            append(row(number, "Ada"))
        rows.strip(tmp_path)
        assert path.read_text().count("Ada") == texts, "a marked folder is not read again"


def test_a_row_without_room_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "rows-0.jsonl"
    with rows.appending(path) as append:
        append(row(0, "before"))
    named = pytest.raises(OSError, match=re.escape(str(path)))
    with named as failed, no_room(path.stat().st_size + 20), rows.appending(path) as append:
        append(row(1, "no room"))
    assert failed.value.errno == errno.EFBIG
    with rows.appending(path) as append:
        append(row(2, "after"))
    assert [key[1] for key in rows.read(tmp_path)] == ["0", "2"]


def test_errors_of_others_keep_their_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="elsewhere"), rows.appending(tmp_path / "rows-0.jsonl"):
        (tmp_path / "elsewhere").read_text()
