"""Documents of a composed request are found and locked wherever their blocks are."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.context.compose.locate import Locator
from sglang_ext.context.compose.request import (
    ComposedContext,
    DocumentOnDevice,
    DocumentOnHost,
    tier_of,
    tokens_by_tier,
)
from sglang_ext.documents.session_pages import TurnPages
from sglang_ext.documents.tier_store import TierStore
from sglang_ext.wire.protocol import (
    ContextPlan,
    PlanError,
    SessionPart,
    Span,
    composed_session_key,
    session_key,
)
from tests.unit.documents.document_samples import SHAPE, Sample, flushed, opened

BLOCK = SHAPE.block
QUESTION = [7, 8, 9]


def locator_of(store: TierStore, tree: Any = None) -> Locator:
    nothing_on_device = SimpleNamespace(document=lambda ids, key: None)
    return Locator(tree or nothing_on_device, store, lambda key: False, BLOCK)


def context_of(documents: Sequence[Sample], kept: Sequence[Sequence[int]]) -> ComposedContext:
    """A request that needs these tokens of each document now."""
    ids = array("q", [token for document in documents for token in document.ids] + QUESTION)
    bounds = [0, *accumulate(document.meta.n_tokens for document in documents)]
    spans = tuple(Span(a, b) for a, b in pairwise(bounds))
    plan = ContextPlan("compose", "default", "samkv", spans)
    partial: Any = SimpleNamespace(kept=positions(spans, kept))
    return ComposedContext(plan, ids, tuple(document.key for document in documents), partial)


def positions(spans: Sequence[Span], kept: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([s.start + token for s, own in zip(spans, kept, strict=True) for token in own])


def settle(context: ComposedContext, kept: Sequence[Sequence[int]]) -> None:
    """The selection is final."""
    decided: Any = SimpleNamespace(kept=positions(context.plan.spans, kept))
    context.decided = decided


def resolved(locator: Locator, context: ComposedContext) -> list[int]:
    """Ask once a step, as the scheduler does, until the documents are there or missing."""
    until = time.monotonic() + 240
    while (missing := locator.resolve(context)) is None:
        locator.unlock(context)
        assert time.monotonic() < until
        time.sleep(0.001)
    return missing


def on_disk(store: TierStore, documents: Sequence[Sample]) -> None:
    for document in documents:
        document.put(store)
    flushed(store)
    store.drop_host()


def test_chosen_blocks_of_many_documents_come_from_disk(tmp_path: Path) -> None:
    """A draft loads the first block of each; the selection asks for others, which never were on host."""
    documents = [Sample(i, 40) for i in range(13)]
    with opened(tmp_path) as store:
        on_disk(store, documents)
        context, locator = context_of(documents, [[0]] * 13), locator_of(store)
        assert resolved(locator, context) == []
        locator.unlock(context)
        settle(context, [[0, 20, 37]] * 13)
        assert resolved(locator, context) == []
        assert {tier_of(source) for source in context.located.sources} == {"disk"}
        for document in documents:
            document.assert_pages(store, [0, 5, 9])
        locator.unlock(context)
        store.check_integrity()


def test_blocks_that_are_evicted_again_and_again_end_as_misses(tmp_path: Path) -> None:
    document = Sample(1, 40)
    with opened(tmp_path) as store:
        on_disk(store, [document])
        context, locator = context_of([document], [[0, 20]]), locator_of(store)
        missing: list[int] | None = None
        loads = 0
        while loads < 100:
            missing = locator.resolve(context)
            locator.unlock(context)
            if missing is not None:
                break
            loads += 1
            assert store.flush(30)
            store.drop_host()
        assert missing == [0]
        assert 2 < loads < 20
        assert document.found(store), "the next request tries again"


def test_a_load_waits_for_pages_that_other_requests_hold(tmp_path: Path) -> None:
    documents = [Sample(i, 20) for i in range(3)]  # five pages each
    with opened(tmp_path, host_pages=10) as store:
        on_disk(store, documents)
        for other in documents[:2]:
            store.pin(other.key)
            assert store.load(other.key).wait(240)
        context, locator = context_of(documents[2:], [range(20)]), locator_of(store)
        assert not locator.lacks_room
        for _ in range(50):
            assert locator.resolve(context) is None
            locator.unlock(context)
        assert locator.lacks_room, "those that keep documents for long must let it have some"
        store.unpin(documents[0].key)
        assert resolved(locator, context) == []
        documents[2].assert_pages(store)
        assert not locator.lacks_room, "the one that waited has it, and may be read in place itself"
        locator.unlock(context)
        store.unpin(documents[1].key)
        assert store.stat()["faults"] == {}
        store.check_integrity()


def test_a_request_for_more_than_the_host_holds_ends_as_misses_and_says_why(tmp_path: Path) -> None:
    documents = [Sample(i, 20) for i in range(3)]
    with opened(tmp_path, host_pages=10) as store:
        on_disk(store, documents)
        locator, everything = locator_of(store), [range(20)] * 3
        context = context_of(documents, everything)
        assert resolved(locator, context)
        assert store.stat()["faults"]["no_room"]
        third = documents[2].key
        tree: Any = SimpleNamespace(
            document=lambda ids, key: ([torch.arange(20)], "node") if key == third else None,
            inc_lock_ref=lambda node: None,
            dec_lock_ref=lambda node: None,
        )
        context = context_of(documents, everything)
        locator = locator_of(store, tree)
        assert resolved(locator, context) == [], "the third is on the device"
        locator.unlock(context)
        store.check_integrity()


def test_the_dialogue_so_far_is_found_under_the_session_s_key(tmp_path: Path) -> None:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang_ext.documents.radix import DocumentRadixCache
    from tests.unit.documents.test_radix import insert

    page, end, needed = 4, 30, 22
    tree = DocumentRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            page_size=page,
            enable_kv_cache_events=False,
        )
    )
    ids, slots = array("q", range(100, 140)), torch.randperm(64)
    session = SessionPart(session_key("n", "s"), needed)
    plan = ContextPlan("compose", "n", "concat", (Span(0, end),), session=session)
    removed: set[str] = set()

    def context() -> ComposedContext:
        return ComposedContext(plan, ids, ("whole",), Any)  # type: ignore[arg-type]

    with opened(tmp_path) as store:
        locator = Locator(tree, store, removed.__contains__, BLOCK)
        key = composed_session_key(session.key)
        insert(tree, ids[:16], slots, key=key)
        one = context()
        assert locator.resolve(one) == [0], "less than what nobody else has"
        assert (one.located.held, one.located.sources) == (0, [])
        locator.recount(one)
        assert (one.located.held, one.located.sources) == (16, [])
        insert(tree, ids[:20], slots, key=key)  # a page that is not full is not in the tree
        assert locator.resolve(one) == []
        assert one.located.held == len(one.located.sources[0].slots) == 20  # type: ignore[union-attr]
        assert one.earlier.tolist() == list(range(20, end))
        assert tree.protected_size() == 20
        locator.unlock(one)
        insert(tree, ids[:36], slots, key=key)
        one = context()
        assert locator.resolve(one) == []
        assert one.located.held == 28, "no more than the dialogue so far, in whole pages"
        locator.unlock(one)
        assert tree.protected_size() == 0
        removed.add(key)
        assert locator.resolve(context()) == [0]


def test_ranks_take_of_turns_on_the_host_what_all_of_them_have() -> None:
    unpinned: list[str] = []
    tiers: Any = SimpleNamespace(unpin=unpinned.append)
    tree: Any = SimpleNamespace(page_size=4)
    locator = Locator(tree, tiers, set[str]().__contains__, BLOCK)
    session = SessionPart(session_key("n", "s"), 22)
    plan = ContextPlan("compose", "n", "concat", (Span(0, 30),), session=session)
    context = ComposedContext(plan, array("q", range(40)), ("whole",), Any)  # type: ignore[arg-type]
    context.located.held = 4
    context.located.turns = [TurnPages("a", 4, 12, None), TurnPages("b", 12, 28, None)]
    context.located.pinned_turns = ["a", "b"]
    assert locator.has_turns(context, 28)
    assert (context.there, context.earlier.tolist(), unpinned) == (28, [28, 29], [])
    assert locator.has_turns(context, 20), "another rank's piece ends here"
    assert (context.there, unpinned) == (20, [])
    assert not locator.has_turns(context, 12)
    assert (context.there, unpinned, context.located.pinned_turns) == (12, ["b"], ["a"])
    assert not locator.has_turns(context, 4)
    assert (context.there, context.located.turns, unpinned) == (4, [], ["b", "a"])


def test_documents_that_were_computed_for_the_request_are_of_no_tier() -> None:
    documents = [Sample(number, 20) for number in range(4)]
    context = context_of(documents, [range(20), range(20), range(5), range(10)])
    context.plan = replace(context.plan, computed=(1, 3))
    node: Any = None
    on_device = DocumentOnDevice(torch.arange(20), node)
    context.located.sources = [
        on_device,
        on_device,
        on_device,
        DocumentOnHost("key", torch.arange(2).numpy()),
    ]
    settle(context, [range(20), range(20), range(5), range(10)])
    assert tokens_by_tier(context) == {"computed": 30, "device": 5}
    plan = ContextPlan.from_json(context.plan.to_json(), len(context.ids))
    assert plan.computed == (1, 3)
    text = context.plan.to_json().replace('"computed":[1,3]', '"computed":["x"]')
    with pytest.raises(PlanError, match="not a context plan"):
        ContextPlan.from_json(text, len(context.ids))
