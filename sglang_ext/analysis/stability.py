"""Stable layers (SamKV, appendix A.2): those that agree on which block of a document is attended to most.

Per document: blocks are ranked in every layer by their exponents (A.1; a smaller one is more important), and
the block with the best mean rank over all layers is taken to be the model's choice. A layer is the stabler,
the further that block's exponent lies below the mean of the layer's own, in sigmas. The paper counts
documents where it is three sigma or more (PauTa), which needs long documents: among the thirty blocks of a
chunk hardly anything lies so far out. Here the sigmas are averaged instead. Initial and local blocks, which
are kept anyway and where every model parks attention, have no part in it."""

from __future__ import annotations

import torch

from sglang_ext.analysis.document_analysis import Analysis

_BLOCKS = 4  # fewer have no spread to speak of


def outlying(analysis: Analysis, initial: int = 1, local: int = 2) -> torch.Tensor | None:
    """f32 [layers]: how many sigmas the document's block stands out in each layer; None for a document of too
    few blocks.
    """
    exponent = analysis.exponent.float()[:, initial : analysis.blocks - local]
    exponent = exponent[:, exponent.isfinite().all(0)]
    if exponent.shape[1] < _BLOCKS:
        return None
    rank = exponent.argsort(dim=1, stable=True).argsort(dim=1, stable=True)
    best = int(rank.float().mean(0).argmin())
    deviation, mean = torch.std_mean(exponent, dim=1, correction=0)
    return (mean - exponent[:, best]) / deviation.clamp(min=1e-9)
