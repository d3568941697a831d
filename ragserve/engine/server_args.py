"""Translate settings to SGLang's ServerArgs and to the scheduler processes' environment."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
from pathlib import Path
from typing import Any

from ragserve import logs, tracing
from ragserve.config import Settings
from ragserve.engine import shared_store
from ragserve.engine.cpu_precision import cpu_dtype
from ragserve.engine.document_prefix import prefix_text
from ragserve.errors import InvalidRequest
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.option_checks import RequestOptions
from sglang_ext.wire.prefill_options import PrefillOptions
from sglang_ext.wire.protocol import (
    ATTENTION_CONFIG_VARIABLE,
    CACHE_BACKEND,
    KV_CONFIG_VARIABLE,
    PREFILL_KERNELS_VARIABLE,
    DecodeOptions,
)

log = logging.getLogger(__name__)
_KERNEL_CACHES = {  # variables and folders in kernel_cache_dir
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",  # of SGLang's own kernels
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention",
    "SGLANG_DG_CACHE_DIR": "deep-gemm",
    "SGLANG_CACHE_DIR": "sglang",
}
_CPU_POOL_BYTES = 2**30  # default KV pool without a GPU; memory is touched only as it fills


def server_args(settings: Settings, *, nccl_port: int | None = None) -> Any:
    """Build SGLang's ServerArgs; ``settings.engine_args`` overrides everything. ``nccl_port``: where its
    processes meet. Raises InvalidRequest for
    settings that SGLang refuses, and for a file of theirs that is not what they say."""
    from ragserve.engine.compat import prepare, without_collection
    from sglang_ext.sglang_internals import quiet

    os.environ.pop(quiet.QUIET_VARIABLE, None)
    if settings.log_level != "debug":
        quiet.silence()
    # With pickle IPC (the default), SGLang loses the scheduler's timings in the detokenizer.
    os.environ.setdefault("SGLANG_USE_PICKLE_IPC", "0")
    _keep_kernels(settings.kernel_cache_dir)
    os.environ[KV_CONFIG_VARIABLE] = json.dumps(_kv_config(settings))
    os.environ[PREFILL_KERNELS_VARIABLE] = settings.prefill_kernels
    os.environ.pop(ATTENTION_CONFIG_VARIABLE, None)
    if settings.sparse_attention == "on":
        os.environ[ATTENTION_CONFIG_VARIABLE] = json.dumps(_attention_config(settings))
        # SGLang would size the pool by the memory left after graph capture, when page statistics are already
        # allocated for the reserved pool.
        os.environ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"] = "0"
    with without_collection():
        prepare()
        import torch
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs

        from sglang_ext import versions

        load_plugins()  # registers our cache, which ServerArgs checks by name
    if settings.sparse_attention == "on" and settings.decode_heads:
        _check_heads(settings.decode_heads, own_pool=settings.decode_heads_pool == "own")

    options: dict[str, Any] = {
        "model_path": settings.model,
        "host": settings.host,
        "port": settings.port,
        "nccl_port": nccl_port,
        "context_length": settings.context_length,
        "max_total_tokens": settings.max_total_tokens,
        "mem_fraction_static": settings.mem_fraction_static,
        "tp_size": settings.tp_size,
        "dtype": settings.dtype,
        # Metrics feed queue_ms and /metrics. SGLang's warm-up uses HTTP and knows only its own API key.
        "enable_metrics": True,
        "enable_cache_report": True,
        "skip_server_warmup": True,
        "radix_cache_backend": CACHE_BACKEND,
        # A model that has to write JSON may write blanks until its answer is full.
        "constrained_json_disable_any_whitespace": True,
        # SGLang is verbose at info; operators need its warnings.
        "log_level": "info" if settings.log_level == "debug" else "warning",
        "log_level_http": "warning",
    }
    if settings.sparse_attention == "on":
        options["page_size"] = settings.decode_page_size
    if settings.decode_heads_pool == "own":
        # KV behind streaming heads is approximate and theirs is kept in part: no request reads another's.
        options |= {"disable_radix_cache": True}
    if settings.tokenizer:
        options["tokenizer_path"] = settings.tokenizer
    if not torch.cuda.is_available():
        # PyTorch's CUDA build brings NCCL, which SGLang would start between CPU processes: hide the library.
        os.environ.setdefault("SGLANG_NCCL_SO_PATH", os.devnull)
        options |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,  # CPU streams do nothing
            # an idle scheduler would otherwise poll and occupy a core
            "sleep_on_idle": True,
        }
        if settings.dtype == "auto":
            options["dtype"] = cpu_dtype()[0]
        if settings.max_total_tokens is None:
            options["max_total_tokens"] = _default_cpu_tokens(
                settings, 2 if options["dtype"] in ("bfloat16", "float16") else 4
            )
    options |= _observed(settings, options["log_level"]) | settings.engine_args
    if unknown := sorted(settings.engine_args.keys() - inspect.signature(ServerArgs).parameters.keys()):
        raise InvalidRequest(
            f"engine_args: SGLang has no setting {', '.join(map(repr, unknown))}.",
            hint="Its names are those of SGLang's ServerArgs, with underscores.",
            param="engine_args",
        )
    try:
        args = ServerArgs(**{name: value for name, value in options.items() if value is not None})
        versions.resolve(args)
        return args
    except (ValueError, TypeError, AssertionError) as error:
        log.debug("SGLang refuses the settings", exc_info=True)
        raise InvalidRequest(f"SGLang refuses these settings: {error}") from error


def resolve_sparse_attention(settings: Settings) -> tuple[Settings, str]:
    """Settings with what `sparse_attention` auto stands for with their model, and why, in words; empty where
    it is not auto. They hold in another data folder, too: the lengths that were calibrated are among them."""
    if settings.sparse_attention != "auto":
        return settings, ""
    from ragserve.profiles.sparse_attention import chosen
    from sglang_ext.documents.fingerprint import model_fingerprint

    def prefill_off(there: Settings) -> str | None:
        below, why = _prefill_from(there)
        return why if below is None else None

    fingerprint = model_fingerprint(settings.model, options=settings.engine_args)
    found, why = chosen(settings, fingerprint, expected_dtype(settings), prefill_off)
    level = logging.INFO if found["sparse_attention"] == "on" else logging.WARNING
    log.log(level, "sparse_attention=auto: %s", why)
    settings = settings.model_copy(update=dict(found))
    if settings.sparse_attention == "on":
        lengths = {
            "decode_dense_below": _dense_below(settings),
            "prefill_dense_below": _prefill_from(settings)[0],
        }
        settings = settings.model_copy(update=lengths)
    return settings, why


def sparse_defaults(settings: Settings) -> str:
    """`EngineInfo.sparse` of an engine with these settings, in which auto is resolved."""
    if settings.sparse_attention != "on":
        return ""
    parts = []
    if settings.decode_mode != "dense":
        progressive = settings.decode_mode == "progressive"
        most = settings.decode_threshold if progressive else settings.decode_budget
        parts.append(f"{settings.decode_mode} {most:g}")
    if settings.prefill_mode != "dense" and _prefill_from(settings)[0] is not None:
        parts.append(f"{settings.prefill_mode} {settings.prefill_alpha:g}")
    return ", ".join(parts)


def expected_dtype(settings: Settings) -> str:
    """`EngineInfo.dtype` of the engine that the settings are to start; "unknown" where its model does not
    say."""
    given = settings.engine_args.get("dtype")
    weights = str(given or settings.dtype)
    if weights == "auto":
        import torch

        automatic = given is None and not torch.cuda.is_available()
        weights = cpu_dtype()[0] if automatic else _model_dtype(settings)
    weights = {"half": "float16", "float": "float32"}.get(weights, weights)
    kv = settings.engine_args.get("kv_cache_dtype") or "auto"
    return weights if kv in ("auto", weights) else f"{weights}, KV {kv}"


def _model_dtype(settings: Settings) -> str:
    """What SGLang computes in by default: the weights' type, or a half of float32."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(settings.model, revision=settings.engine_args.get("revision"))
    except (OSError, ValueError):
        log.debug("transformers cannot read the model's configuration", exc_info=True)
        return "unknown"
    text = config.get_text_config()
    name = str(getattr(text, "dtype", None) or "float32").removeprefix("torch.")
    if name != "float32":
        return name
    return "bfloat16" if text.model_type.startswith("gemma") else "float16"


