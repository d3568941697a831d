"""Makes SGLang's attention backends with sparse decoding around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sglang_ext.attention.decode.backend import SparseDecodeBackend
from sglang_ext.attention.decode.page_stats import PageStatistics
from sglang_ext.attention.decode.step_planner import StepPlanner
from sglang_ext.attention.decode_runtime import DecodeRuntime
from sglang_ext.attention.engine_checks import check_engine
from sglang_ext.attention.pools.streaming_pool import StreamingRings
from sglang_ext.attention.pools.streaming_pool_attention import StreamingPoolBackend
from sglang_ext.attention.pools.streaming_pool_runtime import StreamingPoolRuntime
from sglang_ext.documents.kv_config import kv_config, page_bits
from sglang_ext.documents.pages.types import KvShape
from sglang_ext.kv_offload.documents.context_table import ContextTable
from sglang_ext.kv_offload.host.host_pages import HostPages
from sglang_ext.kv_offload.offloaded_rows import OffloadedRows
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.sglang_internals.model import NotComposable
from sglang_ext.state import current
from sglang_ext.tensors.rope import rotation_of
from sglang_ext.versions import tp_group
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.protocol import DOCUMENT_PAGE


def with_sparse_decode(make: Callable[[Any], Any], config: AttentionConfig) -> Callable[[Any], Any]:
    """Return a factory for SGLang's registry: sparse decoding around what ``make`` makes, or in its place the
    attention of streaming heads with a pool of their own."""

    def factory(runner: Any) -> Any:
        check_engine(runner, config)
        if config.heads_pool == "own":
            if current.streaming is not None:
                raise ValueError(
                    "decode_heads_pool=own: prefill and decoding have attention backends of their own, and "
                    "streaming heads one pool: omit prefill_attention_backend and "
                    "decode_attention_backend"
                )
            plan, rows = runner.token_to_kv_pool.plan, len(runner.req_to_token_pool.req_to_token)
            pool, device = runner.token_to_kv_pool, torch.device(runner.device)
            rings = StreamingRings(plan, rows, pool.head_dim, dtype=pool.dtype, device=device)
            current.streaming = StreamingPoolRuntime(config, rings, runner)
            return StreamingPoolBackend(runner, plan, rings)
        wrapped, page = make(runner), runner.page_size
        planner = StepPlanner(config, page, runner.model_config.context_len)
        table = runner.req_to_token_pool.req_to_token
        pages = host_pages(runner, config)
        offloaded_pages = 0 if pages is None else pages.numbers
        pool = runner.token_to_kv_pool
        statistics = PageStatistics(pool, table, page, config.logical_page, offloaded_pages)
        host = None if pages is None else pages.pool
        backend = SparseDecodeBackend(wrapped, runner, config, statistics, host)
        offloaded = None
        if pages is not None:
            contexts = context_table(runner, pages)
            offloaded = OffloadedRows(pool, table, page, pages, statistics.tables, contexts)
            backend.progressive.shared_blocks, backend.progressive.contexts = (
                offloaded.shared_blocks.places,
                contexts,
            )
        current.attention = DecodeRuntime(config, planner, statistics, backend, offloaded, runner)
        return backend

    return factory


def host_pages(runner: Any, config: AttentionConfig) -> HostPages | None:
    """Return a rank's share of the host memory for requests' KV; None where there is none.

    Raises:
        ValueError: it holds no page.
    """
    if not config.offload_bytes:
        return None
    pool = runner.token_to_kv_pool
    shape = KvShape(pool.layer_num, pool.head_num, pool.head_dim, pool.dtype, runner.page_size)
    on_gpu = torch.device(runner.device).type == "cuda"
    budget, numbers = config.offload_bytes // Ranks(tp_group(runner)).world, config.offloaded_tokens
    if budget < shape.page_bytes:
        raise ValueError(
            f"kv_offload_bytes is {config.offload_bytes}: a page of {runner.page_size} tokens takes "
            f"{shape.page_bytes} bytes of it on each rank; raise it, or omit it"
        )
    return HostPages(shape, budget, pin=on_gpu, numbers=numbers // runner.page_size)


def context_table(runner: Any, pages: HostPages) -> ContextTable | None:
    """Return where progressive attention finds contexts in documents' host pages, made before there are any,
    for graphs; None where contexts are not composed, or keys rotate by neighbours."""
    try:
        rotation = rotation_of(runner.model)
    except NotComposable:
        return None
    if not rotation.neox:
        return None
    shape = replace(pages.shape, block=DOCUMENT_PAGE, bits=page_bits(kv_config()))
    device = torch.device(runner.device)
    return ContextTable(shape, rotation.rotary_dim // 2, pages.numbers, runner.page_size, device)
