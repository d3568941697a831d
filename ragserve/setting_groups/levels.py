"""Which settings most users set, and which are experimental."""

from __future__ import annotations

from typing import Literal

COMMON = (
    *("model", "embedder", "data_dir", "host", "port", "api_key"),
    *("dtype", "tp_size", "mem_fraction_static", "top_k", "retrieval", "strategy"),
)
EXPERIMENTAL = (
    "decode_threshold",  # progressive decoding
    *("decode_ranking", "decode_bound"),  # for ablations
    "decode_heads_pool",  # the streaming heads' second cache
    "max_inject_tokens",  # prefill layer by layer
)
"""No benefit is shown for these on a real model. They may change or go without notice."""


def group_of(name: str) -> Literal["common", "other", "experimental"]:
    """Return the group of a setting."""
    return "common" if name in COMMON else "experimental" if name in EXPERIMENTAL else "other"
