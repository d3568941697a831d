"""A shared store's folder is its own: what others have put there is neither counted nor deleted."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ragserve.config import Settings
from ragserve.engine import shared_store
from ragserve.errors import InvalidRequest
from sglang_ext.documents.disk.page_files import DocumentFiles
from sglang_ext.documents.remote.own_folder import ForeignFolder, claim
from tests.unit.documents.document_samples import Sample, flushed
from tests.unit.documents.test_remote_tier import PAGE, engine, found, until
from tests.unit.documents.test_summaries import summary_of


def test_a_shared_folder_keeps_what_no_store_has_put_there(tmp_path: Path) -> None:
    """Other files that come to lie there, oldest of all, are neither counted nor deleted."""
    shared, limit = tmp_path / "shared", 3 * (4096 + 4 * PAGE)
    options = {"folder": str(shared), "bytes": limit}
    shared.mkdir()
    with engine(tmp_path, options=options) as one:
        Sample(0, 16).put(one)
        flushed(one)
        rank = next(shared.glob("v*/rank-*"))
        others = [
            *("thesis/chapter1.tex", ".tmp/draft", "v1/rank-0-of-1/a/b.pages", "rank-0-of-1/.tmp/x.y.1"),
            *(f"{rank.relative_to(shared)}/{name}" for name in ("notes", ".tmp/mine", "a/my own.pages")),
        ]
        for name in others:
            (shared / name).parent.mkdir(parents=True, exist_ok=True)
            (shared / name).write_bytes(b"x" * limit)
            os.utime(shared / name, (1, 1))
        for number in range(1, 8):
            Sample(number, 16).put(one)
            flushed(one)
        assert 2 <= len(set(rank.rglob("*.pages")) - {shared / name for name in others}) <= 3
        assert one.stat()["remote"]["bytes"] <= limit
    assert all((shared / name).exists() for name in others)


def test_a_full_disk_below_the_limit_refuses_and_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, write = tmp_path / "shared", DocumentFiles.write
    shared.mkdir()
    documents = [Sample(number, 16) for number in range(4)]
    full = True

    def failing(files: DocumentFiles, namespace: str, key: str, *args: Any, **kwargs: Any) -> bool:
        if full and shared in files.folder.parents and key == documents[2].key:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return write(files, namespace, key, *args, **kwargs)

    monkeypatch.setattr(DocumentFiles, "write", failing)
    with engine(tmp_path, options={"folder": str(shared)}) as one:
        for number, document in enumerate(documents[:2]):
            document.put(one)
            flushed(one)
            os.utime(next(shared.rglob(f"{document.key}.pages")), (number, number))
        documents[2].put(one)
        flushed(one)
        figures = one.stat()
        assert (figures["remote"]["away"], figures["remote"]["refused"]) == (False, 1)
        assert figures["faults"] == {"disk_full": 1}
        assert [path.stem for path in shared.rglob("*.pages")] == [documents[1].key], "the oldest made room"
        full = False
        documents[3].put(one)
        flushed(one)
        assert one.stat()["remote"]["stored"] == 3


def test_a_summary_without_room_on_a_full_disk_leaves_the_store_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, document, replace = tmp_path / "shared", Sample(1, 16), DocumentFiles.replace_summary
    shared.mkdir()

    def failing(files: DocumentFiles, *args: Any, **kwargs: Any) -> bool:
        if shared in files.folder.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(files, *args, **kwargs)

    monkeypatch.setattr(DocumentFiles, "replace_summary", failing)
    with engine(tmp_path, options={"folder": str(shared)}) as one:
        document.put(one)
        flushed(one)
        one.put_summary(document.key, b"summary")
        flushed(one)
        assert one.stat()["faults"] == {"disk_full": 1}
        assert not one.stat()["remote"]["away"]


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "team"
    (folder / "thesis").mkdir(parents=True)
    with pytest.raises(ForeignFolder, match="holds other files, such as 'thesis'"):
        claim(folder)
    options = {"folder": str(folder)}
    with engine(tmp_path, options=options, away=True) as store:  # it was away when the server checked it
        Sample(1, 16).put(store)
        until(lambda: store.stat()["remote"]["away"])
    assert [path.name for path in folder.iterdir()] == ["thesis"]
    settings = Settings(kv_storage="shared", kv_storage_args=options)
    with pytest.raises(InvalidRequest, match="holds other files") as caught:
        shared_store.check(settings)
    assert "team/ragserve" in str(caught.value.hint)
    (folder / "thesis").rename(folder / ("v3-" + "0" * 32))  # of an earlier version
    shared_store.check(settings)
    (folder / "later").touch()
    shared_store.check(settings)  # it stays the store's


def test_a_summary_that_another_engine_has_replaced_is_no_fault(tmp_path: Path) -> None:
    shared, document = tmp_path / "shared", Sample(1, 16)
    shared.mkdir()
    options = {"folder": str(shared)}
    with engine(tmp_path, "a", options=options) as one, engine(tmp_path, "b", options=options) as other:
        one.put(document.meta, document.k, document.v, b"summary")
        flushed(one)
        assert found(other, document) == "remote"
        assert summary_of(other, document.key) == b"summary"
        assert one.put_summary(document.key, b"another")
        flushed(one)
        assert summary_of(other, document.key) == b"another"
        assert not other.stat()["faults"]
