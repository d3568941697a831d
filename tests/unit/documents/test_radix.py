"""A document is found in the device's tree whole or not at all, however its KV came there."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit import request_shapes

KEY = "d" * 32


@pytest.fixture(params=[1, 4])
def tree(request: pytest.FixtureRequest) -> Any:
    return tree_of(request.param)


def tree_of(page_size: int) -> Any:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang_ext.documents.radix import DocumentRadixCache

    return DocumentRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            page_size=page_size,
            enable_kv_cache_events=False,
        )
    )


def insert(
    tree: Any, ids: array[int], slots: torch.Tensor, *, limit: int | None = None, key: str = KEY
) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree.insert(InsertParams(key=RadixKey(ids, extra_key=key, limit=limit), value=slots[:limit]))


def over_rows(tree: Any, slots: torch.Tensor, freed: list[int]) -> None:
    """Give the tree a request table of one row with these slots. ``freed``: gets what is freed."""
    table = slots[None].clone()
    tree.req_to_token_pool = SimpleNamespace(req_to_token=table, write=table.__setitem__)
    tree.token_to_kv_pool_allocator = SimpleNamespace(
        page_size=tree.page_size,
        free=lambda freed_slots: freed.extend(freed_slots.tolist()),
        free_segment=lambda part, *, start_pos: freed.extend(part.tolist()),
        free_segments=lambda segments: freed.extend(slot for part, _ in segments for slot in part.tolist()),
    )


def told_tokens(node: Any) -> int:
    """Tokens from the tree's root to a node."""
    return 0 if node.parent is None else len(node.key) + told_tokens(node.parent)


def found(tree: Any, ids: array[int], key: str = KEY) -> list[int] | None:
    answer = tree.document(ids, key)
    return None if answer is None else torch.cat(answer[0]).tolist()


def test_in_one_piece_and_in_chunks(tree: Any) -> None:
    ids, slots = array("q", range(100, 124)), torch.randperm(24)
    insert(tree, ids, slots, limit=8)  # SGLang inserts a chunk with all ids and says how many of them count
    assert found(tree, ids) is None
    assert found(tree, ids[:8]) == slots[:8].tolist()
    insert(tree, ids, slots, limit=16)
    insert(tree, ids, slots)
    assert found(tree, ids) == slots.tolist()
    node = tree.document(ids, KEY)[1]
    assert node.last_access_time == max(
        each.last_access_time for each in (node, node.parent, node.parent.parent)
    )
    assert found(tree, ids, "e" * 32) is None
    assert found(tree, array("q", [*ids, 1, 2, 3, 4])) is None
    assert found(tree, array("q", [*ids[:20], 1, 2, 3, 4])) is None


def test_with_what_was_decoded_behind_it(tree: Any) -> None:
    """With the overlap scheduler a document's request may decode a token before SGLang knows that it has
    ended, and caches it, too.
    """
    ids, slots = array("q", range(100, 112)), torch.randperm(16)
    insert(tree, array("q", [*ids, 7, 8, 9, 10]), slots)
    assert found(tree, ids) == slots[:12].tolist()
    chunked = array("q", range(200, 212))
    insert(tree, chunked, slots, limit=8, key="e" * 32)
    insert(tree, array("q", [*chunked, 7, 8, 9, 10]), slots, key="e" * 32)
    assert found(tree, chunked, "e" * 32) == slots[:12].tolist()
    assert found(tree, array("q", [*chunked[:8], 1, 2, 3, 4]), "e" * 32) is None


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 250])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_a_document_of_any_length_is_found_in_pages(page: int, n: int, chunk: int | None) -> None:
    from sglang_ext.context.scheduler.sglang_req import prefill_whole_pages

    tree, ids, slots = tree_of(page), array("q", range(1000, 1000 + n)), torch.randperm(512)
    request: Any = SimpleNamespace(origin_input_ids=ids)
    prefill_whole_pages(request, page, longest=4096)
    prompt = request.origin_input_ids
    for end in range(chunk or len(prompt), len(prompt), chunk or 1):
        insert(tree, prompt, slots, limit=end)
    insert(tree, array("q", [*prompt, 7]), slots)  # and a token decoded behind it
    assert found(tree, ids) == slots[:n].tolist()
    assert tree.tokens_by_key()[KEY] >= n
    assert found(tree, array("q", [*ids[:-1], 5])) is None
    assert found(tree, array("q", [*ids, *range(64)])) is None


def test_a_document_as_long_as_the_context_is_not_padded() -> None:
    from sglang_ext.context.scheduler.sglang_req import prefill_whole_pages

    tree, ids = tree_of(16), array("q", range(100))
    request: Any = SimpleNamespace(origin_input_ids=ids)
    prefill_whole_pages(request, 16, longest=100)
    assert request.origin_input_ids == ids
    insert(tree, ids, torch.arange(100))
    assert found(tree, ids) is None, "only whole pages are on the device"


