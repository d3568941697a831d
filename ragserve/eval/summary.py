"""Average an evaluation's rows: one line per set and strategy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.eval.margins import LEAST_MARGIN, margins
from ragserve.files import write_json
from ragserve.profiles.bounds import answer_figures, interval, upper_bound
from ragserve.verification import report
from ragserve.verification.report import percentile

if TYPE_CHECKING:
    from ragserve.eval.parallel import Plan

NOTE = (
    "em, f1: percent, SQuAD's normalisation. contains: answers with an accepted one as whole words; refused: "
    "that say there is none. full_misses: questions of which full has F1 0; of_these: those of them of which "
    "the strategy has more. f1_vs_full: points above full on the same questions; _95: paired interval, "
    "Student's t over the questions and one more at the far end. kl: KL(full || strategy) of the first "
    "answer token in nats over the whole vocabulary, mean and median; agrees: percent with the same most "
    "likely token. answer_kl, answer_agrees: the same a token, over the whole answer of full along which the "
    "strategy is led; answer_regret: by how many percent full finds the strategy's most likely token less "
    "likely than its own. ..._bound: 95 % confidence bound on the side of the loss, f1_loss in points below "
    "full. kept, recomputed: percent of the document tokens; from_host: percent of those read from caches. "
    "ttft: milliseconds, with documents of composed strategies in the tier that the head names. Pooled: all "
    "questions of all sets. margin: percent of what concat loses that is recovered, (f1 - concat) / (full - "
    "concat), over the questions of the sets where "
    f"full is at least {LEAST_MARGIN:g} points above concat; its interval is a paired bootstrap within sets."
)

# columns of the file only
UNPRINTED = (
    *("kl_p50", "agrees", "prompt_tokens", "documents_dropped", "fallbacks"),
    *("f1_loss_bound", "answer_kl", "answer_agrees", "answer_regret", "f1_vs_full_se"),
)


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make a line per (set, strategy), in order of first appearance. Failed questions count as wrong, and in
    no other mean."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["set"], row["strategy"]), []).append(row)
    full_f1 = _full_f1(itertools.chain(*groups.values()))
    return [
        {"set": name, "strategy": strategy, **_line(group, full_f1)}
        for (name, strategy), group in groups.items()
    ]


def pooled(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make a line per strategy over the questions of all sets, with the recovered margin."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["strategy"], []).append(row)
    full_f1, found = _full_f1(rows), margins(rows)
    return [
        {"sets": len({row["set"] for row in group}), "strategy": strategy, **_line(group, full_f1)}
        | {"margin": None, "margin_95": None, "margin_sets": None}
        | found.get(strategy, {})
        for strategy, group in groups.items()
    ]


def write(
    plan: Plan, rows: Sequence[Mapping[str, Any]], served: Mapping[str, Any], out: Path | None
) -> dict[str, Any]:
    """Print the tables of a run and write its report (see `ragserve.verification.report`); its ``pooled`` has
    a line per strategy over all sets. ``served`` as `parallel.run` returns it."""
    workload = {
        "model": Path(plan.settings.model).name,
        "device": served["engine"]["device"],
        "attention": served["engine"]["attention_backend"],
        "dtype": served["engine"].get("dtype", ""),
        "samkv profile": served["engine"].get("samkv", ""),
        "prefix": served["engine"].get("prefix", ""),
        **({"sparse attention": sparse} if (sparse := served["engine"].get("sparse")) else {}),
        "max_new_tokens": plan.max_new_tokens,
        "limit": plan.limit,
        "engines": plan.workers,
        "questions in flight each": plan.in_flight,
        "decoding": "greedy",
        "documents of composed strategies": plan.tier,
        **{name: value for name, value in _given(plan).items() if value is not None},
    }
    lines = summarise(rows)
    ran_on, together = served["environment"], pooled(rows)
    table = report.write("eval", workload, lines, out=None, ran_on=ran_on, shown=_shown(lines))
    report.write("eval, pooled", {}, together, out=None, note=NOTE, ran_on=ran_on, shown=_shown(together))
    table |= {"note": NOTE, "pooled": together}
    if out is not None:
        write_json(out, table)
        print(f"written: {out}")
    return table


def _given(plan: Plan) -> dict[str, Any]:
    own = {"benchmark": plan.benchmark, "half": plan.half}
    return own | {"system text": plan.settings.system_prompt}


def _shown(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns to print: those with a figure anywhere."""
    return [
        column
        for column in lines[0]
        if column not in UNPRINTED and any(line[column] is not None for line in lines)
    ]


