"""Entry point of the strategies: from a plan to its partial selection."""

from __future__ import annotations

from sglang_ext.context.selection.base import ModelShape, PartialSelection
from sglang_ext.context.selection.reuse import reuse
from sglang_ext.context.selection.samkv import select_by_samkv
from sglang_ext.wire.protocol import ContextPlan
from sglang_ext.wire.request_options import PlanError, SamKvOptions, strategy_options


def partial_selection(plan: ContextPlan, shape: ModelShape) -> PartialSelection:
    """The partial selection of a plan. Raises PlanError for an unknown strategy or bad options.

    `sglang_ext.wire.request_options.STRATEGY_OPTIONS` lists the strategies and their options. All but
    `samkv` keep tokens by position and differ in their options only."""
    given = shape.profile.completed(plan.options) if plan.strategy == "samkv" else plan.options
    options = strategy_options(plan.strategy, given)
    if isinstance(options, SamKvOptions):
        return select_by_samkv(plan, options, shape)
    made = reuse(plan, options, shape)
    if made.kept.dim() == 2 and made.kept.shape[0] != shape.layers:
        raise PlanError(f"kept has {made.kept.shape[0]} rows, the model {shape.layers} layers")
    return made
