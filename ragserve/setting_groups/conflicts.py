"""Settings that do not go together."""

from __future__ import annotations

from typing import Any

_SENT_KEYS = ("engine_api_key", "embedder_api_key", "rerank_api_key")


def conflict(settings: Any) -> str | None:
    """Return what is wrong with a `Settings` as a whole, and what to change; None if nothing is."""
    if settings.api_key is not None and not settings.api_key.get_secret_value().strip():
        return "api_key is empty: give a key, or unset --api-key (RAGSERVE_API_KEY)"
    if settings.host not in {"127.0.0.1", "localhost", "::1"} and not settings.has_key:
        return (
            f"host {settings.host!r} would serve everyone who can reach it: set --api-key "
            "(RAGSERVE_API_KEY), make keys with `ragserve keys create`, or bind to 127.0.0.1"
        )
    for name in _SENT_KEYS:
        if (key := getattr(settings, name)) is not None and not _can_be_sent(key.get_secret_value()):
            return f"{name}: it has a space, a line break or another character that no header can have"
    engines = [name for name in ("engine_url", "workers", "replicas") if getattr(settings, name)]
    if len(engines) > 1:
        return f"{' and '.join(engines)} exclude each other: each says where the engine is"
    if settings.router_url is not None and settings.workers is None:
        return "router_url: a router is between the server and workers elsewhere: name them with --workers"
    if settings.kv_bits != 16 and settings.sparse_attention != "on":
        return (
            f"kv_bits={settings.kv_bits}: only sparse decoding's backend reads such a pool: set "
            "--sparse-attention on"
        )
    if settings.sparse_attention == "auto" and settings.decode_heads is not None:
        return (
            "sparse_attention='auto': its record is of heads that do not stream: omit decode_heads, or set "
            "--sparse-attention on"
        )
    if settings.decode_heads_pool == "own" and (problem := _unlike_own_pool(settings)):
        return f"decode_heads_pool='own': {problem}"
    if settings.kv_page_bits != 16 and settings.kv_storage == "aibrix":
        return (
            f"kv_page_bits={settings.kv_page_bits}: aibrix lays pages out by the model's shape and dtype: "
            "omit kv_page_bits, or set another --kv-storage"
        )
    if settings.kv_offload_bytes and (settings.sparse_attention != "on" or settings.kv_bits != 16):
        return (
            f"kv_offload_bytes={settings.kv_offload_bytes}: offloaded requests need 16 bits and chosen "
            "pages: set --sparse-attention on, and omit kv_bits"
        )
    if settings.kv_offload_tokens and not settings.kv_offload_bytes:
        return (
            f"kv_offload_tokens={settings.kv_offload_tokens}: offloaded requests need host memory, for what "
            "no document holds: set --kv-offload-bytes"
        )
    if settings.prefill_mode != "dense" and (settings.sparse_attention != "on" or settings.kv_bits != 16):
        return (
            f"prefill_mode={settings.prefill_mode!r}: sparse prefill needs our attention backend and keys of "
            "16 bits: set --sparse-attention on, and omit kv_bits"
        )
    if settings.decode_offload != "off" and not settings.kv_offload_bytes:
        return (
            f"decode_offload={settings.decode_offload}: offloaded requests need host memory: "
            "set --kv-offload-bytes"
        )
    if settings.decode_offload != "off" and settings.decode_heads is not None:
        return (
            f"decode_offload={settings.decode_offload}: offloaded requests need heads that do not stream, "
            "for their pages are not on the device: omit decode_heads"
        )
    if settings.decode_scores == "exact" and (settings.decode_offload != "off" or settings.kv_bits != 16):
        return (
            "decode_scores='exact': keys are read, of 16 bits and on the device: omit decode_offload and "
            "kv_bits, or set --decode-scores bound"
        )
    if settings.decode_observe == "recent" and settings.decode_offload != "off":
        return (
            "decode_observe='recent': offloaded requests choose pages by queries: set --decode-observe window"
        )
    if settings.rerank == "keys" and (settings.engine_url is not None or settings.kv_bits != 16):
        return (
            "rerank='keys': only an engine of this server, with KV of 16 bits, has documents' keys: name a "
            "CrossEncoder, or omit rerank"
        )
    return None


def _can_be_sent(key: str) -> bool:
    """Whether a header can have a key. The errors of libraries repeat others, for clients to read."""
    return key.isascii() and key.isprintable() and " " not in key


def _unlike_own_pool(settings: Any) -> str | None:
    """Return what does not go with a pool of their own for streaming heads, and what to change."""
    if settings.sparse_attention != "on" or settings.decode_heads is None:
        return (
            "only our attention backend reads such a pool, and a pattern file names the heads: set "
            "--sparse-attention on and --decode-heads"
        )
    if settings.decode_mode != "dense" or settings.prefill_mode != "dense":
        return "the other heads are dense: set --decode-mode dense, and omit prefill_mode"
    if settings.kv_bits != 16 or settings.kv_offload_bytes or settings.session_on_host:
        return (
            "the KV has 16 bits and stays on the device: omit kv_bits, kv_offload_bytes and session_on_host"
        )
    return None
