"""Strategies that keep documents whole or in evenly spaced blocks: `concat`, `epic`, `random`,
`cacheblend`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.context.selection.base import ModelShape, PartialSelection
from sglang_ext.context.selection.recompute_rules import Rule
from sglang_ext.wire.protocol import ContextPlan, Span
from sglang_ext.wire.request_options import ComposedOptions, ConcatOptions, KeepOptions, PlanError

BLOCK = 16  # tokens; unit of option `keep`


def reuse(plan: ContextPlan, options: ComposedOptions, shape: ModelShape) -> PartialSelection:
    """Keep ``keep`` of every document's blocks and recompute by the strategy's rule."""
    concat = options if isinstance(options, ConcatOptions) else ConcatOptions()
    kept = concat.experimental.kept
    keep = options.keep if isinstance(options, KeepOptions) else 1.0
    return PartialSelection(
        plan,
        _spread(plan, keep) if kept is None else _explicit(plan, kept),
        Rule.of(plan, options),
        fuse=options.update == "fusion",
        cut=shape.cut,
        compact=concat.kept_positions == "compact",
        rotate=concat.experimental.rotate,
    )


def _spread(plan: ContextPlan, keep: float) -> torch.Tensor:
    """Positions of the system text and of evenly spaced blocks of every document."""
    if keep == 1.0:
        return torch.arange(plan.question_start)
    system = np.arange(plan.spans[0].end)
    return torch.from_numpy(np.concatenate((system, _blocks(plan.spans[1:], keep))))


def _blocks(documents: Sequence[Span], keep: float) -> npt.NDArray[np.int64]:
    """Positions of a share of each document's blocks, at least one, spaced from the first to the last."""
    start = np.array([span.start for span in documents], dtype=np.int64)
    end = np.array([span.end for span in documents], dtype=np.int64)
    blocks = -(-(end - start) // BLOCK)
    count = np.maximum(1, np.round(keep * blocks).astype(np.int64))
    document = np.repeat(np.arange(len(documents)), count)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)
    # A document has at least as many blocks as are chosen, so neighbours are at least one block apart and no
    # block is chosen twice.
    chosen = np.floor(nth * ((blocks - 1) / np.maximum(1, count - 1))[document] + 0.5).astype(np.int64)
    positions = (start[document] + chosen * BLOCK)[:, None] + np.arange(BLOCK)
    return positions[positions < end[document, None]]


def _explicit(plan: ContextPlan, positions: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
    """Option `experimental.kept` as [S] or [layers, S]."""
    try:
        kept = torch.tensor(positions, dtype=torch.int64)
    except ValueError:
        raise PlanError(
            "kept must be a list of positions or equally long lists, one for each layer"
        ) from None
    if kept.shape[-1] == 0:
        raise PlanError("kept must name at least one position")
    if int(kept.max()) >= plan.question_start or bool((kept.diff(dim=-1) <= 0).any()):
        raise PlanError(f"kept must hold ascending positions below {plan.question_start}")
    return kept
