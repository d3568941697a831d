"""Host pages stay pinned until the device has read them, and no longer once someone asks for order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.context.compose.locate import Locator
from sglang_ext.context.compose.request import DocumentOnDevice, DocumentOnHost, LocatedDocuments
from sglang_ext.context.scheduler.composition import Composition
from sglang_ext.context.scheduler.release_queue import ReleaseQueue
from sglang_ext.documents.device import DeviceDocuments
from sglang_ext.documents.pages.types import DocumentMeta, KvShape
from sglang_ext.documents.tier_store import TierStore
from sglang_ext.process import hook_functions
from sglang_ext.process.control import answer
from sglang_ext.process.runtime import ContextRuntime
from sglang_ext.ranks.ranks import Ranks

SHAPE = KvShape(layers=1, kv_heads=1, head_dim=8, dtype=torch.float32, block=4)


class Event:
    """The device passes it when somebody waits for it."""

    def __init__(self) -> None:
        self.passed = False

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


def test_polling_releases_in_order_what_the_device_has_passed_and_waiting_everything() -> None:
    queue, released = ReleaseQueue(), []
    events = [Event() for _ in range(3)]
    for number, event in enumerate(events):
        queue.add(event, lambda number=number: released.append(number))
    queue.poll()
    assert released == []
    events[0].passed = events[2].passed = True
    queue.poll()
    assert released == [0], "the stream has not come to the third one before the second"
    queue.wait()
    assert released == [0, 1, 2]
    assert events[1].passed
    queue.wait()
    assert released == [0, 1, 2], "once"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A runtime on a device that runs behind, with real tiers below and one document in them that a
    composition is reading.
    """
    monkeypatch.setattr(torch.cuda, "Event", Event)
    tiers = TierStore(SHAPE, fingerprint="f", host_bytes=64 * SHAPE.page_bytes, disk=None, pin=False)
    k, v = (torch.randn(1, 10, 1, 8) for _ in "kv")
    tiers.put(DocumentMeta("d" * 32, "n", list(range(10)), 10, "f"), k, v)
    unlocked: list[Any] = []
    tree = SimpleNamespace(
        tokens_by_key=dict,
        remove_keys=lambda keys: set(),
        document_tokens=0,
        documents_evicted=0,
        protected_size=lambda: 0,
        dec_lock_ref=unlocked.append,
    )
    runtime: Any = ContextRuntime.__new__(ContextRuntime)
    runtime.tree, runtime.tiers, runtime.unlocked, runtime.ranks = tree, tiers, unlocked, Ranks()
    pool = SimpleNamespace(get_kv_size_bytes=lambda: (8, 8))
    tree.token_to_kv_pool_allocator = SimpleNamespace(size=4)
    runtime.documents = DeviceDocuments(SimpleNamespace(token_to_kv_pool=pool), tree, tiers)
    composition: Any = Composition.__new__(Composition)
    composition._device, composition.releases = torch.device("cuda"), ReleaseQueue()
    composition._tiers, composition.analyses = tiers, SimpleNamespace(stat=dict)
    composition.stage = SimpleNamespace(waits=False, fail=None)
    composition._locator = Locator(tree, tiers, runtime.documents.is_removed, SHAPE.block)
    runtime.composition = composition
    tiers.pin("d" * 32)
    located = LocatedDocuments(
        [DocumentOnDevice(torch.arange(2), "node"), DocumentOnHost("d" * 32, torch.arange(3).numpy())]
    )
    composition._unlock([SimpleNamespace(located=located)])
    yield runtime
    tiers.close()


def test_the_device_is_unlocked_at_once_and_host_pages_when_the_copies_have_run(runtime: Any) -> None:
    assert runtime.unlocked == ["node"]
    assert runtime.tiers.drop_host() == 0
    runtime.composition.releases.poll()
    assert runtime.tiers.drop_host() == 0
    runtime.composition.releases.wait()
    assert runtime.tiers.drop_host() == 1


def test_host_pages_are_free_for_those_that_wait_while_others_only_decode(
    runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "query", lambda event: True)  # the device has passed everything
    monkeypatch.setattr(hook_functions.current, "runtime", runtime)
    monkeypatch.setattr(hook_functions.current, "attention", None)
    hook_functions.before_schedule(SimpleNamespace(waiting_queue=[]), None)
    assert runtime.tiers.drop_host() == 1


@pytest.mark.parametrize("body", [{"op": "evict", "tiers": ["host"]}, {"op": "clear"}])
def test_evicting_and_clearing_wait_for_what_still_reads_host_pages(
    runtime: Any, body: dict[str, Any]
) -> None:
    deadline = time.monotonic() + 240
    while "pending" in (found := answer(runtime, body)["response"][0]):
        assert time.monotonic() < deadline
        body = body | found
        time.sleep(0.01)
    assert found == {}
    assert runtime.tiers.host_pages("d" * 32, list(range(10)), "n") is None


@pytest.mark.parametrize("operation", ["stat", "flush", "check"])
def test_what_asks_for_the_state_lets_go_of_what_the_device_has_finished(
    runtime: Any, operation: str
) -> None:
    assert answer(runtime, {"op": operation})["success"]
    assert runtime.tiers.drop_host() == 1
