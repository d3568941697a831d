"""Entry point `sglang.srt.plugins`: the only place that registers ragserve in SGLang's processes.

Registers the document cache (selected with ``--radix-cache-backend ragserve``), the hooks that compose
contexts, FA3 kernels for FlashInfer's prefill, sparse decoding around SGLang's attention backends where it
is configured, and on the CPU platform a faster torch-native attention. SGLang only logs a plugin that fails,
so a scheduler process calls `hooks.require_loaded()` at its start.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.wire.protocol import CACHE_BACKEND


def register() -> None:
    """Register everything. SGLang calls it once in every process, before its classes are used."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from sglang_ext.cpu.activate import activate
    from sglang_ext.process import hooks

    if activate() is not None:
        # under SGLang's own name: several of its modules take another path for an unknown name
        register_attention_backend("torch_native")(_torch_native)
    _choose_prefill_kernels()
    _wrap_attention()
    register_radix_cache_backend(CACHE_BACKEND, _document_cache)
    hooks.install()


def _choose_prefill_kernels() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_ext.attention.prefill.flashinfer_prefill import with_fa3

    ATTENTION_BACKENDS["flashinfer"] = with_fa3(ATTENTION_BACKENDS["flashinfer"])


def _wrap_attention() -> None:
    """Wrap every backend for plain attention in sparse decoding, under SGLang's own names, which it compares
    in many places.
    """
    from sglang_ext.wire.attention_config import from_environment

    config = from_environment()
    if config is None:
        return
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_ext.attention.factory import with_sparse_decode

    for name in ("torch_native", "flashinfer", "triton", "fa3", "fa4", "trtllm_mha"):
        ATTENTION_BACKENDS[name] = with_sparse_decode(ATTENTION_BACKENDS[name], config)


def _torch_native(runner: Any) -> Any:
    from sglang_ext.cpu.torch_native import TorchNativeCpuBackend

    return TorchNativeCpuBackend(runner)


def _document_cache(context: Any) -> Any:
    from sglang_ext.process.build import create_cache

    return create_cache(context)
