"""Presets of an evaluation: what two people have to share so that their figures can be compared."""

from __future__ import annotations

from dataclasses import dataclass

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


def expanded(strategies: str) -> str:
    """A list of strategies with `rivals` written out."""
    parts = [part.strip() for part in strategies.split(",")]
    return ",".join(RIVALS if part == "rivals" else part for part in parts)
