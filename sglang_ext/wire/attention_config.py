"""Settings of sparse decoding in a scheduler process, from its environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from sglang_ext.wire.prefill_options import PrefillOptions
from sglang_ext.wire.protocol import ATTENTION_CONFIG_VARIABLE
from sglang_ext.wire.request_options import DecodeOptions, RequestOptions


class AttentionConfig(RequestOptions):
    """Sparse decoding and sparse prefill of one server."""

    options: DecodeOptions = Field(default=DecodeOptions(), description="Defaults of requests.")
    prefill: PrefillOptions = Field(default=PrefillOptions(), description="The same of prefill.")
    logical_page: int = Field(default=16, ge=1, description="Tokens that share one min and max key.")
    max_budget: int = Field(
        default=4096, ge=1, description="Tokens: the largest budget of a request. Page tables are that wide."
    )
    heads: Path | None = Field(default=None, description="Pattern file of streaming heads.")
    heads_pool: Literal["shared", "own"] = Field(
        default="shared", description="own: `sglang_ext.attention.pools.streaming_pool`, for every request."
    )
    sink_tokens: int = Field(default=64, ge=0, description="First tokens that streaming heads attend to.")
    local_tokens: int = Field(default=256, ge=0, description="Latest tokens that streaming heads attend to.")
    kv_bits: Literal[16, 8, 4] = Field(
        default=16, description="Bits of the KV pool; 8 and 4: `sglang_ext.attention.pools.quantized_pool`."
    )
    offload_bytes: int = Field(
        default=0, ge=0, description="Host memory of all ranks for the KV of offloaded requests; 0: none are."
    )
    offloaded_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens of offloaded prompts whose page statistics the device keeps, if more than "
        "offload_bytes holds: contexts that are read in their documents' pages take no more.",
    )
    inject_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Tokens times layers that a step prefills of a prompt that the pool cannot take; None: a "
        "prefill chunk in every layer; 0: such prompts wait or are refused.",
    )
    bound: Literal["lowest", "round"] = Field(
        default="round", description="progressive: assumed weight of unread pages, see `progressive_decode`."
    )
    ranking: Literal["minmax", "center"] = Field(
        default="minmax",
        description="progressive: order pages by the best upper bound of their logical pages, or by the "
        "centre of their bounding box (one score per page).",
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
