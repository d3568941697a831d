"""Forward passes through the decoder layers with attention over K and V in memory. SGLang's pools are neither
read nor written.

Layers are the outer loop and chunks of rows the inner one, so a pass holds Q, K and V of one layer only,
however long its texts are. Of the last layer, only Q, K and V are computed. A long pass is run in pieces,
between which the scheduler does other work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
_CPU_PAIRS = 2**23  # of query and key, in one layer: long texts go through it in fewer rows at once on a CPU
PAIRS_PER_ROW = 1024  # of query and key: about as much as a row's products with the weights, in a small model
_QUERIES = 1024  # rows of one attention call: bounds its mask
_KEPT_MASK = 2**20  # elements of the largest mask that serves all layers
_LARGE = (0, 0)  # where the memory of larger ones is, which are made again

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


Observer = Callable[[int, Sequence[LayerState]], Iterable[int] | None]
"""Called after each layer with its number and one state a text, which the next layer overwrites. What it
returns does more work on them, in pieces, and tells of each how many pairs of query and key it had."""


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
        self._keys: dict[int, Kv] = {}  # by text, in one layer: those of its context, then its own
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
                if start == self._starts[i]:
                    self._begin(i, layer, q, k, v)
                self._keep(i, start - self._starts[i], q[rows], k[rows], v[rows])
                if not self.last:
                    out[rows] = self._attend(i, start - self._starts[i], end - self._starts[i])
        if self.last:
            raise LayersComplete
        return out.view(len(out), -1)

    def _begin(self, i: int, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Make room for a layer of text ``i``, behind its context."""
        text, n = self._texts[i], len(self._texts[i].ids)
        context = None if text.context is None or self.last else text.context(layer.layer_id)
        before = 0 if context is None else len(context[0])
        keys, values = _rows(k, before + n), _rows(v, before + n)
        if context is not None:
            keys[:before], values[:before] = context
        self._keys[i] = keys, values
        self._states[i] = LayerState(_rows(q, n), keys[before:], values[before:], layer.scaling)

    def _keep(self, i: int, start: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        state = self._state(i)
        for whole, part in ((state.q, q), (state.k, k), (state.v, v)):
            whole[start : start + len(part)] = part

    def _attend(self, i: int, start: int, end: int) -> torch.Tensor:
        """Attend with rows ``start`` to ``end`` of text ``i`` to its context and its own rows up to each."""
        state, (k, v) = self._state(i), self._keys[i]
        before = len(k) - len(state.k)
        k, v = k[: before + end], v[: before + end]
        parts = [slice(at, min(at + _QUERIES, end)) for at in range(start, end, _QUERIES)]
        return torch.cat(
            [attend(state.q[part], k, v, before + part.start, state.scaling, self._masks) for part in parts]
        )

    def _state(self, i: int) -> LayerState:
        state = self._states[i]
        if state is None:
            raise RuntimeError("rows of a text came out of order")
        return state


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scaling: float,
    masks: dict[tuple[int, int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Causal attention of q [r, heads, head_dim], whose rows are keys ``start`` to ``start + r - 1`` of k and
    v. ``masks`` keeps masks, and the memory of a large one, for further calls.
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
    mask = _mask(q, start, {} if masks is None else masks) if start else None
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


def _mask(q: torch.Tensor, start: int, masks: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
    """What hides later keys from q, [rows, start + rows]."""
    rows, end = len(q), start + len(q)
    mask = masks.get((rows, start))
    if mask is not None:
        return mask
    kept, count = rows * end <= _KEPT_MASK, rows * end
    memory = None if kept else masks.get(_LARGE)
    if memory is None or len(memory) < count:
        # of the queries' dtype: torch would convert a mask of bool at every call
        memory = q.new_empty(count if kept else 1 << (count - 1).bit_length())
        if not kept:
            masks[_LARGE] = memory
    mask = memory[:count].view(rows, end).zero_()
    mask[:, start:] = q.new_full((rows, rows), -torch.inf).triu_(1)
    if kept:
        masks[rows, start] = mask
    return mask


def _rows(part: torch.Tensor, n: int) -> torch.Tensor:
    return part.new_empty((n, *part.shape[1:]))


def run(model_runner: Any, texts: Sequence[Text], observe: Observer) -> None:
    """Run the texts through all layers together, each attending to its context and itself only."""
    for _ in pieces(model_runner, texts, observe):
        pass


@torch.no_grad()
def pieces(model_runner: Any, texts: Sequence[Text], observe: Observer) -> Iterator[float]:
    """`run` in pieces of at most one layer. Yields the work of each, in tokens that go through all layers."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    model = model_runner.model
    ids, positions = torch.cat([text.ids for text in texts]), torch.cat([text.positions for text in texts])
    steps = list(_chunks([len(text.ids) for text in texts], on_cpu=ids.device.type == "cpu"))
    batches = [forward_batch(ids[rows], positions[rows]) for rows, _ in steps]
    hidden: list[Any] = [model.model.embed_tokens(ids[rows]) for rows, _ in steps]
    residual: list[Any] = [None] * len(steps)
    backend: Any = _Memory(model_runner, texts)
    layers = decoder_layers(model)
    for number, layer in enumerate(layers):
        backend.last = number == len(layers) - 1
        for i, (rows, pairs) in enumerate(steps):
            backend.first = rows.start
            with suppress(LayersComplete), forward_context(ForwardContext(attn_backend=backend)):
                hidden[i], residual[i] = run_layer(layer, positions[rows], hidden[i], batches[i], residual[i])
            yield (rows.stop - rows.start + pairs / PAIRS_PER_ROW) / len(layers)
        for pairs in observe(number, backend.states()) or ():
            yield pairs / PAIRS_PER_ROW / len(layers)


def _chunks(lengths: Sequence[int], *, on_cpu: bool) -> Iterator[tuple[slice, int]]:
    """Rows of texts of these ``lengths`` that go through a layer at once, and the pairs of query and key that
    they have within their texts."""
    # pairs of all rows up to each
    pairs = torch.cat([torch.arange(1, n + 1) for n in lengths]).cumsum(0)
    at, before, total = 0, 0, len(pairs)
    while at < total:
        end = min(at + (CPU_ROWS if on_cpu else ROWS), total)
        if on_cpu:
            end = min(end, max(at + 1, int(torch.searchsorted(pairs, before + _CPU_PAIRS, right=True))))
        seen = int(pairs[end - 1])
        yield slice(at, end), seen - before
        at, before = end, seen
