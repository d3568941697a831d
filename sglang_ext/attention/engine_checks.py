"""Refuses engines and models that sparse decoding cannot serve, when the engine starts."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from ragserve_kernels.dispatch import FLOAT_DTYPES
from ragserve_kernels.kv import HEAD_DIMS
from sglang_ext.attention.pools.quantized_pool import QuantizedKVPool
from sglang_ext.attention.pools.streaming_pool import OtherHeadsPool
from sglang_ext.versions import settings_of
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.protocol import CACHE_BACKEND

_PAGE_SIZES = (16, 32, 64, 128)


def check_engine(runner: Any, config: AttentionConfig) -> None:
    """Raise ValueError, with what to change, for an engine that sparse decoding cannot serve."""
    args, pool = settings_of(runner.server_args), runner.token_to_kv_pool
    problems = []
    if runner.page_size not in _PAGE_SIZES:
        problems.append(f"page_size is {runner.page_size}: use one of {', '.join(map(str, _PAGE_SIZES))}")
    own = config.heads_pool == "own"
    wanted_pool = OtherHeadsPool if own else QuantizedKVPool
    plain = type(pool) is MHATokenToKVPool
    if not (plain if config.kv_bits == 16 and not own else isinstance(pool, wanted_pool)):
        problems.append(
            f"the KV pool is a {type(pool).__name__}: only multi-head attention over one plain pool is "
            "supported"
        )
    elif pool.dtype not in FLOAT_DTYPES or pool.dtype != runner.dtype:
        problems.append(f"the KV is {pool.dtype} and the model {runner.dtype}: leave kv_cache_dtype alone")
    elif pool.head_dim not in HEAD_DIMS or getattr(pool, "v_head_dim", pool.head_dim) != pool.head_dim:
        problems.append(
            f"the heads have {pool.head_dim} dimensions: supported are {', '.join(map(str, HEAD_DIMS))}"
        )
    else:
        problems += _unserved_layers(runner.model, pool)
    for flag, wanted in (
        ("enable_lora", False),
        ("enable_pdmux", False),
        ("enable_two_batch_overlap", False),
        ("speculative_algorithm", None),
        ("pp_size", 1),
    ):
        if getattr(args, flag, wanted) not in (wanted, None, False):
            problems.append(f"{flag} is {getattr(args, flag)}: expected {wanted}")
    for flag in ("hicache_storage_backend", "enable_lmcache", "enable_flexkv"):
        if value := getattr(args, flag, None):
            problems.append(
                f"{flag} is {value}: that storage finds KV by its tokens alone, and that of a sparse prefill "
                "is approximate; leave it out"
            )
    if args.radix_cache_backend != CACHE_BACKEND:
        problems.append(f"the prefix cache is not ragserve's: set radix_cache_backend to {CACHE_BACKEND}")
    if own:
        problems += _unlike_own_pool(args, config)
    elif config.logical_page > runner.page_size:
        problems.append(
            f"the logical page has {config.logical_page} tokens, more than a page, {runner.page_size}"
        )
    if config.offload_bytes and config.kv_bits != 16:
        problems.append(
            f"kv_offload_bytes is {config.offload_bytes} and kv_bits {config.kv_bits}: KV of few bits is not "
            "offloaded, omit one of them"
        )
    if problems:
        raise ValueError("sparse decoding (sparse_attention=on) does not work here: " + "; ".join(problems))


def _unlike_own_pool(args: Any, config: AttentionConfig) -> list[str]:
    """Return what does not go with a pool of their own for streaming heads, a line each."""
    problems = [
        f"{flag} is {getattr(args, flag)}: a pool of their own for streaming heads (decode_heads_pool=own) "
        f"expects {wanted}"
        for flag, wanted in (
            ("disable_radix_cache", True),
            ("enable_hierarchical_cache", False),
            ("enable_dp_attention", False),
            ("dp_size", 1),
            ("disaggregation_mode", "null"),
            ("enable_streaming_session", False),
        )
        if getattr(args, flag, wanted) not in (wanted, *([] if wanted else [None]))
    ]
    if config.kv_bits != 16 or config.offload_bytes:
        problems.append(
            "decode_heads_pool is own: omit kv_bits and kv_offload_bytes, as the pool has 16 bits and stays "
            "on the device"
        )
    if config.options.mode != "dense" or config.prefill.mode != "dense":
        problems.append(
            "decode_heads_pool is own: set decode_mode and prefill_mode to dense, as the other heads are"
        )
    return problems


def _unserved_layers(model: Any, pool: Any) -> list[str]:
    """Return what attention layers want that our kernels do not do: a line per kind, with its first layer."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    if not layers:
        return ["the model has no layers of SGLang's RadixAttention"]
    heads = layers[0].tp_q_head_num
    found: dict[str, int] = {}
    for layer in layers:
        for wants, what in (
            (layer.logit_cap > 0, "caps its logits"),
            (
                layer.sliding_window_size is not None and layer.sliding_window_size > -1,
                "attends in a sliding window",
            ),
            (
                layer.is_cross_attention or layer.attn_type != AttentionType.DECODER,
                "is not causal self-attention",
            ),
            (
                layer.qk_head_dim != pool.head_dim or layer.v_head_dim != pool.head_dim,
                f"has heads of other than {pool.head_dim} dimensions",
            ),
            (
                layer.tp_q_head_num != heads or layer.tp_k_head_num != pool.head_num,
                "has another number of heads than the first one",
            ),
        ):
            if wants:
                found.setdefault(what, layer.layer_id)
    problems = [f"layer {layer} {what}" for what, layer in found.items()]
    sinks = next((name for name, _ in model.named_parameters() if name.endswith(".sinks")), None)
    return problems if sinks is None else [*problems, f"the model has learned attention sinks ({sinks})"]
