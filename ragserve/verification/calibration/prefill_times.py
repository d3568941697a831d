"""Measure from which prompt length on sparse prefill is faster than dense on this machine.

How many blocks a sparse prefill computes depends on what the model attends to, so prompts are text, the
documents of `ragserve.verification.calibration.probes`, and every point says the share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.base import Engine, GenerateRequest, Sampling
from ragserve.errors import EngineError, InvalidRequest
from ragserve.profiles.prefill_crossover import PrefillPoint
from ragserve.verification.calibration.probes import DOCUMENT_TOKENS, make
from ragserve.verification.engine_run import doubling, first_token

_SHORTEST = 2048
_DOCUMENTS = 16  # of a probe, which has names for some 80
_RESERVED_TOKENS = 8  # of SGLang, and the answer's


def check_longest(tokens: int) -> None:
    """Raise InvalidRequest if prompts of at most so many tokens are too short for this."""
    if tokens < _SHORTEST:
        raise InvalidRequest(
            f"Prompts of {tokens} tokens are too short to compare dense and sparse prefill.",
            hint=f"Give at least {_SHORTEST} with --max-tokens, --context-length and --max-total-tokens.",
        )


async def measure(
    engine: Engine,
    builder: PromptBuilder,
    options: Mapping[str, Any],
    *,
    max_tokens: int | None,
    repeats: int,
    report: Callable[[str], None],
) -> list[PrefillPoint]:
    """Time the first token of prompts whose KV is not cached, dense and sparse in turn, at doubling lengths.

    Args:
        options: Prefill options of the sparse requests.
        max_tokens: Longest prompt; None for the longest that the engine takes.
        repeats: Measurements of each, after one warm-up; the fastest counts.
        report: Gets a line for each length.

    Raises:
        InvalidRequest: The engine has no sparse prefill, or takes too short prompts.
    """
    if not engine.info.sparse_prefill:
        raise InvalidRequest(
            "This engine has no sparse prefill.",
            hint="Calibrate with an attention backend that has KV of 16 bits.",
        )
    longest = engine.info.max_prompt_tokens - _RESERVED_TOKENS
    longest = min(longest, max_tokens) if max_tokens else longest
    check_longest(longest)
    text = _text(builder, longest)
    points = []
    for length in doubling(_SHORTEST, longest):
        best: dict[str, float] = {}
        share = 1.0
        for turn in range(repeats + 1):
            for name, prefill in (("dense", {"mode": "dense"}), ("sparse", {**options, "dense_below": 0})):
                # strategy full: nothing of it is cached
                request = GenerateRequest(
                    f"prefill-{name}-{length}-{turn}",
                    text[:length],
                    "calibration",
                    "full",
                    Sampling(max_new_tokens=1),
                    prefill=prefill,
                )
                answer = await first_token(engine, request)
                if turn:
                    best[name] = min(answer.ttft_ms, best.get(name, answer.ttft_ms))
                if name == "sparse":
                    if answer.last.prefill is None:
                        raise EngineError(f"A prompt of {length} tokens was not prefilled sparsely.")
                    share = answer.last.prefill.share
        points.append(
            PrefillPoint(length, round(best["dense"], 2), round(best["sparse"], 2), round(share, 3))
        )
        report(
            f"{length} tokens: dense {best['dense']:.0f} ms, sparse {best['sparse']:.0f} ms with "
            f"{share:.0%} of the blocks"
        )
    return points


def _text(builder: PromptBuilder, tokens: int) -> list[int]:
    """Return so many tokens of probes' documents, no two alike."""
    ids: list[int] = []
    while len(ids) < tokens:
        count = min(_DOCUMENTS, max(2, -(-(tokens - len(ids)) // DOCUMENT_TOKENS)))
        ids += make(builder, documents=count, questions=1, seed=len(ids)).ids
    return ids[:tokens]
