"""The CPU platform's class. SGLang loads it during its own import, so other parts of SGLang are imported
on use.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_ext import versions


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """PyTorch operators only: no graphs, no Triton, no compiled extension."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_mha_kv_pool_cls(self) -> Any:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from sglang_ext.attention.pools.pool_hooks import pool_class

        return pool_class() or MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> Any:
        """What 0.5.17 makes a pool of compressed KV of. It also gives the size of an index, which only models
        with sparse attention of their own have, and they do not run on a CPU."""
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return lambda *args, index_head_dim, **kwargs: MLATokenToKVPool(*args, **kwargs)

    def get_kv_pool_cls(self, *, kind: str) -> Any:
        return self.get_mha_kv_pool_cls() if kind == "mha" else None

    def get_paged_allocator_cls(self) -> Any:
        return versions.paged_allocator()

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        from torch.profiler import ProfilerActivity

        return ProfilerActivity.CPU
