"""Makes SGLang's attention backends with sparse decoding around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.attention.backend import SparseDecodeBackend
from sglang_ext.attention.config import AttentionConfig
from sglang_ext.attention.decode_runtime import DecodeRuntime
from sglang_ext.attention.engine_checks import check_engine
from sglang_ext.attention.page_stats import PageStatistics
from sglang_ext.attention.step_planner import StepPlanner
from sglang_ext.state import current


def with_sparse_decode(make: Callable[[Any], Any], config: AttentionConfig) -> Callable[[Any], Any]:
    """Return a factory for SGLang's registry: sparse decoding around what ``make`` makes."""

    def factory(runner: Any) -> Any:
        check_engine(runner, config)
        wrapped, page = make(runner), runner.page_size
        planner = StepPlanner(config, page, runner.model_config.context_len)
        table = runner.req_to_token_pool.req_to_token
        statistics = PageStatistics(runner.token_to_kv_pool, table, page, config.logical_page)
        backend = SparseDecodeBackend(wrapped, runner, config, statistics)
        current.attention = DecodeRuntime(config, planner, statistics, backend)
        return backend

    return factory
