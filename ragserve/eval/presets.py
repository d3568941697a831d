"""Presets of an evaluation: what two people have to share so that their figures can be compared."""

from __future__ import annotations

from dataclasses import dataclass

from ragserve.config import Settings
from ragserve.errors import InvalidRequest

RIVALS = (
    "full,passages:keep=0.15,passages:keep=0.25,concat,cacheblend:share=0.15,epic:first=16,"
    "concat:recompute=question,share=0.15,concat:recompute=anchors,share=0.15,random:share=0.15"
)
"""What `--strategies rivals` stands for: exact prefill of everything and of the best passages alone, plain
reuse of documents, and the rules of CacheBlend, EPIC, ProphetKV and QCFuse, and chance, at one budget."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The parts of a preset. Decoding is greedy."""

    system_prompt: str
    max_new_tokens: int
    strategies: str


BENCHMARKS = {
    "short-answers": Benchmark(
        "Answer the question from the documents. Write the answer alone, in as few words as possible, "
        "without a sentence around it.",
        24,
        "rivals",
    )
}


def fixed_by(
    benchmark: str | None, settings: Settings, max_new_tokens: int | None, strategies: str
) -> tuple[Settings, int | None, str]:
    """Settings, tokens of an answer and strategies of a run; the benchmark's strategies only if none are
    given. Raises InvalidRequest where it is unknown, or another value is given of what it fixes."""
    if benchmark is None:
        return settings, max_new_tokens, strategies
    if benchmark not in BENCHMARKS:
        raise InvalidRequest(f"No benchmark {benchmark!r}.", hint=f"One of: {', '.join(BENCHMARKS)}.")
    fixed = BENCHMARKS[benchmark]
    given = {
        "--system-prompt": settings.system_prompt not in (None, fixed.system_prompt),
        "--max-new-tokens": max_new_tokens not in (None, fixed.max_new_tokens),
    }
    if other := [flag for flag, is_other in given.items() if is_other]:
        raise InvalidRequest(
            f"Benchmark {benchmark} fixes what {' and '.join(other)} would change.",
            hint="Leave it away, or omit --benchmark.",
        )
    settings = settings.model_copy(update={"system_prompt": fixed.system_prompt})
    return settings, fixed.max_new_tokens, strategies or fixed.strategies


def expanded(strategies: str) -> str:
    """A list of strategies with `rivals` written out."""
    parts = [part.strip() for part in strategies.split(",")]
    return ",".join(RIVALS if part == "rivals" else part for part in parts)
