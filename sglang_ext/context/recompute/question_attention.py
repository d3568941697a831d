"""Measures what questions attend to in their composed contexts, by a pass of the questions alone.

A question whose slots are in the step writes its K and V there already; they are written again over the
repaired context. So the pass is the recompute pass with the question's tokens as its rows, by CUDA graph
where that fits. A question that comes in chunks has only some of its slots yet and runs beside the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ragserve_kernels.key_scores import key_scores
from sglang_ext.analysis.forward import Kv, LayerState, Text, run
from sglang_ext.context.buffers import PADDING_SLOT, Ints, upload
from sglang_ext.context.recompute.graphs import RecomputeGraphs
from sglang_ext.context.recompute.job import LastQueries, RecomputeJob
from sglang_ext.context.recompute.recompute_pass import recompute
from sglang_ext.ranks import Ranks

_SCORES_AT_ONCE = 2**25  # float32 of all heads and layers that are made probabilities in one go: 128 MB


@dataclass(frozen=True, eq=False)
class QuestionRows:
    """A question over its composed context, tensors on the model's device.

    ``ids`` int64 [q] on the host, behind ``start`` tokens of the prompt, at positions from ``at`` on;
    ``kept`` int64 [S] or [layers, S] and ``slots`` int64 [S]: the context. Documents begin at position
    ``first``. ``job``: the question as rows of a pass; None while it lacks some of its slots.
    """

    ids: Ints
    start: int
    at: int
    first: int
    kept: torch.Tensor
    slots: torch.Tensor
    job: RecomputeJob | None


def warm_questions(model_runner: Any) -> None:
    """Compile what measures questions beside the kernels of passes (`recompute_pass.warm`). Call it before
    there is any document: it writes to the padding slot."""
    keys = model_runner.token_to_kv_pool.get_key_buffer(0)
    zeros = torch.zeros(1, dtype=torch.int64, device=keys.device)
    last, padding = LastQueries(zeros), torch.full_like(zeros, PADDING_SLOT)
    job = RecomputeJob(zeros, zeros, padding, zeros[None], padding[None], None, 0)
    recompute(model_runner, [job], None, last)
    q, scaling = last.queries[0]
    key_scores(q[0], keys, padding, scale=scaling)


def attention(
    model_runner: Any, questions: Sequence[QuestionRows], graphs: RecomputeGraphs | None = None
) -> list[torch.Tensor]:
    """Return, for each question, how much its last token attends to each document token: f32 [start - first],
    on the CPU.

    That is the largest probability of any head of any rank, summed over the upper half of the layers. A token
    that a layer does not keep has none there.
    """
    placed = [question for question in questions if question.job is not None]
    found = dict(zip(placed, _in_place(model_runner, placed, graphs), strict=True))
    beside = [question for question in questions if question.job is None]
    found |= zip(beside, _beside(model_runner, beside), strict=True)
    sizes = [len(question.slots) for question in questions]
    largest = torch.cat([torch.stack(found[question]) for question in questions], dim=1)
    largest = Ranks(model_runner.tp_group).max(largest)
    layer_num = model_runner.token_to_kv_pool.layer_num
    upper = range(layer_num // 2, layer_num)
    parts = [
        by_token(question, own, upper)
        for question, own in zip(questions, largest.split(sizes, dim=1), strict=True)
    ]
    # the choice is made on the host: the only time that a step waits for the device
    whole = torch.cat(parts).cpu()
    return list(whole.split([len(part) for part in parts]))


def _in_place(
    model_runner: Any, questions: Sequence[QuestionRows], graphs: RecomputeGraphs | None
) -> list[list[torch.Tensor]]:
    """Largest probabilities by question and upper layer, f32 [S], of questions that have their slots."""
    jobs = [question.job for question in questions if question.job is not None]
    if not jobs:
        return []
    pool = model_runner.token_to_kv_pool
    ends = np.array([*accumulate(len(job.ids) for job in jobs)], dtype=np.int64)
    last = LastQueries(upload(ends - 1, jobs[0].ids.device))
    if recompute(model_runner, jobs, graphs, last).by_graph and graphs is not None:
        last = graphs.last
    upper = range(pool.layer_num // 2, pool.layer_num)
    found = []
    for number, (question, job) in enumerate(zip(questions, jobs, strict=True)):
        heads, count = last.queries[upper.start][0].shape[1], len(job.slots)
        # few launches for few keys, and little memory for many
        at_once = max(1, _SCORES_AT_ONCE // (heads * count))
        own: list[torch.Tensor] = []
        for at in range(upper.start, upper.stop, at_once):
            layers = range(at, min(at + at_once, upper.stop))
            scores = torch.empty(len(layers), heads, count, device=job.slots.device)
            for out, layer in zip(scores, layers, strict=True):
                q, scaling = last.queries[layer]
                key_scores(q[number], pool.get_key_buffer(layer), job.slots, scale=scaling, out=out)
            own.extend(scores.softmax(-1).amax(1)[:, : len(question.slots)])
        found.append(own)
    return found


def _beside(model_runner: Any, questions: Sequence[QuestionRows]) -> list[list[torch.Tensor]]:
    """Do as `_in_place` does, for questions that lack slots."""
    found: list[list[torch.Tensor]] = [[] for _ in questions]
    if not questions:
        return found
    pool = model_runner.token_to_kv_pool
    lowest = pool.layer_num // 2

    def context(question: QuestionRows, layer: int) -> Kv:
        return pool.get_key_buffer(layer)[question.slots], pool.get_value_buffer(layer)[question.slots]

    def text(question: QuestionRows) -> Text:
        ids = upload(question.ids, question.slots.device)
        return Text(ids, question.at + torch.arange(len(ids), device=ids.device), partial(context, question))

    def observe(layer: int, states: Sequence[LayerState]) -> None:
        if layer < lowest:
            return
        for own, question, state in zip(found, questions, states, strict=True):
            keys = torch.cat((pool.get_key_buffer(layer)[question.slots].to(state.k.dtype), state.k))
            place = torch.arange(len(keys), device=keys.device)
            scores = key_scores(state.q[-1], keys, place, scale=state.scaling)
            own.append(scores.softmax(-1).amax(0)[: len(question.slots)])

    run(model_runner, [text(question) for question in questions], observe)
    return found


def by_token(question: QuestionRows, weights: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Sum ``weights`` [layers, S] by document token, on its device; drop what the system text has."""
    kept = question.kept[list(layers)] if question.kept.dim() == 2 else question.kept.expand_as(weights)
    place = (kept - question.first + 1).clamp(min=0)
    out = torch.zeros(question.start - question.first + 1, device=weights.device)
    return out.index_add(0, place.flatten(), weights.flatten())[1:]
