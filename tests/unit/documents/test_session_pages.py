"""Evicted KV of sessions goes to host pages, comes back to its own session alone, and goes with it."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.documents import session_pages
from sglang_ext.documents.device import DeviceDocuments
from sglang_ext.documents.session_pages import SessionPages
from sglang_ext.documents.tier_store import TierStore
from sglang_ext.wire.protocol import composed_session_key, session_key
from tests.unit.documents.document_samples import FINGERPRINT, SHAPE
from tests.unit.documents.test_radix import insert, tree_of
from tests.unit.documents.test_remote_tier import engine

PAGE = 4
OURS = session_key("acme", "a" * 32)
KEY, THEIRS = composed_session_key(OURS), composed_session_key(session_key("acme", "b" * 32))
IDS = array("q", range(100, 140))
SLOTS = torch.randperm(64)[:40]


class Bench:
    """A tree of one dialogue of two turns (24 and 16 tokens) and one of somebody else, and a host tier."""

    def __init__(self, pages: int = 64, store: TierStore | None = None) -> None:
        self.store = store or TierStore(
            SHAPE, fingerprint=FINGERPRINT, host_bytes=pages * SHAPE.page_bytes, disk=None, pin=False
        )
        self.k, self.v = (
            [torch.randn(128, SHAPE.kv_heads, SHAPE.head_dim) for _ in range(SHAPE.layers)] for _ in "kv"
        )
        pool = SimpleNamespace(
            layer_num=SHAPE.layers, get_key_buffer=self.k.__getitem__, get_value_buffer=self.v.__getitem__
        )
        self.sessions = SessionPages(pool, self.store, FINGERPRINT)
        self.tree = tree_of(PAGE)
        self.tree.token_to_kv_pool_allocator = SimpleNamespace(free=lambda slots: None)
        self.tree.observer = SimpleNamespace(before_eviction=self.sessions.save, on_evicted=lambda node: None)
        self.documents = DeviceDocuments(None, self.tree, self.store)
        self.documents.sessions = self.sessions
        insert(self.tree, IDS[:24], SLOTS, key=KEY)
        insert(self.tree, IDS, SLOTS, key=KEY)
        insert(self.tree, IDS[:24], SLOTS + 64, key=THEIRS)

    def evict(self) -> None:
        self.documents.evict(["sessions"])

    def found(self, ids: array[int] = IDS, held: int = 0, key: str = KEY) -> list[tuple[int, int]]:
        turns = self.sessions.find(key, ids, held)
        for turn in turns:
            own = self.store.pages
            token = torch.arange(turn.end - turn.start)
            page = torch.from_numpy(turn.pages)[token // SHAPE.block]
            for layer in range(SHAPE.layers):
                k, v = own.read(layer, page, token % SHAPE.block)
                slots = SLOTS[turn.start : turn.end] + (64 if key == THEIRS else 0)
                assert torch.equal(k, self.k[layer][slots])
                assert torch.equal(v, self.v[layer][slots])
            self.store.unpin(turn.name)
        return [(turn.start, turn.end) for turn in turns]


@pytest.fixture
def bench() -> Any:
    bench = Bench()
    yield bench
    bench.store.check_integrity()
    bench.store.close()


def test_evicted_turns_are_found_by_the_session_that_said_them(bench: Bench) -> None:
    assert bench.found() == []
    bench.evict()
    assert bench.tree.tokens_by_key() == {}
    assert bench.found() == [(0, 24), (24, 40)]
    assert bench.found(held=24) == [(24, 40)], "behind what the device still has"
    assert bench.found(ids=IDS[:30]) == [(0, 24)], "whole pieces of what was asked for"
    assert bench.found(held=8) == []
    other = IDS[:]
    other[30] = 0
    assert bench.found(ids=other) == [(0, 24)], "another answer in the second turn"
    assert bench.found(key=THEIRS) == [(0, 24)]
    assert bench.found(key=composed_session_key(session_key("acme-old", "a" * 32))) == []


def test_a_turn_that_could_not_be_copied_is_not_found(bench: Bench) -> None:
    slots = SLOTS[:24].clone()
    slots[20] = 128  # the buffers end at 127
    key = composed_session_key(session_key("acme", "c" * 32))
    insert(bench.tree, IDS[:24], slots, key=key)
    found = bench.tree.document(IDS[:24], key)
    assert found is not None
    with pytest.raises((IndexError, RuntimeError)):
        bench.sessions.save(found[1])
    assert bench.found(ids=IDS[:24], key=key) == []
    assert bench.sessions.keys() == set()
    assert bench.store.stat()["host"]["pages"] == 0


def test_what_the_host_has_is_not_copied_again(bench: Bench) -> None:
    bench.evict()
    pages = bench.store.stat()["host"]["pages"]
    longer = array("q", [*IDS, *range(8)])
    slots = torch.cat((SLOTS, torch.arange(100, 108)))
    insert(bench.tree, longer, slots, key=KEY)  # a later turn brought all back and said more
    bench.evict()
    assert bench.store.stat()["host"]["pages"] == pages + 2
    assert [(t.start, t.end) for t in bench.sessions.find(KEY, longer, 0)] == [(0, 24), (24, 40), (40, 48)]
    bench.documents.clear()


def test_the_end_of_a_session_frees_its_pages_and_no_other(bench: Bench) -> None:
    bench.evict()
    bench.documents.remove_session(OURS)
    assert bench.found() == []
    assert bench.sessions.keys() == {THEIRS}
    assert bench.store.stat()["host"]["pages"] == 24 // SHAPE.block


def test_a_removed_document_takes_the_pages_of_its_namespace_s_sessions(bench: Bench) -> None:
    bench.evict()
    bench.documents.remove(["d" * 32], "acme-old")
    assert bench.found() != []
    bench.documents.remove(["d" * 32], "acme")
    assert (bench.sessions.keys(), bench.store.stat()["host"]["pages"]) == (set(), 0)


def test_pages_that_are_read_outlive_the_session_until_then(bench: Bench) -> None:
    bench.evict()
    turns = bench.sessions.find(KEY, IDS, 0)
    bench.documents.clear()
    assert bench.found() == []
    assert bench.store.stat()["host"]["pages"] == 40 // SHAPE.block
    for turn in turns:
        bench.store.unpin(turn.name)
    assert bench.store.stat()["host"]["pages"] == 0


def test_no_more_is_kept_than_the_host_has_room_for_and_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(pages=8)
    bench.evict()
    bench.store.check_integrity()
    assert bench.store.stat()["host"]["pages"] <= 8
    assert len(bench.found()) + len(bench.found(key=THEIRS)) == 1, "the latest fills the host"
    bench.store.close()
    monkeypatch.setattr(session_pages, "MOST", 1)
    bench = Bench()
    bench.evict()
    assert (len(bench.sessions), len(bench.sessions.keys())) == (1, 1)
    assert bench.store.stat()["host"]["documents"] == 1
    bench.store.check_integrity()
    bench.store.close()


def test_the_shared_store_is_asked_to_delete_no_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has none of them, and for too many deletions it drops all of their namespace's documents."""
    monkeypatch.setattr(session_pages, "MOST", 2)
    with engine(tmp_path, options={"folder": str(tmp_path / "unmounted")}, away=True) as store:
        bench = Bench(store=store)
        bench.evict()
        assert len(bench.sessions) == 2, "the third turn is forgotten"
        bench.documents.remove_session(OURS)
        bench.sessions.forget_namespace("acme")
        assert store.stat()["host"]["pages"] == store.stat()["remote"]["unconfirmed_deletions"] == 0
        store.check_integrity()
