"""From the rows of a comparison to a verdict on each strategy."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ragserve.config import Settings
from ragserve.engine.base import EngineInfo
from ragserve.profiles import gate, in_use
from ragserve.profiles.bounds import above_at_all_times, answer_figures, regret_of
from ragserve.profiles.gate import MAX_ANSWER_KL, MAX_FALLBACKS, MAX_REGRET, Figures
from ragserve.verification.comparison import TunedQueries
from ragserve.verification.report import environment, measured_on, percentile

FOLDER = "tune"  # in the data folder: rows of all runs
_ENOUGH = 20  # questions, before a mean beyond the limits refuses
_FEWEST = 8  # questions, before the distribution of their losses does
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


def verdicts(labels: Sequence[str], rows: Rows, *, project: bool = True, ended: bool = True) -> list[Verdict]:
    """Judge the strategies that have rows; the options are those of `verdict`."""
    found = [
        verdict(label, [r for r in rows if r["strategy"] == label], project=project, ended=ended)
        for label in labels
    ]
    return [one for one in found if one is not None]


def verdict(label: str, rows: Rows, *, project: bool = True, ended: bool = True) -> Verdict | None:
    """Judge a strategy by its rows; None without any. With ``project``, find out how many are needed.

    A strategy is refused when its losses show, at 95 %, that it is beyond the limits, and, once the
    comparison has ``ended``, when their mean is."""
    if not rows:
        return None
    figures = figures_of(rows)
    why = figures.shortfall()
    ttft = [row["ttft_ms"] for row in rows if not row["error"] and row["ttft_ms"] is not None]
    median = percentile(ttft, 50) if ttft else None
    if why is None:
        return Verdict(label, "verified", "", figures, median)
    failing = figures.failed or figures.fallbacks > MAX_FALLBACKS * figures.n
    bad = failing or not _means_pass(figures)
    refused = bad and figures.n >= _ENOUGH and ended
    if refused or (figures.n >= _FEWEST and _shown_beyond(rows)):
        return Verdict(label, "refused", why, figures, median)
    return Verdict(label, "undecided", why, figures, median, None if bad or not project else needed(rows))


def state_name(info: EngineInfo, queries: TunedQueries, questions: str | None) -> str:
    """Name the folder of rows that may stand in one table: one model, precision, profile and way to ask."""
    digest = "" if questions is None else hashlib.sha256(Path(questions).read_bytes()).hexdigest()
    asked = [queries.k, queries.retrieval, queries.max_new_tokens]
    text = json.dumps([info.fingerprint, info.dtype, info.samkv, info.prefix, *asked, digest])
    return f"{queries.namespace}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def record_verdicts(
    settings: Settings, info: EngineInfo, queries: TunedQueries, verdicts: Sequence[Verdict]
) -> None:
    """Write what is decided to the gate's record in the data folder, and forget what use has shown of it.
    Something undecided leaves what was recorded before.

    Raises InvalidRequest for a foreign file."""
    entries = {
        one.label: gate.Entry(
            {queries.set_name: one.figures},
            **measured_on(settings.model),
            dtype=info.dtype,
            versions=environment()["versions"],
            samkv=info.samkv,
            prefix=info.prefix,
        )
        for one in verdicts
        if one.decision != "undecided"
    }
    if entries:
        gate.record(settings.data_dir / gate.FILE_NAME, info.fingerprint, entries, keep_sets=True)
        in_use.clear(settings.data_dir / in_use.FILE_NAME, info.fingerprint, queries.namespace, list(entries))


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


def _shown_beyond(rows: Rows) -> bool:
    answered = [row for row in rows if not row["error"]]
    kls, regrets = [row["answer_kl"] for row in answered], [regret_of(row) for row in answered]
    return above_at_all_times(kls, MAX_ANSWER_KL) or above_at_all_times(regrets, MAX_REGRET / 100)


def _means_pass(figures: Figures) -> bool:
    close = figures.answer_kl is not None and figures.answer_kl <= MAX_ANSWER_KL
    return close and figures.answer_regret is not None and figures.answer_regret <= MAX_REGRET


def _percent(rows: Rows, name: str, tokens: int) -> float | None:
    return round(100 * sum(row[name] for row in rows) / tokens, 2) if tokens else None
