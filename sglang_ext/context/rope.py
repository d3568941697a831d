"""Moving cached keys to another position.

K is cached rotated for the document's own positions 0..n-1. Rotations add up: K at position p + d is K at p
rotated by d, exactly, where the angle is linear in the position (plain, linearly scaled and llama3-scaled
RoPE). Models whose rotation is not are refused."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.model import UnsupportedRope, decoder_layers

# SGLang 0.5.16's classes whose angle is position times a fixed frequency
_LINEAR = ("RotaryEmbedding", "Llama3RotaryEmbedding", "LinearScalingRotaryEmbedding")


class Rotation:
    """Rotation of keys by whole positions, for one model."""

    def __init__(self, frequencies: torch.Tensor, rotary_dim: int, *, neox: bool) -> None:
        self._frequencies = frequencies.to(torch.float64)  # [rotary_dim / 2], radians per position
        self.rotary_dim = rotary_dim
        self.neox = neox

    @property
    def frequencies(self) -> torch.Tensor:
        """fp64 [rotary_dim / 2], radians per position."""
        return self._frequencies

    def angles(self, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, fp32 [..., rotary_dim / 2], of shifts int64 [...]. Angles are fp64: fp32 loses digits
        beyond some thousand.
        """
        angle = shifts.to(torch.float64)[..., None] * self._frequencies.to(shifts.device)
        return angle.cos().float(), angle.sin().float()

    def rotate(self, k: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """k [tokens, heads, head_dim] moved by shifts int64 [tokens] positions; computed in fp32, returned in
        k's dtype.
        """
        return self.turn(k, *self.angles(shifts))

    def turn(self, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """k [tokens, heads, head_dim] rotated by angles whose cos and sin are given, [tokens, rotary_dim / 2]
        each.
        """
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
    """The rotation of an SGLang model. Raises UnsupportedRope, naming the kind, where positions cannot be
    shifted.
    """
    layers = decoder_layers(model)
    embeddings = [getattr(getattr(layer, "self_attn", None), "rotary_emb", None) for layer in layers]
    rope = embeddings[0]
    kind = type(rope).__name__
    if rope is None or kind not in _LINEAR or any(type(e).__name__ != kind for e in embeddings):
        raise UnsupportedRope(
            "composed contexts need rotary positions that are linear in the position (plain, linear or llama3 scaling); "
            f"this model has {kind}: use strategy 'prefix' or 'full'"
        )
    if kind == "LinearScalingRotaryEmbedding":
        factors = list(rope.scaling_factors)
        if len(factors) != 1:
            raise UnsupportedRope(
                "this model scales its rotary positions in several ways at once: use strategy 'prefix' or 'full'"
            )
        frequencies = rope._compute_inv_freq(rope.base) / float(factors[0])
    else:
        frequencies = rope._compute_inv_freq(rope.base)
    return Rotation(frequencies.detach().cpu(), rope.rotary_dim, neox=rope.is_neox_style)
