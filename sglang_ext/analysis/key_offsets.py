"""What all keys of a head have in common, which a pool of few bits leaves out.

Some channels of a model's keys hardly differ from token to token, and may be a hundred times as large as
those that do (Qwen2's, by the bias of its key projection): 4 bits of both together hold nothing of the
latter. A vector that all keys share adds the same to all scores of a query, which softmax does not see:
``softmax(q . (k - c)) = softmax(q . k)``. So keys are stored without it, and nothing adds it back.

It is the mean of a text's keys before they are rotated, rotated for every position of the context and
averaged: what turns on the way cancels out, what hardly turns stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_ext.analysis.forward import LayerState, Text, run
from sglang_ext.sglang_internals.model import NotComposable, check_layers, decoder_layers
from sglang_ext.tensors.rope import Rotation

_FIRST = 4  # tokens that attention sinks on, whose keys are unlike all others


def key_offsets(runner: Any, ids: Sequence[int]) -> torch.Tensor | None:
    """Return the vectors that the keys share, f32 [layers, kv_heads, head_dim] of this rank, by a pass over
    the text ``ids``; None for a model whose layers no pass of ours runs."""
    try:
        check_layers(runner.model)
    except NotComposable:
        return None
    layers, length = decoder_layers(runner.model), runner.model_config.context_len
    found: list[torch.Tensor] = []

    def observe(number: int, states: Sequence[LayerState]) -> None:
        keys = states[0].k[_FIRST:].float()
        rope = getattr(layers[number].self_attn, "rotary_emb", None)
        if rope is None:
            found.append(keys.mean(0))
            return
        rotation = Rotation(torch.empty(0), rope.rotary_dim, neox=rope.is_neox_style)
        cos, sin = rope.cos_sin_cache[:length].to(keys).chunk(2, -1)
        scale = cos[:1].square() + sin[:1].square()  # some kinds of rope scale keys, too
        own = slice(_FIRST, _FIRST + len(keys))
        still = rotation.turn(keys, cos[own] / scale, -sin[own] / scale).mean(0, keepdim=True)
        found.append(rotation.turn(still, cos.mean(0, keepdim=True), sin.mean(0, keepdim=True))[0])

    tokens = torch.tensor(ids, device=runner.device)
    run(runner, [Text(tokens, torch.arange(len(ids), device=runner.device))], observe)
    return torch.stack(found)
