"""Measure by how much a request that arrives within a prefill of the server's own is delayed: the comparison
of an answer in use is cancelled when a request arrives, but a chunk of an exact prefill, or a layer of a
composed one, ends first.

    .venv/bin/python examples/arrival_delay.py --out examples/results

The same cached request is sent to one engine in turns: alone, and within a prefill of each strategy whose
documents are warm, at another place each time. The prefill is cancelled as the request is sent, as the idle
worker does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragserve.bench.verify_share import median_delay
from ragserve.config import DEFAULT_MODEL, load
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.local import LocalEngine
from ragserve.engine.offline import run_once
from ragserve.strategy_spec import parse
from ragserve.verification.engine_run import first_token
from ragserve.verification.report import write
from sglang_ext.wire.protocol import Span

CORPUS = Path(__file__).parent / "corpus" / "files"
STRATEGIES = "full,concat:recompute=sentences,share=0.3"
DOCUMENTS, TOKENS, QUESTION = 8, 250, 32
REST_S = 0.8  # between measurements: a cancelled prefill has ended
TURNS = 12


def token_ids() -> list[int]:
    """Token ids of the example corpus, as many as a prompt and the request need."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    found: list[int] = []
    for path in sorted(CORPUS.glob("*.txt")):
        found += tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
        if len(found) > (DOCUMENTS + 1) * TOKENS:
            break
    return found


async def measured(engine: LocalEngine) -> list[dict[str, Any]]:
    """A row of each strategy."""
    ids, end = token_ids(), DOCUMENTS * TOKENS
    spans = tuple(Span(at, at + TOKENS) for at in range(0, end, TOKENS))
    one = Sampling(max_new_tokens=1)
    background = GenerateRequest(
        "verify", ids[: end + QUESTION], "delay", sampling=one, spans=spans, background=True
    )
    user = GenerateRequest("user", ids[end + QUESTION : end + TOKENS], "delay", "prefix", one)
    await engine.warm(background)
    rows = []
    for spec in parse(STRATEGIES):
        own = replace(background, strategy=spec.name, options=spec.options)
        whole = [(await first_token(engine, own)).ttft_ms for _ in range(3)]
        await first_token(engine, user)
        alone, within = [], []
        prefill_ms = sorted(whole)[1]
        for turn in range(TURNS):
            await asyncio.sleep(REST_S)
            alone.append((await first_token(engine, user)).ttft_ms)
            await asyncio.sleep(REST_S)
            task = asyncio.create_task(first_token(engine, own))
            await asyncio.sleep(1e-3 * prefill_ms * (turn + 0.5) / TURNS)
            task.cancel()
            within.append((await first_token(engine, user)).ttft_ms)
            with contextlib.suppress(asyncio.CancelledError):
                await task
        delay, low, high = median_delay([b - a for a, b in zip(alone, within, strict=True)], block=1)
        rows.append(
            {
                "prefill": spec.label,
                "prefill ms": round(prefill_ms, 1),
                "ttft ms alone": round(median_delay(alone)[0], 1),
                "ttft ms within": round(median_delay(within)[0], 1),
                "delay ms p50": round(delay, 1),
                "at least": round(low, 1),
                "at most": round(high, 1),
                "longest": round(max(b - a for a, b in zip(alone, within, strict=True)), 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder for arrival-delay.json")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory(prefix="ragserve-arrival-") as folder:
        options: dict[str, Any] = {"data_dir": Path(folder), "log_level": "warning"}
        rows = run_once(load(**options), measured)
    workload = {
        "model": "ragserve-tiny",
        "prefill": f"{DOCUMENTS} documents of {TOKENS} tokens and a question of {QUESTION}",
        "arrives": "at even distances over the prefill",
        "pairs": TURNS,
    }
    write("arrival-delay", workload, rows, out=out and out / "arrival-delay.json", note=_NOTE)


_NOTE = (
    "Times to the first token of a request whose prompt is cached. prefill ms: the whole prefill, alone. "
    "delay: within less alone, pair by pair; the median, its 95 % interval by a bootstrap, "
    "and the longest."
)

if __name__ == "__main__":
    main()
