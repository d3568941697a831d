"""What questions attend to in their composed contexts: a pass of the questions alone that writes no KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_ext.analysis.passes import Kv, LayerState, Text, run


@dataclass(frozen=True, eq=False)
class Question:
    """``ids`` int64 [q] at positions from ``start`` on; ``kept`` int64 [S] or [layers, S] and ``slots`` int64 [S]: its composed context.
    Documents begin at position ``first``. On the model's device."""

    ids: torch.Tensor
    start: int
    first: int
    kept: torch.Tensor
    slots: torch.Tensor


def attention(model_runner: Any, questions: Sequence[Question]) -> list[torch.Tensor]:
    """f32 [start - first] on the CPU for each question: how much its last token attends to each document token.

    Summed over the upper half of the layers is the largest probability of any head; a token that a layer does not keep has none there.
    """
    pool, group = model_runner.token_to_kv_pool, model_runner.tp_group
    upper = range(pool.layer_num // 2, pool.layer_num)

    def context(question: Question, layer: int) -> Kv:
        return pool.get_key_buffer(layer)[question.slots], pool.get_value_buffer(layer)[question.slots]

    texts = [
        Text(question.ids, question.start + torch.arange(len(question.ids), device=question.ids.device), partial(context, question))
        for question in questions
    ]
    found: list[list[torch.Tensor]] = [[] for _ in questions]  # by upper layer, [S]

    def observe(layer: int, states: Sequence[LayerState]) -> None:
        if layer not in upper:
            return
        for own, question, state in zip(found, questions, states, strict=True):
            keys = torch.cat((pool.get_key_buffer(layer)[question.slots].to(state.k.dtype), state.k)).float()
            last = state.q[-1].float().unflatten(0, (keys.shape[1], -1))  # [kv_heads, group, head_dim]
            weights = (torch.einsum("hgd,shd->hgs", last, keys) * state.scaling).softmax(-1)
            own.append(weights[..., : len(question.slots)].amax((0, 1)))

    run(model_runner, texts, observe)
    sizes = [len(question.slots) for question in questions]
    largest = torch.cat([torch.stack(own) for own in found], dim=1)
    if group is not None and group.world_size > 1:  # every rank has some of the heads; all must choose the same
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group.device_group)
    parts = [_by_token(question, own, upper.start) for question, own in zip(questions, largest.split(sizes, dim=1), strict=True)]
    whole = torch.cat(parts).cpu()  # the choice is made on the host: the one time that a step waits for the device
    return list(whole.split([len(part) for part in parts]))


def _by_token(question: Question, largest: torch.Tensor, lowest: int) -> torch.Tensor:
    """``largest`` [upper layers, S] summed by document token, on its device; what the system text has is dropped."""
    kept = question.kept[lowest:] if question.kept.dim() == 2 else question.kept.expand_as(largest)
    place = (kept - question.first + 1).clamp(min=0)
    out = torch.zeros(question.start - question.first + 1, device=largest.device)
    return out.index_add(0, place.flatten(), largest.flatten())[1:]
