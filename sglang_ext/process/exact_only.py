"""Engines whose KV cannot be kept as documents: SGLang's own prefix cache serves exact strategies there."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Any

from sglang_ext.documents.pages.types import DTYPE_CODES, KvShape
from sglang_ext.versions import settings_of

NO_DOCUMENTS = KvShape(1, 1, 1, next(iter(DTYPE_CODES)))  # of tiers that never hold anything
_FLAGS = (  # server settings, the value that documents need, and the reason
    ("disable_radix_cache", False, "documents live in the radix cache"),
    ("enable_hierarchical_cache", False, "SGLang's hierarchical cache manages the KV pool"),
    ("speculative_algorithm", None, "a draft model has no KV for composed slots"),
    ("pp_size", 1, "the recompute pass runs all layers in one process"),
    ("dp_size", 1, "a document would be on one replica, and its query go to another"),
    ("enable_dp_attention", False, "a pass on one rank would wait for the others for ever"),
    ("enable_pdmux", False, "a split prefill does not fill composed slots"),
    ("enable_lora", False, "documents' KV is that of the model without an adapter"),
    ("disaggregation_mode", "null", "composed slots are not transferred"),
)


def why_no_documents(context: Any) -> str | None:
    """Say why documents' KV cannot be kept in the engine of SGLang's `TreeCacheBuildContext`; None if it can.
    The same on every rank.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_ext.attention.pools.quantized_pool import QuantizedKVPool
    from sglang_ext.attention.pools.streaming_pool import OtherHeadsPool

    args, pool = settings_of(context.server_args), context.tp_worker.model_runner.token_to_kv_pool
    if isinstance(pool, OtherHeadsPool):
        return _sentence("decode_heads_pool=own", "streaming heads' KV is kept in part, and not for others")
    for flag, wanted, why in _FLAGS:
        value = getattr(args, flag)
        if value != wanted and (value or wanted):  # None is as good as False
            return _sentence(f"{flag}={value!r}", why)
    if context.is_hybrid_swa or context.is_hybrid_ssm:
        return _sentence("this model", "its layers keep KV of different kinds")
    if not (type(pool) is MHATokenToKVPool or isinstance(pool, QuantizedKVPool)):
        return _sentence(f"a {type(pool).__name__}", "documents need plain K and V by head")
    if pool.dtype not in DTYPE_CODES:
        return _sentence(f"KV of {pool.dtype}", "documents are kept in float32, float16 or bfloat16")
    if getattr(pool, "v_head_dim", pool.head_dim) != pool.head_dim:
        return _sentence("this model", "its keys and values have different sizes")
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        return _sentence("SGLANG_USE_HND_KVCACHE", "documents need KV laid out token by token")
    return None


def _sentence(what: str, why: str) -> str:
    return f"composed contexts do not work with {what}: {why}; use strategy 'prefix' or 'full'"


class ExactTree:
    """SGLang's own prefix cache as the document cache's control operations ask for it. It holds no document,
    and it does not say which namespace a prefix belongs to.
    """

    document_tokens = 0
    documents_evicted = 0
    observer: Any = None  # never called: SGLang's cache knows nothing of it

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    @property
    def token_to_kv_pool_allocator(self) -> Any:
        return self._cache.token_to_kv_pool_allocator

    @property
    def page_size(self) -> int:
        return int(self._cache.page_size)

    def evictable_size(self) -> int:
        return int(self._cache.evictable_size())

    def protected_size(self) -> int:
        return int(self._cache.protected_size())

    def tokens_by_key(self) -> dict[str, int]:
        """There are no documents."""
        return {}

    def peek(self, ids: array[int], extra_key: str) -> int:
        """0: looking would refresh LRU times."""
        return 0

    def remove_keys(self, extra_keys: Collection[str]) -> set[str]:
        """Empty the cache of all prefixes that no running request reads: these keys' cannot be told apart."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        size = self.evictable_size()
        if size:
            self._cache.evict(EvictParams(num_tokens=size, swa_num_tokens=size, mamba_num=size))
        return set()
