"""Settings of sparse decoding in a scheduler process, from its environment."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sglang_ext.protocol import ATTENTION_CONFIG_VARIABLE, DecodeOptions


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """``options``: of requests that do not say. ``logical_page``: tokens that share one min and max key.
    ``max_budget``: tokens, the largest budget a request may ask for: tables are that wide. ``heads``: pattern
    file of the streaming heads, which attend to their first ``sink_tokens`` and latest ``local_tokens``
    tokens.

    ``bound`` and ``ranking``: of progressive decoding, see `ragserve_kernels.progressive_decode`; "center"
    ranks pages by the centre of their bounding box (one score per page), "minmax" by the best upper bound of
    their logical pages.

    ``kv_bits``: of the KV pool, 16 for the plain one, 8 or 4 for `sglang_ext.attention.quantized_pool`.
    """

    options: DecodeOptions = field(default_factory=DecodeOptions)
    logical_page: int = 16
    max_budget: int = 4096
    heads: Path | None = None
    sink_tokens: int = 64
    local_tokens: int = 256
    kv_bits: int = 16
    bound: Literal["lowest", "round"] = "round"
    ranking: Literal["minmax", "center"] = "minmax"

    def __post_init__(self) -> None:
        if self.bound not in ("lowest", "round") or self.ranking not in ("minmax", "center"):
            raise ValueError(
                f"bound is {self.bound!r} and ranking {self.ranking!r}: expected lowest or round, and "
                "minmax or center"
            )
        if self.kv_bits not in (16, 8, 4):
            raise ValueError(f"kv_bits is {self.kv_bits}: expected 16, 8 or 4")
        if self.max_budget < self.options.budget:
            raise ValueError(
                f"the largest budget, {self.max_budget} tokens, is below the default one, "
                f"{self.options.budget}"
            )


def from_environment() -> AttentionConfig | None:
    """The configuration; None where sparse decoding is off. Raises ValueError or PlanError for a bad one."""
    text = os.environ.get(ATTENTION_CONFIG_VARIABLE)
    if not text:
        return None
    raw: dict[str, Any] = json.loads(text)
    options = DecodeOptions().updated(raw.pop("options", {}))
    heads = raw.pop("heads", None)
    return AttentionConfig(options=options, heads=Path(heads) if heads else None, **raw)
