"""A session's KV goes when it is ended, and when a document of its namespace is removed."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.documents import device
from sglang_ext.documents.device import DeviceDocuments
from sglang_ext.wire.protocol import composed_session_key, prefix_key, session_key
from tests.unit.documents.test_radix import insert, tree_of

OURS, THEIRS = session_key("acme", "a" * 32), session_key("acme-old", "b" * 32)
COMPOSED = composed_session_key(OURS)


class Running:
    """A request of SGLang's that caches under its key."""

    def __init__(self, key: str) -> None:
        self.extra_key = key


@pytest.fixture
def tree() -> Any:
    tree = tree_of(1)
    nothing = lambda node: None  # noqa: E731
    tree.freed, tree.observer = [], SimpleNamespace(before_eviction=nothing, on_evicted=nothing)
    tree.token_to_kv_pool_allocator = SimpleNamespace(
        free=lambda slots: tree.freed.extend(slots.tolist()),
        free_segment=lambda slots, *, start_pos: tree.freed.extend(slots.tolist()),
    )
    for number, key in enumerate((OURS, COMPOSED, THEIRS, prefix_key("acme"))):
        insert(tree, array("q", range(8)), torch.arange(8) + 8 * number, key=key)
    return tree


def documents_of(tree: Any) -> DeviceDocuments:
    tiers: Any = SimpleNamespace(
        remove=lambda key, namespace: False, remove_namespace=lambda namespace, keys: 0, clear=lambda: None
    )
    return DeviceDocuments(None, tree, tiers)


def test_the_end_of_a_session_frees_all_of_its_kv_and_no_other(tree: Any) -> None:
    documents, running = documents_of(tree), Running(COMPOSED)
    documents.caching_request(running)
    documents.remove_session(OURS)
    assert sorted(tree.freed) == list(range(16))
    assert set(tree.tokens_by_key()) == {THEIRS, prefix_key("acme")}
    assert running.ragserve_private, "an answer under way does not bring it back"  # type: ignore[attr-defined]


def test_kv_that_a_turn_reads_goes_when_it_has_ended(tree: Any) -> None:
    documents = documents_of(tree)
    node = tree.document(array("q", range(8)), COMPOSED)[1]
    tree.inc_lock_ref(node)
    documents.remove_session(OURS)
    assert documents.is_removed(COMPOSED), "and no other turn finds it"
    assert sorted(tree.freed) == list(range(8))
    tree.dec_lock_ref(node)
    documents.sweep()
    assert sorted(tree.freed) == list(range(16))
    assert not documents.is_removed(COMPOSED)


def test_a_removed_document_takes_the_sessions_of_its_namespace_along(tree: Any) -> None:
    documents, running = documents_of(tree), Running(session_key("acme", "c" * 32))
    documents.exact_request(running)
    documents.remove(["d" * 32], "acme")
    assert set(tree.tokens_by_key()) == {THEIRS}
    assert running.ragserve_private  # type: ignore[attr-defined]


def test_an_emptied_cache_keeps_what_is_read_and_prompts_without_documents(tree: Any) -> None:
    """Prefixes and sessions contain documents."""
    for number, key in ((4, "d" * 32), (5, "key:other")):
        insert(tree, array("q", range(8)), torch.arange(8) + 8 * number, key=key)
    tree.inc_lock_ref(tree.document(array("q", range(8)), COMPOSED)[1])
    documents_of(tree).clear()
    assert set(tree.tokens_by_key()) == {COMPOSED, "key:other"}


class Children(dict[Any, Any]):
    """The root's nodes by key. Counts the walks through all of them."""

    walks = 0

    def values(self) -> Any:
        self.walks += 1
        return super().values()


def counted(tree: Any) -> Children:
    children = tree.root_node.children = Children(tree.root_node.children)
    return children