def _check_heads(heads: Path, *, own_pool: bool) -> None:
    """Raise InvalidRequest for a pattern file with which no engine would start, whatever its model."""
    from sglang_ext.attention.pools.streaming_heads import read_pattern
    from sglang_ext.attention.pools.streaming_pool import check_pattern

    try:
        check_pattern(heads) if own_pool else read_pattern(heads)
    except ValueError as error:
        raise InvalidRequest(f"decode_heads: {error}") from None


def _keep_kernels(folder: Path | None) -> None:
    """Let the engine's processes keep compiled kernels in ``folder``. Variables that are set already count.

    Without it only torch needs to be told: it would use the system's folder of temporary files.
    """
    if folder is None:
        with contextlib.suppress(RuntimeError):  # no home folder
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache/torchinductor"))
        return
    for variable, name in _KERNEL_CACHES.items():
        os.environ.setdefault(variable, str(folder.resolve() / name))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def _observed(settings: Settings, log_level: str) -> dict[str, Any]:
    """Options of the engine's traces; sets the environment by which its processes log and trace as we do."""
    if settings.log_format == "json":
        os.environ.setdefault(
            "SGLANG_LOGGING_CONFIG_PATH", str(logs.engine_file(settings.data_dir.resolve(), log_level))
        )
    if settings.otlp_endpoint is None:
        return {}
    protocol, address = tracing.otlp(settings.otlp_endpoint)
    os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = protocol
    return {"enable_trace": True, "otlp_traces_endpoint": address}


