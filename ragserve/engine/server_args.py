"""From our settings to SGLang's ServerArgs and the environment that the scheduler processes read."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from ragserve.config import Settings
from sglang_ext.protocol import (
    ATTENTION_CONFIG_VARIABLE,
    CACHE_BACKEND,
    KV_CONFIG_VARIABLE,
    DecodeOptions,
)

log = logging.getLogger(__name__)
_CPU_POOL_BYTES = 2**30  # default of the KV pool without a GPU; memory is touched only as it fills


def server_args(settings: Settings) -> Any:
    """SGLang's ServerArgs for these settings; ``settings.engine_args`` has the last word."""
    from ragserve.engine.compat import prepare

    # With pickle between its processes (the default) SGLang 0.5.16 loses the scheduler's timings on the way
    # through the detokenizer.
    os.environ.setdefault("SGLANG_USE_PICKLE_IPC", "0")
    os.environ[KV_CONFIG_VARIABLE] = json.dumps(_kv_config(settings))
    os.environ.pop(ATTENTION_CONFIG_VARIABLE, None)
    if settings.sparse_attention == "on":
        os.environ[ATTENTION_CONFIG_VARIABLE] = json.dumps(_attention_config(settings))
        # SGLang would size the pool by what memory is left at the end; page statistics are as large as the
        # pool's reservation by then.
        os.environ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"] = "0"
    prepare()
    import torch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()  # registers our cache, which ServerArgs checks by name

    options: dict[str, Any] = {
        "model_path": settings.model,
        "host": settings.host,
        "port": settings.port,
        "context_length": settings.context_length,
        "max_total_tokens": settings.max_total_tokens,
        "mem_fraction_static": settings.mem_fraction_static,
        "tp_size": settings.tp_size,
        "dtype": settings.dtype,
        # Metrics feed queue_ms and /metrics; the warm-up is ours, because SGLang's goes over HTTP and knows
        # no API key but its own.
        "enable_metrics": True,
        "enable_cache_report": True,
        "skip_server_warmup": True,
        "radix_cache_backend": CACHE_BACKEND,
        # SGLang says much at info; its warnings are what an operator needs unless they debug.
        "log_level": "info" if settings.log_level == "debug" else "warning",
        "log_level_http": "warning",
    }
    if settings.sparse_attention == "on":
        options["page_size"] = settings.decode_page_size
    if settings.tokenizer:
        options["tokenizer_path"] = settings.tokenizer
    if not torch.cuda.is_available():
        # PyTorch's CUDA build brings NCCL, and SGLang would then start it between CPU processes: there is no
        # library here to find.
        os.environ.setdefault("SGLANG_NCCL_SO_PATH", os.devnull)
        options |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,  # nothing to overlap with: CPU streams do nothing
            # SGLang polls when it has nothing to do, which takes a core from everyone else
            "sleep_on_idle": True,
        }
        if settings.dtype == "auto":
            options["dtype"] = "float32"
        if settings.max_total_tokens is None:
            options["max_total_tokens"] = _default_cpu_tokens(
                settings, 2 if options["dtype"] in ("bfloat16", "float16") else 4
            )
    options |= settings.engine_args
    return ServerArgs(**{name: value for name, value in options.items() if value is not None})


def _kv_config(settings: Settings) -> dict[str, Any]:
    """What the document cache of the scheduler processes reads from its environment. Raises InvalidRequest
    for a broken samkv profile.
    """
    from ragserve.profiles import samkv as samkv_profile
    from sglang_ext.documents.build import model_fingerprint

    config: dict[str, Any] = {"host_bytes": settings.kv_host_bytes, "disk_bytes": settings.kv_disk_bytes}
    config |= {
        "analysis": settings.kv_analysis,
        "analysis_bytes": settings.kv_analysis_bytes,
        "block_tokens": settings.kv_block_tokens,
    }
    profile = samkv_profile.load(settings, model_fingerprint(settings.model, ""))
    if profile is not None:
        config["samkv"] = profile.engine
    if settings.kv_disk_bytes:
        config |= {
            "disk_dir": str(settings.data_dir.resolve() / "kv"),
            "backend": settings.kv_storage,
            "extra": settings.kv_storage_args,
        }
    return config


def _attention_config(settings: Settings) -> dict[str, Any]:
    """What sparse decoding in the scheduler processes reads from its environment. Raises PlanError for
    options it cannot have.
    """
    options = DecodeOptions(
        mode=settings.decode_mode,
        budget=settings.decode_budget,
        reuse=settings.decode_reuse,
        threshold=settings.decode_threshold,
        dense_below=_dense_below(settings),
        streaming=settings.decode_heads is not None,
    )
    config: dict[str, Any] = {
        "options": options.model_dump(),
        "logical_page": settings.decode_logical_page,
        "max_budget": max(settings.decode_max_budget, settings.decode_budget),
        "ranking": settings.decode_ranking,
        "bound": settings.decode_bound,
        "kv_bits": settings.kv_bits,
    }
    if settings.decode_heads:
        config["heads"] = str(settings.decode_heads.resolve())
    return config


def _dense_below(settings: Settings) -> int:
    """The setting, or what `ragserve calibrate-decode` found for this model with the same mode and limits, or
    the protocol's default.
    """
    if settings.decode_dense_below is not None:
        return settings.decode_dense_below
    if settings.decode_mode == "dense":
        return DecodeOptions().dense_below
    from ragserve.profiles.decode import DECODE, FILE_NAME, options_of
    from sglang_ext.documents.build import model_fingerprint

    found = DECODE.load(settings.data_dir / FILE_NAME, model_fingerprint(settings.model, ""))
    if found is None:
        return DecodeOptions().dense_below
    if found.options != options_of(settings):
        log.warning(
            "decode steps were calibrated with %s: run ragserve calibrate-decode for these settings",
            found.options,
        )
        return DecodeOptions().dense_below
    return found.dense_below


def _default_cpu_tokens(settings: Settings, itemsize: int) -> int:
    """Slots of the KV pool on a CPU machine: 8 contexts, at most 65,536 and about 1 GiB, at least one
    context.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slot_bytes = 2 * config.num_hidden_layers * heads * head_dim * itemsize
    context = settings.context_length or config.max_position_embeddings
    return int(max(context, min(8 * context, 65_536, _CPU_POOL_BYTES // slot_bytes)))
