"""Ask questions over documents that come from the host in pages of 16 and of 8 bits.

    python -m benchmarks.page_bits --data FOLDER [--sets NAME ...] [--limit N] [--out FILE]

Two engines side by side answer the same questions, as `ragserve eval` asks them (each strategy is led
along the answer of `full`), but drops all documents from the device before each composed request: their KV
comes from host pages. ``16`` is the KV pool's own dtype. ``same`` compares the answers of 8 bits with those
of 16."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.lib.fan_out import this_script
from benchmarks.lib.places import RESULTS
from ragserve.answering.prompt import PromptBuilder
from ragserve.config import Settings
from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.engine.local import LocalEngine
from ragserve.engine.offline import run_once
from ragserve.eval.data import by_name, find, interleaved, load
from ragserve.eval.engine import Ask, evaluate
from ragserve.files import write_json
from ragserve.retrieval.embedder import Embedder
from ragserve.strategy_spec import parse
from ragserve.verification.report import environment, write
from ragserve.verification.rows import Row, appending, read
from sglang_ext.wire.protocol import EXACT_STRATEGIES

OUT = RESULTS / "page-bits.json"
BITS = (16, 8)
STRATEGIES = parse("full,concat,concat:recompute=sentences,share=0.3,samkv")
NOTE = (
    "F1 in percent. KL in nats and agreement in percent with `full` of the same engine: of the first token, "
    "and of all tokens of its answer. same: answers equal to those of 16 bits, percent."
)


class FromHost:
    """An engine whose composed requests find no document on the device."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.info = engine.info
        self.warm = engine.warm

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if request.strategy not in EXACT_STRATEGIES:
            await self._engine.control("evict", tiers=["device"])
        async for chunk in self._engine.generate(request):
            yield chunk


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the question sets")
    parser.add_argument("--sets", nargs="+", default=["onehop", "crossdoc"])
    parser.add_argument("--limit", type=int, default=50, help="questions of each set")
    parser.add_argument("--seconds", type=float, default=math.inf, help="ask no more after that time")
    parser.add_argument("--folder", type=Path, help="rows, to go on with; default: a temporary folder")
    parser.add_argument("--set", default="{}", help="settings of the engine, as JSON")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--bits", type=int, help=argparse.SUPPRESS)  # of the one engine of a process
    options = parser.parse_args()
    if options.bits is not None:
        asked(options)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        command = [*this_script(), *sys.argv[1:], "--folder", str(folder), "--bits"]
        engines = [subprocess.Popen([*command, str(bits)]) for bits in BITS]
        codes = [engine.wait() for engine in engines]
        if any(codes):
            return 1
        report(options, {bits: folder / str(bits) for bits in BITS})
    return 0


def asked(options: argparse.Namespace) -> None:
    """Start an engine with one kind of pages and write its rows."""
    folder = options.folder / str(options.bits)
    given = {"data_dir": folder / "data", "kv_disk_bytes": 0, "kv_page_bits": options.bits}
    settings = Settings(**given | json.loads(options.set))
    sets = [find(name, options.data) for name in options.sets]
    questions = interleaved({name: load(path, options.limit) for name, path in by_name(sets).items()})
    end = time.monotonic() + options.seconds
    open_questions = (each for each in questions if time.monotonic() < end)
    finished = {key for key, row in read(folder).items() if not row.get("error")}

    async def work(engine: LocalEngine) -> None:
        builder, embedder = PromptBuilder.load(engine.info.tokenizer), Embedder.of(settings)
        with appending(folder / "rows-0.jsonl") as add:
            ask = Ask(in_flight=1, sentence_bytes=settings.sentence_bytes)
            await evaluate(
                FromHost(engine),
                builder,
                open_questions,
                STRATEGIES,
                ask,
                finished=finished,
                write=add,
                embedder=embedder,
            )
        await engine.control("check")
        stat, room = await engine.control("stat"), await engine.where("eval", [])
        about = {
            "model": Path(engine.info.model).name,
            "dtype": engine.info.dtype,
            "device": engine.info.device,
            "hits": stat["hits"],
            "faults": stat["faults"],
            "bytes_per_token": room.page_bytes // room.block,
            "environment": environment(),
        }
        write_json(folder / "about.json", about)

    run_once(settings, work)


def report(options: argparse.Namespace, folders: dict[int, Path]) -> None:
    """Put the rows of both engines together."""
    about = {bits: json.loads((folder / "about.json").read_text()) for bits, folder in folders.items()}
    rows = {bits: read(folder) for bits, folder in folders.items()}
    common = rows[16].keys() & rows[8].keys()
    shown: list[dict[str, Any]] = []
    for name in options.sets:
        for spec in STRATEGIES:
            for bits in BITS:
                own = [key for key in common if (key[0], key[2]) == (name, spec.label)]
                pairs = [(rows[bits][key], rows[16][key]) for key in own]
                shown.append({"set": name, "strategy": spec.label, "bits": bits, **summed(pairs)})
    workload = {
        "model": about[8]["model"],
        "dtype": about[8]["dtype"],
        "device": about[8]["device"],
        "documents": "from host pages",
        "bytes_per_token": {str(bits): each["bytes_per_token"] for bits, each in about.items()},
        "hits": {str(bits): each["hits"] for bits, each in about.items()},
        "faults": {str(bits): each["faults"] for bits, each in about.items()},
    }
    write("page-bits", workload, shown, out=options.out, note=NOTE, ran_on=about[8]["environment"])


def summed(pairs: list[tuple[Row, Row]]) -> dict[str, Any]:
    """Means over rows, each with its question's row of 16 bits."""
    fine = [(row, other) for row, other in pairs if not row.get("error") and not other.get("error")]
    count = max(1, len(fine))

    def mean(name: str) -> float:
        return sum(float(row[name] or 0) for row, _ in fine) / count

    return {
        "n": len(fine),
        "errors": len(pairs) - len(fine),
        "fallbacks": sum(row["fallback"] is not None for row, _ in fine),
        "f1": round(100 * mean("f1"), 2),
        "kl": round(mean("kl"), 5),
        "agrees": round(100 * mean("agrees"), 1),
        "answer_kl": round(mean("answer_kl"), 5),
        "answer_agrees": round(100 * mean("answer_agrees"), 2),
        "same": round(100 * sum(row["answer"] == other["answer"] for row, other in fine) / count, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
