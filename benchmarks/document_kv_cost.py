"""What it costs to compute documents' KV: behind the prefix and alone, beside an exact prefill of the same.

    python -m benchmarks.document_kv_cost OUT.json [--model FOLDER] [--documents 32] [--tokens 512]
        [--rounds 5] [--turns 2]

An engine a prefix, one after another, ``--turns`` times in turns. In each round it computes documents of
random tokens that it has never seen, as it does before a composed request, and then prefills other ones
exactly, all at once, as SGLang does. The first round is not counted. Needs SGLang; RAGSERVE_ATTENTION names
the attention backend, and CPU will do."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.fan_out import engine_args, this_script
from ragserve.config import load
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.local import LocalEngine
from ragserve.engine.offline import run_once
from ragserve.verification import report
from ragserve.verification.engine_run import first_token, random_tokens
from sglang_ext.wire.protocol import Span

PREFIXES = ("none", "fixed")
NOTE = (
    "ms a document: medians of all rounds but each engine's first. exact: SGLang's prefill of as many "
    "documents at once, by the same engine. beside none: of the documents' KV without a prefix."
)


async def _measured(given: argparse.Namespace, engine: LocalEngine) -> list[dict[str, float]]:
    """Milliseconds a document of each round, as documents' KV and exact."""
    draw = random.Random(given.seed)
    rounds = []
    for _ in range(given.rounds + 1):
        parts = [random_tokens(draw, given.tokens) for _ in range(given.documents)]
        ids = [token for part in parts for token in part]
        spans = tuple(Span(at, at + given.tokens) for at in range(0, len(ids), given.tokens))
        began = time.perf_counter()
        await engine.warm(GenerateRequest("documents", ids, "cost", "concat", spans=spans, system=False))
        documents = time.perf_counter() - began
        one = Sampling(max_new_tokens=1)
        others = [random_tokens(draw, given.tokens) for _ in range(given.documents)]
        asked = [GenerateRequest("exact", each, "cost", "full", one) for each in others]
        began = time.perf_counter()
        await asyncio.gather(*(first_token(engine, each) for each in asked))
        exact = time.perf_counter() - began
        rounds.append({k: 1e3 * v / given.documents for k, v in (("kv", documents), ("exact", exact))})
    return rounds[1:]


def _work(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        own: dict[str, Any] = {"model": given.model} if given.model else {}
        if gpu := engine_args(None):
            own["engine_args"] = gpu | {"cuda_graph_max_bs_decode": 1, "disable_prefill_cuda_graph": True}
        settings = load(data_dir=Path(folder), kv_prefix=given.prefix, kv_disk_bytes=0, **own)
        rounds = run_once(settings, lambda engine: _measured(given, engine), measures=False)
    given.out.write_text(json.dumps(rounds))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--documents", type=int, default=32, help="computed in a round")
    parser.add_argument("--tokens", type=int, default=512, help="of a document")
    parser.add_argument("--rounds", type=int, default=5, help="of an engine")
    parser.add_argument("--turns", type=int, default=2, help="engines a prefix")
    parser.add_argument("--prefix", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.prefix:
        _work(given)
        return 0
    found: dict[str, list[dict[str, float]]] = {prefix: [] for prefix in PREFIXES}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "rounds.json"
        for turn in range(given.turns):
            for prefix in PREFIXES:
                command = [*this_script(), str(place), *sys.argv[2:], "--prefix", prefix, "--seed", str(turn)]
                subprocess.run(command, check=True)
                found[prefix] += json.loads(place.read_text())
    alone = statistics.median(each["kv"] for each in found["none"])
    rows = []
    for prefix, rounds in found.items():
        kv, exact = (statistics.median(each[name] for each in rounds) for name in ("kv", "exact"))
        row = {"prefix": prefix, "rounds": len(rounds), "kv ms": round(kv, 2), "exact ms": round(exact, 2)}
        rows.append(row | {"beside exact": round(kv / exact, 3), "beside none": round(kv / alone, 3)})
    workload = {
        "model": Path(given.model or "ragserve-tiny").name,
        "documents at once": given.documents,
        "tokens of a document": given.tokens,
    }
    report.write("document-kv-cost", workload, rows, out=given.out, note=NOTE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
