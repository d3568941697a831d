"""Entry point `sglang.srt.plugins`: what ragserve adds inside SGLang's processes is registered here, and only here.

On the CPU platform that is a faster torch-native attention; elsewhere nothing yet: strategies `full` and `prefix` are SGLang as it is.
The document cache, composed contexts and sparse attention will register from here. SGLang only logs a plugin that fails, so start-up
asks `loaded()`.
"""

from __future__ import annotations

from typing import Any

_loaded = False


def register() -> None:
    """Called by SGLang once in every process, before its classes are used."""
    global _loaded
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_ext.platform import activate

    if activate() is not None:
        # Under SGLang's own name: several of its modules take another path for a backend they do not know by name.
        register_attention_backend("torch_native")(_torch_native)
    _loaded = True


def _torch_native(runner: Any) -> Any:
    from sglang_ext.attention.torch_native_cpu import TorchNativeCpuBackend

    return TorchNativeCpuBackend(runner)


def loaded() -> bool:
    """Whether SGLang ran this plugin in this process without an error."""
    return _loaded
