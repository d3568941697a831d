"""A plain Llama in float32: rows of tokens over given K and V."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu


@dataclass
class Cache:
    """K before rotation and V, each [layers, batch, kv_heads, tokens, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor


class Llama:
    """The decoder in plain torch, float32: rows of tokens over given K and V."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.device, self.layers, self.heads = device, config["num_hidden_layers"], config["num_attention_heads"]
        self.kv_heads, self.dim, self.eps = config["num_key_value_heads"], config["head_dim"], config["rms_norm_eps"]
        self.w = {name: tensor.float().to(device) for name, tensor in load_file(folder / "model.safetensors").items()}
        steps = torch.arange(0, self.dim, 2, device=device).float() / self.dim
        self.frequencies = 1.0 / (config["rope_theta"] ** steps)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [batch, heads, tokens, head_dim], positions [batch or 1, tokens]."""
        angle = positions[:, None, :, None].float() * self.frequencies
        cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((angle.sin(),) * 2, -1)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def project(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [B, heads, R, d], k and v [B, kv_heads, R, d] of hidden [B, R, width]; not rotated."""
        p = f"model.layers.{layer}."
        x = rms_norm(hidden, hidden.shape[-1:], self.w[p + "input_layernorm.weight"], self.eps)
        q, k, v = (linear(x, self.w[f"{p}self_attn.{n}_proj.weight"]).unflatten(-1, (-1, self.dim)).transpose(1, 2) for n in "qkv")
        return q, k, v

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        p = f"model.layers.{layer}."
        hidden = hidden + linear(attended.transpose(1, 2).flatten(2), self.w[p + "self_attn.o_proj.weight"])
        x = rms_norm(hidden, hidden.shape[-1:], self.w[p + "post_attention_layernorm.weight"], self.eps)
        gate = silu(linear(x, self.w[p + "mlp.gate_proj.weight"])) * linear(x, self.w[p + "mlp.up_proj.weight"])
        return hidden + linear(gate, self.w[p + "mlp.down_proj.weight"])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        embedding = self.w["model.embed_tokens.weight"]
        return linear(rms_norm(hidden, hidden.shape[-1:], self.w["model.norm.weight"], self.eps), embedding)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.heads // self.kv_heads, 1)

    def prefill(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        past: Cache | None = None,
        past_positions: torch.Tensor | None = None,
        share: list[torch.Tensor] | None = None,
    ) -> Cache:
        """Tokens ids, positions [B, R] behind ``past`` (batch 1, the same for all; None: nothing). Their own K and V.

        ``share`` receives for each layer what part of every head's attention goes to ``past``, [B, heads, R].
        """
        hidden = self.w["model.embed_tokens.weight"][ids]
        n = 0 if past is None else past.v.shape[3]
        rows, batch = ids.shape[1], ids.shape[0]
        mask = torch.ones(rows, n + rows, dtype=torch.bool, device=self.device).tril(n)
        keys, values = [], []
        for layer in range(self.layers):
            q, k, v = self.project(layer, hidden)
            keys.append(k)
            values.append(v)
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            if past is not None and past_positions is not None:
                old = self.rotate(past.k[layer], past_positions)
                k = torch.cat((old.expand(batch, -1, -1, -1), k), 2)
                v = torch.cat((past.v[layer].expand(batch, -1, -1, -1), v), 2)
            if share is not None:
                score = (q @ self.wide(k).transpose(-1, -2)) / math.sqrt(self.dim)
                share.append(score.masked_fill_(~mask, -torch.inf).softmax(-1)[..., :n].sum(-1))
            attended = scaled_dot_product_attention(q, self.wide(k), self.wide(v), attn_mask=mask)
            hidden = self.finish(layer, hidden, attended)
        return Cache(torch.stack(keys), torch.stack(values))

    def rows(
        self, ids: torch.Tensor, where: torch.Tensor, cache: Cache, *, weights: bool = False, written: list[Cache] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the rows at positions ``where`` [B, R] again over ``cache`` (batch 1), each after everything before it.

        ids [T]: the whole prompt. Returns hidden [B, R, width] and, if asked, attention [layers, B, heads, R, T]. ``written`` receives
        the rows' own K and V.
        """
        hidden = self.w["model.embed_tokens.weight"][ids[where]]
        batch, total = len(where), cache.v.shape[3]
        everywhere = torch.arange(total, device=self.device)
        mask = (everywhere[None, None] <= where[:, :, None])[:, None]
        place = where[:, None, :, None].expand(-1, self.kv_heads, -1, self.dim)
        seen, new_k, new_v = [], [], []
        for layer in range(self.layers):
            q, k, v = self.project(layer, hidden)
            if written is not None:
                new_k.append(k)
                new_v.append(v)
            q, k = self.rotate(q, where), self.rotate(k, where)
            old = self.rotate(cache.k[layer], everywhere[None])
            k_all = old.expand(batch, -1, -1, -1).scatter(2, place, k)
            v_all = cache.v[layer].expand(batch, -1, -1, -1).scatter(2, place, v)
            if weights:
                score = (q @ self.wide(k_all).transpose(-1, -2)) / math.sqrt(self.dim)
                score = score.masked_fill(~mask, -torch.inf).softmax(-1)
                seen.append(score)
                attended = score @ self.wide(v_all)
            else:
                attended = scaled_dot_product_attention(q, self.wide(k_all), self.wide(v_all), attn_mask=mask)
            hidden = self.finish(layer, hidden, attended)
        if written is not None:
            written.append(Cache(torch.stack(new_k), torch.stack(new_v)))
        return hidden, torch.stack(seen) if weights else None
