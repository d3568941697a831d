"""Guards: what an adapted model must not lose, measured on held-out questions before and after.

A few answers change with any training, for the better as for the worse. So a loss counts where it is shown:
where the 95 % lower bound of the mean difference, question by question, is above what is allowed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ragserve.adapt import greedy
from ragserve.adapt.packing import TrainingSequence, in_packs
from ragserve.adapt.training_rows import LEAST_HELD_OUT
from ragserve.errors import InvalidRequest
from ragserve.profiles.bounds import upper_bound
from ragserve.verification.metrics import contains_answer, is_refusal, token_f1

if TYPE_CHECKING:
    from ragserve.adapt.low_rank import AdaptedModel
    from ragserve.adapt.sample_mix import SampleMix
    from ragserve.adapt.training_rows import TrainingPassage, TrainingRow

LOST_F1 = 1.0  # points of F1 of whole prompts that may be shown to be lost
LOST_REFUSALS = 2.0  # points
PERPLEXITY = 1.01  # times the base's; both read the same tokens, so that chance adds little
_ROUNDING = 1e-6
_REFERENCE_TOKENS = 24
_TEXTS = 64  # held-out passages in the perplexity
_TEXT_TOKENS = 512  # of each
_ROWS = 512  # tokens whose logits are in memory at once


@dataclass(slots=True)
class Measured:
    """By held-out question: F1 in points of whole prompts and of composed ones with nothing recomputed, whose
    reference is known, and whether prompts without the passages that answer were refused. ``loss``: nats a
    token of general text, ``tokens`` of them."""

    whole: list[float] = field(default_factory=list)
    composed: list[float] = field(default_factory=list)
    refused: list[bool] = field(default_factory=list)
    loss: float = math.nan
    tokens: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    def row(self) -> dict[str, Any]:
        """The figures of a table, rounded."""
        return {
            "whole_f1": round(statistics.fmean(self.whole), 2),
            "composed_f1": round(statistics.fmean(self.composed), 2),
            "questions": len(self.whole),
            "refused_percent": round(100 * statistics.fmean(self.refused), 1) if self.refused else None,
            "unanswerable": len(self.refused),
            "perplexity": round(self.perplexity, 3),
            "text_tokens": self.tokens,
        }


def references(
    model: AdaptedModel,
    mix: SampleMix,
    rows: Sequence[TrainingRow],
    on_progress: Callable[[str], None] = lambda what: None,
) -> list[tuple[str, ...]]:
    """What a right answer says, by row: the row's answer, or else the base's over the passages that answer,
    alone; empty where neither is known, and where it is not in what fits into the prompt. Raises
    InvalidRequest for fewer than `LEAST_HELD_OUT`, and where it does not fit for more than half."""
    asked = [n for n, row in enumerate(rows) if row.answer is None and row.gold]
    prompts = [mix.sequence(rows[n].question, [rows[n].passages[at] for at in rows[n].gold]) for n in asked]
    found: list[tuple[str, ...]] = [() if row.answer is None else (row.answer,) for row in rows]
    for n, ids in zip(asked, greedy.answers(model, prompts, _REFERENCE_TOKENS), strict=True):
        text = greedy.text_of(model, ids)
        found[n] = (text,) if text and not is_refusal(text, [" "]) else ()
    cut = [n for n, row in enumerate(rows) if not _shows(mix.context(row, n), row, found[n])]
    if 2 * len(cut) > len(rows):
        raise InvalidRequest(
            f"{len(cut)} of {len(rows)} held-out questions have passages that answer but do not fit.",
            hint="Give rows with shorter passages, or a larger --pack-tokens, with another --work.",
        )
    if cut:
        on_progress(f"{len(cut)} of {len(rows)} are not measured: the passages that answer do not fit")
        found = [() if n in cut else each for n, each in enumerate(found)]
    if sum(map(bool, found)) < LEAST_HELD_OUT:
        raise InvalidRequest(
            f"Only {sum(map(bool, found))} of {len(rows)} held-out questions have an answer that is known; "
            f"{LEAST_HELD_OUT} are needed to see that the model stays as good.",
            hint="Give rows with an `answer`, or with `gold` passages, or more of them.",
        )
    return found


def _shows(context: Sequence[TrainingPassage], row: TrainingRow, answers: Sequence[str]) -> bool:
    """Whether a prompt's passages have all that answers, or one of the answers."""
    whole = row.gold_texts <= {each.text for each in context}
    return whole or contains_answer(" ".join(f"{each.title} {each.text}" for each in context), answers)


