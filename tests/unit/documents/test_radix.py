"""A document is found in the device's tree whole or not at all, however its KV came there."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

KEY = "d" * 32


@pytest.fixture(params=[1, 4])
def tree(request: pytest.FixtureRequest) -> Any:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang_ext.documents.radix import DocumentRadixCache

    return DocumentRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            page_size=request.param,
            enable_kv_cache_events=False,
        )
    )


def insert(
    tree: Any, ids: array[int], slots: torch.Tensor, *, limit: int | None = None, key: str = KEY
) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree.insert(InsertParams(key=RadixKey(ids, extra_key=key, limit=limit), value=slots[:limit]))


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


def test_with_pages_a_document_needs_whole_ones(tree: Any) -> None:
    ids = array("q", range(10))
    insert(tree, ids, torch.arange(10))
    assert (found(tree, ids) is None) == (tree.page_size > 1)


@pytest.mark.parametrize("kind", ["composed", "private", "ordinary"])
def test_only_ordinary_requests_enter_the_tree(tree: Any, kind: str) -> None:
    """Slots of a composed or private request are freed, each once, and nothing finds them afterwards."""
    slots, freed = torch.randperm(8), []
    tree.req_to_token_pool = SimpleNamespace(req_to_token=slots[None])
    tree.token_to_kv_pool_allocator = SimpleNamespace(
        free=lambda freed_slots: freed.extend(freed_slots.tolist())
    )
    tree.observer = SimpleNamespace(
        is_composed=lambda req: kind == "composed",
        before_release=lambda req, tokens: None,
        on_document=lambda req, slots: None,
        on_finished=lambda: None,
    )
    request = SimpleNamespace(
        origin_input_ids=array("q", range(100, 106)),
        output_ids=array("q", [7, 8]),
        extra_key=None,
        req_pool_idx=0,
        extend_range=SimpleNamespace(end=8),
        cache_protected_len=0,
        last_node=None,
        session=None,
        ragserve_private=kind == "private",
    )
    if kind != "ordinary":
        tree.cache_unfinished_req(request)
        assert request.prefix_indices.tolist() == slots.tolist()
        assert tree.total_size() == 0
    tree.cache_finished_req(request, kv_len_to_handle=8)
    assert tree.total_size() == (8 if kind == "ordinary" else 0)
    assert sorted(freed) == ([] if kind == "ordinary" else list(range(8)))
