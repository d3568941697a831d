"""Finds stable layers (SamKV, appendix A.2): layers that agree on a document's most attended block.

Per document every layer ranks the blocks by exponent (A.1; smaller is more important), and the block with the
best mean rank over all layers counts as the model's choice. A layer is the more stable the further that
block's exponent lies below the layer's mean, in sigmas. The paper counts documents at three sigma or more
(PauTa), which needs long documents: hardly one of a chunk's thirty blocks lies so far out. Here the sigmas
are averaged instead. Initial and local blocks are left out: they are kept anyway, and every model parks
attention there.
"""

from __future__ import annotations

import torch

from sglang_ext.analysis.document_analysis import Analysis

_BLOCKS = 4  # fewer have no spread to speak of


def outlying(analysis: Analysis, initial: int = 1, local: int = 2) -> torch.Tensor | None:
    """Sigmas by which the model's block stands out in each layer, f32 [layers]; None for too few blocks."""
    exponent = analysis.exponent.float()[:, initial : analysis.blocks - local]
    exponent = exponent[:, exponent.isfinite().all(0)]
    if exponent.shape[1] < _BLOCKS:
        return None
    rank = exponent.argsort(dim=1, stable=True).argsort(dim=1, stable=True)
    best = int(rank.float().mean(0).argmin())
    deviation, mean = torch.std_mean(exponent, dim=1, correction=0)
    return (mean - exponent[:, best]) / deviation.clamp(min=1e-9)
