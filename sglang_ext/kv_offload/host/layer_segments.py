"""Prefills a prompt one layer at a time, so that the device holds K and V of one layer only (SparseServe,
section 3.4)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from sglang_ext.analysis.forward import LayersComplete, attend
from sglang_ext.sglang_internals.model import decoder_layers, forward_batch
from sglang_ext.state import current
from sglang_ext.versions import run_layer

_QUERIES = 1024  # rows of one attention call on a CPU: bounds its mask

Writer = Callable[[int, int, torch.Tensor, torch.Tensor], None]
"""Takes a chunk's K and V of a layer, ``[tokens, kv_heads, head_dim]`` each: called with the layer, the
chunk's first token and both, whose memory is not written to again before it is freed."""


class _LayerAttention:
    """Attention of a chunk, as `RadixAttention` finds it in the forward context: to the layer's K and V of
    the prompt up to each token. SGLang's pool is neither read nor written."""

    def __init__(self, model_runner: Any, tokens: int, write: Writer) -> None:
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._tokens = tokens
        self._write = write
        self._k = self._v = torch.empty(0)
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        self._planned: dict[int, Any] = {}  # attention of chunks, by their first token
        self.first = 0  # token of the chunk that goes through the layer now
        self.last = False  # the layer is the last: nothing follows its K and V

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
    ) -> torch.Tensor:
        """q [tokens, heads * head_dim], k and v [tokens, kv_heads * head_dim] or with heads apart."""
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        first, end = self.first, self.first + len(q)
        if not first:  # not the memory of the layer before, which may be on its way to the host
            self._k, self._v = (each.new_empty((self._tokens, *each.shape[1:])) for each in (k, v))
        self._k[first:end], self._v[first:end] = k, v
        if first not in self._planned:  # before the write, behind which the plan is known to be there
            self._planned[first] = self._plan(len(q), end, layer.scaling)
        self._write(layer.layer_id, first, self._k[first:end], self._v[first:end])
        if self.last:
            raise LayersComplete
        if (by_plan := self._planned[first]) is not None:
            return by_plan(q, self._k[:end], self._v[:end]).flatten(1)
        rows = len(q) if q.is_cuda else _QUERIES
        parts = [
            attend(part, self._k, self._v, first + at, layer.scaling, self._masks)
            for at, part in zip(range(0, len(q), rows), q.split(rows), strict=True)
        ]
        return torch.cat(parts).flatten(1)

    def _plan(self, rows: int, end: int, scale: float) -> Any:
        chunks = current.chunk_attention
        return None if chunks is None else chunks.plan(len(self._planned), rows, end, scale)


class LayerSegments:
    """The prefill of one prompt, in units of a layer and a chunk of tokens: all chunks go through a layer
    before any goes through the next one.

    Between two units the device holds the residual stream of all tokens and K and V of two layers at most. Of
    the last layer only K and V are computed. The same on all ranks: units depend on lengths alone."""

    def __init__(self, model_runner: Any, ids: torch.Tensor, chunk: int, write: Writer) -> None:
        """``ids``: int64 [tokens] on the model's device, from position 0. ``chunk``: tokens that go through a
        layer at once. ``write``: takes each chunk's K and V."""
        self._model = model_runner.model
        self._layers = decoder_layers(self._model)
        self._ids = ids
        self._positions = torch.arange(len(ids), device=ids.device)
        self._chunks = [slice(at, min(at + chunk, len(ids))) for at in range(0, len(ids), chunk)]
        self._hidden: list[Any] = [None] * len(self._chunks)
        self._residual: list[Any] = [None] * len(self._chunks)
        self._backend = _LayerAttention(model_runner, len(ids), write)
        self._done = 0  # units

    @property
    def left(self) -> int:
        """Units that have not been computed yet."""
        return len(self._layers) * len(self._chunks) - self._done

    @torch.no_grad()
    def advance(self, tokens: int) -> None:
        """Compute the next units, on the current stream: as many as ``tokens`` tokens of one layer are, and
        one at least."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        backend: Any = self._backend
        with forward_context(ForwardContext(attn_backend=backend)):
            while self.left:
                layer, number = divmod(self._done, len(self._chunks))
                self._run(layer, number)
                self._done += 1
                rows = self._chunks[number]
                tokens -= rows.stop - rows.start
                if tokens < rows.stop - rows.start:
                    return

    def _run(self, layer: int, number: int) -> None:
        """Let a chunk go through a layer."""
        rows, backend = self._chunks[number], self._backend
        ids, positions = self._ids[rows], self._positions[rows]
        backend.first, backend.last = rows.start, layer == len(self._layers) - 1
        if not layer:
            self._hidden[number] = self._model.model.embed_tokens(ids)
        hidden, residual = self._hidden[number], self._residual[number]
        self._hidden[number] = self._residual[number] = None
        batch = forward_batch(ids, positions)
        with suppress(LayersComplete):
            self._hidden[number], self._residual[number] = run_layer(
                self._layers[layer], positions, hidden, batch, residual
            )


def memory_bytes(model_runner: Any, tokens: int) -> int:
    """Return the device memory that `LayerSegments` of so many tokens takes beside a chunk's activations:
    hidden and residual states, and K and V of two layers."""
    first = model_runner.token_to_kv_pool.get_key_buffer(0)
    states = 2 * model_runner.model_config.hidden_size * first.dtype.itemsize
    return tokens * (states + 4 * first[0].nbytes)
