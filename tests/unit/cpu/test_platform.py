"""The CPU platform's allocator hands out the slots that SGLang's page layout asks for, and loses none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.cpu.activate import activate
from sglang_ext.versions.sglang_0_5_17.cpu_allocator import make_allocator

PAGES = 40


def test_platform_is_active_exactly_without_an_accelerator() -> None:
    assert (activate() is None) == torch.cuda.is_available()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the platform is inactive")
def test_functions_that_sglang_compiles_need_no_compiler() -> None:
    activate()
    assert torch.compiler.get_default_backend() == "eager"


def _make(page_size: int):  # type: ignore[no-untyped-def]
    return make_allocator(
        PAGES * page_size,
        page_size=page_size,
        dtype=torch.float32,
        device="cpu",
        kvcache=None,
        need_sort=False,
    )


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 4, 16]),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6)), min_size=1, max_size=4),
)
def test_extend_and_decode_fill_pages_in_order_and_all_come_back(
    page_size: int, requests: list[tuple[int, int]]
) -> None:
    allocator = _make(page_size)
    total = allocator.available_size()
    slots: list[torch.Tensor] = []
    for prompt, steps in requests:
        if page_size == 1:
            taken = allocator.alloc(prompt)
        else:
            length = torch.tensor([prompt])
            zero = torch.zeros(1, dtype=torch.int64)
            taken = allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), prompt)
        if taken is None:
            continue
        for step in range(steps):
            if page_size == 1:
                more = allocator.alloc(1)
            else:
                length = torch.tensor([prompt + step + 1])
                more = allocator.alloc_decode(length, length, taken[-1:])
            if more is None:
                break
            taken = torch.cat([taken, more])
        within_page = torch.arange(len(taken)) % page_size
        assert torch.equal(taken % page_size, within_page), (
            "token i of a request lies at offset i of its page"
        )
        assert all(
            len(set((taken[i : i + page_size] // page_size).tolist())) == 1
            for i in range(0, len(taken), page_size)
        )
        slots.append(taken)
    every = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)
    assert len(every.unique()) == len(every), "no slot is handed out twice"
    assert (every >= page_size).all(), "page 0 belongs to padding"
    for taken in slots:
        allocator.free(taken)
    assert allocator.available_size() == total


def test_exhausted_pool_says_so_and_takes_nothing() -> None:
    allocator = _make(4)
    before = allocator.available_size()
    zero, length = torch.zeros(1, dtype=torch.int64), torch.tensor([4 * PAGES + 1])
    assert allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), 4 * PAGES + 1) is None
    assert allocator.available_size() == before
