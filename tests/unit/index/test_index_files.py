"""Index files that are missing, stale, damaged or someone else's: never searched, never fatal, always
replaced.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragserve.errors import Unavailable
from ragserve_index import IndexStore
from tests.campaigns.troubles import few_descriptors
from tests.unit.index.index_samples import DIM, TYPES, assert_clean, fill, item, make, texts, vectors_of

QUERY = vectors_of("d3", 0, n=10)[4]


def saved(data_dir: Path, index_type: str = "flat") -> Path:
    """A closed store of 120 chunks; its index file."""
    with make(data_dir, index_type) as store:
        fill(store, 12)
    (path,) = (data_dir / "indexes").glob("*.faiss")
    return path


def assert_recovers(
    data_dir: Path, caplog: pytest.LogCaptureFixture, reason: str, *, problem: bool = True
) -> None:
    """The damage is reported, the search is right all the same, and after closing the file is good again."""
    with IndexStore(data_dir) as store:
        report = store.check("n")[0]
        assert report.ok is not problem, report
        assert texts(store, QUERY, 1) == ["d3#0.4"]
        assert len(texts(store, QUERY, 1000)) == 120
    assert reason in caplog.text
    caplog.clear()
    with IndexStore(data_dir) as store, caplog.at_level(logging.INFO, logger="ragserve_index"):
        assert texts(store, QUERY, 1) == ["d3#0.4"]
        assert store.check()[0].file == "current"
        assert_clean(store)
    assert not caplog.records


def cut(share: float) -> Callable[[bytes], bytes]:
    return lambda data: data[: int(len(data) * share)]


@pytest.mark.parametrize("index_type", TYPES)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut(0), "only 0 bytes"),
        (cut(0.5), "its end is missing"),
        (lambda data: data[:-1], "its end is missing"),
        (lambda data: data[100:], "bytes of index instead of"),
        (lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], "fails its checksum"),
        (lambda data: data[:-40] + bytes([data[-40] ^ 4]) + data[-39:], "footer fails its checksum"),
        (lambda data: b"something else entirely" * 100, "not an index of ours"),
    ],
    ids=["empty", "half", "last-byte", "head-gone", "payload-bit", "footer-bit", "foreign"],
)
def test_damage(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    index_type: str,
    damage: Callable[[bytes], bytes],
    reason: str,
) -> None:
    path = saved(tmp_path, index_type)
    path.write_bytes(damage(path.read_bytes()))
    assert_recovers(tmp_path, caplog, reason)


@given(data=st.data())
def test_any_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.getbasetemp() / "flipped"
    if not directory.exists():
        shutil.copy(saved(directory), directory / "good")
    good = (directory / "good").read_bytes()
    at = data.draw(st.integers(0, 8 * len(good) - 1))
    damaged = bytearray(good)
    damaged[at // 8] ^= 1 << at % 8
    (directory / "indexes" / "ns-000001.faiss").write_bytes(damaged)
    with IndexStore(directory) as store:
        assert store.check()[0].file.startswith("damaged")
        assert texts(store, QUERY, 1) == ["d3#0.4"]


def test_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path).unlink()
    caplog.set_level(logging.INFO, logger="ragserve_index")
    assert_recovers(tmp_path, caplog, "no saved index", problem=False)


def test_another_namespace_of_the_same_registry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path)
    with IndexStore(tmp_path) as store:
        store.ensure_namespace("m", embedder="e", dim=DIM)
        fill(store, 12, namespace="m", prefix="other")
    shutil.copy(tmp_path / "indexes" / "ns-000002.faiss", path)
    assert_recovers(tmp_path, caplog, "another namespace's")


def test_the_same_namespace_of_another_registry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path / "a")
    shutil.copy(saved(tmp_path / "b"), path)
    assert_recovers(tmp_path / "a", caplog, "another namespace's")


def test_a_registry_put_back_from_a_backup(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Versions and chunk ids are given a second time, to other content: only the version's stamp tells the
    two apart.
    """
    with make(tmp_path) as store:
        fill(store, 11)
    backup = (tmp_path / "ragserve.sqlite3").read_bytes()
    with IndexStore(tmp_path) as store:
        (lost,) = store.replace_documents("n", [item("lost", 10)])
        ids = [chunk.chunk_id for chunk in store.document_chunks("n", lost.doc_id)]
    (tmp_path / "ragserve.sqlite3").write_bytes(backup)
    with IndexStore(tmp_path) as store:
        (new,) = store.replace_documents("n", [item("d11", 10)])
        assert [chunk.chunk_id for chunk in store.document_chunks("n", new.doc_id)] == ids
        assert texts(store, vectors_of("d11", 0, n=10)[6], 1) == ["d11#0.6"]
        assert "its version 2 is not the registry's" in caplog.text
    with IndexStore(tmp_path) as store:
        assert store.check()[0].file == "current"
        assert_clean(store)


