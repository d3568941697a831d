"""Time to the first token where the best quarter of the retrieved passages is read, exact and from stored KV.

    python -m benchmarks.gpu_passages OUT_FOLDER [--retrieved 16384,65536,102400] [--text SET.jsonl[.gz]]

One engine with the shape of Llama-3.1-8B and random weights (`ragserve.bench.context`), documents of 512
tokens: `full` over all that is retrieved; over the quarter alone, which is strategy `passages`; and the
quarter composed from the host and from disk, with nothing, a tenth and a fifth of it recomputed. The choice
itself takes time on the CPU: with a question set (``--text``) it is measured over as many passages of about
512 tokens, made of the set's, as the engine would choose from; the first time they are seen, and again.
OUT_FOLDER/passages.json has a row a number of retrieved tokens and strategy."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.fan_out import engine_args
from ragserve.bench import context
from ragserve.bench.context import ContextCase
from ragserve.best_passages import KEEP, PassagesOptions
from ragserve.eval.data import load
from ragserve.files import write_json

DOCUMENT = 512
WORDS = 380  # of a passage of about as many tokens
STORED = {
    "composed, nothing recomputed": {},
    "composed, a tenth recomputed": {"recompute": "question", "share": 0.1},
    "composed, a fifth recomputed": {"recompute": "question", "share": 0.2},
}
EXACT = "full"


def cases(retrieved: list[int], tiers: tuple[str, ...]) -> list[ContextCase]:
    """All strategies of the quarters, and `full` everywhere."""
    quarters = tuple(round(tokens * KEEP) for tokens in retrieved)
    stored = [
        ContextCase(name, "concat", options, tiers, lengths=quarters) for name, options in STORED.items()
    ]
    return [ContextCase(EXACT, "full"), *stored]


def choice_ms(path: Path, tokens: int, rounds: int = 5) -> dict[str, float]:
    """Medians of the time in which passages are chosen: by texts never seen before, and by the same again."""
    words = [word for question in load(path) for ctx in question.documents for word in ctx.text.split()]
    count = tokens // DOCUMENT
    titles = [ctx.title for question in load(path) for ctx in question.documents]
    options, cold, warm = PassagesOptions(), [], []
    for round_ in range(rounds):
        places = itertools.count(round_ * count * WORDS % max(1, len(words) - count * WORDS), WORDS)
        texts = [
            (titles[number % len(titles)], " ".join(words[at : at + WORDS]))
            for number, at in zip(range(count), places, strict=False)
        ]
        scores = [0.9 - 0.5 * number / count for number in range(count)]
        question = load(path)[round_].question
        for times in (cold, warm):
            started = time.perf_counter()
            options.chosen(question, texts, [DOCUMENT] * count, scores)
            times.append((time.perf_counter() - started) * 1e3)
    return {"cold": round(statistics.median(cold), 1), "warm": round(statistics.median(warm), 1)}


def table(rows: list[dict[str, Any]], retrieved: list[int], choices: dict[int, Any]) -> list[dict[str, Any]]:
    """A row for all retrieved tokens, and one for each way to read the best quarter of them."""
    found = {(r["context tokens"], r["strategy"], r["tier"]): r for r in rows if "error" not in r}
    made = []
    for tokens in retrieved:
        quarter = round(tokens * KEEP)
        all_ms, exact_ms = (found[n, EXACT, None]["ttft ms"] for n in (tokens, quarter))
        row = {"retrieved tokens": tokens, "read tokens": tokens, "strategy": EXACT, "documents": ""}
        made.append(row | {"ttft ms": all_ms})
        chosen = choices.get(tokens, {})
        for (length, strategy, tier), own in found.items():
            if length != quarter:
                continue
            name = "exact" if strategy == EXACT else strategy
            row = {"retrieved tokens": tokens, "read tokens": quarter, "strategy": name}
            ms = own["ttft ms"]
            row |= {"documents": tier or "", "ttft ms": ms, "choice ms": chosen.get("warm")}
            row["sooner than full"] = round(all_ms / (ms + chosen.get("warm", 0)), 1)
            row["sooner than exact"] = round(
                (exact_ms + chosen.get("warm", 0)) / (ms + chosen.get("warm", 0)), 2
            )
            made.append(row | {k: own[k] for k in ("fastest ms", "slowest ms", "runs") if k in own})
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--retrieved", default="16384,65536,102400")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--attention", default="flashinfer")
    parser.add_argument("--shape", default="llama-3.1-8b", help="or embedded, to try this without a GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiers", default="host,disk", help="that the quarter is composed from")
    options = parser.parse_args()
    retrieved = [int(tokens) for tokens in options.retrieved.split(",")]
    choices = {tokens: choice_ms(options.text, tokens) for tokens in retrieved} if options.text else {}
    print("choice:", choices, flush=True)
    gpu = engine_args(options.attention) if options.shape != "embedded" else {}
    # Graphs serve decoding, of which there are two tokens.
    gpu |= {"cuda_graph_max_bs_decode": 1, "disable_prefill_cuda_graph": True} if gpu else {}
    try:
        context.run(
            options.out,
            shape=options.shape,
            lengths=sorted({*retrieved, *(round(tokens * KEEP) for tokens in retrieved)}),
            document_tokens=[DOCUMENT],
            cases=cases(retrieved, tuple(options.tiers.split(","))),
            repeats=options.repeats,
            with_auto=False,
            engine_args=gpu,
            **({"mem_fraction_static": 0.75} if gpu else {}),
        )
    finally:
        path = options.out / f"context-{options.shape}.json"
        report = json.loads(path.read_text())
        report["benchmark"], report["choice ms"] = "passages", choices
        report["rows"] = table(report["rows"], retrieved, choices)
        write_json(options.out / "passages.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