def _kv_config(settings: Settings) -> dict[str, Any]:
    """Configure the document cache of the scheduler processes. Raises InvalidRequest for a broken samkv
    profile."""
    from ragserve.profiles import samkv as samkv_profile
    from sglang_ext.documents.fingerprint import model_fingerprint

    config: dict[str, Any] = {
        "host_bytes": settings.kv_host_bytes,
        "disk_bytes": settings.kv_disk_bytes,
        "page_bits": settings.kv_page_bits,
        "prefix": prefix_text(settings),
        "sessions": settings.session_on_host,
        "analysis": settings.kv_analysis,
        "analysis_bytes": settings.kv_analysis_bytes,
        "block_tokens": settings.kv_block_tokens,
    }
    profile = samkv_profile.load(settings, model_fingerprint(settings.model, options=settings.engine_args))
    if profile is not None:
        config["samkv"] = profile.engine
    folder = str(settings.data_dir.resolve() / "kv")
    if settings.kv_disk_bytes:
        config["disk_dir"] = folder
        if not settings.shared_store:
            config |= {"backend": settings.kv_storage, "extra": settings.kv_storage_args}
    if settings.shared_store:
        config["remote"] = shared_store.config(settings, folder)
    return config


def _attention_config(settings: Settings) -> dict[str, Any]:
    """Configure sparse decoding and prefill in the scheduler processes."""
    streaming = settings.decode_heads is not None
    decode = _like(DecodeOptions, settings, "decode_") | {
        "dense_below": _dense_below(settings),
        "streaming": streaming,
        "offloaded": {"off": False, "on": True, "auto": "auto"}[settings.decode_offload],
    }
    prefill = _like(PrefillOptions, settings, "prefill_") | {
        "dense_below": _prefill_dense_below(settings),
        "streaming": streaming,
    }
    return _like(AttentionConfig, settings, "decode_") | {
        "options": DecodeOptions(**decode).model_dump(),
        "prefill": PrefillOptions(**prefill).model_dump(),
        "max_budget": max(settings.decode_max_budget, settings.decode_budget),
        "heads": str(settings.decode_heads.resolve()) if settings.decode_heads else None,
        "kv_bits": settings.kv_bits,
        "offload_bytes": settings.kv_offload_bytes,
        "offloaded_tokens": settings.kv_offload_tokens,
        "inject_tokens": settings.max_inject_tokens,
    }


