"""The question in the recompute pass: its rows ride along, and of the forward pass that SGLang would run for
it only the logits are left.

In every layer all rows' K and V are written before any row attends, so the question sees the context as it is
after recomputing, layer by layer: what its own extend computes. A pass reads all weights, however few its
rows are; so one instead of two saves most of the second."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_ext.context.buffers import upload
from sglang_ext.context.recompute.job import question_job
from sglang_ext.model import decoder_layers

if TYPE_CHECKING:
    from sglang_ext.context.compose.request import ComposedContext
    from sglang_ext.context.recompute.graphs import RecomputeGraphs
    from sglang_ext.context.recompute.job import RecomputeJob

# with nothing to recompute: for 5,120 the pass takes two thirds of SGLang's extend, more was not measured
# (H200, 8B model)
SLOTS = 8192
WITHOUT = (
    "speculative_algorithm",
    "enable_dp_attention",
    "enable_lora",
    "lora_paths",
    "enable_mis",
    "is_embedding",
    "enable_return_routed_experts",
)


class FusedQuestion:
    """One rank's. Hidden states of the questions wait here, from the pass that computed them to the forward
    that they are of.
    """

    def __init__(self, model_runner: Any, graphs: RecomputeGraphs | None) -> None:
        self._runner = model_runner
        self._graphs = graphs
        self._device = torch.device(model_runner.device)
        group = model_runner.tp_group
        self._alone = group is None or group.world_size == 1
        self._possible = _ends_plainly(model_runner) and _attends_plainly(model_runner)
        self._hidden: torch.Tensor | None = None

    def joined(
        self,
        contexts: Sequence[ComposedContext],
        rows: Sequence[torch.Tensor],
        jobs: Sequence[RecomputeJob | None],
        *,
        loading: bool,
    ) -> list[RecomputeJob] | None:
        """By context its job, None where nothing is recomputed, with its question behind; None where the
        questions are left to SGLang.

        ``rows`` as in `Composer.fill`. ``loading``: KV is still coming from host. All ranks must answer the
        same, or the collectives of one would wait for the others for ever: what may differ between them is
        asked only where there is one."""
        complete = all(
            len(row) == context.slots + context.question_tokens
            for context, row in zip(contexts, rows, strict=True)
        )
        if not (self._possible and complete and all(job is None or job.uniform for job in jobs)):
            return None
        recomputes = any(job is not None for job in jobs)
        # A pass of questions alone pays by graph only, and a graph waits for all layers, beside whose loading
        # SGLang's extend would run.
        by_graph = self._alone and not loading and all(context.slots <= SLOTS for context in contexts)
        if not recomputes and (self._graphs is None or not by_graph):
            return None
        joined = [
            self._question(context, row).behind(job)
            for context, row, job in zip(contexts, rows, jobs, strict=True)
        ]
        return joined if recomputes or (self._graphs is not None and self._graphs.fits(joined)) else None

    def _question(self, context: ComposedContext, row: torch.Tensor) -> RecomputeJob:
        return question_job(
            upload(context.question, self._device),
            context.question_at,
            row[: context.slots],
            row[context.slots :],
        )

    def keep(
        self, hidden: torch.Tensor, contexts: Sequence[ComposedContext], joined: Sequence[RecomputeJob]
    ) -> None:
        """``hidden`` [rows, hidden size] of a pass over the joined jobs, at once behind it: a graph's memory
        is the next pass', too.
        """
        ends = accumulate(len(job.ids) for job in joined)
        rows = [
            np.arange(end - context.question_tokens, end) for context, end in zip(contexts, ends, strict=True)
        ]
        self._hidden = hidden.index_select(0, upload(np.concatenate(rows), self._device))

    @torch.no_grad()
    def output(self, forward_batch: Any) -> Any:
        """SGLang's `ModelRunnerOutput` of the questions kept, once; None where there are none, or not of this
        batch.
        """
        hidden, self._hidden = self._hidden, None
        if hidden is None or len(hidden) != len(forward_batch.input_ids):
            return None
        from sglang.srt.model_executor.model_runner import ModelRunnerOutput

        model = self._runner.model
        logits = model.logits_processor(forward_batch.input_ids, hidden, model.lm_head, forward_batch)
        return ModelRunnerOutput(logits_output=logits, can_run_graph=False)

    def drop(self) -> None:
        """The forward is over."""
        self._hidden = None


def _ends_plainly(model_runner: Any) -> bool:
    """Whether the model goes from its last norm to logits as SGLang's own `forward_split_prefill`, which
    those have that do.
    """
    model = model_runner.model
    if any(getattr(model_runner.server_args, name) for name in WITHOUT) or getattr(
        model, "capture_aux_hidden_states", False
    ):
        return False
    return all(
        hasattr(model, name) for name in ("forward_split_prefill", "logits_processor", "lm_head")
    ) and hasattr(model.model, "norm")


def _attends_plainly(model_runner: Any) -> bool:
    """Whether ours is the model's attention, and its KV is written as it is: no window, no cap on scores, no
    other type in the pool.
    """
    if model_runner.token_to_kv_pool.get_key_buffer(0).dtype != model_runner.dtype:
        return False
    layers = [getattr(layer.self_attn, "attn", None) for layer in decoder_layers(model_runner.model)]
    return all(
        attn is not None and not attn.logit_cap and attn.sliding_window_size == -1 and not attn.use_irope
        for attn in layers
    )
