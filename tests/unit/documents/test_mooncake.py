"""Documents in Mooncake Store: a real master, and a client process for each engine, over TCP on loopback."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.documents.pages.page_format import PageLayout
from sglang_ext.documents.remote.mooncake_client import MooncakeClient
from sglang_ext.documents.remote.remote_backend import StoreAway
from sglang_ext.documents.tier_store import TierStore
from tests.unit.documents.document_samples import SHAPE, Sample, flushed
from tests.unit.documents.mooncake_master import Master, why_not
from tests.unit.documents.test_remote_tier import (
    control,
    engine,
    found,
    removed,
    resolved_tiers,
    until,
)

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine's store is no store that is away."""
    monkeypatch.setattr("sglang_ext.documents.remote.tier.LOOKUP_S", 240)
    monkeypatch.setattr("sglang_ext.documents.promote.LOAD_S", 240)


@pytest.fixture
def master() -> Iterator[Master]:
    running = Master()
    yield running
    running.kill()


def options(master: Master, segment: int = 64 * 2**20) -> dict[str, Any]:
    return {
        "master_server_address": master.address,
        "global_segment_size": segment,
        "local_buffer_size": 16 * 2**20,
    }


def test_two_engines_share_and_delete_documents(master: Master, tmp_path: Path) -> None:
    master.start()
    documents = [Sample(i, 40, namespace=f"space-{i % 2}") for i in range(4)]
    mine = {"store": "mooncake", "options": options(master)}
    theirs = {"store": "mooncake", "options": options(master, 0)}  # it gives no memory
    with engine(tmp_path, "a", **mine) as one, engine(tmp_path, "b", **theirs, disk=False) as other:
        for document in documents:
            one.put(document.meta, document.k, document.v, b"analysis of it")
        flushed(one)
        assert one.stat()["remote"]["stored"] == 4
        for document in documents:
            assert found(other, document) == "remote"
            assert document.load_and_check(other)
            assert other.summary(document.key).finished.wait(240)
        assert one.put_summary(documents[1].key, b"another analysis")
        flushed(one)
        client = MooncakeClient(theirs["options"], SHAPE.page_bytes)
        name = f"{_prefix(one)}/space-0/{documents[0].key}"
        assert client.get(f"{name}/r")
        assert client.get(f"{name}/9")
        started = time.monotonic()  # just read, so leased for ten seconds
        assert removed(one, documents[0]) == {"removed": 1}
        assert time.monotonic() - started < 8
        assert client.get(f"{name}/r") is None
        assert client.get(f"{name}/9") is None
        assert "unconfirmed" not in control(other, "remove_namespace", namespace="space-0")
        other.drop_host()
        assert [found(other, document) for document in documents] == ["absent", "remote", "absent", "remote"]
        assert documents[1].load_and_check(other)
        assert client.get(f"{_prefix(one)}/space-1/{documents[1].key}/r").endswith(b"another analysis")  # type: ignore[union-attr]
        other.drop_host()
        client.remove([f"{_prefix(one)}/space-1/{documents[3].key}/4"])  # the store evicts page by page
        assert found(other, documents[3]) == "remote"
        assert not documents[3].load_and_check(other)
        flushed(other)
        assert client.get(f"{_prefix(one)}/space-1/{documents[3].key}/r") is None, "the rest is dropped"
        control(one, "clear")
        assert client.get(f"{_prefix(one)}/space-1/{documents[3].key}/r") is None
        client.close()
        assert other.stat()["faults"] == {}


def test_a_master_that_goes_and_comes_back(master: Master, tmp_path: Path) -> None:
    first, second = Sample(1, 16), Sample(2, 16)
    with engine(tmp_path, store="mooncake", options=options(master), away=True) as store:  # away at the start
        until(lambda: store.stat()["faults"].get("remote_away"))
        first.put(store)
        assert found(store, second) == "absent"
        assert resolved_tiers(store, [first]) == {"host"}
        assert removed(store, second)["unconfirmed"] == 1
        master.start()
        until(lambda: not store.stat()["remote"]["away"])
        until(lambda: not store.stat()["remote"]["unconfirmed_deletions"])
        store.retrieved([first.key], "default")
        flushed(store)
        assert store.stat()["remote"]["stored"] == 1
        master.kill()
        assert removed(store, first) == {"removed": 1, "unconfirmed": 1}
        until(lambda: store.stat()["remote"]["away"])
        started = time.monotonic()
        assert found(store, second) == "absent"
        assert time.monotonic() - started < 120, "nobody waits for a store that is known to be away"
        master.start()
        until(lambda: not store.stat()["remote"]["unconfirmed_deletions"])
        until(lambda: second.put(store) or flushed(store) or store.stat()["remote"]["stored"] == 2)


def test_a_client_process_that_dies_is_started_again(master: Master) -> None:
    master.start()
    client = MooncakeClient(options(master), SHAPE.page_bytes)
    assert client.put("a", b"value")
    process = client._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(StoreAway, match="has ended"):
        client.get("a")
    client.check()
    assert client.get("nothing") is None
    client.close()
    with pytest.raises(StoreAway, match="closed"):
        client.check()


def _prefix(store: TierStore) -> str:
    layout: PageLayout = store._tiers.layout
    from sglang_ext.documents.pages.page_format import OLDEST, digest

    return f"ragserve/v{OLDEST}/{digest(layout.fingerprint).hex()[:32]}/0-1"
