"""Hooks on how SGLang sizes and makes the KV pool: quantised ones, and streaming heads' pool of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.versions import settings_of
from sglang_ext.wire.attention_config import from_environment

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SIZES = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
POOL, ROWS = f"{_CONFIGURATOR}._build_mha_kv_pool", f"{_CONFIGURATOR}.resolve_max_num_reqs"
CELL, TOKENS = f"{_SIZES}._compute_cell_size", f"{_SIZES}.calculate_pool_sizes"


def pool_class() -> Any:
    """Return the class of our pool for where SGLang takes one; None where its own does."""
    config = from_environment()
    if config is not None and config.heads_pool == "own":
        from sglang_ext.attention.pools.streaming_pool import OtherHeadsPool

        return OtherHeadsPool
    if config is not None and config.kv_bits != 16:
        from sglang_ext.attention.pools.quantized_pool import quantized_pool

        return quantized_pool(config.kv_bits)
    return None


def around_pool(original: Callable[..., Any], configurator: Any, **options: Any) -> Any:
    """Give SGLang's builder our class, where there is one."""
    if (ours := pool_class()) is not None:
        options["mha_pool_class"] = ours
    return original(configurator, **options)


def after_cell_size(plain: int, configurator: Any, kvc: Any, num_layers: int) -> int:
    """Return the bytes of a token's slot, with what we keep beside it."""
    config = from_environment()
    if config is None:
        return plain
    from sglang.srt.runtime_context import get_parallel

    from sglang_ext.attention.pools.quantized_pool import cell_bytes

    model, page = kvc.model_config, settings_of(kvc.server_args).page_size
    kv_heads = model.get_num_kv_heads(get_parallel().attn_tp_size)
    if config.heads_pool == "own":
        from sglang_ext.attention.pools.streaming_pool import own_plan

        plan = own_plan(page, layers=num_layers, kv_heads=kv_heads)
        configurator.ragserve_rings = plan, plain, settings_of(kvc.server_args).max_running_requests
        return plan.cell_bytes(plain)
    return cell_bytes(
        plain,
        layers=num_layers,
        kv_heads=kv_heads,
        head_dim=model.head_dim,
        page_size=page,
        logical_page=config.logical_page,
        bits=config.kv_bits,
    )


def around_tokens(original: Callable[..., Any], configurator: Any, available: int, page_size: int) -> Any:
    """Leave room for the rings of streaming heads in the memory that SGLang divides into slots."""
    rings = getattr(configurator, "ragserve_rings", None)
    if rings is None:
        return original(configurator, available, page_size)
    plan, plain, rows = rings
    tokens = plan.tokens(available, plain, rows)
    if tokens <= 0:
        raise ValueError(
            f"decode_heads_pool=own: the streaming heads of a request take {plan.row_bytes(plain):,} bytes, "
            f"and of {available:,} nothing is left for the other heads: set a lower max_running_requests in "
            "engine_args, or a higher mem_fraction_static"
        )
    return original(configurator, tokens * plan.cell_bytes(plain), page_size)


def after_rows(most: int, kvc: Any, token_capacity: int) -> int:
    """Return how many requests may run: each has rings in the streaming heads' pool."""
    config = from_environment()
    args = settings_of(kvc.server_args)
    if config is None or config.heads_pool != "own" or args.max_running_requests is not None:
        return most
    from sglang.srt.runtime_context import get_parallel

    from sglang_ext.attention.pools.streaming_pool import own_plan

    layers, world = kvc.layer_info.num_effective_layers, get_parallel().attn_tp_size
    kv_heads = kvc.model_config.get_num_kv_heads(world)
    plan = own_plan(args.page_size, layers=layers, kv_heads=kv_heads)
    return min(most, plan.rows(token_capacity))
