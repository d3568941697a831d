"""Host pages belong to one request each, and come back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.attention.factory import host_pages
from sglang_ext.documents.pages.types import IntegrityError, KvShape
from sglang_ext.kv_offload.host.host_pages import HostPages
from sglang_ext.wire.attention_config import AttentionConfig
from tests.unit import request_shapes

SHAPE = KvShape(layers=2, kv_heads=2, head_dim=64, dtype=torch.float32, block=16)


def test_pages_are_given_once_and_come_back() -> None:
    pages = HostPages(SHAPE, 5 * SHAPE.page_bytes + 1, pin=False)
    assert pages.capacity == 5
    assert pages.allocate(0, 3) == [0, 1, 2]
    assert pages.allocate(1, 3) is None, "there are two"
    assert pages.allocate(1, 2) == [3, 4]
    pages.check({0, 1})
    pages.release(0)
    assert pages.used == 2
    pages.check({1})
    assert sorted(pages.allocate(2, 3) or []) == [0, 1, 2]


def test_a_lost_page_and_a_forgotten_request_are_found() -> None:
    pages = HostPages(SHAPE, 4 * SHAPE.page_bytes, pin=False)
    own = pages.allocate(7, 2)
    assert own is not None
    with pytest.raises(IntegrityError, match="request 7 has"):
        pages.allocate(7, 1)
    with pytest.raises(IntegrityError, match=r"belong to requests \[7\], and offloaded are \[\]"):
        pages.check(set())
    own.pop()
    with pytest.raises(IntegrityError, match="3 host pages are free or owned"):
        pages.check({7})


class Documents:
    released = 0

    def release(self) -> None:
        self.released += 1


def test_pages_whose_kv_lies_elsewhere_take_memory_last_and_release_it_once() -> None:
    pages, kv = HostPages(SHAPE, 3 * SHAPE.page_bytes, pin=False, numbers=5), Documents()
    assert (pages.capacity, pages.numbers, len(pages.pool)) == (3, 5, 3)
    assert pages.name(0, 6, kv) is None
    first = pages.name(0, 2, kv)
    assert first is not None
    assert min(first) >= 3, "without memory"
    assert (pages.used, pages.elsewhere) == (0, 2)
    second = pages.name(1, 1, kv)
    assert second is not None
    assert second[0] < 3
    assert pages.extend(0, 2) is not None, "what follows a prompt is its own"
    assert pages.allocate(2, 1) is None
    assert (pages.used, pages.elsewhere) == (2, 3)
    pages.check({0, 1})
    pages.shrink(0, 2)
    pages.release(0)
    assert kv.released == 1
    assert pages.allocate(2, 2) is not None
    assert pages.allocate(3, 1) is None, "the memory of the second one lies idle"
    pages.release(1)
    pages.release(2)
    assert kv.released == 2
    assert pages.allocate(4, 3) is not None
    pages.check({4})


def test_settings_say_how_many_pages_there_are() -> None:
    pool = SimpleNamespace(layer_num=2, head_num=2, head_dim=64, dtype=torch.float32)
    group = SimpleNamespace(world_size=2)
    runner = SimpleNamespace(token_to_kv_pool=pool, page_size=16, device="cpu", tp_group=group)
    assert host_pages(runner, AttentionConfig()) is None
    budget = 2 * 3 * SHAPE.page_bytes  # of both ranks
    with request_shapes.group(group):
        pages = host_pages(runner, AttentionConfig(offload_bytes=budget, offloaded_tokens=8 * 16 + 5))
    assert pages is not None
    assert (pages.capacity, pages.numbers) == (3, 8)
    with request_shapes.group(group):
        pages = host_pages(runner, AttentionConfig(offload_bytes=budget, offloaded_tokens=16))
    assert pages is not None
    assert pages.numbers == 3
    with pytest.raises(ValueError, match="kv_offload_bytes is 9: a page of 16 tokens takes"):
        host_pages(runner, AttentionConfig(offload_bytes=9))
