"""Measures what questions attend to in their composed contexts, by a pass of the questions alone.

A question whose slots are in the step writes its K and V there already; they are written again over the
repaired context. So the pass is the recompute pass with the question's tokens as its rows, by CUDA graph
where that fits. A question that comes in chunks has only some of its slots yet and runs beside the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ragserve_kernels.key_scores import key_scores
from sglang_ext.analysis.forward import Kv, LayerState, Text, run
from sglang_ext.context.recompute.graphs import RecomputeGraphs
from sglang_ext.context.recompute.job import LastQueries, RecomputeJob
from sglang_ext.context.recompute.recompute_pass import recompute
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.tensors.buffers import PADDING_SLOT, Ints, upload
from sglang_ext.tensors.joint import alike
from sglang_ext.versions import tp_group

_SCORES_AT_ONCE = 2**25  # float32 of all heads and layers that are made probabilities in one go: 128 MB


@dataclass(frozen=True, eq=False)
class QuestionRows:
    """A question over its composed context.

    ``ids`` int64 [q] on the host, behind ``start`` tokens of the prompt, at positions from ``at`` on;
    ``kept`` int64 [S] or [layers, S] on the host, and ``slots`` int64 [S] on the model's device: the context.
    Documents begin at position ``first``. ``job``: the question as rows of a pass; None while it lacks some
    of its slots.
    """

    ids: Ints
    start: int
    at: int
    first: int
    kept: Ints
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
    key_scores(q, keys, padding, _starts([1], keys.device), 1, scale=scaling)


def attention(
    model_runner: Any, questions: Sequence[QuestionRows], graphs: RecomputeGraphs | None = None
) -> list[torch.Tensor]:
    """Return, for each question, how much its last token attends to each document token: f32 [start - first],
    on the CPU.

    That is the largest probability of any head of any rank, summed over the upper half of the layers. A token
    that a layer does not keep has none there.
    """
    ranks = Ranks(tp_group(model_runner))
    layers = model_runner.token_to_kv_pool.layer_num
    placed = [question for question in questions if question.job is not None]
    beside = [question for question in questions if question.job is None]
    parts = [
        (group, ranks.max(largest))
        for group, largest in (*_in_place(model_runner, placed, graphs), *_beside(model_runner, beside))
    ]
    found = [
        (question, own if question.kept.ndim == 2 else own.sum(0, keepdim=True))
        for group, largest in parts
        for question, own in zip(group, largest.unbind(1), strict=True)
    ]
    # the choice is made on the host: the only time that a step waits for the device
    whole = torch.cat([own.flatten() for _, own in found]).cpu().split([own.numel() for _, own in found])
    by_question = {
        question: by_token(question, weights.view_as(own), range(layers // 2, layers))
        for (question, own), weights in zip(found, whole, strict=True)
    }
    return [by_question[question] for question in questions]


Group = tuple[Sequence[QuestionRows], torch.Tensor]
"""Questions of about the same length, and f32 [upper layers, questions, W]: the largest probabilities by
slot; W is at least the number of each question's slots."""


def _in_place(
    model_runner: Any, questions: Sequence[QuestionRows], graphs: RecomputeGraphs | None
) -> Iterator[Group]:
    """The groups of questions that have their slots."""
    jobs = [question.job for question in questions if question.job is not None]
    if not jobs:
        return
    device = jobs[0].ids.device
    ends = np.array([*accumulate(len(job.ids) for job in jobs)], dtype=np.int64)
    last = LastQueries(upload(ends - 1, device))
    if recompute(model_runner, jobs, graphs, last).by_graph and graphs is not None:
        last = graphs.last
    heads = last.queries[0][0].shape[1]
    for numbers in alike([len(job.slots) for job in jobs], _SCORES_AT_ONCE // heads):
        slots = torch.cat([jobs[number].slots for number in numbers])
        starts = _starts([len(jobs[number].slots) for number in numbers], device)
        rows = None if len(numbers) == len(jobs) else upload(np.array(numbers), device)
        yield (
            [questions[number] for number in numbers],
            _largest(model_runner, last, rows, slots, starts, max(len(jobs[n].slots) for n in numbers)),
        )


def _largest(
    model_runner: Any,
    last: LastQueries,
    rows: torch.Tensor | None,
    slots: torch.Tensor,
    starts: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """f32 [upper layers, questions, width]: the largest probability of any head, 0 behind a question's slots.
    ``rows``: the questions' among those of ``last``; None for the first ones."""
    pool, count = model_runner.token_to_kv_pool, len(starts) - 1
    upper = range(pool.layer_num // 2, pool.layer_num)
    heads = last.queries[upper.start][0].shape[1]
    # few launches for few keys, and little memory for many
    at_once = max(1, _SCORES_AT_ONCE // (heads * count * max(1, width)))
    parts: list[torch.Tensor] = []
    for at in range(upper.start, upper.stop, at_once):
        layers = range(at, min(at + at_once, upper.stop))
        scores = torch.empty(len(layers), count, heads, width, device=slots.device)
        for out, layer in zip(scores, layers, strict=True):
            q, scaling = last.queries[layer]
            q = q[:count] if rows is None else q[rows]
            key_scores(q, pool.get_key_buffer(layer), slots, starts, width, scale=scaling, out=out)
        parts.append(scores.softmax(-1).amax(2))
    return torch.cat(parts)


def _starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return upload(np.cumsum([0, *lengths], dtype=np.int32), device)


def _beside(model_runner: Any, questions: Sequence[QuestionRows]) -> Iterator[Group]:
    """Do as `_in_place` does, for questions that lack slots."""
    found: list[list[torch.Tensor]] = [[] for _ in questions]
    if not questions:
        return
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
            starts = _starts([len(keys)], keys.device)
            scores = key_scores(state.q[-1:], keys, place, starts, len(keys), scale=state.scaling)
            own.append(scores[0].softmax(-1).amax(0)[: len(question.slots)])

    run(model_runner, [text(question) for question in questions], observe)
    for question, own in zip(questions, found, strict=True):
        yield [question], torch.stack(own)[:, None]


def by_token(question: QuestionRows, weights: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Sum ``weights`` [layers, W], or what has been summed over them [1, W], by document token, on the host;
    drop what the system text has."""
    by_layer = question.kept.ndim == 2
    kept = question.kept[list(layers)] if by_layer else question.kept[None]
    values = (weights if by_layer else weights.sum(0, keepdim=True))[:, : kept.shape[1]].numpy()
    place = (kept - question.first + 1).clip(min=0)
    summed = np.bincount(place.ravel(), values.ravel(), question.start - question.first + 1)
    return torch.from_numpy(summed[1:]).float()
