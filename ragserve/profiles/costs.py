"""Cost model of the time to the first token on this machine, fitted by `ragserve calibrate` and used by
strategy ``auto``.

Milliseconds; all coefficients are at least 0, fitted by least squares of the relative error:

    exact:     a0 + a1 (n - c) + a2 (n^2 - c^2)  n prompt tokens, the first c in the exact prefix cache
    composed:  b0 + b1 d + b2 d^2                d document tokens, per strategy (with options) and tier
    absent:    c0 + c1 m + c2 m^2                m of them cached nowhere, on top, per strategy

Documents of different tiers count by their share of the tokens. Those cached nowhere count as on the device,
from where they are composed in the end. What it takes until then comes on top: refusing the request,
prefilling each alone, analysing it where the strategy needs that. A file of an earlier version has no such
coefficients: then it is a prefill of each, which is too little. Documents of a shared store (`remote`) that
has not been measured count as cached nowhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ragserve.errors import InvalidRequest
from ragserve.profiles.file import ProfileFile
from ragserve.profiles.hardware import is_elsewhere

FILE_NAME = "ragserve-costs.json"
VERSION = 1
TIERS = ("device", "host", "disk", "remote")
ABSENT = "absent"  # in no tier
REMOTE = "remote"  # in the store that engines share
Coefficients = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class CostSample:
    """A measurement. Without a ``strategy``: exact prefill of ``tokens`` prompt tokens, ``cached`` of them
    in the prefix cache. With one: a composed context of ``tokens`` document tokens, all in ``tier``, or all
    `ABSENT`."""

    tokens: int
    ms: float
    cached: int = 0
    strategy: str = ""
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Costs:
    """A fitted model; ``error`` is its mean relative error over the samples."""

    exact: Coefficients
    composed: Mapping[str, Mapping[str, Coefficients]]
    error: float
    model: str
    hardware: str
    date: str

    def exact_ms(self, tokens: int, cached: int = 0) -> float:
        """Cost of a prompt whose first ``cached`` tokens are in the exact prefix cache."""
        return _dot(self.exact, _exact_terms(tokens, cached))

    def composed_ms(self, strategy: str, documents: Sequence[tuple[int, str]]) -> float:
        """Cost of a composed context of (tokens, tier) documents; infinite for an unmeasured strategy or
        tier."""
        tiers = self.composed.get(strategy)
        if tiers is not None and REMOTE not in tiers:
            documents = [(tokens, ABSENT if tier == REMOTE else tier) for tokens, tier in documents]
        total = sum(tokens for tokens, _ in documents)
        if tiers is None or not total:
            return math.inf
        spent = 0.0
        for tier in {tier for _, tier in documents}:
            share = sum(tokens for tokens, other in documents if other == tier) / total
            known = tiers.get("device" if tier == ABSENT else tier)
            spent += math.inf if known is None else share * _dot(known, _composed_terms(total))
        absent = [tokens for tokens, tier in documents if tier == ABSENT]
        if not absent:
            return spent
        if (cold := tiers.get(ABSENT)) is not None:
            return spent + _dot(cold, _composed_terms(sum(absent)))
        return spent + sum(map(self.exact_ms, absent))


def fit(samples: Iterable[CostSample], *, model: str, hardware: str, date: str) -> Costs:
    """Fit a model. Raises InvalidRequest for fewer than three exact samples."""
    samples = list(samples)
    exact = [sample for sample in samples if not sample.strategy]
    if len(exact) < 3:
        raise InvalidRequest(
            f"{len(exact)} measurements of exact prefill are too few to fit a cost model.",
            hint="Measure at three lengths.",
        )
    exact_fit = _fitted([_exact_terms(s.tokens, s.cached) for s in exact], exact)
    composed: dict[str, dict[str, Coefficients]] = {}
    for strategy, tier in dict.fromkeys((s.strategy, s.tier) for s in samples if s.strategy):
        group = [s for s in samples if (s.strategy, s.tier) == (strategy, tier)]
        if tier != ABSENT:
            composed.setdefault(strategy, {})[tier] = _fitted(
                [_composed_terms(s.tokens) for s in group], group
            )
    for strategy, tiers in composed.items():
        group = [s for s in samples if (s.strategy, s.tier) == (strategy, ABSENT)]
        if group and (device := tiers.get("device")) is not None:
            terms = [_composed_terms(s.tokens) for s in group]
            extra = [
                replace(s, ms=max(s.ms - _dot(device, own), 0.01 * s.ms))
                for s, own in zip(group, terms, strict=True)
            ]
            tiers[ABSENT] = _fitted(terms, extra)
    costs = Costs(exact_fit, composed, 0.0, model, hardware, date)
    errors = [abs(_predicted(costs, sample) / sample.ms - 1) for sample in samples]
    return replace(costs, error=round(sum(errors) / len(errors), 4))


def _predicted(costs: Costs, sample: CostSample) -> float:
    if not sample.strategy:
        return costs.exact_ms(sample.tokens, sample.cached)
    return costs.composed_ms(sample.strategy, [(sample.tokens, sample.tier)])


def _fitted(terms: Sequence[Coefficients], samples: Sequence[CostSample]) -> Coefficients:
    """Solve non-negative least squares of the relative error: each row is divided by its measurement."""
    import numpy as np
    from scipy.optimize import nnls

    measured = np.array([sample.ms for sample in samples])
    rows = np.array(terms) / measured[:, None]
    scale = rows.max(axis=0)  # squared tokens are millions of times larger than 1
    scale[scale == 0] = 1
    solution, _ = nnls(rows / scale, np.ones(len(samples)))
    a, b, c = (solution / scale).tolist()
    return (a, b, c)


def _exact_terms(tokens: int, cached: int) -> Coefficients:
    return (1.0, float(tokens - cached), float(tokens**2 - cached**2))


def _composed_terms(tokens: int) -> Coefficients:
    return (1.0, float(tokens), float(tokens**2))


def _dot(coefficients: Coefficients, terms: Coefficients) -> float:
    return sum(a * b for a, b in zip(coefficients, terms, strict=True))


def costs_here(place: Path, fingerprint: str, device: str) -> Costs | None:
    """Load a model's costs for an engine of this ``device``; None if there are none, or those of other
    hardware. Raises InvalidRequest for a file that is no cost profile."""
    found = COSTS.load(place, fingerprint)
    return None if found is None or is_elsewhere(found.hardware, device) else found


def add_costs(place: Path, fingerprint: str, device: str, found: Costs) -> None:
    """Write a model's costs, beside what is known by then of other strategies on this hardware. ``device`` as
    in `costs_here`. Raises InvalidRequest for a file that is no cost profile."""

    def added(known: Costs | None) -> Costs:
        if known is None or is_elsewhere(known.hardware, device):
            return found
        return replace(found, composed={**known.composed, **found.composed})

    COSTS.revise(place, fingerprint, added)


COSTS: ProfileFile[Costs] = ProfileFile(VERSION, "cost profile", "ragserve calibrate", Costs)