@pytest.mark.parametrize("kind", ["composed", "private", "ordinary"])
def test_only_ordinary_requests_enter_the_tree(tree: Any, kind: str) -> None:
    """Slots of a composed or private request are freed, each once, and nothing finds them afterwards."""
    slots, freed = torch.randperm(8), []
    over_rows(tree, slots, freed)
    cached: list[Any] = []
    evicted: list[Any] = []
    tree.observer = SimpleNamespace(
        is_composed=lambda req: kind == "composed",
        in_session=lambda req: False,
        exact_tokens=lambda req, tokens: tokens,
        before_release=lambda req, tokens: None,
        on_document=lambda req, slots: None,
        on_finished=lambda: None,
        on_cached=lambda req, node: cached.append((req, node)),
        on_evicted=evicted.append,
    )
    request = request_shapes.request(
        row=0,
        end=8,
        origin_input_ids=array("q", range(100, 106)),
        output_ids=array("q", [7, 8]),
        extra_key=None,
        session=None,
        ragserve_private=kind == "private",
    )
    if kind != "ordinary":
        request_shapes.end_chunk(tree, request, 8)
        assert tree.total_size() == 0
        assert tree.req_to_token_pool.req_to_token[0].tolist() == slots.tolist()
    request_shapes.release(tree, request, 8)
    assert tree.total_size() == (8 if kind == "ordinary" else 0)
    assert sorted(freed) == ([] if kind == "ordinary" else list(range(8)))
    tree.reset()
    if kind == "ordinary":
        ((told, node),) = cached
        assert told is request
        assert told_tokens(node) == 8
        assert node in evicted
    else:
        assert cached == evicted == []


@pytest.mark.parametrize("ends", ["well", "aborted", "retracted"])
def test_a_turn_of_a_session_goes_on_from_the_slots_of_the_one_before(tree: Any, ends: str) -> None:
    """What the tree has is not freed, what a turn adds enters it if it ends well, and no slot is lost."""
    slots, freed = torch.randperm(24), []
    over_rows(tree, slots, freed)
    tree.observer = SimpleNamespace(
        is_composed=lambda req: True,
        in_session=lambda req: True,
        exact_tokens=lambda req, tokens: tokens,
        before_release=lambda req, tokens: None,
        on_document=lambda req, slots: pytest.fail("a turn is no document"),
        on_finished=lambda: None,
        on_cached=lambda req, node: None,
    )
    key, ids = "session:n:s:composed", array("q", range(100, 124))

    def request(end: int, **fields: Any) -> Any:
        return request_shapes.request(
            row=0,
            origin_input_ids=ids[: end - 2],
            output_ids=ids[end - 2 : end],
            extra_key=key,
            session=None,
            **fields,
        )

    first = request(12, ragserve_private=False)
    request_shapes.release(tree, first, 12)
    assert tree.total_size() == 12
    assert found(tree, ids[:12], key) == slots[:12].tolist()
    assert tree.peek(ids, key) == 12
    node = tree.document(ids[:12], key)[1]
    then = request(24, protected=12, ragserve_private=ends == "aborted")
    request_shapes.lock(tree, then, node)
    request_shapes.release(tree, then, 24, inserts=ends != "retracted")
    assert node.lock_ref == 0
    if ends == "well":
        assert found(tree, ids, key) == slots.tolist()
        assert freed == []
    else:
        assert tree.total_size() == 12
        assert sorted(freed) == sorted(slots[12:].tolist())
    assert not tree.document_tokens, "a session's KV is no document's"


@pytest.mark.parametrize(("exact", "cached"), [(24, 24), (19, 16), (8, 8), (7, 4)])
def test_what_a_sparse_step_has_computed_does_not_enter_the_tree(exact: int, cached: int) -> None:
    """It is freed in whole pages, each slot once. What entered the tree as a prompt stays."""
    tree = tree_of(4)
    slots, freed = torch.arange(24), []
    over_rows(tree, slots, freed)
    told: list[str] = []
    tree.observer = SimpleNamespace(
        is_composed=lambda req: False,
        exact_tokens=lambda req, tokens: told.append("exact") or min(exact, tokens),
        before_release=lambda req, tokens: told.append("released"),
        on_document=lambda req, slots: None,
        on_finished=lambda: None,
        on_cached=lambda req, node: None,
    )
    ids = array("q", range(100, 124))
    request = request_shapes.request(
        row=0, origin_input_ids=ids[:8], output_ids=ids[8:], extra_key=KEY, session=None
    )
    request_shapes.release(tree, request, 24)
    assert told == ["exact", "released"], "a request that is released knows nothing of its steps any more"
    assert tree.total_size() == cached
    assert found(tree, ids[:cached]) == slots[:cached].tolist()
    assert sorted(freed) == list(range(cached, 24))
