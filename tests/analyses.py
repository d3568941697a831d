"""The dequantised tensors of a document's analysis."""

from __future__ import annotations

import torch

from sglang_ext.analysis.document_analysis import Analysis


def mean_keys(analysis: Analysis) -> torch.Tensor:
    """Mean keys, f32 [layers, blocks, kv_heads, head_dim]."""
    return analysis.mean_k.float() * analysis.mean_k_scale.float()[..., None]


def local_queries(analysis: Analysis) -> torch.Tensor:
    """Mean local queries, f32 [layers, heads, head_dim]."""
    return analysis.local_q.float() * analysis.local_q_scale.float()[..., None]
