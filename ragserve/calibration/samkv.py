"""Find a model's profile of strategy `samkv`: stable layers, retrieval heads, and for each selection the best
way to score and ask.

No data is needed: probes (`ragserve.calibration.probes`) are texts in which the answers' places are known,
and what counts is the recall, the share of the needed tokens that a selection keeps, at several budgets. A
built-in default stays unless something is better by more than chance."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ragserve.answering.prompt import PromptBuilder
from ragserve.calibration.probes import DOCUMENT_TOKENS, KINDS, Probe, make
from ragserve.engine.local import LocalEngine
from ragserve.errors import InvalidRequest
from ragserve.strategy_spec import StrategySpec

BUDGETS = (0.05, 0.15, 0.3)  # shares of the document tokens
_MARGIN = 2.0  # standard errors by which a default must be beaten
_OVER = 1.02  # times its budget: what counts as kept within it
_WIDTH = 120  # columns of the longest options
_RESERVED_TOKENS = 256  # of a prompt: system text, question, document headers


@dataclass(frozen=True, slots=True)
class ProbeSchedule:
    """``sets`` of up to ``documents`` documents, with ``questions`` of each kind."""

    sets: int = 4
    documents: int = 8
    questions: int = 6
    seed: int = 0

    def probes(self, builder: PromptBuilder, max_prompt_tokens: int) -> list[Probe]:
        """Raises InvalidRequest where fewer than three documents fit into a prompt."""
        documents = min(self.documents, (max_prompt_tokens - _RESERVED_TOKENS) // (DOCUMENT_TOKENS + 64))
        if documents < 3:
            raise InvalidRequest(
                f"Prompts of {max_prompt_tokens} tokens are too short to find a samkv profile by.",
                hint="Raise --context-length or --max-total-tokens.",
            )
        return [
            make(builder, documents=documents, questions=self.questions, seed=self.seed + i)
            for i in range(self.sets)
        ]


@dataclass(slots=True)
class Candidate:
    """Options of samkv and what they keep: ``recall`` [questions][budgets], ``kept`` [sets][budgets], the
    share of all document tokens.
    """

    options: dict[str, Any]
    recall: list[list[float]] = field(default_factory=list)
    kept: list[list[float]] = field(default_factory=list)

    @property
    def selection(self) -> str:
        return str(self.options["selection"])

    def scores(self) -> list[float]:
        """Of each question: the mean recall over the budgets, 0 where it keeps more than it may."""
        kept = [statistics.fmean(shares) for shares in zip(*self.kept, strict=True)]
        within = [share <= _OVER * budget for share, budget in zip(kept, BUDGETS, strict=True)]
        return [
            statistics.fmean(r if ok else 0.0 for r, ok in zip(recalls, within, strict=True))
            for recalls in self.recall
        ]


@dataclass(frozen=True, slots=True)
class FoundProfile:
    """A profile's contents, see `ragserve.profiles.samkv`."""

    stable: list[int]
    heads: list[list[int]]
    selection: str
    options: dict[str, dict[str, Any]]
    figures: dict[str, Any]


