"""The same documents on SGLang's storage backends: its own file backend, and one that works on the pool by
address.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.documents.disk import hicache
from sglang_ext.documents.pages.types import PAGE_BITS, DiskConfig, KvShape
from sglang_ext.documents.tier_store import TierStore
from tests.unit.documents.document_samples import FINGERPRINT, LARGE, SHAPE, Sample, flushed, look_up


@pytest.fixture(params=["sglang-file", "dynamic"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    if request.param == "sglang-file":
        yield {"path": tmp_path, "backend": "sglang-file"}
        return
    yield {"path": None, "backend": "dynamic", "extra": _dynamic("PoolStorage")}
    from tests.unit.documents import storage_by_pool

    storage_by_pool.PAGES.clear()


def _dynamic(name: str, **more: Any) -> dict[str, Any]:
    return {
        "backend_name": "pool",
        "module_path": "tests.unit.documents.storage_by_pool",
        "class_name": name,
        "interface_v1": 1,
        **more,
    }


def _open(
    config: dict[str, Any], host_pages: int = 100, fingerprint: str = FINGERPRINT, shape: KvShape = SHAPE
) -> TierStore:
    disk = DiskConfig(queue_bytes=LARGE, **config)
    return TierStore(
        shape, fingerprint=fingerprint, host_bytes=host_pages * shape.page_bytes, disk=disk, pin=False
    )


@pytest.mark.parametrize("bits", PAGE_BITS)
def test_documents_survive_restarts_and_removal_means_removal(config: dict[str, Any], bits: int) -> None:
    shape, sizes = replace(SHAPE, bits=bits), (1, 18, 64, 300)
    documents = [Sample(i, n, namespace=f"space-{i % 2}", shape=shape) for i, n in enumerate(sizes)]
    store = _open(config, shape=shape)
    for document in documents:
        document.put(store)
    flushed(store)
    assert store.stat()["faults"] == {}
    assert store.verify().documents == 4
    store.close()
    store = _open(config, shape=shape)
    for document in documents:
        resident = document.resident(store)
        assert resident.on_disk
        assert not resident.blocks_on_host.any()
        assert look_up(store, document.key, document.ids, "nobody") is None
        assert document.load_and_check(store, [0])
        assert document.load_and_check(store)
    assert store.remove(documents[1].key)
    assert store.remove_namespace("space-0") == 2
    store.close()
    store = _open(config, shape=shape)
    assert [document.found(store) is not None for document in documents] == [False, False, False, True]
    store.clear()
    store.close()
    store = _open(config, shape=shape)
    assert documents[3].found(store) is None
    store.check_integrity()
    store.close()


def test_a_namespace_is_removed_with_what_only_the_device_names(config: dict[str, Any]) -> None:
    """A restarted process has met no document of the backend's."""
    document, other = Sample(1, 18, namespace="space-0"), Sample(2, 18, namespace="space-1")
    store = _open(config)
    for each in (document, other):
        each.put(store)
    flushed(store)
    store.close()
    store = _open(config)
    assert store.remove_namespace("space-0", [document.key]) == 1
    assert document.found(store) is None
    assert other.found(store) is not None
    store.close()


def test_damaged_and_foreign_pages_are_misses(config: dict[str, Any]) -> None:
    document = Sample(1, 18)
    store = _open(config)
    document.put(store)
    flushed(store)
    store.close()
    store = _open(config, fingerprint="model-b")
    assert document.found(store) is None
    store.close()
    if config["backend"] == "dynamic":
        from tests.unit.documents import storage_by_pool

        first, second = storage_by_pool.PAGES[f"{document.key}@2"]
        storage_by_pool.PAGES[f"{document.key}@2"] = [second, first]
    else:
        path = next(config["path"].glob(f"{document.key}@2*"))
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)
    store = _open(config)
    assert document.found(store) is not None
    assert [bad.reason.split(":")[0] for bad in store.verify().bad] == ["crc"]
    assert document.load_and_check(store, [0, 1])
    assert not document.load_and_check(store)
    assert document.found(store) is None
    assert store.stat()["faults"]["crc"] == 2  # verify and load
    document.put(store)
    flushed(store)
    store.drop_host()
    assert document.load_and_check(store)
    store.close()


def test_a_backend_that_fails_costs_hits_not_answers(caplog: pytest.LogCaptureFixture) -> None:
    document = Sample(1, 18)
    with caplog.at_level(logging.WARNING):
        store = _open({"path": None, "backend": "dynamic", "extra": _dynamic("PoolStorage", refuse=True)})
        document.put(store)
        flushed(store)
        assert store.stat()["faults"]["backend"] > 0
        document.assert_pages(store)
        store.drop_host()
        assert document.found(store) is None
        store.close()
    assert "the storage cluster is away" in caplog.text


def test_a_removal_that_the_backend_fails_hides_the_document(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    *removed, other, last = (Sample(i, 18) for i in range(12))
    is_away, deleter, tries = True, hicache._deleter, list[str]()

    def failing(storage: Any) -> Any:
        delete = deleter(storage)

        def delete_value(key: str) -> bool:
            tries.append(key)
            if is_away:
                raise ConnectionError("the storage cluster is away")
            return bool(delete(key))

        return delete_value

    monkeypatch.setattr(hicache, "_deleter", failing)
    store = _open(config)
    for document in removed:
        document.put(store)
    flushed(store)
    for document in removed:
        assert store.remove(document.key)
    flushed(store)
    assert [document.found(store) for document in removed] == [None] * 10
    assert store.stat()["faults"]["backend"] >= 10
    tries.clear()
    other.put(store)
    flushed(store)
    assert len(tries) <= 2, "the lock is not held for all of them"
    is_away = False
    for edition in range(10):
        last.put(store)
        flushed(store)
        assert edition == 9 or store.remove(last.key)
    store.close()
    store = _open(config)
    assert [each.found(store) is not None for each in (*removed, other, last)] == [False] * 10 + [True] * 2
    store.close()


def test_a_backend_that_cannot_delete_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _open({"path": None, "backend": "dynamic", "extra": _dynamic("KeepingStorage")}).close()
    assert "cannot delete" in caplog.text


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="Unknown storage backend 'nonesuch'"):
        _open({"path": None, "backend": "nonesuch"})
