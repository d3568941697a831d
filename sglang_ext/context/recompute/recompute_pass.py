"""Runs one recompute pass over all requests of a batch, by CUDA graph where one fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_ext.context.buffers import PADDING_SLOT, Buffers
from sglang_ext.context.recompute.graphs import RecomputeGraphs
from sglang_ext.context.recompute.job import Passed, RecomputeJob, Watch
from sglang_ext.context.recompute.layers import run_choosing, run_layers
from sglang_ext.context.recompute.row_attention import Rows

_WARM_ROWS = (768, 1280, 2560)  # one for each number of tiles that the attention distinguishes, at 8 KV heads
_WARM_SLOTS = 512


@torch.no_grad()
def recompute(
    model_runner: Any,
    jobs: Sequence[RecomputeJob],
    graphs: RecomputeGraphs | None = None,
    watch: Watch | None = None,
    beside: Buffers | None = None,
) -> Passed:
    """Run the jobs' rows through all layers in one pass. Their slots must hold the composed KV.

    A CUDA graph does not call ``watch``: `RecomputeGraphs.last` then has the jobs' last queries. ``beside``:
    the buffers that the slots belong to, if not the pool.
    """
    if not jobs:
        return Passed(None, False)
    hidden = None if graphs is None else graphs.replay(jobs)
    if hidden is not None:
        return Passed(hidden, True)
    ids, positions = torch.cat([job.ids for job in jobs]), torch.cat([job.positions for job in jobs])
    if any(job.choose is not None for job in jobs):
        run_choosing(model_runner, jobs, ids, positions, watch, beside)
    else:
        hidden = run_layers(model_runner, Rows.of(jobs), ids, positions, watch, beside)
    return Passed(hidden, False)


def warm(model_runner: Any) -> None:
    """Compile the kernels of passes that no graph serves, so that the first such request does not wait for
    them (over a second on an H200).

    Call it before there is any document: it writes to the padding slot. The kernels depend on the number of
    rows.
    """
    device = torch.device(model_runner.device)
    slots = torch.full((_WARM_SLOTS,), PADDING_SLOT, dtype=torch.int64, device=device)
    for rows in _WARM_ROWS:
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        targets = torch.full_like(zeros, PADDING_SLOT)[None]
        recompute(model_runner, [RecomputeJob(zeros, zeros, slots, zeros[None], targets, None, 0)])
