"""Measure what the analysis of documents costs, in prefills: CPU seconds of an engine that computes the KV of
the same documents with their analyses and without.

    .venv/bin/python examples/analysis_cost.py --out examples/results

Pieces of the example corpus, `DOCUMENTS` at a time, in one batch. Each mode has an engine of its own. The
first batch is left out: it also finds the model's retrieval heads.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from ragserve.config import DEFAULT_MODEL, load
from ragserve.engine.base import GenerateRequest
from ragserve.engine.local import LocalEngine
from ragserve.engine.offline import run_once
from ragserve.verification.report import write
from sglang_ext.wire.protocol import Span

CORPUS = Path(__file__).parent / "corpus" / "files"
DOCUMENTS, TOKENS, BATCHES = 16, 250, 4


def batches() -> list[list[list[int]]]:
    """`BATCHES` batches of `DOCUMENTS` pieces of about `TOKENS` token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    pieces: list[list[int]] = []
    for path in sorted([*CORPUS.glob("*.txt"), *CORPUS.glob("*.md")]):
        ids = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
        pieces += [ids[at : at + TOKENS - at % 17] for at in range(0, len(ids) - TOKENS, TOKENS)]
    return [pieces[at * DOCUMENTS : (at + 1) * DOCUMENTS] for at in range(BATCHES)]


def measured(analysis: str) -> list[float]:
    """CPU milliseconds a token of each batch but the first, with ``kv_analysis`` as given."""

    async def work(engine: LocalEngine) -> list[float]:
        found = []
        for batch in batches():
            ids = [token for piece in batch for token in piece]
            ends = [sum(map(len, batch[: i + 1])) for i in range(len(batch))]
            spans = tuple(Span(end - len(piece), end) for piece, end in zip(batch, ends, strict=True))
            before = cpu_seconds()
            await engine.warm(GenerateRequest("warm", ids, "cost", spans=spans))
            found.append(1e3 * (cpu_seconds() - before) / len(ids))
        return found[1:]

    with tempfile.TemporaryDirectory(prefix="ragserve-analysis-") as folder:
        options: dict[str, Any] = {"data_dir": Path(folder), "log_level": "warning", "kv_analysis": analysis}
        return run_once(load(**options), work)


def cpu_seconds() -> float:
    """CPU time of this process and all that it started."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder for analysis-cost.json")
    out = parser.parse_args().out
    rows: list[dict[str, Any]] = []
    for name, mode in (("prefill", "lazy"), ("prefill and analysis", "ingest")):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            each = process.submit(measured, mode).result()
        least = min(each)
        more = least / rows[0]["CPU ms a token"] - 1 if rows else 0.0
        row = {"computed": name, "CPU ms a token": round(least, 3), "prefills more": round(more, 2)}
        rows.append(row | {"batches": ", ".join(f"{ms:.3f}" for ms in each)})
    workload = {"model": "ragserve-tiny", "documents": f"{DOCUMENTS} of about {TOKENS} tokens"}
    write("analysis-cost", workload, rows, out=out and out / "analysis-cost.json", note=_NOTE)


_NOTE = "CPU seconds of all of the engine's processes; the least of some batches, which are in `batches`."

if __name__ == "__main__":
    main()
