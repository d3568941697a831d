"""Find a model's profile of strategy `samkv`: its stable layers and retrieval heads.

No data is needed: probes (module `probes`) are texts in which the place of every answer is known. What
counts is recall: the share of the tokens an answer needs that a selection keeps. A built-in default stays
unless something beats it by more than chance.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import Settings
from ragserve.engine.local import LocalEngine
from ragserve.errors import InvalidRequest
from ragserve.profiles.bounds import better
from ragserve.profiles.samkv import SAMKV, SamkvProfile, place_of
from ragserve.verification.calibration.probes import DOCUMENT_TOKENS, Probe, make
from ragserve.verification.calibration.signal_weights import LearnedWeights
from ragserve.verification.report import environment, measured_on

_RESERVED_TOKENS = 256  # of a prompt: system text, question, document headers


@dataclass(frozen=True, slots=True)
class ProbeSchedule:
    """``sets`` of up to ``documents`` documents, with ``questions`` of each kind."""

    sets: int = 4
    documents: int = 8
    questions: int = 6
    seed: int = 0

    def probes(self, builder: PromptBuilder, max_prompt_tokens: int) -> list[Probe]:
        """Make the probes. Raises InvalidRequest if fewer than three documents fit into a prompt."""
        documents = min(self.documents, (max_prompt_tokens - _RESERVED_TOKENS) // (DOCUMENT_TOKENS + 64))
        if documents < 3:
            raise InvalidRequest(
                f"Prompts of {max_prompt_tokens} tokens are too short to find a samkv profile.",
                hint="Raise --context-length or --max-total-tokens.",
            )
        return [
            make(builder, documents=documents, questions=self.questions, seed=self.seed + i)
            for i in range(self.sets)
        ]


@dataclass(frozen=True, slots=True)
class FoundProfile:
    """``stable`` layers and retrieval ``heads``, see `ragserve.profiles.samkv`; ``figures``: what was
    measured."""

    stable: list[int]
    heads: list[list[int]]
    figures: dict[str, Any]


async def find(engine: LocalEngine, probes: Sequence[Probe], report: Callable[[str], None]) -> FoundProfile:
    """Measure on a running engine; ``report`` gets a line for each step."""
    surveys = []
    for number, probe in enumerate(probes, 1):
        surveys.append(await engine.control("probe", **asdict(probe)))
        documents = len(probe.spans) - 1
        report(f"set {number} of {len(probes)}: {documents} documents, {len(probe.ids)} tokens read")
    default = surveys[0]["built_in"]
    rows = [row for survey in surveys for row in survey["stable"]]
    stability = [statistics.fmean(values) for values in zip(*rows, strict=True)]
    stable = stable_of(stability) or list(default["stable"])
    by_head = [row for survey in surveys for row in survey["heads"]]
    heads = heads_of(by_head, default["heads"])
    report(f"stable layers {_list(stable)}; retrieval heads {_heads(heads)}")
    proportions: dict[str, list[dict[str, Any]]] = {}
    for number, probe in enumerate(probes, 1):
        found = await engine.control("probe", **asdict(probe), stable=stable)
        for name, row in found["proportion"].items():
            proportions.setdefault(name, []).append(row)
        report(f"set {number} of {len(probes)}: both choices of stable layers tried")
    recalls = {name: [value for row in rows for value in row["recall"]] for name, rows in proportions.items()}
    if better(recalls["built_in"], recalls["found"]):
        report("P over the built-in stable layers finds more: they stay")
        stable = list(default["stable"])
    figures = {
        "stability": [round(value, 3) for value in stability],
        "built_in": default,
        "heads": _best_heads(by_head),
        "proportion": {name: _proportion(rows) for name, rows in proportions.items()},
    }
    return FoundProfile(stable, heads, figures)


async def find_and_save(
    settings: Settings,
    engine: LocalEngine,
    schedule: ProbeSchedule,
    report: Callable[[str], None],
    learned: LearnedWeights | None = None,
) -> tuple[FoundProfile, Path]:
    """Find the profile of the engine's model and write it where an engine with these settings reads it, with
    the weights of signals that were ``learned``.

    Raises InvalidRequest for a model whose contexts cannot be composed."""
    info = engine.info
    if info.only_exact:
        raise InvalidRequest(f"There is no samkv for this model: {info.only_exact}.")
    probes = schedule.probes(PromptBuilder.load(info.tokenizer), info.max_prompt_tokens)
    found = await find(engine, probes, report)
    profile = SamkvProfile(
        found.stable,
        found.heads,
        selection="",  # the built-in ones
        options={"sentences": {"experimental": learned.options}} if learned and learned.options else {},
        dtype=info.dtype,
        versions=environment()["versions"],
        **measured_on(settings.model),
        probes={
            "sets": schedule.sets,
            "seed": schedule.seed,
            "documents": len(probes[0].spans) - 1,
            "tokens": len(probes[0].ids),
            "questions": sum(len(probe.questions) for probe in probes),
        },
        figures=found.figures | ({"signals": learned.figures} if learned else {}),
    )
    place = place_of(settings)
    SAMKV.save(place, info.fingerprint, profile)
    return found, place


def stable_of(stability: Sequence[float]) -> list[int]:
    """N* (SamKV, appendix A.2): the layers of the later half that are at least half as stable as the most
    stable one.

    Empty if no layer is stable."""
    later = range(len(stability) // 2, len(stability))
    highest = max((stability[layer] for layer in later), default=0.0)
    return [layer for layer in later if highest > 0 and stability[layer] >= highest / 2]


def heads_of(
    recall: Sequence[Sequence[Sequence[float]]], default: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Choose retrieval heads: those of the highest ``recall`` [questions][layers][heads], as many as
    ``default`` has.

    The default ones stay unless the chosen ones are better."""
    mean = _mean_by_head(recall)
    chosen = sorted(sorted(mean, key=lambda place: -mean[place])[: len(default)])

    def scores(heads: Sequence[Sequence[int]]) -> list[float]:
        return [statistics.fmean(r[layer][head] for layer, head in heads) for r in recall]

    return [list(head) for head in (chosen if better(scores(chosen), scores(default)) else default)]


