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
from torch.nn.functional import pad

from ragserve_kernels.kv import HEAD_DIMS
from ragserve_kernels.prefix_rows_attention import prefix_rows_attention
from sglang_ext.analysis.forward import Kv, LayerState, Text, run
from sglang_ext.context.buffers import PADDING_SLOT, Ints, upload
from sglang_ext.context.recompute.graphs import RecomputeGraphs
from sglang_ext.context.recompute.job import LastQueries, RecomputeJob
from sglang_ext.context.recompute.recompute_pass import recompute
from sglang_ext.ranks import Ranks

# keys scored in one go: 0.4 GB for 8 KV heads of 128, in bfloat16 and in float32
_KEYS_AT_ONCE = 65_536
_WARM_SLOTS = 512


@dataclass(frozen=True, eq=False)
class QuestionRows:
    """A question over its composed context, tensors on the model's device.

    ``ids`` int64 [q] on the host, behind ``start`` tokens of the prompt, at positions from ``at`` on;
    ``kept`` int64 [S] or [layers, S] and ``slots`` int64 [S]: the context. Documents begin at position
    ``first``. ``job``: the question as rows of a pass; None while it lacks some of its slots. ``before``: the
    first slots that no document has, whose weights nobody asks for: those of a session's earlier turns.
    """

    ids: Ints
    start: int
    at: int
    first: int
    kept: torch.Tensor
    slots: torch.Tensor
    job: RecomputeJob | None
    before: int = 0


def warm_questions(model_runner: Any) -> None:
    """Compile what questions behind a dialogue need beside the kernels of passes (`recompute_pass.warm`)."""
    keys = model_runner.token_to_kv_pool.get_key_buffer(0)
    slots = torch.full((_WARM_SLOTS,), PADDING_SLOT, dtype=torch.int64, device=keys.device)
    zeros = torch.zeros(1, dtype=torch.int64, device=keys.device)
    last = LastQueries(zeros)
    target = torch.full_like(zeros, PADDING_SLOT)[None]
    recompute(model_runner, [RecomputeJob(zeros, zeros, slots, zeros[None], target, None, 0)], None, last)
    q, scaling = last.queries[0]
    if _has_kernel(q, keys):
        largest_behind(model_runner.token_to_kv_pool, range(1), q, slots, 1, scaling)


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
        before = question.before if _has_kernel(last.queries[0][0], pool.get_key_buffer(0)) else 0
        # few launches for few keys, and little memory for many
        at_once = max(1, _KEYS_AT_ONCE // (len(job.slots) - before))
        own: list[torch.Tensor] = []
        for at in range(upper.start, upper.stop, at_once):
            layers = range(at, min(at + at_once, upper.stop))
            q = torch.stack([last.queries[layer][0][number] for layer in layers])
            weights = largest_behind(pool, layers, q, job.slots, before, last.queries[at][1])
            own.extend(pad(weights[:, : len(question.slots) - before], (before, 0)))
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
            own.append(_largest(state.q[-1:], keys[None], state.scaling)[0, : len(question.slots)])

    run(model_runner, [text(question) for question in questions], observe)
    return found


def largest_behind(
    pool: Any, layers: Sequence[int], q: torch.Tensor, slots: torch.Tensor, before: int, scaling: float
) -> torch.Tensor:
    """The largest probability that a head of q [layers, heads, head_dim] gives each of ``slots``, int64 [S],
    but the first ``before``: f32 [layers, S - before].

    With ``before`` a kernel adds up what all of them get, so that the others need no copy of their keys.
    """
    keys = torch.stack([pool.get_key_buffer(layer)[slots[before:]] for layer in layers])
    return _largest(q, keys, scaling, _log_sums(pool, layers, q, slots, scaling) if before else None)


def _log_sums(
    pool: Any, layers: Sequence[int], q: torch.Tensor, slots: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Log-sum-exp of each head's scores of all slots, f32 [layers, heads]."""
    sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    start = torch.zeros(2, dtype=torch.int32, device=q.device)
    start[1] = 1
    for place, layer in enumerate(layers):
        prefix_rows_attention(
            q[place : place + 1],
            pool.get_key_buffer(layer),
            pool.get_value_buffer(layer),
            slots,
            start[:1],
            start,
            torch.full((1,), len(slots), dtype=torch.int32, device=q.device),
            max_rows=1,
            scale=scaling,
            lse=sums[place : place + 1],
        )
    return sums


def _has_kernel(q: torch.Tensor, keys: torch.Tensor) -> bool:
    return q.shape[-1] in HEAD_DIMS and q.dtype == keys.dtype


def _largest(
    q: torch.Tensor, keys: torch.Tensor, scaling: float, log_sums: torch.Tensor | None = None
) -> torch.Tensor:
    """The largest probability that a head of q [layers, heads, head_dim] gives each of the keys [layers, n,
    kv_heads, head_dim], f32 [layers, n]. ``log_sums``, f32 [layers, heads]: where there are others beside
    these, the log-sum-exp of the scores of all.
    """
    grouped = q.float().unflatten(1, (keys.shape[2], -1))  # [layers, kv_heads, group, head_dim]
    scores = torch.einsum("lhgd,lshd->lhgs", grouped, keys.float()) * scaling
    if log_sums is None:
        return scores.softmax(-1).amax((1, 2))
    return (scores - log_sums.unflatten(1, (keys.shape[2], -1))[..., None]).amax((1, 2)).exp()


def by_token(question: QuestionRows, weights: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Sum ``weights`` [layers, S] by document token, on its device; drop what the system text has."""
    kept = question.kept[list(layers)] if question.kept.dim() == 2 else question.kept.expand_as(weights)
    place = (kept - question.first + 1).clamp(min=0)
    out = torch.zeros(question.start - question.first + 1, device=weights.device)
    return out.index_add(0, place.flatten(), weights.flatten())[1:]
