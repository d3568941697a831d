"""Runs one recompute pass over all requests of a batch: by CUDA graph where one fits, else in slices whose
activations the engine has memory for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_ext.context.recompute.graphs import RecomputeGraphs
from sglang_ext.context.recompute.job import Passed, QueryObserver, RecomputeJob
from sglang_ext.context.recompute.layers import choose_rows, run_slices
from sglang_ext.tensors.buffers import PADDING_SLOT, Buffers, Ints, upload
from sglang_ext.versions import settings_of

NO_ROWS: Ints = np.empty(0, dtype=np.int64)
_ROWS = 8192  # in one call of the model where prefills come in one piece
_WARM_ROWS = (768, 1280, 2560)  # one for each number of tiles that the attention distinguishes, at
_WARM_HEADS = 8  # KV heads of a rank; fewer make as many tiles of more rows
_WARM_SLOTS = 512


@torch.no_grad()
def recompute(
    model_runner: Any,
    jobs: Sequence[RecomputeJob],
    graphs: RecomputeGraphs | None = None,
    watch: QueryObserver | None = None,
    beside: Buffers | None = None,
    keep: Ints = NO_ROWS,
) -> Passed:
    """Run the jobs' rows through all layers. Their slots must hold the composed KV.

    A CUDA graph does not call ``watch``: `RecomputeGraphs.last` then has the jobs' last queries. ``beside``:
    the buffers that the slots belong to, if not the pool. ``keep``: rows, ascending, whose hidden states are
    returned.
    """
    if not jobs:
        return Passed(None, False)
    hidden = None if graphs is None else graphs.replay(jobs)
    if hidden is not None:
        # copied at once: the next pass overwrites a graph's memory
        return Passed(hidden.index_select(0, upload(keep, hidden.device)), True)
    most = rows_at_once(model_runner.server_args)
    choose_rows(model_runner, jobs, most)
    return Passed(run_slices(model_runner, jobs, most, keep, watch, beside), False)


def rows_at_once(server_args: Any) -> int:
    """Most rows in one call of the model: those of SGLang's prefill chunk, for whose activations its memory
    settings leave room.
    """
    size = getattr(settings_of(server_args), "chunked_prefill_size", None)
    return size if size is not None and size > 0 else _ROWS


def warm(model_runner: Any) -> None:
    """Compile the kernels of passes that no graph serves, so that the first such request does not wait for
    them (over a second on an H200).

    Call it before there is any document: it writes to the padding slot. The kernels depend on the number of
    rows, and on whether a layer leaves some out.
    """
    device = torch.device(model_runner.device)
    slots = torch.full((_WARM_SLOTS,), PADDING_SLOT, dtype=torch.int64, device=device)
    heads = model_runner.token_to_kv_pool.get_key_buffer(0).shape[1]
    for rows in (max(1, _WARM_HEADS // heads) * rows for rows in _WARM_ROWS):
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        targets = torch.full_like(zeros, PADDING_SLOT)[None]
        for alone in (None, torch.zeros_like(targets, dtype=torch.bool)):
            recompute(model_runner, [RecomputeJob(zeros, zeros, slots, zeros[None], targets, alone, 0)])
