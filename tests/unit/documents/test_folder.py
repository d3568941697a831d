"""A document folder without a server."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.documents.disk import folder as offline
from sglang_ext.documents.disk import page_files
from tests.unit.documents.document_samples import Sample, bytes_under, files_of, flushed, opened


def _fill(folder: Path) -> list[Sample]:
    documents = [Sample(i, 5 + 9 * i, namespace=f"space-{i % 2}") for i in range(5)]
    with opened(folder) as store:
        for document in documents:
            document.put(store)
        flushed(store)
    return documents


def test_figures_and_verification_agree_with_the_folder(tmp_path: Path) -> None:
    documents = _fill(tmp_path)
    figures = offline.stat(tmp_path)
    assert (figures["files"], figures["bytes"], figures["in_use"]) == (5, bytes_under(tmp_path), False)
    assert {name: space["files"] for name, space in figures["namespaces"].items()} == {
        "space-0": 3,
        "space-1": 2,
    }
    report = offline.verify(tmp_path)
    assert (report.ok, report.documents, report.pages) == (
        True,
        5,
        sum(document.blocks for document in documents),
    )
    assert report.bytes_ == bytes_under(tmp_path)
    path = files_of(tmp_path)[2]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    report = offline.verify(tmp_path)
    assert [(bad.key, bad.reason.split(":")[0]) for bad in report.bad] == [(path.stem, "crc")]
    assert report.documents == 4


def test_what_is_removed_offline_is_gone_for_the_next_server(tmp_path: Path) -> None:
    documents = _fill(tmp_path)
    texts = [documents[0].ids, documents[1].ids]
    assert offline.remove_texts(tmp_path, texts, namespace="space-0") == 1
    assert offline.remove_texts(tmp_path, texts, namespace="space-0") == 0
    assert offline.clear(tmp_path, namespace="space-1") == 2
    with opened(tmp_path) as store:
        assert [document.found(store) is not None for document in documents] == [
            False,
            False,
            True,
            False,
            True,
        ]
    assert offline.clear(tmp_path) == 2
    assert bytes_under(tmp_path) == 0
    assert offline.stat(tmp_path / "nowhere")["files"] == 0
    assert offline.verify(tmp_path / "nowhere").ok


def test_a_running_server_keeps_its_folder(tmp_path: Path) -> None:
    documents = _fill(tmp_path)
    with opened(tmp_path) as store:
        assert offline.stat(tmp_path)["in_use"]
        assert offline.verify(tmp_path).ok
        with pytest.raises(offline.FolderInUse):
            offline.remove_texts(tmp_path, [documents[0].ids], namespace="space-0")
        with pytest.raises(offline.FolderInUse):
            offline.clear(tmp_path)
        assert documents[0].load_and_check(store)


def test_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    _fill(tmp_path)
    with pytest.raises(ValueError, match="not a namespace"):
        offline.clear(tmp_path, namespace="..")
    with pytest.raises(ValueError, match="not a namespace"):
        offline.remove_texts(tmp_path, [[1]], namespace="../..")


def test_neither_torch_nor_sglang_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from sglang_ext.documents.disk import folder; "
        "folder.stat(Path(sys.argv[1])); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'sglang')))"
    )
    repository = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=repository)


def test_a_file_that_cannot_be_read_is_told_when_the_others_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [each for each in _fill(tmp_path) if each.namespace == "space-0"]
    bad = min(documents, key=lambda each: each.key)

    def failing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if bad.key in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return open(path, *args, **kwargs)

    monkeypatch.setattr(page_files, "open", failing, raising=False)
    with pytest.raises(OSError, match="Input/output"):
        offline.remove_texts(tmp_path, [each.ids for each in documents], namespace="space-0")
    assert [path.stem for path in files_of(tmp_path) if path.parent.name == "space-0"] == [bad.key]