def _like(model: type[RequestOptions], settings: Settings, prefix: str) -> dict[str, Any]:
    """Options of ``model`` from the settings that are named ``prefix`` and the option's name."""
    return {
        name: getattr(settings, prefix + name)
        for name in model.model_fields
        if prefix + name in Settings.model_fields
    }


def _dense_below(settings: Settings) -> int:
    """Resolve `dense_below`: the setting, else the calibration for this model with the same mode and limits,
    else the protocol's default."""
    if settings.decode_dense_below is not None:
        return settings.decode_dense_below
    default = DecodeOptions().dense_below
    if settings.decode_mode == "dense":
        return default
    from ragserve.profiles.decode import DECODE, FILE_NAME, options_of
    from sglang_ext.documents.fingerprint import model_fingerprint

    found = DECODE.load(
        settings.data_dir / FILE_NAME, model_fingerprint(settings.model, options=settings.engine_args)
    )
    if found is None:
        return default
    if found.options == options_of(settings):
        return found.dense_below
    log.warning(
        "decode steps were calibrated with %s: run ragserve calibrate --part decode for these settings",
        found.options,
    )
    return default


def _prefill_dense_below(settings: Settings) -> int | None:
    """Resolve `dense_below` of prefill, and say why sparse prefill is off where it is wanted."""
    found, why = _prefill_from(settings)
    if found is None and settings.prefill_mode != "dense":
        log.warning("sparse prefill is off: %s, or give --prefill-dense-below to have it all the same", why)
    return found


def _prefill_from(settings: Settings) -> tuple[int | None, str]:
    """`dense_below` of prefill: the setting, else the calibration for this model with the same options, else
    None; and why that is None."""
    if settings.prefill_dense_below is not None:
        return settings.prefill_dense_below, ""
    from ragserve.profiles.prefill_crossover import FILE_NAME, PREFILL, options_of
    from sglang_ext.documents.fingerprint import model_fingerprint

    found = PREFILL.load(
        settings.data_dir / FILE_NAME, model_fingerprint(settings.model, options=settings.engine_args)
    )
    if found is None:
        return (
            None,
            "it is not known from which length on it is faster; run ragserve calibrate --part prefill",
        )
    if options_of(settings) != found.options:
        return None, f"it was calibrated with {found.options}; run ragserve calibrate --part prefill again"
    if found.dense_below is None:
        return None, f"it was slower at the longest prompt measured, {found.points[-1].tokens} tokens"
    return found.dense_below, ""


def _default_cpu_tokens(settings: Settings, itemsize: int) -> int:
    """KV slots on a CPU machine: 8 contexts, at most 65,536 tokens and about 1 GiB, at least one context.
    With a pool of their own for streaming heads: as many as the same bytes take."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(settings.model).get_text_config()
    except (OSError, ValueError) as error:
        log.debug("transformers cannot read the model's configuration", exc_info=True)
        why = str(error).strip().partition("\n")[0]
        raise InvalidRequest(
            f"Cannot read the configuration of {settings.model}: {why}",
            hint="`ragserve doctor --model ...` says more.",
            param="model",
        ) from error
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slot_bytes = 2 * config.num_hidden_layers * heads * head_dim * itemsize
    context = settings.context_length or config.max_position_embeddings
    tokens = int(max(context, min(8 * context, 65_536, _CPU_POOL_BYTES // slot_bytes)))
    if settings.decode_heads_pool == "shared":
        return tokens
    from sglang_ext.attention.pools.streaming_pool import StreamingPlan
    from sglang_ext.wire.attention_config import from_environment

    attention, ranks = from_environment(), settings.tp_size
    if attention is None:  # the settings have been checked
        return tokens
    try:
        plan = StreamingPlan.of(
            attention,
            settings.decode_page_size,
            layers=config.num_hidden_layers,
            kv_heads=max(1, heads // ranks),
            world=ranks,
        )
    except ValueError as error:
        raise InvalidRequest(f"decode_heads: {error}") from None
    slot_bytes //= ranks
    rows = settings.engine_args.get("max_running_requests")
    return max(context, plan.tokens(tokens * slot_bytes, slot_bytes, rows))
