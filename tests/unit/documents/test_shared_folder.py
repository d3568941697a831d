"""A shared store's folder is its own: what others have put there is neither counted nor deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ragserve.config import Settings
from ragserve.engine import shared_store
from ragserve.errors import InvalidRequest
from sglang_ext.documents.remote.own_folder import ForeignFolder, claim
from tests.unit.documents.document_samples import Sample, flushed
from tests.unit.documents.test_remote_tier import PAGE, engine, until


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
