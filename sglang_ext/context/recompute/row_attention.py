"""A layer of the recompute pass: writes K and V of all jobs' rows, which attend to the slots up to their
positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention

from ragserve_kernels import dispatch as kernels
from ragserve_kernels.kv import HEAD_DIMS
from ragserve_kernels.prefix_rows_attention import prefix_rows_attention
from sglang_ext.context.recompute.job import RecomputeJob
from sglang_ext.tensors.buffers import upload


@dataclass(slots=True)
class Rows:
    """The jobs' rows and slots, joined; index tensors on the device. `RecomputeJob` defines ``seen``,
    ``targets`` and ``alone``.
    """

    slots: torch.Tensor  # int64 [all S]
    slot_start: torch.Tensor  # int32 [jobs]
    row_start: torch.Tensor  # int32 [jobs + 1]
    seen: torch.Tensor  # int32 [layers or 1, rows]
    targets: torch.Tensor  # int64 [layers or 1, rows]
    alone: torch.Tensor | None  # bool [layers or 1, rows]
    slot_counts: tuple[int, ...]
    row_counts: tuple[int, ...]
    fuse: torch.Tensor | None = None  # bool [rows]: blend new K and V with the cached
    padded: bool = False  # rows behind the last job's attend to nothing

    @classmethod
    def of(cls, jobs: Sequence[RecomputeJob]) -> Rows:
        layers = max(len(job.seen) for job in jobs)
        device = jobs[0].slots.device
        slot_counts = tuple(len(job.slots) for job in jobs)
        row_counts = tuple(len(job.positions) for job in jobs)

        def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.cat([part.expand(layers, -1) for part in parts], dim=1)

        alone = None
        if any(job.alone is not None for job in jobs):
            alone = joined(
                [
                    torch.zeros_like(job.seen, dtype=torch.bool) if job.alone is None else job.alone
                    for job in jobs
                ]
            )
        return cls(
            slots=torch.cat([job.slots for job in jobs]),
            slot_start=_starts(slot_counts, device)[:-1],
            row_start=_starts(row_counts, device),
            seen=joined([job.seen for job in jobs]).to(torch.int32),
            targets=joined([job.targets for job in jobs]),
            alone=alone,
            slot_counts=slot_counts,
            row_counts=row_counts,
            fuse=torch.cat([torch.full_like(job.positions, job.fuse, dtype=torch.bool) for job in jobs])
            if any(job.fuse for job in jobs)
            else None,
        )

    def step(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Write k and v [rows, kv_heads, head_dim] into keys and values [pool slots, kv_heads, head_dim],
        then attend with q [rows, heads, head_dim]; returns q's shape.
        """
        row = layer if len(self.seen) > 1 else 0
        target = self.targets[row]
        new_k, new_v = k, v
        if self.fuse is not None:
            fuse = self.fuse[:, None, None]
            new_k, new_v = (
                torch.where(fuse, fused(k, keys[target]), k),
                torch.where(fuse, fused(v, values[target]), v),
            )
        keys[target], values[target] = new_k.to(keys.dtype), new_v.to(values.dtype)
        alone = None if self.alone is None else self.alone[row]
        if kernels.use_triton(q) and q.shape[-1] in HEAD_DIMS and q.dtype == keys.dtype:
            return self.by_kernel(self.seen[row], alone, q, k, v, keys, values, scaling)
        return self.by_torch(self.seen[row], alone, q, k, v, keys, values, scaling)

    def by_kernel(
        self,
        seen: torch.Tensor,
        alone: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Attend in one launch for all jobs. A row that is not kept folds itself in afterwards, by the
        log-sum-exp of what it has seen.
        """
        lse = None if alone is None else torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out = prefix_rows_attention(
            q,
            keys,
            values,
            self.slots,
            self.slot_start,
            self.row_start,
            seen,
            max_rows=max(self.row_counts),
            scale=scaling,
            out=torch.zeros(q.shape, dtype=q.dtype, device=q.device) if self.padded else None,
            lse=lse,
        )
        if alone is None or lse is None:
            return out
        group = q.shape[1] // k.shape[1]
        own_k, own_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = (q.float() * own_k.float()).sum(-1) * scaling
        weight = torch.sigmoid(score - lse).masked_fill(~alone[:, None], 0.0)[..., None]
        return torch.lerp(out.float(), own_v.float(), weight).to(q.dtype)

    def by_torch(
        self,
        seen: torch.Tensor,
        alone: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Attend with a mask, one job after the other."""
        parts = []
        for own, slots in zip(_slices(self.row_counts), self.slots.split(self.slot_counts), strict=True):
            k_all, v_all = keys[slots].to(q.dtype), values[slots].to(q.dtype)
            mask = torch.arange(len(slots), device=q.device)[None, :] < seen[own, None]
            if alone is not None:
                k_all, v_all = torch.cat((k_all, k[own])), torch.cat((v_all, v[own]))
                mask = torch.cat((mask, torch.diag(alone[own])), dim=1)
            attended = scaled_dot_product_attention(
                q[own].transpose(0, 1)[None],
                k_all.transpose(0, 1)[None],
                v_all.transpose(0, 1)[None],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            parts.append(attended[0].transpose(0, 1))
        return torch.cat(parts)


def fused(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Blend by SamKV's equation 4, per token and head [tokens, heads, head_dim]: theta * new + (1 - theta) *
    old with theta = cos(new, old).
    """
    a, b = new.float(), old.float()
    theta = cosine_similarity(a, b, dim=-1)[..., None]
    return (theta * a + (1 - theta) * b).to(new.dtype)


def _starts(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Starts of the joined parts and their end, int32 [n + 1]."""
    return upload(np.cumsum([0, *counts], dtype=np.int32), device)


def _slices(counts: Sequence[int]) -> list[slice]:
    return [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
