"""Chooses whole sentences by the fused signals (docs/composed-contexts.md, `selection=sentences`)."""

from __future__ import annotations

import torch

from sglang_ext.context.selection import sentences
from sglang_ext.context.selection.samkv import Chosen, budget
from sglang_ext.context.selection.signals import Evidence, fused
from sglang_ext.request_options import SamKvOptions


def choose_sentences(evidence: Evidence) -> Chosen:
    """Choose the sentences that every layer keeps. All ranks choose the same."""
    options, sentence = evidence.options, evidence.sentence
    score = score_sentences(evidence)
    most = budget(options, evidence.blocks)
    if options.top_p is not None:
        count, reason = _by_weight(score, sentence, options, most)
    else:
        count, reason = most, "option min_tokens" if most == options.min_tokens else "option keep"
    return Chosen(evidence.blocks.first + sentences.take_best(score, sentence, count), reason=reason)


def score_sentences(evidence: Evidence) -> torch.Tensor:
    """f32 [sentences]: the score by which sentences are kept, the best first."""
    tuned = evidence.options.experimental
    score = sentences.penalize_length(fused(evidence), evidence.sentence, tuned.length_penalty)
    return sentences.lift_titles(score, evidence.sentence, evidence.first, tuned.title_weight)


def _by_weight(
    score: torch.Tensor, sentence: torch.Tensor, options: SamKvOptions, most: int
) -> tuple[int, str]:
    """How many tokens to keep, and why: the best sentences that hold `top_p` of the weight of all, between
    the floor and ``most``."""
    p = options.top_p or 1.0
    least = min(most, max(1, options.min_tokens, round(options.keep_least * len(sentence))))
    count = sentences.tokens_of_weight(score, sentence, p)
    if count < least:
        return least, f"the floor: fewer hold {p:g} of the weight"
    if count > most:
        return most, f"the ceiling: {count / len(sentence):.0%} would hold {p:g} of the weight"
    return count, f"they hold {p:g} of the weight"
