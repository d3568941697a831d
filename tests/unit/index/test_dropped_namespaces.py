"""Namespaces that are dropped while another store works on them: nothing of them stays or comes back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragserve.errors import Conflict, NotFound
from ragserve_index import IndexStore, JobStore, batch, lexical_indexes
from ragserve_index.index import file_format
from ragserve_index.lexical_index import LexicalIndex
from tests.unit.index.index_samples import DIM, fill, item, on_both_registries, open_store, texts, vectors_of


@pytest.fixture
def other(store: IndexStore, tmp_path: Path) -> Iterator[IndexStore]:
    """The store of another process on the same data folder."""
    with open_store(tmp_path / "data") as other:
        yield other


def files(store: IndexStore) -> list[str]:
    """Names of the files of indexes."""
    return sorted(path.name for path in (store.data_dir / "indexes").glob("ns-*"))


@on_both_registries
def test_a_save_does_not_bring_a_dropped_namespace_back(
    registry: str, store: IndexStore, other: IndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = file_format.write

    def dropped_meanwhile(*given: Any) -> None:
        other.drop_namespace("n")
        write(*given)

    fill(store, 2)
    monkeypatch.setattr(file_format, "write", dropped_meanwhile)
    with pytest.raises(NotFound):
        store.save()
    assert files(store) == []


@on_both_registries
def test_a_lexical_index_of_a_dropped_namespace_does_not_stay(
    registry: str, store: IndexStore, other: IndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = LexicalIndex.follow

    def dropped_meanwhile(index: LexicalIndex, *given: Any) -> None:
        other.drop_namespace("n")
        follow(index, *given)

    monkeypatch.setattr(lexical_indexes, "FROM", 1)
    monkeypatch.setattr(LexicalIndex, "follow", dropped_meanwhile)
    fill(store, 2)
    with pytest.raises(NotFound):
        store.save()
    assert files(store) == []


@on_both_registries
def test_what_another_process_dropped_is_let_go(
    registry: str, store: IndexStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers with folders of their own share a registry in Postgres."""
    monkeypatch.setattr(lexical_indexes, "FROM", 1)
    fill(store, 2)
    store.ensure_namespace("kept", embedder="e", dim=DIM)
    fill(store, 2, namespace="kept")
    store.save()
    kept = [name for name in files(store) if name.startswith("ns-000002")]
    assert len(files(store)) == 2 * len(kept) == 4
    index = weakref.ref(store.faiss_index("n"))
    with open_store(tmp_path / ("data" if registry == "sqlite" else "another")) as other:
        other.drop_namespace("n")
        other.ensure_namespace("n", embedder="e", dim=DIM)
        other.replace_documents("n", [item("new", 1)])
        store.forget_dropped()
        gc.collect()
        assert index() is None
        assert files(store) == kept
        assert texts(store, vectors_of("q"), 9) == ["new#0.0"]
        store.save("n")
        after = files(store)
        store.forget_dropped()
        assert files(store) == after > kept


@on_both_registries
def test_a_cancelled_job_writes_nothing(registry: str, store: IndexStore, other: IndexStore) -> None:
    """Its namespace may be another by now, with another embedder."""
    job = JobStore(store).create("n", {"kind": "upload"}, ["a"])
    store.replace_documents("n", [item("a", 1)], job_id=job.job_id)
    other.drop_namespace("n")
    other.ensure_namespace("n", embedder="another", dim=DIM)
    with pytest.raises(Conflict) as caught:
        store.replace_documents("n", [item("b", 1)], job_id=job.job_id)
    assert caught.value.code == "job_cancelled"
    assert store.documents("n") == []


def test_a_batch_for_another_embedder_is_refused(store: IndexStore, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = batch.prepare

    def made_again_meanwhile(*given: Any) -> Any:
        store.drop_namespace("n")
        store.ensure_namespace("n", embedder="another", dim=DIM)
        return prepare(*given)

    monkeypatch.setattr(batch, "prepare", made_again_meanwhile)
    with pytest.raises(Conflict) as caught:
        store.replace_documents("n", [item("a", 1)])
    assert caught.value.code == "embedder_mismatch"
