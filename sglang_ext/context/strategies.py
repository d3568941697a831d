"""Which tokens of a context are kept and which are computed again: one function per strategy, one registry.

All share selection -> gather -> recompute -> extend; a strategy only decides the two sets. What can be decided from the plan alone is
decided here, before the request is admitted; what needs the model (`cacheblend`) is left to the recompute pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.protocol import ContextPlan, PlanError, Span

BLOCK = 16  # tokens; unit of selection


@dataclass(frozen=True, slots=True)
class Selection:
    """Positions in the full prompt, ascending, int64.

    ``kept`` is [S], the same in every layer, or [layers, S]. ``recomputed`` is [R]. With ``deviation_share`` the recomputed tokens are
    chosen at run time among the document tokens instead: that share of them, by how much their values differ at layer 1.
    ``rotate`` False leaves keys at their documents' own positions (wrong on purpose: it shows what re-rotation is for).
    """

    kept: torch.Tensor
    recomputed: torch.Tensor
    deviation_share: float | None = None
    rotate: bool = True

    @property
    def slots(self) -> int:
        """S: KV slots the context takes in every layer."""
        return int(self.kept.shape[-1])


Strategy = Callable[[ContextPlan], Selection]
_registry: dict[str, Strategy] = {}


def strategy(name: str) -> Callable[[Strategy], Strategy]:
    """Register a strategy under a name."""

    def add(function: Strategy) -> Strategy:
        _registry[name] = function
        return function

    return add


def names() -> tuple[str, ...]:
    """Registered strategies, sorted."""
    return tuple(sorted(_registry))


def select(plan: ContextPlan, layers: int) -> Selection:
    """The selection for a plan. Raises PlanError for an unknown strategy or bad options."""
    if plan.strategy not in _registry:
        raise PlanError(f"no strategy {plan.strategy!r}: one of {', '.join(names())}")
    chosen = _registry[plan.strategy](plan)
    if chosen.kept.dim() == 2 and chosen.kept.shape[0] != layers:
        raise PlanError(f"kept has {chosen.kept.shape[0]} rows, the model {layers} layers")
    return chosen


@strategy("concat")
def _concat(plan: ContextPlan) -> Selection:
    """Documents' KV as it is, moved to its place; nothing recomputed unless ``recompute`` says so."""
    options = _options(plan, "keep", "kept", "recompute", "rotate")
    rotate = options.get("rotate", True)
    if not isinstance(rotate, bool):
        raise PlanError("rotate must be true or false")
    return Selection(_kept(plan, options), _explicit(plan, options), rotate=rotate)


@strategy("epic")
def _epic(plan: ContextPlan) -> Selection:
    """EPIC: the first ``first`` tokens of every document are computed again."""
    options = _options(plan, "keep", "first")
    first = _integer(options, "first", 16, low=0)
    kept = _kept(plan, options)
    wanted = [torch.arange(s.start, min(s.end, s.start + first)) for s in _documents(plan)]
    return Selection(kept, _among(torch.cat([torch.empty(0, dtype=torch.int64), *wanted]), kept))


@strategy("random")
def _random(plan: ContextPlan) -> Selection:
    """A share of the documents' tokens, drawn with ``seed``: what any rule for choosing must beat."""
    options = _options(plan, "keep", "share", "seed")
    kept = _kept(plan, options)
    candidates = _among(_document_positions(plan), kept)
    generator = torch.Generator().manual_seed(_integer(options, "seed", 0, low=0))
    order = torch.randperm(len(candidates), generator=generator)
    return Selection(kept, candidates[order[: _count(_share(options, 0.15), len(candidates))]].sort().values)


@strategy("cacheblend")
def _cacheblend(plan: ContextPlan) -> Selection:
    """CacheBlend: the ``share`` of the documents' tokens whose values at layer 1 differ most from the cached ones."""
    options = _options(plan, "share")
    return Selection(_kept(plan, {}), torch.empty(0, dtype=torch.int64), deviation_share=_share(options, 0.15))


def _options(plan: ContextPlan, *known: str) -> Mapping[str, Any]:
    unknown = set(plan.options) - set(known)
    if unknown:
        raise PlanError(f"strategy {plan.strategy!r} has no option {', '.join(sorted(unknown))}: it has {', '.join(known)}")
    return plan.options


def _documents(plan: ContextPlan) -> tuple[Span, ...]:
    """All spans but the first: the system text is exact as it is, nothing stands before it."""
    return plan.spans[1:]


def _document_positions(plan: ContextPlan) -> torch.Tensor:
    return torch.arange(plan.spans[0].end, plan.question_start)


def _kept(plan: ContextPlan, options: Mapping[str, Any]) -> torch.Tensor:
    if "kept" in options:
        return _explicit_kept(plan, options["kept"])
    keep = _share(options, 1.0, name="keep")
    if keep == 1.0:
        return torch.from_numpy(np.arange(plan.question_start))
    system = np.arange(plan.spans[0].end)
    return torch.from_numpy(np.concatenate((system, _spread(_documents(plan), keep))))


def _spread(documents: tuple[Span, ...], keep: float) -> npt.NDArray[np.int64]:
    """Positions of a share of each document's blocks, at least one, at equal distances from the first to the last."""
    start, end = (np.array(values, dtype=np.int64) for values in ([s.start for s in documents], [s.end for s in documents]))
    blocks = -(-(end - start) // BLOCK)
    count = np.maximum(1, np.round(keep * blocks).astype(np.int64))
    of = np.repeat(np.arange(len(documents)), count)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    # With at least as many blocks as chosen ones neighbours are a block or more apart: no block comes twice.
    chosen = np.floor(nth * ((blocks - 1) / np.maximum(1, count - 1))[of] + 0.5).astype(np.int64)
    positions = (start[of] + chosen * BLOCK)[:, None] + np.arange(BLOCK)
    return positions[positions < end[of, None]]


def _explicit_kept(plan: ContextPlan, value: Any) -> torch.Tensor:
    """``kept``: positions, or one list of positions per layer, all of the same length; for experiments with selectors."""
    try:
        kept = torch.tensor(value, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a number beyond 64 bits
        raise PlanError("kept must be a list of positions or equally long lists, one for each layer") from None
    if kept.dim() not in (1, 2) or kept.shape[-1] == 0:
        raise PlanError("kept must name at least one position")
    if int(kept.min()) < 0 or int(kept.max()) >= plan.question_start or bool((kept.diff(dim=-1) <= 0).any()):
        raise PlanError(f"kept must hold ascending positions below {plan.question_start}")
    return kept


def _explicit(plan: ContextPlan, options: Mapping[str, Any]) -> torch.Tensor:
    value = options.get("recompute", [])
    if value == "all":
        return torch.arange(plan.question_start)
    try:
        positions = torch.tensor(sorted(set(value)), dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):
        raise PlanError("recompute must be 'all' or a list of positions") from None
    if len(positions) and (int(positions[0]) < 0 or int(positions[-1]) >= plan.question_start):
        raise PlanError(f"recompute must hold positions below {plan.question_start}")
    return positions


def _among(positions: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return positions[torch.from_numpy(np.isin(positions.numpy(), kept.numpy(), assume_unique=True))]


def _share(options: Mapping[str, Any], default: float, name: str = "share") -> float:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise PlanError(f"{name} must be a number above 0 and up to 1")
    return float(value)


def _count(share: float, n: int) -> int:
    return min(n, max(1, round(share * n))) if n else 0


def _integer(options: Mapping[str, Any], name: str, default: int, *, low: int) -> int:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        raise PlanError(f"{name} must be a whole number of at least {low}, of 63 bits at most")
    return value
