"""Host memory of offloaded requests over one composed context, and their time to the first token: read in the
documents' host pages, copied from them to host pages of each request, and composed on the device.

    python -m benchmarks.offloaded_documents OUT.json [--shape SHAPE] [--context TOKENS] [--documents N]
        [--requests N,N] [--repeats N] [--answer TOKENS] [--page TOKENS] [--budget TOKENS]

One engine measures all three, in turn. Documents of random tokens, of lengths that no page divides, are on
the host alone; every request asks something else about all of them. Copies are forced by a host tier of which
the documents take more than half. Only one request at a time is composed on the device. Answers of the three
must be the same. ``--shape llama-3.1-8b``: random weights, for a GPU; default: the embedded model, also on a
CPU. Memory: the documents' KV twice, and once more for each request."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.fan_out import engine_args
from ragserve.bench import model_shapes
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.local import LocalEngine
from ragserve.verification import report
from ragserve.verification.engine_run import TimedAnswer, first_token, random_tokens
from sglang_ext.wire.protocol import Span

NAMESPACE, QUESTION, LOOK_S = "bench", 24, 0.05
SIDES = ("in place", "copied", "device")
NOTE = (
    "first token ms: median over requests and repeats; last: of the slowest request, median over repeats. "
    "own MB: KV in host pages of the requests' own; documents MB: pages of documents that are kept for them, "
    "each once; most at a time. differing: answers with other tokens than the request has alone in place."
)


@dataclass
class Run:
    """Answers of requests at once, and what they held on the host at most."""

    answers: list[TimedAnswer]
    own_pages: int = 0
    document_pages: int = 0


def lengths(total: int, count: int) -> list[int]:
    """Lengths of so many documents, odd ones but for the last, of ``total`` tokens in all."""
    each = [(total // count + 37 * (n % 5 - 2)) | 1 for n in range(count - 1)]
    return [*each, total - sum(each)]


class Bench:
    """One context and the requests about it."""

    def __init__(self, engine: LocalEngine, given: argparse.Namespace) -> None:
        self.engine, self.given = engine, given
        draw = random.Random(7)
        ends = [0, *accumulate(lengths(given.context, given.documents))]
        self.spans = tuple(Span(a, b) for a, b in pairwise(ends))
        self.context = random_tokens(draw, given.context)
        most = max(given.requests)
        self.questions = [random_tokens(draw, QUESTION) for _ in range(most)]

    def request(self, number: int, side: str) -> GenerateRequest:
        decode = {"mode": "hierarchical", "budget": self.given.budget, "lag": 2, "dense_below": 0}
        return GenerateRequest(
            f"{side} {number}",
            self.context + self.questions[number],
            NAMESPACE,
            "concat",
            Sampling(self.given.answer, ignore_eos=True),
            self.spans,
            decode=decode | {"offloaded": side != "device"},
            unregistered=range(len(self.spans)),
        )

    async def run(self, side: str, count: int) -> Run:
        document_bytes = self.given.context * self.given.token_bytes
        share = 1.5 if side == "copied" else 2.5
        await self.engine.control("budget", host_bytes=int(share * document_bytes))
        run = Run([])
        watching = asyncio.create_task(self._watch(run))
        sent = [first_token(self.engine, self.request(number, side)) for number in range(count)]
        run.answers = list(await asyncio.gather(*sent))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return run

    async def _watch(self, run: Run) -> None:
        while True:
            offloaded = (await self.engine.control("info"))["decode"]["offloaded"]
            run.own_pages = max(run.own_pages, offloaded["used"])
            run.document_pages = max(run.document_pages, offloaded["document_pages"])
            await asyncio.sleep(LOOK_S)


def row_of(side: str, count: int, runs: list[Run], alone: list[list[int]], given: Any) -> dict[str, Any]:
    firsts = [[each.ttft_ms for each in run.answers] for run in runs]
    steps = [
        (each.chunks[-1][0] - each.chunks[0][0]) * 1e3 / (given.answer - 1)
        for run in runs
        for each in run.answers
    ]
    own = max(run.own_pages for run in runs) * given.page * given.token_bytes / 1e6
    documents = max(run.document_pages for run in runs) * 16 * given.token_bytes / 1e6
    return {
        "side": side,
        "requests": count,
        "first token ms": round(statistics.median(chain.from_iterable(firsts)), 1),
        "last": round(statistics.median(map(max, firsts)), 1),
        "ms a token": round(statistics.median(steps), 2),
        "own MB": round(own, 1),
        "documents MB": round(documents, 1),
        "differing": sum(
            list(each.last.output_ids) != want
            for run in runs
            for each, want in zip(run.answers, alone, strict=False)
        ),
    }


async def measure(engine: LocalEngine, given: argparse.Namespace) -> list[dict[str, Any]]:
    bench = Bench(engine, given)
    await engine.warm(bench.request(0, "in place"))
    await engine.control("evict", tiers=["device"])
    alone = []
    for number in range(len(bench.questions)):  # the first one warms up
        answer = await first_token(engine, bench.request(number, "in place"))
        alone.append(list(answer.last.output_ids))
    for side in SIDES:
        await bench.run(side, 1)
    points = [(side, count) for count in given.requests for side in SIDES if side != "device" or count == 1]
    runs: dict[tuple[str, int], list[Run]] = {point: [] for point in points}
    for _ in range(given.repeats):
        for side, count in points:
            runs[side, count].append(await bench.run(side, count))
    await engine.control("check")
    return [row_of(*point, runs[point], alone, given) for point in points]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="embedded")
    parser.add_argument("--context", type=int, default=7500)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--requests", default="1,8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--attention", help="SGLang's attention backend; default: its own choice")
    given = parser.parse_args()
    given.requests = [int(each) for each in given.requests.split(",")]
    given.token_bytes = model_shapes.kv_bytes_per_token(given.shape)
    document_bytes, most = given.context * given.token_bytes, max(given.requests)
    graphs: dict[str, Any] = {}
    if torch.cuda.is_available():  # small: starting matters more here than decoding
        graphs = {"cuda_graph_max_bs_decode": most, "disable_prefill_cuda_graph": True}

    async def work(engine: LocalEngine) -> None:
        rows = await measure(engine, given)
        workload = {
            "model": given.shape,
            "context": f"{given.context} tokens of {given.documents} documents",
            "KV of the context, MB": round(document_bytes / 1e6, 1),
            **{name: getattr(given, name) for name in ("repeats", "answer", "page", "budget")},
        }
        report.write("offloaded documents", workload, rows, out=given.out, note=NOTE)

    model_shapes.run_engine(
        given.shape,
        work,
        max_total_tokens=2 * given.context + 4096 * most,
        kv_disk_bytes=0,
        kv_host_bytes=int(2.5 * document_bytes),
        kv_offload_bytes=(most + 1) * document_bytes,
        sparse_attention="on",
        decode_page_size=given.page,
        decode_budget=given.budget,
        engine_args=graphs | engine_args(given.attention),
    )


if __name__ == "__main__":
    main()
