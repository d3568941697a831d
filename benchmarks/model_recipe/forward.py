"""The model on packed batches, and its losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.model_recipe import architecture as model
from benchmarks.model_recipe import attention
from benchmarks.model_recipe.architecture import Params, Shape
from benchmarks.model_recipe.samples import Batch

TEACHING = 1.0
"""Weight of the teacher, beside 1 for the answers and texts themselves."""


def head_loss(
    h: torch.Tensor, norm: torch.Tensor, embedding: torch.Tensor, target: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted mean loss, loss of each target and the best guess of each."""
    logits = F.linear(model.rms_norm(h, norm), embedding.to(h.dtype)).float()
    each = F.cross_entropy(logits, target, reduction="none")
    return (each * weight).sum() / weight.sum(), each.detach(), logits.detach().argmax(-1)


def taught_loss(
    h: torch.Tensor,
    norm: torch.Tensor,
    embedding: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    taught: torch.Tensor,
    reply: torch.Tensor,
    logits_of_teacher: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`head_loss` and the divergence from the teacher on ``taught`` targets.

    Of answers only the tokens that the teacher guesses count: it is no help where it is wrong."""
    logits = F.linear(model.rms_norm(h, norm), embedding.to(h.dtype)).float()
    each = F.cross_entropy(logits, target, reduction="none")
    wanted = logits_of_teacher.float()
    trusted = taught & (~reply | (wanted.argmax(-1) == target))
    known = wanted.log_softmax(-1)
    apart = (known.exp() * (known - logits.log_softmax(-1))).sum(-1)
    share = weight.clamp(max=1.0) * trusted
    loss = (each * weight).sum() / weight.sum() + TEACHING * (apart * share).sum() / (share.sum() + 1.0)
    return loss, each.detach(), logits.detach().argmax(-1)


def head_logits(h: torch.Tensor, norm: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    return F.linear(model.rms_norm(h, norm), embedding.to(h.dtype))


class Forward:
    """The layers and the output layer, compiled and in bfloat16 on a GPU."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self.table = model.rope_table(shape, shape.max_position_embeddings, device)
        self.dtype, self.attention = torch.float32, attention.REFERENCE
        parts: tuple[Any, ...] = (
            model.before_attention,
            model.after_attention,
            head_loss,
            taught_loss,
            head_logits,
        )
        if device == "cuda":
            torch.set_float32_matmul_precision("high")
            self.dtype = torch.bfloat16
            self.attention = attention.choose(shape.num_attention_heads, shape.num_key_value_heads)
            parts = tuple(torch.compile(part, dynamic=False) for part in parts)
        self.before, self.after, self.head_loss, self.taught_loss, self.head_logits = parts

    def visible(self, batch: Batch) -> attention.Visible:
        visible = attention.Visible(batch.sample, batch.segment)  # type: ignore[arg-type]
        self.attention.prepare(visible)
        return visible

    def __call__(self, params: Params, batch: Batch, visible: attention.Visible) -> torch.Tensor:
        """The last layer's output at the chosen positions."""
        ids, position, chosen = batch.ids, batch.position, batch.chosen
        x = F.embedding(ids, params["model.embed_tokens.weight"]).to(self.dtype)  # type: ignore[arg-type]
        cos, sin = (table[position] for table in self.table)
        for i in range(self.shape.num_hidden_layers):
            first, second = model.layer_weights(params, i)
            x = self.after(x, self.attention.attend(*self.before(x, *first, cos, sin), visible), *second)
        return x[chosen]

    def head(self, params: Params) -> tuple[torch.Tensor, torch.Tensor]:
        """Arguments of the heads."""
        return params["model.norm.weight"], params["model.embed_tokens.weight"]
