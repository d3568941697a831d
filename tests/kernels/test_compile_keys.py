"""Launches for documents and prompts of different sizes ask for the same compiled kernels: what Triton
compiles for, of each argument, is the same. Requests would wait for another compilation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl

from ragserve_kernels.block_summary import BlockPlan, block_summary
from ragserve_kernels.context_gather import HostContexts, context_gather, context_shared_gather
from ragserve_kernels.key_scores import key_scores
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.prefill_lists import LinePlan, list_blocks, list_lines
from ragserve_kernels.prefix_rows_attention import prefix_rows_attention
from ragserve_kernels.sparse_prefill import PrefillBatch, list_room

Keys = dict[str, set[Any]]  # by kernel
INTERPRETED = not torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a GPU the compiler says what it compiles")


def key(value: Any, *, whole: bool, aligned: bool) -> Any:
    """Return what Triton compiles for: the kind of a value and, with ``whole`` and ``aligned``, if it is 1 or
    divisible by 16."""
    if isinstance(value, tuple):
        return tuple(key(each, whole=whole, aligned=aligned) for each in value)
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, torch.Tensor):
        return value.dtype, whole and aligned and value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return "int", whole and value == 1, whole and aligned and value % 16 == 0
    return type(value)


class Recorded:
    """A kernel that notes the keys of its launches."""

    runs = True  # False: launches are noted only

    def __init__(self, kernel: Any, seen: set[Any]) -> None:
        self._kernel, self._seen = kernel, seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            kept = self._kernel.kwargs
            whole = kept["do_not_specialize"] or ()
            aligned = kept["do_not_specialize_on_alignment"] or ()
            names = self._kernel.arg_names
            found = [
                key(value, whole=name not in whole, aligned=name not in aligned)
                for name, value in zip(names, arguments, strict=False)
            ]
            self._seen.add((*found, *sorted(constants.items())))
            if self.runs:
                self._kernel[grid](*arguments, **constants)

        return launch


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Keys:
    """Keys of the launches so far."""
    found: Keys = {}
    lists = ("prefill_lists.triton", "prefill_lists.blocks_triton", "prefill_lists.lines_triton")
    contexts = ("context_gather.triton", "context_gather.context_shared_blocks")
    others = ("block_summary.launches", "prefix_rows_attention.triton", "key_scores.triton")
    for name in (*others, *lists, *contexts):
        module = importlib.import_module(f"ragserve_kernels.{name}")
        for attribute, kernel in list(vars(module).items()):
            if attribute.endswith("_kernel"):
                seen = found.setdefault(attribute, set())
                monkeypatch.setattr(module, attribute, Recorded(kernel, seen))
    return found


def test_documents_of_any_length(device: torch.device, keys: Keys) -> None:
    for lengths in ([40], [16], [523], [33, 80]):
        plan = BlockPlan.build(lengths, query_stride=8, min_queries=2, device=device)
        q, k = (torch.randn(plan.tokens, heads, 64, device=device) for heads in (2, 1))
        block_summary(q, k, plan)
    assert {name: len(seen) for name, seen in keys.items() if len(seen) > 1} == {}
    assert len(keys["exponent_kernel"]) == len(keys["choose_kernel"]) == 1


def test_recomputed_rows_of_any_layer(device: torch.device, keys: Keys) -> None:
    """A layer's row of a table begins where that of the layer before ends."""
    for rows in (16, 5):
        seen = torch.full((2, rows), 20, dtype=torch.int32, device=device)
        q, k, v = (torch.randn(n, heads, 64, device=device) for n, heads in ((rows, 2), (20, 1), (20, 1)))
        starts = torch.tensor([0, rows], dtype=torch.int32, device=device)
        for layer in range(2):
            prefix_rows_attention(
                *(q, k, v, torch.arange(20, device=device), starts[:1], starts, seen[layer]),
                max_rows=rows,
                scale=0.125,
            )
    assert len(keys["prefix_rows_attention_kernel"]) == 1


