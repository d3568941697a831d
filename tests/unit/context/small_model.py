"""A model runner with what a pass needs: a model of attention alone over a pool of a few slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_ext.context.compose.fused_question import WITHOUT
from sglang_ext.tensors.buffers import Buffers

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, VOCABULARY = 3, 4, 2, 8, 16, 50


ROTATION: Any = SimpleNamespace(rotate=lambda k, shifts: k + shifts[:, None, None] / 100)
"""Moves keys as the model does (`Layer`)."""


class Layer:
    """A decoder layer of attention alone."""

    def __init__(self, number: int) -> None:
        sizes = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
        self._projections = [torch.randn(HIDDEN, size) / 4 for size in sizes]
        self._out = torch.randn(HEADS * DIM, HIDDEN) / 4
        self.self_attn = SimpleNamespace(
            attn=SimpleNamespace(
                layer_id=number,
                scaling=DIM**-0.5,
                logit_cap=0.0,
                sliding_window_size=-1,
                use_irope=False,
                tp_q_head_num=HEADS,
                tp_k_head_num=KV_HEADS,
                tp_v_head_num=KV_HEADS,
                qk_head_dim=DIM,
                v_head_dim=DIM,
            )
        )

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, batch: Any, residual: Any
    ) -> tuple[torch.Tensor, None]:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        q, k, v = (hidden @ projection for projection in self._projections)
        k, v = (part.view(-1, KV_HEADS, DIM) for part in (k + positions[:, None] / 100, v))
        return hidden + get_attn_backend().forward(q, k, v, self.self_attn.attn, batch) @ self._out, None

    __call__ = forward


class Decoder:
    """Scales its embeddings, as some models do, and ends with a norm."""

    def __init__(self) -> None:
        self.layers = [Layer(number) for number in range(LAYERS)]
        self.embed_tokens = torch.randn(VOCABULARY, HIDDEN).__getitem__

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        hidden = 1.5 * self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden, _ = layer(positions, hidden, forward_batch, None)
        return self.norm(hidden)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / hidden.norm(dim=-1, keepdim=True)


class Model:
    def __init__(self) -> None:
        self.model = Decoder()
        self.lm_head = torch.randn(HIDDEN, VOCABULARY)

    def logits_processor(
        self, ids: torch.Tensor, hidden: torch.Tensor, lm_head: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        assert len(ids) == len(hidden)
        return hidden @ lm_head

    def forward_split_prefill(self) -> None:
        """Those have it that end with norm and logits."""


def runner_of(slots: int, seed: int = 0) -> Any:
    """Tensors are drawn from ``seed``."""
    torch.manual_seed(seed)
    pool = Buffers(*([torch.randn(slots, KV_HEADS, DIM) for _ in range(LAYERS)] for _ in "kv"))
    holder = SimpleNamespace(
        k_buffer=pool.k,
        v_buffer=pool.v,
        layer_num=LAYERS,
        get_key_buffer=pool.get_key_buffer,
        get_value_buffer=pool.get_value_buffer,
    )
    return SimpleNamespace(
        token_to_kv_pool=holder,
        req_to_token_pool=None,
        tp_group=None,
        device="cpu",
        dtype=torch.float32,
        server_args=SimpleNamespace(**dict.fromkeys(WITHOUT)),
        model=Model(),
    )
