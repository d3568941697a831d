"""From the rows of a comparison to a verdict on each strategy."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ragserve.config import Settings
from ragserve.engine.base import EngineInfo
from ragserve.profiles import gate
from ragserve.profiles.bounds import (
    answer_figures,
    interval,
    loses_at_all_times,
    margin_at_all_times,
)
from ragserve.profiles.figures import MARGIN, MIN_QUESTIONS, Figures
from ragserve.strategy_spec import FULL
from ragserve.verification.course import full_ms
from ragserve.verification.report import environment, measured_on, percentile
from ragserve.verification.tuned_queries import TunedQueries

FOLDER = "tune"  # in the data folder: rows of all runs
_FORM = 2  # of rows: those of an earlier one have no references
_FEWEST = 8  # questions, before the distribution of their losses refuses
_FACTORS = (1.1, 1.25, 1.5, 2, 3, 5, 10, 20)

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``undecided``: too few questions show whether it loses too much; ``passed over``: it was compared on
    the first part of the probes only, and another was picked. ``figures`` of the probes that decide, for what
    was passed over of those that it has. ``needed``: about how many would verify it, if the others go like
    these; None if unknown. ``score``: mean and 95 % interval over all its probes, percent. ``ttft_ms`` and
    ``full_ms``: medians to the first token, the strategy's and full's."""

    label: str
    decision: Literal["verified", "refused", "undecided", "passed over"]
    why: str
    figures: Figures
    ttft_ms: float | None
    needed: int | None = None
    score: tuple[float, float, float] | None = None
    full_ms: float | None = None

    @property
    def line(self) -> str:
        """The decision and its reason, for a table."""
        if self.decision == "verified":
            return self.why
        if self.decision == "refused":
            return f"refused because {self.why}"
        if self.decision == "passed over":
            return f"passed over: {self.why}"
        more = "" if self.needed is None else f"; about {self.needed} questions would verify it"
        return f"undecided: {self.why}{more}"


def verdicts(
    labels: Sequence[str], rows: Rows, *, margin: float = MARGIN, project: bool = True, ended: bool = True
) -> list[Verdict]:
    """Judge the strategies that have rows; the options are those of `verdict`."""
    found = [verdict(label, rows, margin=margin, project=project, ended=ended) for label in labels]
    return [one for one in found if one is not None]


def verdict(
    label: str, rows: Rows, *, margin: float = MARGIN, project: bool = True, ended: bool = True
) -> Verdict | None:
    """Judge a strategy by its rows; None without any. With ``project``, find out how many are needed.

    What verifies are the rows of the second part (`ragserve.verification.course`) and those without a part. A
    strategy is refused when its losses show, at 95 %, that it loses more than the ``margin``, and, once the
    comparison has ``ended``, when too many of `MIN_QUESTIONS` or more failed: fewer, like the mean of a few
    losses, show it by chance."""
    every = [row for row in rows if row["strategy"] == label]
    own = [row for row in every if row.get("part") != "pick"]
    if not every:
        return None
    ttft = [row["ttft_ms"] for row in every if not row["error"] and row["ttft_ms"] is not None]
    about: dict[str, Any] = {"ttft_ms": percentile(ttft, 50) if ttft else None, "score": _score(every)}
    about["full_ms"] = full_ms(rows)
    if not own:
        figures = figures_of(every)
        return Verdict(label, "passed over", figures.loss, figures, **about)
    earlier = losses_of([row for row in every if row.get("part") == "pick"])
    figures = figures_of(own, earlier)
    why = figures.shortfall(margin)
    if why is None:
        return Verdict(label, "verified", figures.basis(margin), figures, **about)
    losses = losses_of(own)
    fails = figures.failing and figures.n >= MIN_QUESTIONS and ended
    if fails or (len(losses) >= _FEWEST and loses_at_all_times(losses, margin / 100)):
        return Verdict(label, "refused", why, figures, **about)
    count = needed(own, margin, earlier) if project else None
    return Verdict(label, "undecided", why, figures, needed=count, **about)


