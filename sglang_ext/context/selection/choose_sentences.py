"""Chooses whole sentences by the fused signals (docs/composed-contexts.md, `selection=sentences`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_ext.context.selection import sentences
from sglang_ext.context.selection.samkv import Chosen, budget
from sglang_ext.context.selection.sentences import Sentences
from sglang_ext.context.selection.signals import Evidence, Scores, fused, scored
from sglang_ext.context.selection.signals.attention import Attention
from sglang_ext.wire.request_options import SamKvOptions


def choose_sentences(evidence: Evidence) -> Chosen:
    """Choose the sentences that every layer keeps. All ranks choose the same."""
    return begin_sentences(evidence)()


def begin_sentences(evidence: Evidence, attention: Attention | None = None) -> Callable[[], Chosen]:
    """Begin `choose_sentences` without waiting for the device, and return what ends it. ``attention``: what
    ends that signal, if it has begun (`begin_attention`)."""
    scores = scored(evidence, () if attention is None else ("attention",))

    def end() -> Chosen:
        if attention is not None and "attention" in scores:
            scores["attention"] = attention()
        return _chosen(evidence, score_sentences(evidence, scores))

    return end


def _chosen(evidence: Evidence, score: torch.Tensor) -> Chosen:
    options = evidence.options
    most = budget(options, evidence.blocks)
    if options.top_p is not None:
        count, reason = _by_weight(score, evidence.sentences, options, most)
    else:
        count, reason = most, "option min_tokens" if most == options.min_tokens else "option keep"
    taken = sentences.take_best(score, evidence.sentences, count)
    return Chosen(evidence.blocks.first + taken, reason=reason)


def score_sentences(evidence: Evidence, scores: Scores | None = None) -> torch.Tensor:
    """f32 [S]: the score by which sentences are kept, the best first. ``scores``: the signals', if they have
    been made."""
    tuned = evidence.options.experimental
    score = sentences.penalize_length(fused(evidence, scores), evidence.sentences, tuned.length_penalty)
    return sentences.lift_titles(score, evidence.sentences, tuned.title_weight)


def _by_weight(score: torch.Tensor, given: Sentences, options: SamKvOptions, most: int) -> tuple[int, str]:
    """How many tokens to keep, and why: the best sentences that hold `top_p` of the weight of all, between
    the floor and ``most``."""
    p = options.top_p or 1.0
    least = min(most, max(1, options.min_tokens, round(options.keep_least * given.tokens)))
    count = sentences.tokens_of_weight(score, given, p)
    if count < least:
        return least, f"the floor: fewer hold {p:g} of the weight"
    if count > most:
        return most, f"the ceiling: {count / given.tokens:.0%} would hold {p:g} of the weight"
    return count, f"they hold {p:g} of the weight"
