"""The recompute pass: chosen tokens of composed contexts run through the model again and their KV is replaced.

A recomputed token at position p attends, in every layer, to the composed slots with positions up to p (METHODS, section 1): slots are
sorted by position, so that is a prefix length per row and layer. All requests of a scheduler step run in one pass over the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.context.compose.gather import PADDING_SLOT, Buffers, Ints, upload
from sglang_ext.context.recompute.attention import Rows
from sglang_ext.context.rope import decoder_layers

if TYPE_CHECKING:
    from sglang_ext.context.recompute.graphs import RecomputeGraphs

_WARM_ROWS = (768, 1280, 2560)  # for each number of tiles that the attention distinguishes, with 8 KV heads
_WARM_SLOTS = 512

Watch = Callable[[int, torch.Tensor, float], None]
"""Called in each layer with its number, the queries of all rows, [rows, heads, head_dim], and the scale of their scores."""


@dataclass(slots=True)
class RecomputeJob:
    """One request's part of a pass, R rows over S slots. Tensors on the model's device, int64; by layer, or once for all layers.

    ``ids`` and ``positions`` [R], ascending: the rows. ``slots`` [S]. ``seen`` [layers or 1, R]: how many slots a row attends to, those of
    positions up to its own. ``targets`` [layers or 1, R]: the slots that the rows' new K and V go to. ``alone`` bool [layers or 1, R]: rows
    that a layer does not keep, which see themselves besides; None where every layer keeps every row.
    ``choose``: from layer 1 on only so many of the rows ``candidates`` [C] go on, those whose values differ most from the cached ones.
    ``recomputed``: document tokens that are computed again. ``fuse``: new KV is blended with the cached.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seen: torch.Tensor
    targets: torch.Tensor
    alone: torch.Tensor | None
    recomputed: int
    choose: int | None = None
    candidates: torch.Tensor | None = None
    fuse: bool = False

    @classmethod
    def plan(
        cls,
        ids: Ints,
        positions: Ints,
        kept: Ints,
        slots: torch.Tensor,
        *,
        first_document: int,
        deviation_share: float | None = None,
        fuse: bool = False,
    ) -> RecomputeJob:
        """``ids``, ``positions`` [R] and ``kept`` [S] or [layers, S] on the host; documents begin at position ``first_document``.

        With ``deviation_share`` that share of the document rows which layer 1 keeps is chosen in the pass.
        """
        device = slots.device
        kept = np.atleast_2d(kept)
        place = np.stack([np.searchsorted(row, positions) for row in kept])
        clipped = np.minimum(place, kept.shape[1] - 1)
        found: npt.NDArray[np.bool_] = (place < kept.shape[1]) & (np.take_along_axis(kept, clipped, 1) == positions)
        documents = positions >= first_document
        candidates = np.flatnonzero(documents & found[min(1, len(found) - 1)])
        choose = None if deviation_share is None else min(len(candidates), max(1, round(deviation_share * len(candidates))))
        targets = slots[upload(clipped, device)]
        absent = None if found.all() else upload(~found, device)
        if absent is not None:
            targets = targets.masked_fill(absent, PADDING_SLOT)
        return cls(
            ids=upload(ids, device),
            positions=upload(positions, device),
            slots=slots,
            seen=upload(place + found, device),
            targets=targets,
            alone=absent,
            recomputed=int(documents.sum()) if choose is None else choose,
            choose=choose,
            candidates=None if choose is None else upload(candidates, device),
            fuse=fuse,
        )

    @property
    def uniform(self) -> bool:
        """Whether every layer does the same with every row: none is chosen or left out on the way, or blended."""
        return self.choose is None and self.alone is None and not self.fuse and len(self.seen) == 1

    def behind(self, job: RecomputeJob | None) -> RecomputeJob:
        """These rows behind those of ``job``, in one job: both uniform, and this one's slots begin with that one's."""
        if job is None:
            return self
        return replace(
            self,
            ids=torch.cat((job.ids, self.ids)),
            positions=torch.cat((job.positions, self.positions)),
            seen=torch.cat((job.seen, self.seen), dim=1),
            targets=torch.cat((job.targets, self.targets), dim=1),
            recomputed=job.recomputed + self.recomputed,
        )

    def narrow(self, rows: torch.Tensor) -> None:
        """Go on with these rows, int64 ascending, only."""
        self.ids, self.positions, self.choose = self.ids[rows], self.positions[rows], None
        self.seen, self.targets = self.seen[:, rows], self.targets[:, rows]
        self.alone = None if self.alone is None else self.alone[:, rows]


class Passed(NamedTuple):
    """``hidden`` [rows, hidden size]: behind the model's last norm, of all rows in the jobs' order; None where rows were chosen on the way.
    ``by_graph``: whether a CUDA graph did it, and writes those of the next pass to the same memory."""

    hidden: torch.Tensor | None
    by_graph: bool


