"""From the rows of a comparison to a verdict on each strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ragserve.measuring.bounds import answer_figures
from ragserve.measuring.report import percentile
from ragserve.profiles.gate import MAX_ANSWER_KL, MAX_FALLBACKS, MIN_AGREEMENT, Figures

_ENOUGH = 20  # questions, before a mean beyond the limits refuses
_FACTORS = (1.25, 1.5, 2, 3, 5, 10, 20)
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``undecided``: the means are good, and too few questions show it. ``needed``: about how many would, if
    the others go like these; None if unknown."""

    label: str
    decision: Literal["verified", "refused", "undecided"]
    why: str
    figures: Figures
    ttft_ms: float | None
    needed: int | None = None

    @property
    def line(self) -> str:
        """The decision and its reason, for a table."""
        if self.decision == "verified":
            return "verified"
        if self.decision == "refused":
            return f"refused because {self.why}"
        more = "" if self.needed is None else f"; about {self.needed} questions would verify it"
        return f"undecided: {self.why}{more}"


def verdict(label: str, rows: Rows) -> Verdict | None:
    """Judge a strategy by its rows; None without any."""
    if not rows:
        return None
    figures = figures_of(rows)
    why = figures.shortfall()
    ttft = [row["ttft_ms"] for row in rows if not row["error"]]
    median = percentile(ttft, 50) if ttft else None
    if why is None:
        return Verdict(label, "verified", "", figures, median)
    failing = figures.failed or figures.fallbacks > MAX_FALLBACKS * figures.n
    bad = failing or not _means_pass(figures)
    if bad and figures.n >= _ENOUGH:
        return Verdict(label, "refused", why, figures, median)
    return Verdict(label, "undecided", why, figures, median, None if bad else needed(rows))


def figures_of(rows: Rows) -> Figures:
    """Figures without labels."""
    answered = [row for row in rows if not row["error"]]
    kls = [row["kl"] for row in answered]
    tokens = sum(row["document_tokens"] for row in answered)
    return Figures(
        n=len(rows),
        f1=None,
        f1_vs_full=None,
        kl=float(f"{math.fsum(kls) / len(kls):.3g}") if kls else None,
        kept=_percent(answered, "kept", tokens),
        recomputed=_percent(answered, "recomputed", tokens),
        fallbacks=sum(bool(row["fallback"]) for row in answered),
        failed=len(rows) - len(answered),
        **answer_figures(answered),
    )


def needed(rows: Rows) -> int | None:
    """About how many questions like these a verification takes; None for more than twenty times as many."""
    for factor in _FACTORS:
        count = math.ceil(factor * len(rows))
        if figures_of([rows[number % len(rows)] for number in range(count)]).shortfall() is None:
            return count
    return None


def _means_pass(figures: Figures) -> bool:
    close = figures.answer_kl is not None and figures.answer_kl <= MAX_ANSWER_KL
    return close and figures.answer_agrees is not None and figures.answer_agrees >= MIN_AGREEMENT


def _percent(rows: Rows, name: str, tokens: int) -> float | None:
    return round(100 * sum(row[name] for row in rows) / tokens, 2) if tokens else None