def measure(
    model: AdaptedModel,
    mix: SampleMix,
    rows: Sequence[TrainingRow],
    wanted: Sequence[tuple[str, ...]],
    general: Sequence[str],
    *,
    tokens: int,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Measured:
    """Measure a model. ``wanted``: `references`; ``general``: texts for the perplexity, beside held-out
    passages; ``tokens`` of an answer."""
    found = Measured()
    known = [(n, row) for n, row in enumerate(rows) if wanted[n]]
    for name, composed in (("whole", False), ("composed", True)):
        on_progress(f"{name} prompts")
        prompts = [mix.sequence(row.question, mix.context(row, n), composed=composed) for n, row in known]
        said = _said(model, prompts, tokens)
        scores = [100 * token_f1(text, wanted[n]) for (n, _), text in zip(known, said, strict=True)]
        setattr(found, name, scores)
    on_progress("prompts without the answer")
    without = [
        mix.sequence(row.question, context)
        for n, row in enumerate(rows)
        if row.gold and (context := mix.context(row, n, without_gold=True))
    ]
    found.refused = [is_refusal(text, [" "]) for text in _said(model, without, tokens)]
    on_progress("general text")
    texts = [*general, *(f"{each.title}\n\n{each.text}".strip() for row in rows for each in row.passages)]
    found.loss, found.tokens = _loss(model, list(dict.fromkeys(texts))[: len(general) + _TEXTS])
    return found


@dataclass(frozen=True, slots=True)
class Loss:
    """A mean loss over ``n`` questions in points, and its one-sided 95 % bounds."""

    points: float
    at_least: float
    at_most: float
    n: int

    def row(self) -> dict[str, float]:
        """The figures of a table, rounded."""
        return {name: round(value, 2) for name, value in asdict(self).items()}


def lost(before: Sequence[float], after: Sequence[float]) -> Loss:
    """What was lost of the same questions' scores, 0 to 100. The bounds are those of the gate: Student's t
    over the questions and one more, whose loss or gain is the largest there can be."""
    losses = [(own - new) / 100 for own, new in zip(before, after, strict=True)]
    low, high = -upper_bound([-each for each in losses], 1.0), upper_bound(losses, 1.0)
    return Loss(100 * statistics.fmean(losses), max(100 * low, -100.0), min(100 * high, 100.0), len(losses))


def losses(before: Measured, after: Measured) -> dict[str, dict[str, float] | None]:
    """What whole prompts lose of F1, and prompts without an answer of refusals; None where there are none."""
    return {
        "whole_f1": lost(before.whole, after.whole).row(),
        "refused": _fewer(before, after).row() if before.refused else None,
    }


def _fewer(before: Measured, after: Measured) -> Loss:
    return lost(*([100.0 * each for each in one.refused] for one in (before, after)))


def failures(before: Measured, after: Measured) -> list[str]:
    """A sentence for each guard that fails."""
    found = []
    of_f1 = lost(before.whole, after.whole)
    if not of_f1.at_least <= LOST_F1 + _ROUNDING:
        found.append(
            f"whole prompts lose {of_f1.points:.1f} points of F1 (n {of_f1.n}, at 95 % at least "
            f"{of_f1.at_least:.1f}; allowed {LOST_F1:g})"
        )
    ratio = after.perplexity / before.perplexity
    if not ratio <= PERPLEXITY + _ROUNDING:
        found.append(
            f"perplexity on {after.tokens:,} tokens of text rises by {100 * (ratio - 1):.1f} % "
            f"(allowed {100 * (PERPLEXITY - 1):.0f} %)"
        )
    if before.refused:
        fewer = _fewer(before, after)
        if not fewer.at_least <= LOST_REFUSALS + _ROUNDING:
            found.append(
                f"questions without an answer are refused less often by {fewer.points:.1f} points (n "
                f"{fewer.n}, at 95 % at least {fewer.at_least:.1f}; allowed {LOST_REFUSALS:g})"
            )
    return found


def recovered(before: Measured, after: Measured) -> float | None:
    """The share of what composed prompts lost that the adapted model gets back; None where they lost less
    than a point."""
    lost = statistics.fmean(before.whole) - statistics.fmean(before.composed)
    gained = statistics.fmean(after.composed) - statistics.fmean(before.composed)
    return round(gained / lost, 3) if lost >= 1 else None


def _said(model: AdaptedModel, prompts: Sequence[TrainingSequence], tokens: int) -> list[str]:
    return [greedy.text_of(model, ids) for ids in greedy.answers(model, prompts, tokens)]


def _loss(model: AdaptedModel, texts: Sequence[str]) -> tuple[float, int]:
    """Mean negative log-likelihood a token, and the tokens."""
    import torch

    ids = [model.tokenizer(text, add_special_tokens=False).input_ids[:_TEXT_TOKENS] for text in texts]
    sequences = [TrainingSequence(each, rows=range(len(each) - 1)) for each in ids if len(each) > 1]
    total, count = 0.0, 0
    with torch.inference_mode():
        for part in in_packs(sequences, model.room):
            pack = model.pack(part)
            hidden, *_ = model.run(pack)
            for at in range(0, len(pack.targets), _ROWS):
                rows = pack.targets[at : at + _ROWS]
                wanted = torch.tensor([pack.ids[row + 1] for row in rows], device=model.device)
                logits = model.logits(hidden[rows])
                total += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
                count += len(rows)
    return total / count, count