def test_same_version_other_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make(tmp_path / "a") as store:
        fill(store, 11)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name, source in (("a", "d11"), ("b", "unseen")):
        with IndexStore(tmp_path / name) as store:
            store.replace_documents("n", [item(source, 10)])
    shutil.copy(
        tmp_path / "b" / "indexes" / "ns-000001.faiss", tmp_path / "a" / "indexes" / "ns-000001.faiss"
    )
    assert_recovers(tmp_path / "a", caplog, "its version 2 is not the registry's")


@pytest.mark.parametrize("index_type", TYPES)
def test_a_file_that_is_behind_is_caught_up_not_built(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, index_type: str
) -> None:
    path = saved(tmp_path, index_type)
    old = path.read_bytes()
    with IndexStore(tmp_path) as store:
        found = store.find_source("n", "d0")
        assert found is not None
        store.remove_document("n", found.doc_id)
        store.replace_documents("n", [item("d1", 4, edition=1), item("new", 3)])
        # no close: as if killed here, with the old file in place
    path.write_bytes(old)
    with IndexStore(tmp_path) as store, caplog.at_level(logging.INFO, logger="ragserve_index"):
        version = store.namespace("n").version
        assert version == 3
        found_texts = texts(store, QUERY, 1000)
        assert len(found_texts) == len(set(found_texts)) == 120 - 10 - 10 + 4 + 3
        assert {"d1#1.3", "new#0.2"} <= set(found_texts)
        assert not any(text.startswith(("d0#", "d1#0")) for text in found_texts)


def test_a_version_without_new_vectors_is_saved_too(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.save()
    assert store.check()[0].file == "missing", "nothing is in it yet"
    store.replace_documents("n", [item("empty", 0), item("a", 2)])
    store.save()
    empty = store.find_source("n", "empty")
    assert empty is not None
    store.remove_document("n", empty.doc_id)
    assert store.check()[0].file == "behind"
    store.save()
    assert store.check()[0].file == "current"
    store.close()


def test_a_running_store_catches_up_past_a_forgotten_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saving forgets the change log up to the saved version; who is older than that compares ids."""
    with make(tmp_path) as writer, IndexStore(tmp_path) as reader:
        fill(writer, 12)
        assert len(texts(reader, QUERY, 1000)) == 120
        for edition in range(1, 4):
            writer.replace_documents("n", [item("d1", 4, edition=edition), item(f"new{edition}", 2)])
        writer.save()
        with caplog.at_level(logging.INFO, logger="ragserve_index"):
            found = texts(reader, QUERY, 1000)
        assert not caplog.records
        assert len(found) == len(set(found)) == 110 + 4 + 6
        assert "d1#3.3" in found
        assert_clean(reader)


def test_leftovers_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path)
    half, orphan = path.with_name(f"{path.name}.123.tmp"), path.with_name("ns-000099.faiss")
    half.write_bytes(b"half")
    orphan.write_bytes(b"x")
    with IndexStore(tmp_path):
        assert not half.exists()
        assert not orphan.exists()
        assert path.exists()


def test_saving_twice_writes_once(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = path.stat()
    with IndexStore(tmp_path) as store:
        texts(store, QUERY, 1)
        store.save()
    assert path.stat().st_ino == before.st_ino


def test_an_older_store_does_not_overwrite_a_newer_file(tmp_path: Path) -> None:
    saved(tmp_path)
    old = IndexStore(tmp_path)
    texts(old, QUERY, 1)
    with IndexStore(tmp_path) as newer:
        newer.replace_documents("n", [item("new", 5)])
    old.close()
    with IndexStore(tmp_path) as store:
        assert store.check()[0].file == "current"
        assert len(texts(store, QUERY, 1000)) == 125


def test_the_store_saves_by_itself_after_enough_changes(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.replace_documents("n", [item("a", 4_999)])
    assert store.check()[0].file == "missing"
    store.replace_documents("n", [item("b", 1)])
    report = store.check()[0]
    assert (report.file, report.index_bytes > 5_000 * DIM * 4) == ("current", True)
    store.replace_documents("n", [item("c", 10)])
    assert store.check()[0].file == "behind"
    store.close()
    with IndexStore(tmp_path) as store:
        assert store.check()[0].file == "current"
        assert np.isclose(store.search("n", vectors_of("c", 0, n=10)[3:4], 1).hits[0][0].score, 1, atol=1e-4)


def test_a_file_that_no_descriptor_is_left_for_is_refused_and_read_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Building a large index again would take minutes, and its file is right."""
    saved(tmp_path)
    with IndexStore(tmp_path) as store:
        with few_descriptors(0), pytest.raises(Unavailable, match=r"Too many open files.*ulimit -n"):
            texts(store, QUERY, 1)
        assert texts(store, QUERY, 1) == ["d3#0.4"]
        assert store.check()[0].file == "current"
    assert "rebuilding" not in caplog.text
    with few_descriptors(1), pytest.raises(Unavailable, match=r"Too many open files.*ulimit -n"):
        IndexStore(tmp_path)
