"""The GPU copy of an index: refused plainly without faiss-gpu; with it, renewed after changes and by-passed
where it has no answer.

No machine of CI has a GPU, so FAISS's three GPU calls are stood in for by their CPU counterparts: this tests
when a copy is made and asked, not CUDA. On a machine with faiss-gpu the same tests run on the real thing."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import faiss
import numpy as np
import pytest

from ragserve.errors import InvalidRequest, Unavailable
from ragserve_index import IndexStore, Range, gpu
from ragserve_index.structures.ivf import Ivf
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
        SearchParametersIVF=faiss.SearchParametersIVF,
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


def test_inverted_lists_are_probed_as_on_the_cpu(tmp_path: Path, copies: list[Any]) -> None:
    n = Ivf.TRAIN_FROM
    vectors = np.random.default_rng(0).standard_normal((n, DIM), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    structure = Ivf.train(vectors[::2].copy(), n)
    structure.add(np.arange(100, 100 + n), vectors)
    mirror = gpu.GpuMirror()
    for k in (10, 1000):  # the second probes all lists
        scores, ids = mirror.search(structure, vectors[:20], k)
        wanted, same = structure.search(vectors[:20], k)
        np.testing.assert_allclose(scores, wanted, atol=1e-5)
        assert (ids == same).mean() > 0.99  # but for ties
    assert structure.probes(1000, n) > structure.probes(10, n)
    assert len(copies) == 1


def test_a_full_gpu_leaves_searches_to_the_cpu(
    tmp_path: Path, copies: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in = gpu.load_faiss()
    copy, calls = stand_in.index_cpu_to_gpu, []

    def full(*given: Any) -> Any:
        calls.append(given)
        raise RuntimeError("StandardGpuResources: alloc fail")

    with IndexStore(tmp_path, device="gpu") as store:
        store.ensure_namespace("n", embedder="e", dim=DIM)
        fill(store, 20)
        monkeypatch.setattr(stand_in, "index_cpu_to_gpu", full)
        for _ in range(3):
            assert texts(store, QUERY, 1) == ["d3#0.4"]
        assert len(calls) == 1
        assert caplog.text.count("alloc fail") == 1
        monkeypatch.setattr(stand_in, "index_cpu_to_gpu", copy)
        store.replace_documents("n", [item("d4", 10, edition=1)])
        assert texts(store, QUERY, 1) == ["d3#0.4"]
        assert len(copies) == 1


def test_the_copy_of_a_dropped_namespace_is_freed_by_the_next_search(
    tmp_path: Path, copies: list[Any]
) -> None:
    with IndexStore(tmp_path, device="gpu") as store:
        for name in ("one", "two"):
            store.ensure_namespace(name, embedder="e", dim=DIM)
            fill(store, 20, namespace=name)
        assert texts(store, QUERY, 1, namespace="one") == ["d3#0.4"]
        freed = ref(copies.pop())
        store.drop_namespace("one")
        gc.collect()
        kept = freed() is not None  # not freed where it was dropped: another thread may search
        assert kept
        deadline = (
            time.monotonic() + 30
        )  # a save in the background may hold the dropped index a little longer
        while freed() is not None and time.monotonic() < deadline:
            assert texts(store, QUERY, 1, namespace="two") == ["d3#0.4"]
            gc.collect()
        assert freed() is None
