"""Measures what questions attend to once they have read a few tokens of every document (QCFuse).

A question runs through the layers over its anchors alone. In the critical layers its queries then meet the
keys of the whole context. Nothing is written to the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from sglang_ext.analysis.forward import Kv, LayerState, Text, run
from sglang_ext.context.recompute.question_attention import QuestionRows, by_token
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.tensors.buffers import upload
from sglang_ext.versions import tp_group

_SCORES = 2**26  # attention scores held at once


def anchor_attention(
    model_runner: Any,
    questions: Sequence[QuestionRows],
    anchors: Sequence[Sequence[torch.Tensor]],
    layers: Sequence[int],
) -> list[torch.Tensor]:
    """Return, for each question, how much it attends to each document token: f32 [start - first], on the CPU.

    That is the mean over the question's tokens, all ranks' heads and ``layers``. ``anchors``: by question and
    layer of the model, the slots that it reads there, int64. A token that a layer does not keep has no
    attention there.
    """
    pool = model_runner.token_to_kv_pool
    found: list[list[torch.Tensor]] = [[] for _ in questions]

    def context(number: int, layer: int) -> Kv:
        slots = anchors[number][layer]
        return pool.get_key_buffer(layer)[slots], pool.get_value_buffer(layer)[slots]

    def text(number: int, question: QuestionRows) -> Text:
        ids = upload(question.ids, question.slots.device)
        return Text(ids, question.at + torch.arange(len(ids), device=ids.device), partial(context, number))

    def observe(layer: int, states: Sequence[LayerState]) -> None:
        if layer in layers:
            for own, question, state in zip(found, questions, states, strict=True):
                keys = torch.cat((pool.get_key_buffer(layer)[question.slots].to(state.k.dtype), state.k))
                own.append(mean_attention(state.q, keys, state.scaling)[: len(question.slots)])

    run(model_runner, [text(*each) for each in enumerate(questions)], observe)
    ranks = Ranks(tp_group(model_runner))
    sizes = [len(question.slots) for question in questions]
    means = ranks.sum(torch.cat([torch.stack(own) for own in found], dim=1)) / (ranks.world * len(layers))
    return [
        by_token(question, own, sorted(layers))
        for question, own in zip(questions, means.cpu().split(sizes, dim=1), strict=True)
    ]


def mean_attention(q: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the attention of q [rows, heads, head_dim] to keys [n, kv_heads, head_dim], the last ``rows`` of
    which are the rows' own, causally: the mean over rows and heads, f32 [n].
    """
    rows, n = len(q), len(keys)
    grouped = q.float().unflatten(1, (keys.shape[1], -1))  # [rows, kv_heads, group, head_dim]
    each = keys.float()
    total = torch.zeros(n, device=q.device)
    at_once = max(1, _SCORES // (q.shape[1] * n))
    for at in range(0, rows, at_once):
        part = grouped[at : at + at_once]
        last = torch.arange(n - rows + at, n - rows + at + len(part), device=q.device)
        unseen = torch.arange(n, device=q.device) > last[:, None]  # [part, n]
        scores = torch.einsum("rhgd,nhd->hgrn", part, each) * scaling
        total += scores.masked_fill(unseen, -torch.inf).softmax(-1).sum((0, 1, 2))
    return total / (rows * q.shape[1])
