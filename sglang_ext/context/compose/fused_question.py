"""Runs the question in the recompute pass: its rows ride along, and only the logits are left of the forward
pass that SGLang would run for it.

In every layer the K and V of all rows are written before any row attends. So the question sees the context as
it is after recomputation, layer by layer, which is what its own extend computes. A pass reads all weights,
however few its rows are; one pass instead of two saves most of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.context.recompute.graphs import RecomputeGraphs
from sglang_ext.context.recompute.job import Passed, RecomputeJob
from sglang_ext.context.recompute.recompute_pass import recompute
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.sglang_internals.model import NotComposable, unlike_plain_attention
from sglang_ext.versions import settings_of, tp_group

# Most slots of a context of which nothing is recomputed, on each rank: with several every rank reads a share
# of the heads. For 5,120 the pass takes two thirds of SGLang's extend (H200, 8B model, one GPU); more was not
# measured.
SLOTS = 8192
# Most bytes of one layer that are on their way to the device while one GPU's graph may wait for all layers:
# 10 MB take 0.2 ms, and launching one layer of SGLang's extend takes the host as long, or longer.
SHORT_LOAD = 10 * 2**20
WITHOUT = (  # server settings that rule the fused pass out
    "speculative_algorithm",
    "enable_dp_attention",
    "enable_lora",
    "lora_paths",
    "enable_mis",
    "is_embedding",
    "enable_return_routed_experts",
)


class FusedQuestion:
    """Holds the questions' hidden states between the recompute pass that computes them and the forward pass
    that consumes them. Per rank.
    """

    def __init__(self, model_runner: Any, graphs: RecomputeGraphs | None) -> None:
        self._runner = model_runner
        self._graphs = graphs
        self._world = Ranks(tp_group(model_runner)).world
        keys = model_runner.token_to_kv_pool.get_key_buffer(0)
        self._slot_bytes = 2 * keys[0].numel() * keys.itemsize  # K and V of one layer
        self.possible = _ends_plainly(model_runner) and is_plain(model_runner)
        self._hidden: torch.Tensor | None = None

    @torch.no_grad()
    def run(
        self,
        contexts: Sequence[ComposedContext],
        rows: Sequence[torch.Tensor],
        jobs: Sequence[RecomputeJob | None],
        *,
        loading: bool,
    ) -> Passed | None:
        """Run the jobs, None where nothing is recomputed, with the questions behind them. Returns None, with
        nothing done, if the questions are left to SGLang.

        All ranks must decide alike, or the collectives of one would wait for the others for ever. So only
        plans, what is on the device, and whether there are graphs decide: these are the same everywhere.

        Args:
            rows: as in `Composer.fill`.
            loading: KV is still on its way from below the device.
        """
        complete = all(
            len(row) == context.slots + context.question_tokens
            for context, row in zip(contexts, rows, strict=True)
        )
        if not (self.possible and complete and all(job is None or job.uniform for job in jobs)):
            return None
        recomputes = any(job is not None for job in jobs)
        # A pass of questions alone pays by graph only. A graph waits for all layers, while SGLang's extend
        # would run beside their loading: that is for long loads. With several ranks its collectives take
        # longer to launch than the ranks' shares of so few slots take to load.
        loads = sum(context.slots for context in contexts) * self._slot_bytes
        waits = loading and self._world == 1 and loads > SHORT_LOAD
        short = all(context.slots <= SLOTS * self._world for context in contexts)
        if not recomputes and (self._graphs is None or waits or not short):
            return None
        joined = [
            context.question_job(row[: context.slots], row[context.slots :]).behind(job)
            for context, row, job in zip(contexts, rows, jobs, strict=True)
        ]
        ends = accumulate(len(job.ids) for job in joined)
        own = np.concatenate(
            [
                np.arange(end - context.question_tokens, end)
                for context, end in zip(contexts, ends, strict=True)
            ]
        )
        if not recomputes and self._graphs is not None and not self._graphs.fits(joined):
            return None
        passed = recompute(self._runner, joined, self._graphs, keep=own)
        self._hidden = passed.hidden
        return passed

    @torch.no_grad()
    def output(self, forward_batch: Any) -> Any:
        """Return, once, SGLang's `ModelRunnerOutput` for the questions; None if this batch has none."""
        hidden, self._hidden = self._hidden, None
        if hidden is None or len(hidden) != len(forward_batch.input_ids):
            return None
        from sglang.srt.model_executor.model_runner import ModelRunnerOutput

        model = self._runner.model
        logits = model.logits_processor(forward_batch.input_ids, hidden, model.lm_head, forward_batch)
        return ModelRunnerOutput(logits_output=logits, can_run_graph=False)

    def drop(self) -> None:
        """Forget the states: the forward pass is over."""
        self._hidden = None


def _ends_plainly(model_runner: Any) -> bool:
    """True if the model goes from its last norm to logits as SGLang's `forward_split_prefill` does; models
    that do so have that method.
    """
    model = model_runner.model
    args = settings_of(model_runner.server_args)
    if any(getattr(args, name) for name in WITHOUT) or getattr(model, "capture_aux_hidden_states", False):
        return False
    return all(
        hasattr(model, name) for name in ("forward_split_prefill", "logits_processor", "lm_head")
    ) and hasattr(model.model, "norm")


def is_plain(model_runner: Any) -> bool:
    """True if our attention is the model's and its KV is stored as computed, in its own dtype."""
    pool = model_runner.token_to_kv_pool
    if getattr(pool, "bits", 16) != 16 or pool.get_key_buffer(0).dtype != model_runner.dtype:
        return False
    try:
        return unlike_plain_attention(model_runner.model) is None
    except NotComposable:
        return False
