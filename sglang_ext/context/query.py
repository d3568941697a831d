"""SamKV's query pass: the questions of all waiting requests, each over the initial and local blocks of its documents only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from sglang_ext.analysis.passes import Kv, LayerState, Text, run
from sglang_ext.context.composer import ComposedContext, filling_of
from sglang_ext.context.gather import Buffers, Gather, upload
from sglang_ext.context.samkv import Ask


def question_queries(model_runner: Any, gather: Gather, contexts: Sequence[ComposedContext]) -> list[dict[Ask, torch.Tensor]]:
    """Each question's mean query and that of its last token, f32 [layers, heads, head_dim], rotated for their places.

    The contexts' sources must hold the tokens of their drafts; these are gathered beside the pool, and given back at the end.
    """
    pool, device = model_runner.token_to_kv_pool, torch.device(model_runner.device)
    bounds = [0, *accumulate(len(context.draft.kept) for context in contexts)]
    shape = (pool.layer_num, 2, bounds[-1], *pool.get_key_buffer(0).shape[1:])
    memory = torch.empty(shape, dtype=pool.get_key_buffer(0).dtype, device=device)
    beside = Buffers([layer[0] for layer in memory], [layer[1] for layer in memory])
    rows = torch.arange(bounds[-1], device=device)
    parts = [slice(start, end) for start, end in pairwise(bounds)]
    gather([filling_of(context, rows[part]) for context, part in zip(contexts, parts, strict=True)], beside)
    texts = []
    for context, part in zip(contexts, parts, strict=True):
        start = context.plan.question_start
        ids = upload(np.array(context.ids[start:], dtype=np.int64), device)
        texts.append(Text(ids, start + torch.arange(len(ids), device=device), partial(_before, beside, part)))
    found: list[dict[Ask, list[torch.Tensor]]] = [{"mean": [], "last": []} for _ in texts]

    def observe(layer: int, states: Sequence[LayerState]) -> None:
        for own, state in zip(found, states, strict=True):
            own["mean"].append(state.q.float().mean(0))
            own["last"].append(state.q[-1].float())

    run(model_runner, texts, observe)
    return [{name: torch.stack(queries) for name, queries in own.items()} for own in found]


def _before(beside: Buffers, part: slice, layer: int) -> Kv:
    return beside.k[layer][part], beside.v[layer][part]
