"""Forward passes through the decoder layers with attention over K and V in memory. SGLang's pools are neither
read nor written.

Layers are the outer loop and chunks of rows the inner one, so a pass holds Q, K and V of one layer only,
however long its texts are. Of the last layer, only Q, K and V are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ragserve_kernels import dispatch as kernels
from ragserve_kernels.kv import HEAD_DIMS
from ragserve_kernels.prefix_rows_attention import prefix_rows_attention
from sglang_ext.sglang_internals.model import decoder_layers, forward_batch
from sglang_ext.versions import run_layer

ROWS = 8192  # rows that go through a layer at once
CPU_ROWS = 2048  # as many on a CPU: what a layer computes of more leaves the processor's caches
_QUERIES = 1024  # rows of one attention call: bounds its mask
_KEPT_MASK = 2**20  # elements of the largest mask that serves all layers

Kv = tuple[torch.Tensor, torch.Tensor]
"""K and V, [tokens, kv_heads, head_dim] each, K rotated for the tokens' positions."""


@dataclass(frozen=True)
class Text:
    """Rows of a pass: consecutive tokens ``ids`` [n] at ``positions`` [n], int64 on the model's device.

    Each row attends to all of ``context(layer)`` and to the text's rows up to itself.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    context: Callable[[int], Kv] | None = None


@dataclass(frozen=True)
class LayerState:
    """A text's q [n, heads, head_dim], k and v [n, kv_heads, head_dim] in one layer; q and k rotated, this
    rank's heads.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scaling: float


Observer = Callable[[int, Sequence[LayerState]], None]
"""Called after each layer with its number and one state a text, which the next layer overwrites."""


class LayersComplete(Exception):
    """The last layer's Q, K and V are there, and nothing reads what the rest of it would compute."""


class _Memory:
    """Attention of a pass, as `RadixAttention` finds it in the forward context."""

    def __init__(self, model_runner: Any, texts: Sequence[Text]) -> None:
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._texts = texts
        lengths = [len(text.ids) for text in texts]
        self._starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        self._states: list[LayerState | None] = [None] * len(texts)
        self._context: tuple[int, Kv | None] = (-1, None)
        self._masks: dict[tuple[int, int], torch.Tensor] = {}  # by rows and keys before them, for all layers
        self.first = 0  # first of the rows that go through the layer now
        self.last = False  # the layer is the last: nothing follows its Q, K and V

    def states(self) -> list[LayerState]:
        return [state for state in self._states if state is not None]

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> torch.Tensor:
        """Attend with the rows from ``first`` on, which may end one text and begin others."""
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k, v = (
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
        )
        out = torch.empty_like(q)
        last = self.first + len(q)
        for i in range(len(self._texts)):
            start, end = max(self._starts[i], self.first), min(self._starts[i + 1], last)
            if start < end:
                rows = slice(start - self.first, end - self.first)
                self._keep(i, start - self._starts[i], q[rows], k[rows], v[rows], layer.scaling)
                if not self.last:
                    out[rows] = self._attend(
                        i, layer.layer_id, start - self._starts[i], end - self._starts[i]
                    )
        if self.last:
            raise LayersComplete
        return out.view(len(out), -1)

    def _keep(
        self, i: int, start: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> None:
        n = len(self._texts[i].ids)
        if start == 0:
            self._states[i] = LayerState(_rows(q, n), _rows(k, n), _rows(v, n), scaling)
        state = self._states[i]
        if state is not None:
            for whole, part in ((state.q, q), (state.k, k), (state.v, v)):
                whole[start : start + len(part)] = part

    def _attend(self, i: int, layer: int, start: int, end: int) -> torch.Tensor:
        """Attend with rows ``start`` to ``end`` of text ``i`` to its context and its own rows up to each."""
        state, context = self._states[i], self._context_of(i, layer)
        if state is None:
            raise RuntimeError("rows of a text came out of order")
        k, v, before = state.k[:end], state.v[:end], 0
        if context is not None:
            before = len(context[0])
            k, v = torch.cat((context[0].to(k.dtype), k)), torch.cat((context[1].to(v.dtype), v))
        parts = [slice(at, min(at + _QUERIES, end)) for at in range(start, end, _QUERIES)]
        return torch.cat(
            [attend(state.q[part], k, v, before + part.start, state.scaling, self._masks) for part in parts]
        )

    def _context_of(self, i: int, layer: int) -> Kv | None:
        """The text's context at a layer, made once for all of its chunks, since texts follow each other."""
        text = self._texts[i]
        if text.context is None:
            return None
        key = layer * len(self._texts) + i
        if self._context[0] != key:
            self._context = (key, text.context(layer))
        return self._context[1]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scaling: float,
    masks: dict[tuple[int, int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Causal attention of q [r, heads, head_dim], whose rows are keys ``start`` to ``start + r - 1`` of k and
    v. ``masks`` keeps masks for further calls.
    """
    rows, end = len(q), start + len(q)
    if kernels.use_triton(q) and q.shape[-1] in HEAD_DIMS:
        slots = torch.arange(end, device=q.device)
        # int32, as those of recomputed rows, whose kernels are compiled before the first request
        first = torch.zeros(1, dtype=torch.int32, device=q.device)
        bounds = torch.arange(2, dtype=torch.int32, device=q.device) * rows
        seen = torch.arange(start + 1, end + 1, dtype=torch.int32, device=q.device)
        return prefix_rows_attention(
            q.contiguous(), k, v, slots, first, bounds, seen, max_rows=rows, scale=scaling
        )
    masks = {} if masks is None else masks
    mask = masks.get((rows, start)) if start else None
    if start and mask is None:
        # of the queries' dtype: torch would convert a mask of bool at every call
        mask = torch.full((rows, end), -torch.inf, dtype=q.dtype, device=q.device).triu(start + 1)
        if mask.numel() <= _KEPT_MASK:
            masks[rows, start] = mask
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[:end].transpose(0, 1)[None],
        v[:end].transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _rows(part: torch.Tensor, n: int) -> torch.Tensor:
    return part.new_empty((n, *part.shape[1:]))


@torch.no_grad()
def run(model_runner: Any, texts: Sequence[Text], observe: Observer) -> None:
    """Run the texts through all layers together, each attending to its context and itself only."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    model = model_runner.model
    ids, positions = torch.cat([text.ids for text in texts]), torch.cat([text.positions for text in texts])
    at_once = CPU_ROWS if ids.device.type == "cpu" else ROWS
    steps = [slice(at, min(at + at_once, len(ids))) for at in range(0, len(ids), at_once)]
    batches = [forward_batch(ids[rows], positions[rows]) for rows in steps]
    hidden: list[Any] = [model.model.embed_tokens(ids[rows]) for rows in steps]
    residual: list[Any] = [None] * len(steps)
    backend: Any = _Memory(model_runner, texts)
    with forward_context(ForwardContext(attn_backend=backend)):
        layers = decoder_layers(model)
        for number, layer in enumerate(layers):
            backend.last = number == len(layers) - 1
            for i, rows in enumerate(steps):
                backend.first = rows.start
                with suppress(LayersComplete):
                    hidden[i], residual[i] = run_layer(
                        layer, positions[rows], hidden[i], batches[i], residual[i]
                    )
            observe(number, backend.states())
