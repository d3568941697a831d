"""Moves cached keys to another position.

K is cached rotated for the document's own positions 0..n-1. Rotations add up: K at position p + d is exactly
K at p rotated by d if the angle is linear in the position (plain, linearly scaled and llama3-scaled RoPE).
Other models are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.sglang_internals.model import NotComposable, decoder_layers

# SGLang 0.5.17's classes whose angle is position times a fixed frequency
_LINEAR = ("RotaryEmbedding", "Llama3RotaryEmbedding", "LinearScalingRotaryEmbedding")


class Rotation:
    """Rotates one model's keys by whole positions."""

    def __init__(self, frequencies: torch.Tensor, rotary_dim: int, *, neox: bool) -> None:
        self.frequencies = frequencies.to(torch.float64)  # [rotary_dim / 2], radians per position
        self.rotary_dim = rotary_dim
        self.neox = neox

    def angles(self, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, f32 [..., rotary_dim / 2], of shifts int64 [...]. Angles are f64, because f32 loses
        digits beyond some thousand positions.
        """
        angle = shifts.to(torch.float64)[..., None] * self.frequencies.to(shifts.device)
        return angle.cos().float(), angle.sin().float()

    def rotate(self, k: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """Move k [tokens, heads, head_dim] by shifts int64 [tokens]; computes in f32, returns k's dtype."""
        return self.turn(k, *self.angles(shifts))

    def turn(self, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate k [tokens, heads, head_dim] by angles given as cos and sin [tokens, rotary_dim / 2]."""
        cos, sin = cos[:, None, :], sin[:, None, :]
        turned, rest = k[..., : self.rotary_dim].float(), k[..., self.rotary_dim :]
        if self.neox:
            a, b = turned.chunk(2, dim=-1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = turned[..., ::2], turned[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((out.to(k.dtype), rest), dim=-1) if rest.shape[-1] else out.to(k.dtype)


def rotation_of(model: Any) -> Rotation:
    """Return an SGLang model's rotation. Raises NotComposable, with its kind, if positions cannot be shifted,
    or not by the same angles in every layer.
    """
    layers = decoder_layers(model)
    embeddings = [getattr(getattr(layer, "self_attn", None), "rotary_emb", None) for layer in layers]
    first, *others = {id(rope): rope for rope in embeddings}.values()
    rotation = _rotation_by(first)
    for rope in others:
        other = _rotation_by(rope)
        if (other.rotary_dim, other.neox) != (rotation.rotary_dim, rotation.neox) or not torch.equal(
            other.frequencies, rotation.frequencies
        ):
            raise NotComposable(
                "composed contexts need the same rotary angles in every layer, and this model's layers "
                "differ: use strategy 'prefix' or 'full'"
            )
    return rotation


def _rotation_by(rope: Any) -> Rotation:
    """The rotation of one rotary embedding of SGLang's, None for a layer without. Raises NotComposable."""
    kind = type(rope).__name__
    if kind not in _LINEAR:
        raise NotComposable(
            "composed contexts need rotary angles that are linear in the position (plain, linear or llama3 "
            f"scaling); this model has {kind}: use strategy 'prefix' or 'full'"
        )
    frequencies = rope._compute_inv_freq(rope.base)
    if kind == "LinearScalingRotaryEmbedding":
        factors = list(rope.scaling_factors)
        if len(factors) != 1:
            raise NotComposable(
                "this model scales its rotary positions in several ways at once: use strategy 'prefix' or "
                "'full'"
            )
        frequencies = frequencies / float(factors[0])
    return Rotation(frequencies.detach().cpu(), rope.rotary_dim, neox=rope.is_neox_style)