async def find(engine: LocalEngine, probes: Sequence[Probe], report: Callable[[str], None]) -> FoundProfile:
    """Measure on a running engine. ``report`` gets a line for each step."""
    surveys = []
    for number, probe in enumerate(probes):
        surveys.append(await engine.control("probe", **_body(probe)))
        report(
            f"set {number + 1} of {len(probes)}: {len(probe.spans) - 1} documents, {len(probe.ids)} tokens read"
        )
    own = surveys[0]["built_in"]
    stability = _means([row for survey in surveys for row in survey["stable"]])
    stable = stable_of(stability) or list(own["stable"])
    by_head = [row for survey in surveys for row in survey["heads"]]
    heads = heads_of(by_head, own["heads"])
    report(f"stable layers {_list(stable)}; retrieval heads {_heads(heads)}")
    candidates: dict[str, Candidate] = {}
    proportions: dict[str, list[dict[str, Any]]] = {}
    for number, probe in enumerate(probes):
        found = await engine.control(
            "probe", **_body(probe), heads=heads, stable=stable, budgets=list(BUDGETS)
        )
        for row in found["rows"]:
            candidate = candidates.setdefault(json.dumps(row["options"]), Candidate(row["options"]))
            candidate.recall += row["recall"]
            candidate.kept.append(row["kept"])
        for name, row in found["proportion"].items():
            proportions.setdefault(name, []).append(row)
        report(f"set {number + 1} of {len(probes)}: {len(found['rows'])} ways to select tried")
    recalls = {name: [value for row in rows for value in row["recall"]] for name, rows in proportions.items()}
    if better(recalls["built_in"], recalls["found"]):
        report("P over the built-in stable layers finds more: they stay")
        stable = list(own["stable"])
    kinds = [question.kind for probe in probes for question in probe.questions]
    selection, options = best_options(list(candidates.values()))
    figures = {
        "stability": [round(value, 3) for value in stability],
        "built_in": own,
        "heads": _best_heads(by_head),
        "proportion": {name: _proportion(rows) for name, rows in proportions.items()},
        "selections": [_row(candidate, kinds) for candidate in candidates.values()],
    }
    return FoundProfile(stable, heads, selection, options, figures)


