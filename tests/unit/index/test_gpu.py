"""The GPU copy of an index: refused plainly without faiss-gpu; with it, renewed after changes and by-passed
where it has no answer.

No machine of CI has a GPU, so FAISS's three GPU calls are stood in for by their CPU counterparts: this tests
when a copy is made and asked, not CUDA. On a machine with faiss-gpu the same tests run on the real thing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import pytest

from ragserve.errors import InvalidRequest, Unavailable
from ragserve_index import IndexStore, Range, gpu
from tests.unit.index.index_samples import DIM, assert_clean, fill, item, texts, vectors_of

QUERY = vectors_of("d3", 0, n=10)[4]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The copies made so far."""
    made: list[Any] = []
    real = hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0

    def copy(resources: Any, device: int, index: Any) -> Any:
        made.append(faiss.index_cpu_to_gpu(resources, device, index) if real else faiss.clone_index(index))
        return made[-1]

    stand_in = SimpleNamespace(
        __version__=faiss.__version__,
        StandardGpuResources=faiss.StandardGpuResources if real else object,
        get_num_gpus=lambda: 1,
        index_cpu_to_gpu=copy,
    )
    monkeypatch.setattr(gpu, "load_faiss", lambda: stand_in)
    yield made
    made.clear()


def test_refused_plainly_without_gpu_support(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "load_faiss", lambda: SimpleNamespace(__version__="1.15.1"))
    with pytest.raises(Unavailable, match="no GPU support") as caught:
        IndexStore(tmp_path, device="gpu")
    assert caught.value.code == "gpu_index_unavailable"
    monkeypatch.setattr(
        gpu, "load_faiss", lambda: SimpleNamespace(StandardGpuResources=object, get_num_gpus=lambda: 0)
    )
    with pytest.raises(Unavailable, match="FAISS sees none"):
        IndexStore(tmp_path, device="gpu")


def test_other_devices_and_types_without_gpu_form(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no GPU form"):
        IndexStore(tmp_path, device="gpu", index_type="hnsw")
    with pytest.raises(InvalidRequest, match="cpu, gpu"):
        IndexStore(tmp_path, device="tpu")


def test_the_copy_is_renewed_after_a_change_only(tmp_path: Path, copies: list[Any]) -> None:
    with IndexStore(tmp_path, device="gpu") as store:
        store.ensure_namespace("n", embedder="e", dim=DIM)
        fill(store, 20)
        for _ in range(3):
            assert texts(store, QUERY, 1) == ["d3#0.4"]
        assert len(copies) == 1
        store.replace_documents("n", [item("d3", 10, edition=1)])
        assert texts(store, vectors_of("d3", 1, n=10)[4], 1) == ["d3#1.4"]
        assert texts(store, QUERY, 1) != ["d3#0.4"]
        assert len(copies) == 2
        assert_clean(store)


def test_filters_large_k_and_other_types_run_on_the_cpu(
    tmp_path: Path, copies: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with IndexStore(tmp_path) as store:
        store.ensure_namespace("graph", embedder="e", dim=DIM, index_type="hnsw")
        fill(store, 20, namespace="graph")
    with IndexStore(tmp_path, device="gpu") as store:
        store.ensure_namespace("n", embedder="e", dim=DIM)
        fill(store, 200)
        assert texts(store, QUERY, 1, filter=Range(field="i", lt=5)) == ["d3#0.4"]
        assert len(texts(store, QUERY, 1500)) == 1500
        assert texts(store, QUERY, 1, namespace="graph") == ["d3#0.4"]
        assert not copies
        assert "no GPU form" in caplog.text
        assert texts(store, QUERY, 1) == ["d3#0.4"]
        assert len(copies) == 1


def test_threads_share_the_copy(tmp_path: Path, copies: list[Any]) -> None:
    with IndexStore(tmp_path, device="gpu") as store:
        store.ensure_namespace("n", embedder="e", dim=DIM)
        fill(store, 50)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda i: texts(store, vectors_of(f"d{i}", 0, n=10)[1], 1), range(50)))
        assert found == [[f"d{i}#0.1"] for i in range(50)]
        assert len(copies) == 1
