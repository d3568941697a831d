"""Launches of kernels that only some requests need, before the first of those comes: what the warm-up's own
requests do not reach, because it takes a full pool, a large pass or a crowd. What they compute is thrown
away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ragserve_kernels import dispatch as kernels
from ragserve_kernels.kv import HEAD_DIMS
from ragserve_kernels.paged import KVPair, PagedBatch, PageSelection
from ragserve_kernels.prefix_rows_attention import prefix_rows_attention
from ragserve_kernels.sparse_decode import HeadKinds, sparse_decode
from sglang_ext.attention.decode.backend import SparseDecodeBackend
from sglang_ext.attention.decode.progressive_attention import ProgressiveToken
from sglang_ext.attention.decode_runtime import DecodeRuntime
from sglang_ext.attention.offload.extends import SparseToken
from sglang_ext.attention.offload.streamed_attention import StreamedTokens
from sglang_ext.kv_offload.host.host_reader import HostReader
from sglang_ext.kv_offload.offloaded_rows import OffloadedRows
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.sglang_internals.model import forward_stream
from sglang_ext.versions import tp_group

_MOST = 1024  # decode steps of more requests than this are compiled when they come
_RANKED = 2048  # requests times KV heads: with more, a progressive step is split no further
_KEYS = 1024  # tokens that recomputed rows see: enough to be split


def launch(runner: Any, attention: DecodeRuntime | None, *, recomputes: bool) -> None:
    """Launch them on the stream of the forward passes.

    ``runner``: SGLang's model runner. ``recomputes``: whether contexts are composed."""
    with torch.no_grad(), forward_stream(runner):
        if recomputes:
            recomputed_rows(runner)
        if attention is None:
            return
        for requests in steps_without_graph(attention.backend.graph_size, runner.max_running_requests):
            decode_step(runner, attention.backend, requests)
        if attention.offloaded is not None:
            lone_tokens(runner, attention.backend, attention.offloaded)


def recomputed_rows(runner: Any) -> None:
    """Rows of a recomputation or of a layer's chunk: few, many, and more."""
    (heads, head_dim), k, v = _layer(runner)
    first = torch.zeros(1, dtype=runner.dtype, device=k.device)
    if not kernels.use_triton(first) or head_dim not in HEAD_DIMS or runner.dtype != k.dtype:
        return
    from ragserve_kernels.prefix_rows_attention.triton import rows_of_every_launch

    kv_heads = k.shape[1]
    slots = torch.zeros(_KEYS, dtype=torch.int64, device=k.device)
    start = torch.zeros(1, dtype=torch.int32, device=k.device)
    for rows in rows_of_every_launch(kv_heads, heads // kv_heads):
        q = first.new_zeros(rows, heads, head_dim)
        bounds = torch.arange(2, dtype=torch.int32, device=k.device) * rows
        seen = torch.ones(rows, dtype=torch.int32, device=k.device)
        for lse in (None, torch.empty(q.shape[:2], dtype=torch.float32, device=k.device)):
            prefix_rows_attention(q, k, v, slots, start, bounds, seen, max_rows=rows, scale=1.0, lse=lse)


def steps_without_graph(graph_size: int, most: int) -> Iterator[int]:
    """Yield numbers of requests, one for each kernel of decode steps larger than the largest graph."""
    size = 1
    while size < min(most, _MOST) * 2 and size <= _MOST:
        if size > graph_size:
            yield size
        size *= 2


def decode_step(runner: Any, backend: SparseDecodeBackend, requests: int) -> None:
    """A sparse and a progressive step of so many requests, none of which has a token."""
    (heads, head_dim), k, v = _layer(runner)
    kv: KVPair = (k, v) if not backend.quantized else runner.token_to_kv_pool.quantized(0)
    kv_heads, shape = k.shape[1], backend.shape
    q = torch.zeros(requests, heads, head_dim, dtype=runner.dtype, device=k.device)

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=torch.int32, device=k.device)

    # rows of a table that overlap: nothing is read of it, but kernels are compiled for its stride
    stride = 16 if shape.pages % 16 == 0 else 17
    table = zeros(stride * requests + shape.pages).as_strided((requests, shape.pages), (stride, 1))
    batch = PagedBatch(table, zeros(requests), shape.page_size)
    counts = zeros(requests, kv_heads)
    chosen = PageSelection(zeros(requests, kv_heads, shape.capacity), counts)
    kinds = HeadKinds(counts, backend.config.sink_tokens, backend.config.local_tokens)
    sparse_decode(q, kv, batch, selection=chosen, heads=kinds, scale=1.0)
    if requests * kv_heads > _RANKED:
        return
    backend.progressive.attend(
        *(q, kv, batch, batch, 0),
        threshold=torch.ones(requests, dtype=torch.float32, device=k.device),
        scale=1.0,
        is_ranked=counts,
        places=zeros(requests, kv_heads, shape.pages + 1),
    )


def lone_tokens(runner: Any, backend: SparseDecodeBackend, offloaded: OffloadedRows) -> None:
    """What a request does whose prompt is on the host: its question reads it, and when it was retracted its
    next token attends apart and chooses pages."""
    (heads, head_dim), *kv = _layer(runner)
    device, shape, layers = kv[0].device, backend.shape, backend.shape.layers

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=torch.int32, device=device)

    width = offloaded.statistics_of.shape[1]
    batch = PagedBatch(zeros(1, width), zeros(1) + 1, shape.page_size)
    queries = torch.zeros(layers, heads, head_dim, dtype=runner.dtype, device=device)
    q, out, pair = queries[:1], torch.empty_like(queries[:1]), (kv[0], kv[1])
    selection = backend.choose(queries, batch, backend.config.options)
    places = zeros(1, shape.kv_heads, width)
    for token in (
        SparseToken(0, batch, selection),
        ProgressiveToken(0, backend.progressive, batch, batch, places, 0.5),
        StreamedTokens(0, 1, HostReader(offloaded.pages, zeros(1)), zeros(1).long()),
    ):
        token.attend(q, out, pair, 0, 1.0)


def _layer(runner: Any) -> tuple[tuple[int, int], torch.Tensor, torch.Tensor]:
    """Query heads of this rank and the head's size; K and V of the first layer."""
    pool = runner.token_to_kv_pool
    heads = runner.model_config.num_attention_heads // Ranks(tp_group(runner)).world
    return (heads, pool.head_dim), pool.get_key_buffer(0), pool.get_value_buffer(0)