def _full_f1(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    return {(row["set"], row["id"]): row["f1"] for row in rows if row["strategy"] == "full"}


def _line(group: Sequence[Mapping[str, Any]], full_f1: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    answered = [row for row in group if not row.get("error")]
    kls = [row["kl"] for row in answered if row["kl"] is not None]
    ttft = [row["ttft_ms"] for row in answered]
    agrees = [float(row["agrees"]) for row in answered if row["agrees"] is not None]
    beside = [(row["f1"], full_f1.get((row["set"], row["id"]))) for row in group]
    gains = [100 * (f1 - full) for f1, full in beside if full is not None]
    missed = [f1 > 0 for f1, full in beside if full == 0]
    tokens = sum(row["document_tokens"] for row in answered)
    return {
        "n": len(group),
        "em": _rounded(100 * _mean([row["em"] for row in group])),
        "f1": _rounded(100 * _mean([row["f1"] for row in group])),
        "contains": _share_of("contains", group),
        "refused": _share_of("refused", group),
        "full_misses": _rounded(100 * len(missed) / len(gains)) if gains else None,
        "of_these": _rounded(100 * _mean(missed)) if missed else None,
        "f1_vs_full": _rounded(_mean(gains)) if gains else None,
        "f1_vs_full_95": [_rounded(bound) for bound in interval(gains, -100.0, 100.0)] if gains else None,
        "f1_vs_full_se": _rounded(_standard_error(gains)) if len(gains) > 1 else None,
        "kl": float(f"{_mean(kls):.3g}") if kls else None,
        "kl_p50": float(f"{percentile(kls, 50):.3g}") if kls else None,
        "agrees": _rounded(100 * _mean(agrees)) if agrees else None,
        "f1_loss_bound": _rounded(upper_bound([-gain for gain in gains], 100.0)) if gains else None,
        **answer_figures(answered),
        "kept": _share(answered, "kept", tokens),
        "recomputed": _share(answered, "recomputed", tokens),
        "from_host": _from_host(answered),
        "ttft_ms": _rounded(_mean(ttft)) if ttft else None,
        "ttft_ms_p50": _rounded(percentile(ttft, 50)) if ttft else None,
        "prompt_tokens": round(_mean([row["prompt_tokens"] for row in answered]), 1) if answered else None,
        "documents_dropped": sum(row["documents_dropped"] for row in answered),
        "fallbacks": sum(bool(row["fallback"]) for row in answered),
        "failed": len(group) - len(answered),
    }


def _share_of(name: str, group: Sequence[Mapping[str, Any]]) -> float | None:
    """Percent of the rows; None of an earlier version's, which did not say."""
    if not any(name in row for row in group):
        return None
    return _rounded(100 * _mean([bool(row.get(name)) for row in group]))


def _from_host(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Percent of the tokens read from caches; None if none were."""
    tiers = [row.get("tiers", {}) for row in rows]
    every = sum(sum(each.values()) for each in tiers)
    return _rounded(100 * sum(each.get("host", 0) for each in tiers) / every) if every else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _standard_error(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _share(rows: Sequence[Mapping[str, Any]], name: str, tokens: int) -> float | None:
    return _rounded(100 * sum(row[name] for row in rows) / tokens) if tokens else None


def _rounded(value: float) -> float:
    return round(value, 2)