def stable_of(stability: Sequence[float]) -> list[int]:
    """N*: of the later half of the layers, as in the paper, those at least half as stable as the stablest;
    none where there is none.
    """
    later = range(len(stability) // 2, len(stability))
    most = max((stability[layer] for layer in later), default=0.0)
    return [layer for layer in later if most > 0 and stability[layer] >= most / 2]


def heads_of(recall: Sequence[Sequence[Sequence[float]]], own: Sequence[Sequence[int]]) -> list[list[int]]:
    """As many heads as the engine affords, those with the highest recall [questions][layers][heads]; its own
    where these are as good.
    """
    every = [(layer, head) for layer, row in enumerate(recall[0]) for head in range(len(row))]
    mean = {(layer, head): statistics.fmean(r[layer][head] for r in recall) for layer, head in every}
    chosen = sorted(sorted(every, key=lambda place: -mean[place])[: len(own)])

    def scores(heads: Sequence[Sequence[int]]) -> list[float]:
        return [statistics.fmean(r[layer][head] for layer, head in heads) for r in recall]

    return [list(head) for head in (chosen if better(scores(chosen), scores(own)) else own)]


def best_options(candidates: Sequence[Candidate]) -> tuple[str, dict[str, dict[str, Any]]]:
    """The selection to take, and of each selection its best `_per_selection` options. The first candidate of
    each is its default.

    Sentences are scored by words and attention, and again by attention alone: words find most of what a probe
    asks for, and options of attention would look alike."""
    chosen: dict[str, Candidate] = {}
    for name in dict.fromkeys(candidate.selection for candidate in candidates):
        group = [candidate for candidate in candidates if candidate.selection == name]
        by_options: dict[str, list[Candidate]] = {}
        for candidate in group:
            by_options.setdefault(json.dumps(_per_selection(candidate.options)), []).append(candidate)
        scores = [
            [statistics.fmean(parts) for parts in zip(*(c.scores() for c in same), strict=True)]
            for same in by_options.values()
        ]
        chosen[name] = list(by_options.values())[best(scores)][0]
    names = list(chosen)
    selection = names[best([chosen[name].scores() for name in names])]
    options = {name: _per_selection(candidate.options) for name, candidate in chosen.items()}
    return selection, {name: values for name, values in options.items() if values}


def best(scores: Sequence[Sequence[float]]) -> int:
    """Which of the candidates: the one with the highest mean score, or the first where that is not better by
    more than chance.
    """
    highest = max(range(len(scores)), key=lambda i: statistics.fmean(scores[i]))
    return highest if better(scores[highest], scores[0]) else 0


def better(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether ``one`` is higher by more than `_MARGIN` standard errors of the mean difference, question by
    question.
    """
    differences = [a - b for a, b in zip(one, other, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("inf")
    return statistics.fmean(differences) > max(_MARGIN * error, 1e-9)


def table(found: FoundProfile) -> list[str]:
    """Lines for people: what was chosen, and the recall of every candidate."""
    figures = found.figures
    lines = [
        f"stable layers {_list(found.stable)} (built in: {_list(figures['built_in']['stable'])}); sigmas by layer:"
    ]
    lines.append("  " + "  ".join(f"{layer}:{value:.2f}" for layer, value in enumerate(figures["stability"])))
    lines += [
        f"  with P over {name.replace('_', ' ')} layers: {row['kept']:.1%} kept, recall {row['recall']:.1%}"
        for name, row in figures["proportion"].items()
    ]
    lines.append(f"retrieval heads {_heads(found.heads)} (built in: {_heads(figures['built_in']['heads'])})")
    lines.append(
        f"{'recall at':<{_WIDTH}}"
        + "".join(f"{budget:>8.0%}" for budget in BUDGETS)
        + "".join(f"{kind:>10}" for kind in KINDS)
    )
    for row in sorted(figures["selections"], key=lambda row: -row["score"]):
        said = _written(row["options"])
        recalls = "".join(
            f"{r:>8.1%}" if k <= _OVER * b else f"{'-':>8}"
            for r, k, b in zip(row["recall"], row["kept"], BUDGETS, strict=True)
        )
        lines.append(f"{said:<{_WIDTH}}{recalls}" + "".join(f"{row['kinds'][kind]:>10.1%}" for kind in KINDS))
    chosen = [f"{name} with {_written(values)}" for name, values in found.options.items()]
    return [*lines, f"chosen: selection={found.selection}; " + "; ".join(chosen)]


def _per_selection(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a profile records for each selection."""
    found = {name: options[name] for name in ("score_positions",) if name in options}
    experimental = options.get("experimental", {})
    tuned = {name: experimental[name] for name in ("scoring", "question_query") if name in experimental}
    return found | ({"experimental": tuned} if tuned else {})


def _written(options: Mapping[str, Any]) -> str:
    return StrategySpec("samkv", options).label.partition(":")[2].replace("experimental.", "")


def _row(candidate: Candidate, kinds: Sequence[str]) -> dict[str, Any]:
    scores = candidate.scores()
    by_kind = {
        kind: statistics.fmean(s for s, k in zip(scores, kinds, strict=True) if k == kind)
        for kind in dict.fromkeys(kinds)
    }
    return {
        "options": candidate.options,
        "score": round(statistics.fmean(scores), 4),
        "recall": [round(value, 4) for value in _means(candidate.recall)],
        "kept": [round(value, 4) for value in _means(candidate.kept)],
        "kinds": {kind: round(value, 4) for kind, value in by_kind.items()},
    }


def _proportion(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        "kept": round(statistics.fmean(row["kept"] for row in rows), 4),
        "recall": round(statistics.fmean(value for row in rows for value in row["recall"]), 4),
    }


def _best_heads(recall: Sequence[Sequence[Sequence[float]]]) -> dict[str, float]:
    """The ten best, "layer.head": recall."""
    mean = {
        f"{layer}.{head}": statistics.fmean(r[layer][head] for r in recall)
        for layer, row in enumerate(recall[0])
        for head in range(len(row))
    }
    return {name: round(value, 4) for name, value in sorted(mean.items(), key=lambda item: -item[1])[:10]}


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*rows, strict=True)]


def _list(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def _heads(heads: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{layer}.{head}" for layer, head in heads)


def _body(probe: Probe) -> dict[str, Any]:
    return asdict(probe)
