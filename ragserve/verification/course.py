"""What a comparison asks next: all candidates on a first part of the probes, then those picked on others.

The best of many candidates on some probes looks better than it is. So the probes on which candidates are held
against each other say nothing of the verdict: what is picked there is verified on probes that come after."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ragserve.best_passages import NOT_COMPOSED
from ragserve.profiles.bounds import loses_at_all_times
from ragserve.profiles.gate import LEVEL
from ragserve.strategy_spec import FULL, parse

Part = Literal["pick", "verify"]
Rows = Sequence[Mapping[str, Any]]
PICK = 40  # probes of the first part, at most
_CLEAR, _SINCE = 16, 8  # probes after which it may end sooner, as the same was picked so many before
PICKED = 3  # candidates that are verified at a time
_FEWEST = 8  # probes, before a candidate is left out
_GAIN = 0.95  # of full's time to the first token: sooner


@dataclass(frozen=True, slots=True)
class Course:
    """The part of new questions, and the strategies to ask them under; none when nothing can change."""

    part: Part
    labels: list[str]


@dataclass(frozen=True, slots=True)
class Standing:
    """How a candidate stands on probes: paired losses against `full`, 1 for an answer lost; the mean score,
    and the median milliseconds to the first token, None where none was timed."""

    label: str
    losses: tuple[float, ...]
    score: float
    ttft_ms: float | None

    @property
    def composed(self) -> bool:
        return parse(self.label)[0].name not in NOT_COMPOSED


def standing(label: str, rows: Rows) -> Standing | None:
    """The standing by the rows of a strategy; None without scores."""
    own = [row for row in rows if row["strategy"] == label and not row["error"]]
    probes = [row for row in own if row.get("score") is not None]
    if not probes:
        return None
    losses = tuple(row["full_score"] - row["score"] for row in probes)
    times = [row["ttft_ms"] for row in own if row["ttft_ms"] is not None]
    score = math.fsum(row["score"] for row in probes) / len(probes)
    return Standing(label, losses, score, statistics.median(times) if times else None)


def _ms(found: Standing) -> float:
    return math.inf if found.ttft_ms is None else found.ttft_ms


def full_ms(rows: Rows) -> float | None:
    """Full's median milliseconds to the first token; None where none was timed."""
    times = [r["ttft_ms"] for r in rows if r["strategy"] == FULL.label and r.get("ttft_ms") is not None]
    return statistics.median(times) if times else None


def course(
    labels: Sequence[str],
    rows: Rows,
    *,
    margin: float,
    open_: Callable[[str], bool],
    verified: Callable[[str], bool] = lambda label: False,
    pick_time: Callable[[], bool] = lambda: True,
) -> Course:
    """Where a comparison of candidates goes on.

    ``margin``: points that a strategy may lose. ``open_`` tells of a candidate whether its verdict is still
    open, ``verified`` whether it is that: what is no sooner and no better than such a one can change nothing,
    and is asked no more. ``pick_time``: there is time left for the first part, which ends after `PICK`
    probes of every candidate, sooner where these no longer change what is picked, or when one of the
    candidates has been asked questions of the second."""
    pick = {row["id"] for row in rows if row["strategy"] == FULL.label and row.get("part") == "pick"}
    first = [row for row in rows if row["id"] in pick]  # rows by which one was verified alone among them
    if len(labels) > PICKED:
        left = survivors(labels, first, margin)
        probes = _probes(left, first)
        begun = any(row.get("part") == "verify" and row["strategy"] in labels for row in rows)
        picking = not begun and len(probes) < PICK and pick_time() and not _is_clear(labels, first, probes)
        if len(probes) < _FEWEST or picking:
            return Course("pick", left)
    chosen = picks([label for label in labels if open_(label)], first) if len(labels) > PICKED else labels
    done = [found for label in labels if verified(label) and (found := standing(label, first)) is not None]
    left = [label for label in chosen if open_(label) and not _idle(standing(label, first), done)]
    return Course("verify", left)


def _probes(labels: Sequence[str], rows: Rows) -> list[str]:
    """The probes that full has a score of and that the candidate with the fewest was asked, failures among
    them: the rows of an earlier run may be of other candidates. Without candidates all."""
    every = [row["id"] for row in rows if row["strategy"] == FULL.label and row.get("score") is not None]
    scored = set(every)
    asked = ([r["id"] for r in rows if r["strategy"] == label and r["id"] in scored] for label in labels)
    return min(asked, key=len, default=every)


def _is_clear(labels: Sequence[str], rows: Rows, probes: Sequence[str]) -> bool:
    """Whether the last of the probes have not changed what is picked."""
    if len(probes) < _CLEAR:
        return False
    late = {*probes[-_SINCE:]}
    return set(picks(labels, rows)) == set(picks(labels, [row for row in rows if row["id"] not in late]))


def _idle(found: Standing | None, done: Sequence[Standing]) -> bool:
    """Whether one that is verified is as soon and as good."""
    if found is None:
        return False
    others = [each for each in done if each.label != found.label]
    return any(_ms(each) <= _ms(found) and each.score >= found.score - LEVEL / 100 for each in others)


def survivors(labels: Sequence[str], rows: Rows, margin: float) -> list[str]:
    """The candidates that are not shown to lose more than the margin, and may be sooner than full."""
    whole, left = full_ms(rows), []
    for label in labels:
        found = standing(label, rows)
        if found is not None and len(found.losses) >= _FEWEST:
            late = whole is not None and found.ttft_ms is not None and found.ttft_ms > _GAIN * whole
            if late or loses_at_all_times(found.losses, margin / 100):
                continue
        left.append(label)
    return left


def picks(labels: Sequence[str], rows: Rows) -> list[str]:
    """The candidates to verify, by the first part: of those as good as the best the soonest, and the soonest
    of the other kind, exact or composed; the best; and of those no worse than full the one whose answers
    change least, which takes the fewest questions."""
    whole = full_ms(rows)
    known = [found for label in labels if (found := standing(label, rows)) is not None]
    known = [each for each in known if whole is None or each.ttft_ms is None or each.ttft_ms <= _GAIN * whole]
    if not known:
        return []
    best = max(known, key=lambda each: each.score)
    good = sorted(
        (each for each in known if each.score >= best.score - LEVEL / 100),
        key=_ms,
    )
    other = [each for each in good if each.composed != good[0].composed][:1]
    even = [each for each in known if math.fsum(each.losses) <= LEVEL / 100 * len(each.losses)]
    surest = sorted(even, key=lambda each: (math.fsum(loss**2 for loss in each.losses), _ms(each)))[:1]
    return list(dict.fromkeys(each.label for each in (good[0], *surest, *other, best)))[:PICKED]