def test_sparse_prefills_and_questions_of_any_length(
    device: torch.device, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks at any place of a prompt, the second request of a batch among them."""
    monkeypatch.setattr(Recorded, "runs", False)
    for prefix, new in (([0, 0], [64, 64]), ([0, 1], [1, 100]), ([3, 1024], [130, 2048])):
        table = torch.zeros(2, 200, dtype=torch.int32, device=device)
        batch = PrefillBatch.of(table, 16, prefix, new, block_q=32, block_k=16)
        q, k = (torch.zeros(n, heads, 64, device=device) for n, heads in ((batch.rows, 4), (3200, 2)))
        lists, plan = list_room(batch, 4), LinePlan.of(batch, 4, observe=8, segment=64)
        list_blocks(q, k, batch, lists, alpha=0.9)
        counts = torch.zeros(2, 2, dtype=torch.int64, device=device)
        list_lines(q, k, plan, lists, alpha=0.9, counts=counts)
        slots, starts = (
            torch.zeros(sum(new), dtype=torch.int64, device=device),
            torch.tensor([0, *new], device=device),
        )
        key_scores(q[:2], k, slots, starts.cumsum(0).int(), max(new))
    seen = {name: len(found) for name, found in keys.items() if found}
    assert seen.pop("block_means_kernel") == 2, "of keys and of queries"
    assert set(seen.values()) == {1}
    assert {
        "list_blocks_kernel",
        "pick_lines_kernel",
        "list_lines_kernel",
        "key_scores_kernel",
    } <= seen.keys()


def test_any_number_of_pages_of_contexts(
    device: torch.device, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "runs", False)
    layers, heads, dim = 3, 2, 64
    pool = KVLayers(*([torch.zeros(64, heads, dim, device=device) for _ in range(layers)] for _ in "kv"))
    for host_pages, pages, moved in ((1, 1, 1), (16, 32, 16), (7, 100, 33)):
        host = torch.zeros(host_pages, 2, layers, heads, 16, dim, pin_memory=not INTERPRETED)
        tokens = torch.zeros(pages, 16, 2, dtype=torch.int32, device=device)
        turns = torch.zeros(host_pages, 2, dim // 2, device=device)
        for own in range(layers):
            one = KVLayers(pool.k[:1], pool.v[:1])
            chosen = torch.zeros(1, heads, moved, dtype=torch.int32, device=device)
            context_gather(host, one, tokens, turns, chosen, chosen, first_layer=own)
        base = torch.zeros(1, dtype=torch.int64, device=device)
        some, count = torch.zeros(2, moved, dtype=torch.int32, device=device), base.int()
        context_shared_gather(HostContexts(host, base, tokens, turns), pool, some[0], some[0], count)
    seen = {name: len(found) for name, found in keys.items() if found}
    assert seen == {"context_gather_kernel": 1, "context_shared_blocks_kernel": 1}


def test_a_few_numbers_of_rows_compile_what_any_number_needs(
    device: torch.device, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragserve_kernels.prefix_rows_attention.triton import rows_of_every_launch

    monkeypatch.setattr(Recorded, "runs", False)

    def launch(rows: int, tokens: int) -> None:
        sizes = ((rows, 32), (tokens, 8))
        q, k = (torch.zeros(n, heads, 128, dtype=torch.bfloat16, device=device) for n, heads in sizes)
        starts = torch.tensor([0, rows], dtype=torch.int32, device=device)
        seen = torch.zeros(rows, dtype=torch.int32, device=device)
        slots = torch.zeros(tokens, dtype=torch.int64, device=device)
        prefix_rows_attention(q, k, k, slots, starts[:1], starts, seen, max_rows=rows, scale=0.125)

    few = rows_of_every_launch(kv_heads=8, group=4)
    for rows in few:
        launch(rows, 1024)
    compiled = {name: set(seen) for name, seen in keys.items()}
    assert len(compiled["prefix_rows_attention_kernel"]) == len(few) == 3
    for rows in (1, 31, 100, 500, 600, 1000, 1100, 2000):
        for tokens in (16, 130, 2000):
            launch(rows, tokens)
    assert keys == compiled
