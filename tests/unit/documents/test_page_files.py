"""Document files: one rename in, one rename out, and a removal beats a write that has begun."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.documents.disk.page_files import DocumentFiles
from sglang_ext.documents.pages.page_format import PageError

KEY = "ab" * 32


@pytest.fixture
def files(tmp_path: Path) -> DocumentFiles:
    return DocumentFiles(tmp_path, rank=0, world=1)


@pytest.mark.parametrize("fsync", [False, True])
def test_a_document_is_its_parts_in_order_however_many(files: DocumentFiles, fsync: bool) -> None:
    parts = [bytes([i % 251]) * 7 for i in range(1500)]  # more buffers than one system call takes
    assert files.write("default", KEY, parts, fsync=fsync)
    assert files.path("default", KEY).read_bytes() == b"".join(parts)
    assert list((files.folder / ".tmp").iterdir()) == []
    found = files.find("default", KEY)
    assert found is not None
    assert found.size == 10_500


def test_a_removal_beats_a_write_that_has_begun(files: DocumentFiles) -> None:
    files.begin("default", KEY)
    assert files.remove("default", KEY)
    assert not files.remove("default", KEY)  # it is gone already
    assert not files.write("default", KEY, [b"x"], fsync=False)
    assert files.find("default", KEY) is None
    files.begin("default", KEY)
    assert files.remove_namespace("default") == [KEY]
    assert not files.write("default", KEY, [b"x"], fsync=False)
    assert files.write("default", KEY, [b"x"], fsync=False)  # a later one is another matter
    assert [found.key for found in files.scan()] == [KEY]
    assert list((files.folder / ".tmp").iterdir()) == []


def test_a_namespace_goes_at_once_and_its_space_later(files: DocumentFiles) -> None:
    for i in range(20):
        files.write("gone", f"{KEY}{i}", [b"x" * 100], fsync=False)
    files.write("stays", KEY, [b"x"], fsync=False)
    assert len(files.remove_namespace("gone")) == 20
    assert files.remove_namespace("gone") == []
    assert [found.namespace for found in files.scan()] == ["stays"]
    files.sweep_trash()
    assert not (files.folder / ".trash").exists()


def test_a_namespace_removed_during_the_sweep_is_gone(
    files: DocumentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep must not take the trash away between its making and the move into it."""
    for name in ("first", "second"):
        files.write(name, KEY, [b"x"], fsync=False)
    files.remove_namespace("first")
    make, sweeps = Path.mkdir, []

    def swept_meanwhile(path: Path, *args: Any, **options: Any) -> None:
        make(path, *args, **options)
        sweeps.append(threading.Thread(target=files.sweep_trash))
        sweeps[-1].start()
        sweeps[-1].join(0.3)

    monkeypatch.setattr(Path, "mkdir", swept_meanwhile)
    assert files.remove_namespace("second") == [KEY]
    monkeypatch.undo()
    for sweep in sweeps:
        sweep.join()
    files.sweep_trash()
    assert files.namespaces() == []
    assert list(files.folder.glob(".trash*")) == []


def test_only_the_pages_asked_for_are_read_in_runs(
    files: DocumentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    from array import array

    from sglang_ext.documents.pages import page_format

    layout = page_format.PageLayout("model", 0, 1, 1, 1, 16, 4, 1, 512)
    record = page_format.encode(KEY, "default", array("i", range(40)), array("I", [0] * 10), layout)
    files.write("default", KEY, [record, *(bytes([i]) * 512 for i in range(10))], fsync=False)
    calls: list[tuple[int, int]] = []
    original = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(((offset - len(record)) // 512, sum(map(len, buffers))))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    targets = [bytearray(512) for _ in range(4)]
    assert files.read_pages("default", KEY, 512, [2, 3, 4, 9], targets) == 4 * 512
    assert [target[0] for target in targets] == [2, 3, 4, 9]
    assert calls == [(2, 3 * 512), (9, 512)]
    with pytest.raises(PageError):
        files.read_pages("default", KEY, 512, [9, 10], targets[:2])
    with pytest.raises(FileNotFoundError):
        files.read_pages("default", "unknown", 512, [0], targets[:1])
