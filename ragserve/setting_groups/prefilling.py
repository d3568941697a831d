"""How long prompts are prefilled."""

from __future__ import annotations

from pydantic import BaseModel, Field

from sglang_ext.wire.prefill_options import DENSE_LAST, MAX_OBSERVE, PrefillMode


class PrefillSettings(BaseModel):
    """Defaults of sparse prefill; each field states its purpose and its unit."""

    prefill_mode: PrefillMode = Field(
        "dense",
        description="Default prefill of strategy prefix. dense: exact attention. vertical_slash: to the "
        "vertical and slash lines that sampled queries point to. block_sparse: to the first, local and "
        "best-scoring blocks. Both are approximate and need sparse_attention=on; their KV has a prefix cache "
        "of its own.",
    )
    prefill_alpha: float = Field(
        0.955,
        gt=0,
        le=1,
        description="Sparse modes: share of the attention weight to hold, as the mode estimates it.",
    )
    prefill_observe: int = Field(
        64, ge=1, le=MAX_OBSERVE, description="vertical_slash: queries sampled of every 1,024."
    )
    prefill_dense_last: int = Field(
        DENSE_LAST,
        ge=0,
        description="Sparse modes: last tokens of a prompt, its question, that attend to everything.",
    )
    prefill_dense_below: int | None = Field(
        None,
        ge=0,
        description="Prompt length, in tokens, up to which prefill is dense. Default: the result of "
        "calibrate --part prefill; without one prefill with an alpha is dense, and with a request's share "
        "sparse above 49,152.",
    )