def state_name(info: EngineInfo, queries: TunedQueries, questions: str | None) -> str:
    """Name the folder of rows that may stand in one table: one model, precision, prefix of documents and way
    to ask, and sparse attention if there is any. Rows that depend on samkv's profile say on which."""
    digest = "" if questions is None else hashlib.sha256(Path(questions).read_bytes()).hexdigest()
    asked = [_FORM, queries.retriever, queries.max_new_tokens]
    sparse = [info.sparse] if info.sparse else []
    text = json.dumps([info.fingerprint, info.dtype, info.prefix, *asked, digest, *sparse])
    return f"{queries.namespace}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def record_verdicts(
    settings: Settings,
    info: EngineInfo,
    queries: TunedQueries,
    verdicts: Sequence[Verdict],
    *,
    replaces: Collection[str] = (),
) -> list[str]:
    """Write what is decided to the gate's record in the data folder. Something undecided leaves what was
    recorded before, and so does what fewer questions decide about the same documents, but for strategies
    that it ``replaces`` in any case. Return those whose record stays by more questions.

    Raises InvalidRequest for a foreign file."""
    entries = {
        one.label: gate.Entry(
            {
                gate.set_of(queries.namespace, queries.retriever): replace(
                    one.figures,
                    retriever=queries.retriever,
                    made_at=queries.made_at,
                    version=queries.version,
                    ttft_ms=one.ttft_ms,
                    full_ttft_ms=one.full_ms,
                )
            },
            **measured_on(settings.model),
            dtype=info.dtype,
            versions=environment()["versions"],
            samkv=info.samkv,
            prefix=info.prefix,
            sparse=info.sparse,
        )
        for one in verdicts
        if one.decision in ("verified", "refused")
    }
    if not entries:
        return []
    place, kept = settings.data_dir / gate.FILE_NAME, entries.keys() - set(replaces)
    return gate.record(place, info.fingerprint, entries, keep_sets=True, keep_longer=kept)


def figures_of(rows: Rows, earlier: Sequence[float] = ()) -> Figures:
    """Figures without labels: of closeness to full, and by references. ``earlier`` losses as in
    `margin_at_all_times`."""
    answered = [row for row in rows if not row["error"]]
    kls = [row["kl"] for row in answered if row.get("kl") is not None]
    tokens = sum(row["document_tokens"] for row in answered)
    losses, scores = losses_of(rows), _scores(rows)
    return Figures(
        n=len(rows),
        f1=None,
        f1_vs_full=None,
        kl=float(f"{math.fsum(kls) / len(kls):.3g}") if kls else None,
        kept=_percent(answered, "kept", tokens),
        recomputed=_percent(answered, "recomputed", tokens),
        fallbacks=sum(bool(row["fallback"]) for row in answered),
        failed=len(rows) - len(answered),
        score=_mean(scores),
        score_vs_full=_mean([-loss for loss in losses]),
        references=len(losses),
        margin=round(100 * margin_at_all_times(losses, earlier), 2),
        different=_share(answered, "different"),
        unsupported=_share(answered, "unsupported"),
        **answer_figures(answered, growing=True),
    )


def losses_of(rows: Rows) -> list[float]:
    """What answers lose against full's by their references, -1 to 1."""
    return [row["full_score"] - row["score"] for row in rows if row.get("score") is not None]


def needed(rows: Rows, margin: float = MARGIN, earlier: Sequence[float] = ()) -> int | None:
    """About how many questions like these a verification takes; None for more than twenty times as many."""
    for factor in _FACTORS:
        count = math.ceil(factor * len(rows))
        repeated = [rows[number % len(rows)] for number in range(count)]
        if figures_of(repeated, earlier).shortfall(margin) is None:
            return count
    return None


def full_figures(rows: Rows) -> dict[str, Any]:
    """Full prefill's own score, mean and 95 % interval in percent, and median ms to the first token."""
    own = [row for row in rows if row["strategy"] == FULL.label and not row["error"]]
    return {"score": _score(own), "ttft_ms": full_ms(own), "probes": len(_scores(own))}


def _scores(rows: Rows) -> list[float]:
    return [row["score"] for row in rows if row.get("score") is not None]


def _score(rows: Rows) -> tuple[float, float, float] | None:
    scores = _scores(rows)
    if not scores:
        return None
    low, high = interval(scores)
    return round(100 * math.fsum(scores) / len(scores), 1), round(100 * low, 1), round(100 * high, 1)


def _mean(shares: Sequence[float]) -> float | None:
    return round(100 * math.fsum(shares) / len(shares), 2) if shares else None


def _share(rows: Rows, name: str) -> float | None:
    """In percent; None unless all rows have it, which those of an earlier version may not."""
    found = [float(row[name]) for row in rows if row.get(name) is not None]
    return _mean(found) if len(found) == len(rows) else None


def _percent(rows: Rows, name: str, tokens: int) -> float | None:
    return round(100 * sum(row[name] for row in rows) / tokens, 2) if tokens else None
