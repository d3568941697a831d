"""The engines and settings that `benchmarks.sparse_answers` compares: dense attention, ours, and rivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from ragserve.eval.sparse_answers import DENSE, SparseSetting
from ragserve.strategy_spec import parse
from sglang_ext.attention.pools.streaming_heads import save_pattern

PLAIN = "pages of 64"  # the engine whose dense answers are the reference
COMPOSED = "concat:recompute=question,share=0.15"
SHARES = (0.1, 0.2, 0.4)
ALPHAS = (0.9, 0.955, 0.98)
STREAMING = (25, 50, 75)  # percent of the heads
WRONG = "50 % wrong heads"
WINDOW = "window alone"  # every head streams: sinks and a sliding window, in prefill and decoding
MINFERENCE = "lines by the prompt's end"
PAGES_OF_16 = {"decode_page_size": 16, "decode_logical_page": 16}
FIRST = {"dense_layers": [0, 1]}  # as Quest has them
WHOLE_PROMPTS = {
    "chunked_prefill_size": 2**15,
    "mem_fraction_static": 0.8,
}  # no chunks; SGLang's own fraction
EVERYTHING = {"mode": "progressive", "threshold": 1.0, "dense_below": 0}


@dataclass(frozen=True, slots=True)
class SparseEngine:
    """An engine and what is asked of it. ``settings``: of `ragserve.config.Settings`; ``attention``: fields
    of `AttentionConfig` that no setting has; ``gates``: percent of streaming heads, and whether those with
    the highest gates stream."""

    name: str
    asked: tuple[SparseSetting, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    attention: Mapping[str, Any] = field(default_factory=dict)
    streaming: int | None = None
    wrong: bool = False


def budget(tokens: int, said: str = "", **more: Any) -> SparseSetting:
    """Decode steps over the best pages of so many tokens, by bounds if nothing else is said."""
    options = {"mode": "hierarchical", "budget": tokens, "scores": "bound", "dense_below": 0, **more}
    return SparseSetting(f"budget {tokens:,}{said}", options)


def sparse_engines(budgets: Sequence[int], thresholds: Sequence[float]) -> dict[str, SparseEngine]:
    """All engines by name, with their settings."""
    dense = SparseSetting(DENSE)
    ours = [budget(tokens) for tokens in budgets]
    middle = budgets[len(budgets) // 2]
    composed = parse(COMPOSED)[0]
    over = budget(middle)
    plain = [
        dense,
        *ours,
        *(budget(tokens, ", chosen once (SnapKV)", observe="prompt") for tokens in budgets),
        *(budget(tokens, ", sinks and window (StreamingLLM)", observe="recent") for tokens in budgets),
        budget(middle, ", every step", reuse=1),
        *(budget(tokens, ", exact scores", scores="exact") for tokens in budgets),
        *(SparseSetting(f"threshold {value:g}", {**EVERYTHING, "threshold": value}) for value in thresholds),
        *_prefills("block_sparse", "blocks"),
        *_prefills("vertical_slash", "lines"),
        SparseSetting(f"{COMPOSED}", strategy=composed),
        SparseSetting(f"{COMPOSED}, {over.label}", over.decode, strategy=composed),
    ]
    each_step = {"observe": "last", "reuse": 1}
    quest = [budget(tokens, ", each step by its query (Quest)", **each_step) for tokens in budgets]
    found = [
        SparseEngine(PLAIN, tuple(plain)),
        SparseEngine("pages of 16", (dense, *ours), PAGES_OF_16),
        SparseEngine("pages of 16, 2 first layers dense", (dense, *quest), PAGES_OF_16, FIRST),
        SparseEngine("2 first layers dense", (dense, *ours), attention=FIRST),
        SparseEngine("2 first and last layer dense", (dense, *ours), attention={"dense_layers": [0, 1, -1]}),
        SparseEngine("pages of 64, flat", (dense, *ours), {"decode_logical_page": 64}),
        SparseEngine("logical pages of 4", (dense, *ours), {"decode_logical_page": 4}),
        SparseEngine("KV of 8 bits", (dense, *ours), {"kv_bits": 8}),
        SparseEngine("KV of 4 bits", (dense, *ours), {"kv_bits": 4}),
        SparseEngine("offloaded", tuple(_offloaded(budgets)), {"kv_offload_bytes": 2**33}),
        SparseEngine(
            MINFERENCE,
            (dense, *_prefills("vertical_slash", "lines", alphas=())),
            {"engine_args": WHOLE_PROMPTS},
            {"lines_by": "prompt_end"},
        ),
    ]
    for share in STREAMING:
        found.append(SparseEngine(f"{share} % streaming heads", _streaming(budgets), streaming=share))
    found.append(SparseEngine(WRONG, _streaming(budgets), streaming=50, wrong=True))
    alone = (dense, *_prefills("block_sparse", "sinks and window", shares=(0.01,), alphas=(), streaming=True))
    found.append(SparseEngine(WINDOW, alone, streaming=100))
    return {engine.name: engine for engine in found}


def matching(engines: Mapping[str, SparseEngine], patterns: Sequence[str]) -> list[SparseEngine]:
    """The engines with those settings whose `ENGINE/SETTING` matches one of the patterns, and `dense`."""
    found = []
    for engine in engines.values():
        asked = tuple(
            each
            for each in engine.asked
            if any(fnmatchcase(f"{engine.name}/{each.label}", pattern) for pattern in patterns)
        )
        if asked:
            whole = next(each for each in engine.asked if each.label == DENSE)
            rest = tuple(each for each in asked if each is not whole)
            found.append(replace(engine, asked=(whole, *rest)))
    return found


def write_heads(path: Path, gates: Sequence[Sequence[float]], engine: SparseEngine) -> None:
    """Write the pattern file of an engine: its share of the heads, those with the lowest gates or, to see
    what wrong ones cost, with the highest."""
    learned = torch.tensor(gates, dtype=torch.float32)
    share = (engine.streaming or 0) / 100
    save_pattern(path, -learned if engine.wrong else learned, share=share, model="measured")


def _prefills(
    mode: str,
    said: str,
    *,
    shares: Sequence[float] = SHARES,
    alphas: Sequence[float] = ALPHAS,
    **more: Any,
) -> list[SparseSetting]:
    common = {"mode": mode, "dense_below": 0, **more}
    found = [SparseSetting(f"{said}, a share of {s:g}", prefill={**common, "share": s}) for s in shares]
    return found + [SparseSetting(f"{said}, alpha {a:g}", prefill={**common, "alpha": a}) for a in alphas]


def _offloaded(budgets: Sequence[int]) -> list[SparseSetting]:
    found = [SparseSetting(DENSE)]
    for tokens in budgets:
        found.append(budget(tokens, ", lag 2", lag=2))
        found.append(budget(tokens, ", lag 2, offloaded", lag=2, offloaded=True))
    return found


def _streaming(budgets: Sequence[int]) -> tuple[SparseSetting, ...]:
    whole = SparseSetting("the other heads dense", {**EVERYTHING, "streaming": True})
    chosen = [budget(tokens, " of the other heads", streaming=True) for tokens in budgets]
    prefill = _prefills("block_sparse", "blocks of the other heads", shares=(0.2,), alphas=(), streaming=True)
    return (SparseSetting(DENSE), whole, *chosen, *prefill)
