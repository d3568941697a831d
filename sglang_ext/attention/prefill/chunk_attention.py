"""FA3 over K and V that lie in one piece, for prompts that are prefilled layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

LEAST_ROWS = 1024  # of a chunk; fewer are left to the kernel for rows, which needs no plan
_PLAN_BYTES = 2**20  # of a plan, beside those of its blocks
_BLOCK_BYTES = 64
_BLOCK = 64  # rows, at most as many as a block of FA3 has

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ChunkAttention:
    """Causal attention of a prompt's chunks by FlashInfer's FA3 kernel, in every layer by the same plans.

    A plan goes to the device by a copy from pinned memory, which the next plan in its place writes to. So
    whoever plans a prompt has to know that all copies of the prompt before it are done."""

    def __init__(self, workspace: Any, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """``workspace``: bytes on the device, of which whatever runs on the same stream has the use.
        ``heads``, ``kv_heads``: of this rank. ``dtype``: of queries, keys and values."""
        self._workspace = workspace
        self._heads = heads
        self._kv_heads = kv_heads
        self._head_dim = head_dim
        self._dtype = dtype
        self._wrappers: list[Any] = []

    def plan(self, number: int, rows: int, end: int, scale: float) -> Attend | None:
        """Return the attention of a prompt's chunk ``number``, whose ``rows`` queries are the last of ``end``
        tokens: of q [rows, heads, head_dim] to k and v [end, kv_heads, head_dim]. None where it does not pay.
        """
        if rows < LEAST_ROWS:
            return None
        if number == len(self._wrappers):
            self._wrappers.append(self._wrapper(rows))
        wrapper = self._wrappers[number]
        bounds = [torch.tensor([0, each], dtype=torch.int32) for each in (rows, end)]
        wrapper.plan(
            *bounds,
            self._heads,
            self._kv_heads,
            self._head_dim,
            causal=True,
            sm_scale=scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return partial(self._run, wrapper)

    def _wrapper(self, rows: int) -> Any:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        wrapper = BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD", backend="fa3")
        size = _PLAN_BYTES + _BLOCK_BYTES * self._heads * (rows // _BLOCK + 2)
        plans = torch.empty(size, dtype=torch.uint8, device=self._workspace.device)
        wrapper.reset_workspace_buffer(self._workspace, plans)
        return wrapper

    @staticmethod
    def _run(wrapper: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(q.contiguous(), k, v)
        return out
