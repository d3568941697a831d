"""What all keys of a head have in common, which the pool of few bits leaves out.

A bias of the key projection (Qwen2 has one) is the same in every key, and where rotary angles turn slowly it
still is at every position. It may be a hundred times as large as what differs, and 4 bits of both together
hold nothing of the latter. A vector that all keys share adds the same to all scores of a query, which softmax
does not see: ``softmax(q . (k - c)) = softmax(q . k)``. So keys are stored without it, and nothing adds it
back."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.tensors.rope import Rotation


def key_offsets(model: Any, positions: int) -> torch.Tensor | None:
    """Return the rotated bias of the keys, mean over the first ``positions``: f32 [layers, kv_heads,
    head_dim] of this rank; None for a model whose keys have none."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        bias = getattr(getattr(module, "qkv_proj", None), "bias", None)
        rope, attn = getattr(module, "rotary_emb", None), getattr(module, "attn", None)
        if bias is None or rope is None or attn is None or hasattr(module, "k_norm"):
            continue
        keys = (
            bias.detach()[module.q_size : module.q_size + module.kv_size]
            .float()
            .view(1, -1, attn.qk_head_dim)
        )
        # The mean of rotations is linear, as each of them is.
        cos, sin = rope.cos_sin_cache[:positions].to(keys).mean(0, keepdim=True).chunk(2, -1)
        rotation = Rotation(torch.empty(0), rope.rotary_dim, neox=rope.is_neox_style)
        found[attn.layer_id] = rotation.turn(keys, cos, sin)[0]
    layers = sorted(found)
    return (
        torch.stack([found[layer] for layer in layers])
        if layers and layers == [*range(len(layers))]
        else None
    )
