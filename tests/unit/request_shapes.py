"""Requests as the installed SGLang has them, as far as ragserve reads and writes them, and what SGLang asks
of the radix cache about one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_ext import versions


def request(
    *, row: int | None = None, protected: int = 0, start: int = 0, end: int = 0, **fields: Any
) -> Any:
    """A request that extends tokens ``start`` to ``end`` in a row of the request table, of whose tokens the
    tree owns ``protected``. ``fields``: more attributes."""
    fields = {"last_node": None} | fields
    if versions.IS_0_5_17:
        req = SimpleNamespace(req_pool_idx=row, cache_protected_len=protected, **fields)
        req.prefix_indices = torch.empty(0, dtype=torch.int64)
    else:
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        kv = ReqKvInfo(req_pool_idx=row, cache_protected_len=protected)
        req = SimpleNamespace(**{"kv": kv, "lock": None, "cache_salt": None, "priority": 0} | fields)
        req.ragserve_prefix = None
    extend(req, start, end)
    return req


def extend(req: Any, start: int, end: int) -> None:
    """Let the request extend these tokens in the next step."""
    if versions.IS_0_5_17:
        req.extend_range = SimpleNamespace(start=start, end=end)
    else:
        req.prefix_len, req.extend_end = start, end


def put(req: Any, row: int) -> None:
    """Give the request a row of the request table."""
    if versions.IS_0_5_17:
        req.req_pool_idx = row
        return
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    req.kv = ReqKvInfo(req_pool_idx=row)


def prefix_of(req: Any) -> torch.Tensor:
    """Slots, int64, that SGLang has been shown as the request's prefix."""
    if versions.IS_0_5_17:
        return torch.as_tensor(req.prefix_indices)
    return torch.empty(0, dtype=torch.int64) if req.ragserve_prefix is None else req.ragserve_prefix


def forget_prefix(req: Any) -> None:
    """Let the request be one that waits and has nothing."""
    versions.protect(req, 0)
    req.last_node = "root"
    if versions.IS_0_5_17:
        req.prefix_indices = torch.empty(0, dtype=torch.int64)
    else:
        req.prefix_len, req.ragserve_prefix = 0, None


def lock(tree: Any, req: Any, node: Any) -> None:
    """Lock a node of a radix cache for a request, as SGLang does for its prefix."""
    req.last_node = node
    if versions.IS_0_5_17:
        tree.inc_lock_ref(node)
    else:
        req.lock = tree.lock(node)


def end_chunk(tree: Any, req: Any, tokens: int) -> None:
    """Offer a running request's KV of ``tokens`` to a radix cache."""
    if versions.IS_0_5_17:
        tree.cache_unfinished_req(req)
    else:
        tree.checkpoint(req, up_to=tokens)


def release(tree: Any, req: Any, tokens: int, *, inserts: bool = True) -> None:
    """End a request that has KV of ``tokens`` in its row. ``inserts``: SGLang lets the tree take it."""
    if versions.IS_0_5_17:
        tree.cache_finished_req(req, is_insert=inserts, kv_len_to_handle=tokens)
        return
    req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
    assert not tree.claim_kv_row(req)
    if inserts:
        tree.checkpoint(req, up_to=tokens)
    tree.free_kv_row(req.kv, [(req.kv.cache_protected_len, tokens)])
    tree.unlock(req.lock)
    req.lock = None
    tree.on_release(req, checkpointed=inserts)


def adder(**fields: Any) -> Any:
    """SGLang's `PrefillAdder`, the budget of a step."""
    if versions.IS_0_5_17:
        return SimpleNamespace(rem_total_token_offset=0, **fields)
    return SimpleNamespace(memory_budget=SimpleNamespace(total_offset=0), **fields)


def reserved(adder: Any) -> int:
    """Slots that `versions.reserve_tokens` has taken from an adder."""
    return int(adder.rem_total_token_offset if versions.IS_0_5_17 else adder.memory_budget.total_offset)


@contextmanager
def group(group: Any) -> Iterator[None]:
    """In the block, newer objects of SGLang find this group of ranks."""
    if versions.IS_0_5_17:
        yield
        return
    from sglang.srt.runtime_context import get_parallel

    size = getattr(group, "world_size", 1)
    sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), size)
    with get_parallel().override(tp_group=group, **sizes):
        yield


def publish(model: Path) -> None:
    """Let newer objects of SGLang find the settings, and no group of ranks, of a process for this model."""
    if versions.IS_0_5_17:
        return
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=str(model), device="cpu")
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    runtime_context.publish(args, role="scheduler", ranks=ranks)
    runtime_context.get_parallel().override_permanently(tp_group=None)
