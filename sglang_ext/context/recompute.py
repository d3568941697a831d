"""The recompute pass: chosen tokens of composed contexts run through the model again and their KV is replaced.

A recomputed token at position p attends, in every layer, to the composed slots with positions up to p (METHODS, section 1): slots are
sorted by position, so that is a prefix length per row and layer. All requests of a scheduler step run in one pass over the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.context.rope import decoder_layers


@dataclass(slots=True)
class RecomputeJob:
    """One request's part of a pass. Tensors on the model's device, int64.

    ``ids`` and ``positions`` [R], ascending: the rows. ``kept`` [S] or [layers, S]: positions of the slots. ``slots`` [S]: slot numbers.
    ``deviation_share``: the rows are all context tokens, and from layer 1 on only the ``choosable`` ones ([R] bool) whose values differ
    most from the cached ones go on. ``done`` afterwards holds the positions that were recomputed.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    slots: torch.Tensor
    deviation_share: float | None = None
    choosable: torch.Tensor | None = None
    done: torch.Tensor | None = None

    def kept_at(self, layer: int) -> torch.Tensor:
        return self.kept if self.kept.dim() == 1 else self.kept[layer]


class _Rows:
    """Attention of a pass: what `RadixAttention` reads from the forward context. Writes new K and V into the composed slots itself."""

    def __init__(self, model_runner: Any, jobs: Sequence[RecomputeJob]) -> None:
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._tp_group = model_runner.tp_group
        self._jobs = jobs
        self.counts = [len(job.positions) for job in jobs]
        self.survivors: list[torch.Tensor] | None = None  # per job, bool over its rows: who goes on after layer 1

    def forward(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any) -> torch.Tensor:
        """q [rows, heads * head_dim], k and v [rows, kv_heads, head_dim] of all jobs, one after the other."""
        number = layer.layer_id
        keys, values = self.token_to_kv_pool.get_key_buffer(number), self.token_to_kv_pool.get_value_buffer(number)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = torch.zeros_like(q)
        survivors, start = [], 0
        for job, count in zip(self._jobs, self.counts, strict=True):
            rows = slice(start, start + count)
            start += count
            live = torch.ones(count, dtype=torch.bool, device=q.device)
            if number == 1 and job.deviation_share is not None:
                live = self._most_deviating(job, v[rows], values)
            survivors.append(live)
            # Layer 0 depends on a token alone: what is cached there is exact, and a pass that still chooses must not write yet.
            write = number > 0 or job.deviation_share is None
            out[rows] = self._attend(job, number, q[rows], k[rows], v[rows], keys, values, live, layer.scaling, write=write)
        if number == 1:
            self.survivors = survivors
        return out.view(out.shape[0], -1)

    def _attend(
        self,
        job: RecomputeJob,
        number: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        live: torch.Tensor,
        scaling: float,
        *,
        write: bool,
    ) -> torch.Tensor:
        positions, kept = job.positions[live], job.kept_at(number)
        place = torch.searchsorted(kept, positions)
        found = (place < len(kept)) & (kept[place.clamp(max=len(kept) - 1)] == positions)
        if write:
            target = job.slots[place[found]]
            keys[target], values[target] = k[live][found].to(keys.dtype), v[live][found].to(values.dtype)
        k_all, v_all = keys[job.slots].to(q.dtype), values[job.slots].to(q.dtype)
        mask = kept[None, :] <= positions[:, None]  # [rows, S]: a prefix per row
        if not bool(found.all()):  # a row that this layer does not keep still sees itself
            k_all, v_all = torch.cat((k_all, k[live])), torch.cat((v_all, v[live]))
            mask = torch.cat((mask, torch.diag(~found)), dim=1)
        attended = scaled_dot_product_attention(
            q[live].transpose(0, 1)[None],
            k_all.transpose(0, 1)[None],
            v_all.transpose(0, 1)[None],
            attn_mask=mask,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out = torch.zeros_like(q)
        out[live] = attended[0].transpose(0, 1)
        return out

    def _most_deviating(self, job: RecomputeJob, v: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Bool [rows]: the share of the choosable rows with the largest squared difference to the cached values, over all heads."""
        if job.choosable is None or job.deviation_share is None:
            return torch.ones(len(v), dtype=torch.bool, device=v.device)
        place = torch.searchsorted(job.kept_at(1), job.positions)
        deviation = (v.float() - values[job.slots[place]].float()).square().sum((1, 2))
        if self._tp_group is not None and self._tp_group.world_size > 1:
            deviation = self._tp_group.all_reduce(deviation)  # every rank must choose the same rows
        deviation = deviation.masked_fill(~job.choosable, -1.0)
        n = int(job.choosable.sum())
        count = min(n, max(1, round(job.deviation_share * n))) if n else 0
        live = torch.zeros(len(v), dtype=torch.bool, device=v.device)
        live[deviation.topk(count).indices] = True
        return live


@torch.no_grad()
def recompute(model_runner: Any, jobs: Sequence[RecomputeJob]) -> None:
    """Run the jobs' rows through all layers in one pass; sets each job's ``done``. Their slots must hold the composed KV."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    jobs = [job for job in jobs if len(job.positions)]
    if not jobs:
        return
    model = model_runner.model
    backend: Any = _Rows(model_runner, jobs)
    ids, positions = torch.cat([job.ids for job in jobs]), torch.cat([job.positions for job in jobs])
    batch = _forward_batch(model_runner, ids, positions)
    hidden, residual = model.model.embed_tokens(ids), None
    with forward_context(ForwardContext(attn_backend=backend)):
        for number, layer in enumerate(decoder_layers(model)):
            hidden, residual = layer(positions, hidden, batch, residual)
            if number == 1 and any(job.deviation_share is not None for job in jobs):
                live = torch.cat(backend.survivors)
                for job, mine in zip(jobs, backend.survivors, strict=True):
                    job.ids, job.positions, job.deviation_share = job.ids[mine], job.positions[mine], None
                backend.counts = [len(job.positions) for job in jobs]
                ids, positions, hidden = ids[live], positions[live], hidden[live]
                residual = residual[live] if residual is not None else None
                batch = _forward_batch(model_runner, ids, positions)
    for job in jobs:
        job.done = job.positions


def _forward_batch(model_runner: Any, ids: torch.Tensor, positions: torch.Tensor) -> Any:
    """What decoder layers and communicators read of a batch; slots and rows belong to the pass, not to SGLang's pools."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    n, device = len(ids), ids.device
    lengths = torch.tensor([n], dtype=torch.int32, device=device)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=ids,
        req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
        seq_lens=lengths.to(torch.int64),
        out_cache_loc=torch.zeros(n, dtype=torch.int64, device=device),
        seq_lens_sum=n,
    )
    batch.positions = positions
    batch.extend_num_tokens = n
    batch.extend_seq_lens = lengths
    batch.extend_prefix_lens = torch.zeros_like(lengths)
    batch.extend_seq_lens_cpu = [n]
    batch.extend_prefix_lens_cpu = [0]
    batch.num_token_non_padded_cpu = n
    return batch