class _Pass:
    """Attention of a pass: what `RadixAttention` reads from the forward context. Writes new K and V into the composed slots itself."""

    def __init__(
        self, model_runner: Any, rows: Rows, jobs: Sequence[RecomputeJob] = (), watch: Watch | None = None, beside: Buffers | None = None
    ) -> None:
        """``jobs``: those of the rows, where some have rows to choose."""
        self._watch = watch
        self.token_to_kv_pool = beside or model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._tp_group = model_runner.tp_group
        self._jobs = jobs
        self._rows = rows
        self._chooses = any(job.choose is not None for job in jobs)
        self.going_on: torch.Tensor | None = None  # after layer 1: the rows that go on, where some do not

    def forward(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any) -> torch.Tensor:
        """q [rows, heads * head_dim], k and v [rows, kv_heads, head_dim] of all jobs, one after the other."""
        number = layer.layer_id
        keys, values = self.token_to_kv_pool.get_key_buffer(number), self.token_to_kv_pool.get_value_buffer(number)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if self._watch is not None:
            self._watch(number, q, layer.scaling)
        if number != 1 or not self._chooses:
            return self._rows.step(number, q, k, v, keys, values, layer.scaling).flatten(1)
        self.going_on = rows = self._choose(v, values)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        out[rows] = self._rows.step(number, q[rows], k[rows], v[rows], keys, values, layer.scaling)
        return out.flatten(1)

    def _choose(self, v: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """CacheBlend: narrow the jobs to the rows whose values, v [rows, kv_heads, head_dim], differ most from the cached ones.

        The difference is squared and summed over all heads. Returns the rows of the pass that are left, int64 ascending.
        """
        left, start = [], 0
        for job in self._jobs:
            count = len(job.positions)
            rows = torch.arange(count, device=v.device)
            if job.choose is not None and job.candidates is not None:
                cached = values[job.targets[min(1, len(job.targets) - 1), job.candidates]]
                deviation = (v[start + job.candidates].float() - cached.float()).square().sum((1, 2))
                if self._tp_group is not None and self._tp_group.world_size > 1:
                    deviation = self._tp_group.all_reduce(deviation)  # every rank must choose the same rows
                rows = job.candidates[deviation.topk(job.choose).indices].sort().values
                job.narrow(rows)
            left.append(rows + start)
            start += count
        self._rows = Rows.of(self._jobs)
        return torch.cat(left)


@torch.no_grad()
def recompute(
    model_runner: Any,
    jobs: Sequence[RecomputeJob],
    graphs: RecomputeGraphs | None = None,
    watch: Watch | None = None,
    beside: Buffers | None = None,
) -> Passed:
    """Run the jobs' rows through all layers in one pass. Their slots must hold the composed KV. Where a CUDA graph did it, ``watch``
    was not called: `RecomputeGraphs.last` has the jobs' last queries. ``beside``: whose slots these are, if not the pool's."""
    if not jobs:
        return Passed(None, False)
    hidden = None if graphs is None else graphs.replay(jobs)
    if hidden is not None:
        return Passed(hidden, True)
    ids, positions = torch.cat([job.ids for job in jobs]), torch.cat([job.positions for job in jobs])
    if any(job.choose is not None for job in jobs):
        _run_choosing(model_runner, jobs, ids, positions, watch, beside)
    else:
        hidden = run_layers(model_runner, Rows.of(jobs), ids, positions, watch, beside)
    return Passed(hidden, False)


def warm(model_runner: Any) -> None:
    """Compile the kernels of passes that no graph serves now, not while the first such request waits (over a second on an H200).

    Before there is any document; writes to the padding slot. Which kernels a pass takes depends on how many rows it has.
    """
    device = torch.device(model_runner.device)
    slots = torch.full((_WARM_SLOTS,), PADDING_SLOT, dtype=torch.int64, device=device)
    for rows in _WARM_ROWS:
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        targets = torch.full_like(zeros, PADDING_SLOT)[None]
        recompute(model_runner, [RecomputeJob(zeros, zeros, slots, zeros[None], targets, None, 0)])


def run_layers(
    model_runner: Any,
    rows: Rows,
    ids: torch.Tensor,
    positions: torch.Tensor,
    watch: Watch | None = None,
    beside: Buffers | None = None,
) -> torch.Tensor:
    """Tokens ``ids`` at ``positions``, int64 [rows] each, through the model as SGLang runs it, with what it does around its layers.

    Hidden states behind its last norm, [rows, hidden size].
    """
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    backend: Any = _Pass(model_runner, rows, (), watch, beside)
    with forward_context(ForwardContext(attn_backend=backend)):
        hidden = model_runner.model.model(input_ids=ids, positions=positions, forward_batch=forward_batch(ids, positions))
    states: torch.Tensor = hidden[0] if isinstance(hidden, tuple) else hidden  # some models give those of inner layers, too
    return states


def _run_choosing(
    model_runner: Any,
    jobs: Sequence[RecomputeJob],
    ids: torch.Tensor,
    positions: torch.Tensor,
    watch: Watch | None = None,
    beside: Buffers | None = None,
) -> None:
    """As `run_layers`, for jobs some of which choose rows: layer by layer, because after layer 1 fewer rows go on."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    model = model_runner.model
    backend: Any = _Pass(model_runner, Rows.of(jobs), jobs, watch, beside)
    batch = forward_batch(ids, positions)
    hidden, residual = model.model.embed_tokens(ids), None
    with forward_context(ForwardContext(attn_backend=backend)):
        for number, layer in enumerate(decoder_layers(model)):
            hidden, residual = layer(positions, hidden, batch, residual)
            if number == 1 and backend.going_on is not None:
                left = backend.going_on
                ids, positions, hidden = ids[left], positions[left], hidden[left]
                residual = residual[left] if residual is not None else None
                batch = forward_batch(ids, positions)


def forward_batch(ids: torch.Tensor, positions: torch.Tensor) -> Any:
    """What decoder layers and communicators read of a batch; slots and rows belong to the pass, not to SGLang's pools."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    n, device = len(ids), ids.device
    lengths = torch.full((1,), n, dtype=torch.int32, device=device)
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
