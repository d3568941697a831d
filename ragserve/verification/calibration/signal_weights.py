"""Learn how much each signal counts where `samkv` keeps sentences, on probes of a user's own passages.

What counts is the share of the tokens that answer which the engine's own choice keeps, mean over probes and
over some shares of the context kept. From the built-in weights on, weight moves from one signal to another,
in smaller and smaller steps, as long as more is kept. Half of the probes judge what was learned on the other
half, by documents. Learned weights are used only if they keep more, by more than chance."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import TYPE_CHECKING, Any

from ragserve.answering.prompt import Prompt, PromptBuilder, PromptDocument
from ragserve.errors import InvalidRequest
from ragserve.profiles.bounds import better
from ragserve.verification.calibration.passage_probes import PassageProbe, make_probes
from sglang_ext.wire.protocol import RetrievalScores
from sglang_ext.wire.request_options import SamKvExperiment, SamKvOptions

if TYPE_CHECKING:
    from ragserve.answering.sessions.sentence_choice import PromptSentences, SentenceChooser
    from ragserve.retrieval.embedder import AnyEmbedder
    from ragserve.verification.given_scores import GivenScores, TitledText

SHARES = (0.05, 0.1, 0.15, 0.25)
LEAST = 24  # probes
_FOLDS = 2
_STEPS = (0.2, 0.1, 0.05)  # of weight
Weights = dict[str, float]  # of each signal, 1 together


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """A probe's prompt, whose positions ``needed`` hold the answer, and what the signals read."""

    probe: PassageProbe
    prompt: Prompt
    scores: RetrievalScores | None
    needed: tuple[int, int]
    attended: list[float] | None = None


Case = tuple["PromptSentences", tuple[int, int]]
"""Sentences of a prompt, and the positions that hold the answer."""


@dataclass(frozen=True, slots=True)
class LearnedWeights:
    """``options`` for `SamKvExperiment`, empty where the built-in ones stay; ``figures``: what was
    measured."""

    options: dict[str, float]
    figures: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Lines for people."""
        held = self.figures["held out"]
        weights = ", ".join(f"{name} {weight:.2f}" for name, weight in self.figures["weights"].items())
        verdict = "used" if self.options else "not used: the built-in ones keep as much"
        return [
            f"weights of the signals, learned on {self.figures['probes']} probes: {weights}",
            f"  of what answers in other documents they keep {held['learned']:.1%}, the built-in ones "
            f"{held['fixed']:.1%}: {verdict}",
        ]


def contexts(
    passages: Sequence[TitledText],
    builder: PromptBuilder,
    embedder: AnyEmbedder,
    given: GivenScores,
    *,
    count: int,
    depth: int,
    seed: int = 0,
) -> list[ProbeContext]:
    """Put ``count`` probes among the ``depth`` passages that are nearest to their question; a probe's own
    takes the last place if it is not found."""
    found = []
    for probe in make_probes(passages, embedder, count, seed):
        shown = given.nearest(probe.question, depth)
        if probe.source not in shown:
            shown[-1] = probe.source
        documents = [PromptDocument("", passages[n].title, passages[n].text) for n in shown]
        prompt = builder.build(probe.question, documents, max_prompt_tokens=2**31)
        own = passages[probe.source]
        places = builder.token_starts(own.title, own.text, [probe.start, probe.end - 1])
        if places:
            start = prompt.spans[1 + shown.index(probe.source)].start
            needed = (start + places[0], start + places[-1] + 1)
            found.append(ProbeContext(probe, prompt, given.of(probe.question, prompt, shown), needed))
    return found


def learn(chooser: SentenceChooser, probes: Sequence[ProbeContext]) -> LearnedWeights:
    """Learn weights and judge them beside the built-in ones. Raises InvalidRequest for too few probes."""
    groups = sorted({each.probe.group for each in probes})
    if len(probes) < LEAST or len(groups) < _FOLDS:
        raise InvalidRequest(
            f"{len(probes)} probes of {len(groups)} documents are too few to learn weights from.",
            hint=f"Ingest more text: at least {LEAST} passages of several documents.",
        )
    cases = [(chooser.sentences(p.prompt, p.scores, p.attended), p.needed) for p in probes]
    fold_of = [groups.index(each.probe.group) % _FOLDS for each in probes]
    start = built_in(attention=probes[0].attended is not None)
    own, fixed = [], []
    for fold in range(_FOLDS):
        taught = [case for case, number in zip(cases, fold_of, strict=True) if number != fold]
        held = [case for case, number in zip(cases, fold_of, strict=True) if number == fold]
        own += kept(held, searched(taught, start))
        fixed += kept(held, start)
    weights = searched(cases, start)
    accepted = better(own, fixed)
    figures = {
        "probes": len(probes),
        "weights": {name: round(weight, 3) for name, weight in weights.items()},
        "held out": {"learned": round(statistics.fmean(own), 4), "fixed": round(statistics.fmean(fixed), 4)},
        "used": accepted,
    }
    return LearnedWeights(options_of(weights) if accepted else {}, figures)


def searched(cases: Sequence[Case], start: Mapping[str, float]) -> Weights:
    """The weights by which most is kept, looked for from ``start`` on."""
    best, most = dict(start), statistics.fmean(kept(cases, start))
    for step in _STEPS:
        moved = True
        while moved:
            moved = False
            for giver, taker in permutations(best, 2):
                amount = min(step, best[giver])
                tried = {**best, giver: best[giver] - amount, taker: best[taker] + amount}
                found = statistics.fmean(kept(cases, tried)) if amount > 0 else 0.0
                if found > most + 1e-9:
                    best, most, moved = tried, found, True
    return best


def options_of(weights: Mapping[str, float]) -> dict[str, float]:
    """The options that give the signals these weights. Without `attention` words have all of its weight."""
    retriever = weights["document"] + weights["sentence"]
    own = weights["words"] + weights.get("attention", 0.0)
    options = {"retrieval_weight": retriever / (retriever + own)}
    if retriever:
        options["document_weight"] = weights["document"] / retriever
    options["lexical_weight"] = weights["words"] / own if own else 1.0
    return {name: round(value, 3) for name, value in options.items()}


def built_in(*, attention: bool) -> Weights:
    """The built-in weights; without ``attention`` its weight is that of words."""
    tuned = SamKvExperiment()
    retriever, own = tuned.retrieval_weight, 1 - tuned.retrieval_weight
    words = own * tuned.lexical_weight if attention else own
    found = {
        "document": retriever * tuned.document_weight,
        "sentence": retriever * (1 - tuned.document_weight),
        "words": words,
    }
    return {**found, "attention": own - words} if attention else found


def kept(cases: Sequence[Case], weights: Mapping[str, float]) -> list[float]:
    """For each case the share of the needed tokens that is kept, mean over `SHARES`."""
    options = SamKvOptions.model_validate({"experimental": options_of(weights)})
    found = []
    for sentences, (first, last) in cases:
        every = sentences.positions(options, SHARES)
        shares = [sum(first <= place < last for place in places) / (last - first) for places in every]
        found.append(statistics.fmean(shares))
    return found
