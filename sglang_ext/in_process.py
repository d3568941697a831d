"""Starts SGLang's model worker and our document cache in this process, without a scheduler: for measurements
and tests of what runs inside one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def model_worker(server_args: Any, port: int, *, loaded: Callable[[Any], None] | None = None) -> Any:
    """SGLang's `TpModelWorker` of one rank with pools and attention, as a scheduler makes it. ``port``: of
    torch's rendezvous. ``loaded`` is called with the model before the pools are made.
    """
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.managers.tp_worker import TpModelWorker

    worker = TpModelWorker(server_args=server_args, gpu_id=0, ps=ParallelState.trivial(), nccl_port=port)
    if loaded is not None:
        loaded(worker.model_runner.model)
    worker.alloc_memory_pool()
    worker.init_attention_backends()
    worker.init_cuda_graphs()
    return worker


def document_cache(worker: Any) -> Any:
    """Our cache over a worker's pools; `sglang_ext.state.current` has its runtime."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang_ext.documents.build import create_cache

    runner = worker.model_runner
    return create_cache(
        SimpleNamespace(
            server_args=runner.server_args,
            params=CacheInitParams(
                disable=False,
                req_to_token_pool=runner.req_to_token_pool,
                token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
                page_size=runner.page_size,
            ),
            is_hybrid_swa=False,
            is_hybrid_ssm=False,
            enable_hierarchical_cache=False,
            disable_radix_cache=False,
            effective_chunked_prefill_size=None,
            tp_worker=worker,
            model_config=runner.model_config,
            tp_size=1,
            tp_rank=0,
            tp_group=None,
        )
    )