@pytest.mark.parametrize("n", [1, 40])
def test_a_removal_walks_through_the_tree_as_often_however_much_is_removed(tree: Any, n: int) -> None:
    documents, keys = documents_of(tree), [f"{number:032x}" for number in range(40)]
    for number, key in enumerate(keys):
        insert(tree, array("q", range(8)), torch.arange(8) + 8 * (number + 4), key=key)
    read = tree.document(array("q", range(8)), keys[0])[1]
    tree.inc_lock_ref(read)
    children = counted(tree)
    assert documents.remove(keys[:n], "other") == n
    assert children.walks <= 4
    assert set(keys) & set(tree.tokens_by_key()) == {keys[0], *keys[n:]}
    assert [key for key in keys if documents.is_removed(key)] == [keys[0]]
    tree.dec_lock_ref(read)
    documents.sweep()
    assert set(keys) & set(tree.tokens_by_key()) == set(keys[n:])


def test_many_documents_on_the_device_are_swept_seldom(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_SWEEP_AT", 4)
    documents, children = documents_of(tree), counted(tree)
    for number in range(64):
        key = f"{number:032x}"
        documents.document_request(Running(key), "acme")
        insert(tree, array("q", range(8)), torch.arange(8), key=key)
        documents.cached(key)
    assert children.walks <= 8
    tree.remove_keys({f"{number:032x}" for number in range(63)})
    documents.sweep()
    assert documents.remove_namespace("acme") == 1, "the others are forgotten"


def test_a_removed_namespace_is_not_looked_for_document_by_document(
    tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, keys = documents_of(tree), [f"{number:032x}" for number in range(8)]
    given: list[str] = []

    def removed(namespace: str, also: list[str]) -> int:
        given.extend(also)
        return 3

    for number, key in enumerate(keys):
        documents.document_request(Running(key), "acme")
        insert(tree, array("q", range(8)), torch.arange(8) + 8 * (number + 4), key=key)
    monkeypatch.setattr(documents._tiers, "remove", lambda *_: pytest.fail("one call has removed all"))
    monkeypatch.setattr(documents._tiers, "remove_namespace", removed)
    assert documents.remove_namespace("acme") == 8
    assert sorted(given) == keys, "for a backend that lists nothing"
    assert set(tree.tokens_by_key()) == {THEIRS}


def test_a_busy_namespace_caches_again_after_a_removal(tree: Any) -> None:
    """Requests share the system text, so that somebody always reads a part of what was there before."""
    documents, key, ids = documents_of(tree), prefix_key("busy"), array("q", range(100, 112))
    new, longer = array("q", [*ids[:8], *range(4)]), array("q", [*ids[:8], *range(8)])
    insert(tree, ids, torch.arange(50, 62), key=key)
    old = tree.document(ids, key)[1]
    tree.inc_lock_ref(old)
    documents.remove(["d" * 32], "busy")
    insert(tree, new, torch.tensor([*range(50, 58), *range(70, 74)]), key=key)
    documents.sweep()
    assert tree.peek(new, key) == len(new)
    running = tree.document(new, key)[1]
    tree.inc_lock_ref(running)
    tree.dec_lock_ref(old)
    documents.sweep()
    assert tree.peek(ids, key) == 8, "the rest of what was there before is freed, and not what came since"
    insert(tree, longer, torch.tensor([*range(50, 58), *range(70, 74), *range(80, 84)]), key=key)
    documents.sweep()
    assert tree.peek(longer, key) == len(longer)
    tree.dec_lock_ref(running)
    documents.sweep()
    assert tree.peek(longer, key) == 0, "nobody reads the system text of before"
    assert sorted(tree.freed) == [*range(50, 62), *range(70, 74), *range(80, 84)]
    insert(tree, ids, torch.arange(50, 62), key=key)
    documents.sweep()
    assert tree.peek(ids, key) == len(ids), "nothing of it is removed any more"


def test_what_was_removed_is_known_after_its_node_was_split_and_evicted(tree: Any) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    documents, key, ids = documents_of(tree), prefix_key("busy"), array("q", range(100, 112))
    insert(tree, ids, torch.arange(50, 62), key=key)
    old = tree.document(ids, key)[1]
    tree.inc_lock_ref(old)
    documents.remove(["d" * 32], "busy")
    head = tree.match_prefix(MatchPrefixParams(key=RadixKey(ids[:8], extra_key=key))).last_device_node
    tree.inc_lock_ref(head)
    tree.dec_lock_ref(old)
    tree.evict(EvictParams(num_tokens=tree.evictable_size()))
    assert tree.peek(ids, key) == 8
    tree.dec_lock_ref(head)
    documents.sweep()
    assert tree.peek(ids, key) == 0