def table(found: FoundProfile) -> list[str]:
    """Lines for people: what was chosen, beside the built-in defaults."""
    figures = found.figures
    default = figures["built_in"]
    return [
        f"stable layers {_list(found.stable)} (built in: {_list(default['stable'])}); sigmas by layer:",
        "  " + "  ".join(f"{layer}:{value:.2f}" for layer, value in enumerate(figures["stability"])),
        *(
            f"  with P over {name.replace('_', ' ')} layers: {row['kept']:.1%} kept, recall "
            f"{row['recall']:.1%}"
            for name, row in figures["proportion"].items()
        ),
        f"retrieval heads {_heads(found.heads)} (built in: {_heads(default['heads'])})",
    ]


def _proportion(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        "kept": round(statistics.fmean(row["kept"] for row in rows), 4),
        "recall": round(statistics.fmean(value for row in rows for value in row["recall"]), 4),
    }


def _mean_by_head(recall: Sequence[Sequence[Sequence[float]]]) -> dict[tuple[int, int], float]:
    """Mean over questions, by (layer, head)."""
    every = [(layer, head) for layer, row in enumerate(recall[0]) for head in range(len(row))]
    return {(layer, head): statistics.fmean(r[layer][head] for r in recall) for layer, head in every}


def _best_heads(recall: Sequence[Sequence[Sequence[float]]]) -> dict[str, float]:
    """The ten best as {"layer.head": recall}."""
    ranked = sorted(_mean_by_head(recall).items(), key=lambda item: -item[1])[:10]
    return {f"{layer}.{head}": round(value, 4) for (layer, head), value in ranked}


def _list(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def _heads(heads: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{layer}.{head}" for layer, head in heads)
