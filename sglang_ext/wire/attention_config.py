"""Settings of sparse decoding in a scheduler process, from its environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from sglang_ext.wire import decode_fields
from sglang_ext.wire.prefill_options import PrefillOptions
from sglang_ext.wire.protocol import ATTENTION_CONFIG_VARIABLE
from sglang_ext.wire.request_options import DecodeOptions, RequestOptions


class AttentionConfig(RequestOptions):
    """Sparse decoding and sparse prefill of one server."""

    options: DecodeOptions = Field(default=DecodeOptions(), description="Defaults of requests.")
    prefill: PrefillOptions = Field(default=PrefillOptions(), description="The same of prefill.")
    logical_page: decode_fields.LogicalPage = 16
    max_budget: decode_fields.MaxBudget = 4096
    heads: Path | None = Field(default=None, description="Pattern file of streaming heads.")
    heads_pool: decode_fields.HeadsPool = "shared"
    sink_tokens: int = Field(default=64, ge=0, description="First tokens that streaming heads attend to.")
    local_tokens: int = Field(default=256, ge=0, description="Latest tokens that streaming heads attend to.")
    kv_bits: Literal[16, 8, 4] = Field(
        default=16, description="Bits of the KV pool; 8 and 4: `sglang_ext.attention.pools.quantized_pool`."
    )
    offload_bytes: decode_fields.OffloadBytes = 0
    offloaded_tokens: decode_fields.OffloadTokens = 0
    inject_tokens: decode_fields.InjectTokens = None
    bound: decode_fields.Bound = "round"
    ranking: decode_fields.Ranking = "minmax"
    dense_layers: list[int] = Field(
        default_factory=list,
        description="hierarchical, for measuring: layers, negative ones from the last, whose decode steps "
        "attend to everything.",
    )
    lines_by: Literal["segments", "prompt_end"] = Field(
        default="segments",
        description="vertical_slash, for measuring: prompt_end chooses lines once for all new tokens of a "
        "pass, by the last `observe` queries (MInference).",
    )

    @model_validator(mode="after")
    def _tables_hold_the_default(self) -> AttentionConfig:
        if self.max_budget < self.options.budget:
            raise ValueError(
                f"the largest budget, {self.max_budget} tokens, is below the default one, "
                f"{self.options.budget}"
            )
        return self


def from_environment() -> AttentionConfig | None:
    """The configuration, or None where sparse decoding is off. Raises ValueError for a bad one."""
    text = os.environ.get(ATTENTION_CONFIG_VARIABLE)
    return AttentionConfig.model_validate_json(text) if text else None
