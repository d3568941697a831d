"""Anchors: the few tokens of every document that a question reads before rule `anchors` chooses (QCFuse)."""

from __future__ import annotations

import torch

from sglang_ext.context.selection.recompute_rules import Kept
from sglang_ext.context.selection.sentences import SINKS


def anchors_of(kept: Kept, layers: int) -> list[torch.Tensor]:
    """Return the places of the anchors among the kept tokens of each layer, int64, ascending.

    These are the system text, each document's first tokens, where models park attention, and of each block
    the token that the document's own later tokens attend to most in that layer.
    """
    rows = kept.kept if kept.kept.dim() == 2 else kept.kept.expand(layers, -1)
    always = [torch.arange(kept.first)]
    always += [torch.arange(s.start, min(s.end, s.start + SINKS)) for s in kept.plan.spans[1:]]
    documents = list(zip(kept.plan.spans[1:], kept.analyses, strict=True))
    found = []
    for layer, row in enumerate(rows):
        own = []
        for span, analysis in documents:
            chosen = analysis.attention[layer].isfinite()  # not of blocks with too few later tokens
            places = torch.arange(analysis.blocks) * analysis.block + analysis.token[layer].long()
            own.append(span.start + places[chosen])
        positions = torch.unique(torch.cat([*always, *own]))
        found.append(torch.isin(row, positions).nonzero()[:, 0])
    return found
