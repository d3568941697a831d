"""Sparse prefill of whole prompts on a GPU: when is the first token there, by the share of blocks computed,
beside dense prefill?

    python -m benchmarks.gpu_whole_prompts OUT.json [--lengths 32768,131072] [--shares 0.1,0.2,0.4]
        [--modes blocks,lines] [--repeats N] [--chunk 8192] [--parts sparse,whole] [--no-streaming]
        [--embedded]

Two engines after each other, each in a process of its own, with the shape of Llama-3.1-8B and random weights.
`sparse`: with sparse attention on, prompts in chunks of ``--chunk`` tokens, dense and sparse in turns.
`whole`: SGLang's dense prefill of each prompt as one chunk, without sparse attention. With FlashInfer both
are FA3 on Hopper GPUs. Every row has the time beside the faster dense one of the same length so far. Random
weights choose no lines or blocks that a text would, so each request asks for a fixed share and the answer
says what was computed; how many blocks a text needs is measured by sparse_prefill_quality.py. `blocks` is
also timed with half of the KV heads streaming: their query heads attend to the first and local blocks only.

``--embedded``: the small model and short prompts, to try the script without a GPU."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib.fan_out import engine_args, fan_out, listed, this_script
from benchmarks.streaming_pool import pattern_of
from ragserve.bench import model_shapes
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.errors import EngineError
from ragserve.verification import report
from ragserve.verification.engine_run import TimedAnswer, first_token, random_tokens

STREAMING = "blocks, half of the heads streaming"
RESERVED = 8  # tokens of SGLang, and the answer's
NOTE = (
    "Milliseconds to the first token of a prompt of random tokens with nothing cached, medians after one "
    "warm-up. share: blocks computed of those of dense attention, as the engine counted. times dense: "
    "beside the fastest dense prefill of the length, in chunks or in one. Choosing blocks is in it."
)


async def timed(engine: Any, length: int, prefill: dict[str, Any], repeats: int) -> list[TimedAnswer]:
    """Ask for a token of so many prompts that nobody has sent, one after the other."""
    draw, answers = random.Random(), []
    for _ in range(repeats + 1):
        ids = random_tokens(draw, length)
        # strategy full: nothing of it is cached
        request = GenerateRequest(
            "whole", ids, "prompts", "full", Sampling(max_new_tokens=1), prefill=prefill
        )
        answers.append(await first_token(engine, request))
    return answers[1:]


def measure(given: argparse.Namespace) -> None:
    """Measure one part and add its rows to the report."""
    sparse = given.part == "sparse"
    shape = "embedded" if given.embedded else "llama-3.1-8b"
    workload, earlier = report.read_report(given.out)
    growing = report.GrowingReport(
        "sparse prefill, whole prompts",
        given.out,
        note=NOTE,
        key=("tokens", "prefill", "asked share"),
        earlier=earlier,
        order=lambda row: row["tokens"],
    )
    growing.workload = workload | {"model": f"{shape}, random weights", "repeats": given.repeats}
    growing.workload |= {"chunk": given.chunk}
    longest = max(given.lengths)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("dense", {"mode": "dense"}),
        # with a pattern file the server's blocks stream unless a request says otherwise
        *(
            (mode, {"mode": mode, "share": share, "streaming": False})
            for mode in given.modes
            for share in given.shares
        ),
    ]
    if given.streaming and "block_sparse" in given.modes:
        cases += [
            (STREAMING, {"mode": "block_sparse", "share": share, "streaming": True}) for share in given.shares
        ]
    arguments = engine_args(None) | ({} if given.embedded else {"cuda_graph_max_bs_decode": 8})
    if sparse:
        arguments |= {"chunked_prefill_size": given.chunk}
    else:
        cases = [("dense, one chunk", {})]
        arguments |= {"chunked_prefill_size": 2 * longest, "max_prefill_tokens": 2 * longest}
    if not given.embedded:
        arguments |= {"disable_prefill_cuda_graph": True}

    async def work(engine: Any) -> None:
        growing.workload["attention"] = engine.info.attention_backend
        dense = {
            row["tokens"]: row["first token ms"] for row in earlier if row["prefill"].startswith("dense")
        }
        for asked in given.lengths:
            length, most = asked, engine.info.max_prompt_tokens - RESERVED
            if length > most:  # the same for both engines
                length = most // 1024 * 1024
            for name, prefill in cases:
                options = prefill if name.startswith("dense") else prefill | {"dense_below": 0}
                answers = await timed(engine, length, options, given.repeats)
                ms = statistics.median(each.ttft_ms for each in answers)
                if name.startswith("dense"):
                    dense[length] = min(ms, dense.get(length, ms))
                said = answers[-1].last.prefill
                if ("share" in prefill) != (said is not None):
                    raise EngineError(f"{name} of {length} tokens: the engine says {said}.")
                growing.add(
                    {
                        "tokens": length,
                        "prefill": name,
                        "asked share": prefill.get("share"),
                        "share": 1.0 if said is None else round(said.share, 3),
                        "first token ms": round(ms, 1),
                        "fastest ms": round(min(each.ttft_ms for each in answers), 1),
                        "times dense": round(dense[length] / ms, 2),
                    }
                )

    settings: dict[str, Any] = {"kv_disk_bytes": 0, "max_total_tokens": longest + 16_384}
    with tempfile.TemporaryDirectory() as folder:
        if sparse:
            settings |= {"sparse_attention": "on", "decode_mode": "dense"}
            if given.streaming:
                settings["decode_heads"] = pattern_of(shape, Path(folder))
        elif not given.embedded:
            # SGLang leaves room for a chunk's activations by rule, for such a one too much
            settings["mem_fraction_static"] = 0.6
        model_shapes.run_engine(shape, work, engine_args=arguments, **settings)
    growing.show()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--lengths", type=listed(int), default=[32_768, 131_072])
    parser.add_argument("--shares", type=listed(float), default=[0.1, 0.2, 0.4])
    parser.add_argument("--modes", type=listed(str), default=["block_sparse", "vertical_slash"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--parts", type=listed(str), default=["whole", "sparse"])
    parser.add_argument("--no-streaming", dest="streaming", action="store_false")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--embedded", action="store_true")
    given = parser.parse_args()
    if given.embedded:
        given.lengths, given.shares, given.repeats = [2048], [0.3], 1
        given.chunk = min(given.chunk, 1024)
    if given.part:
        measure(given)
        return 0
    command = [*this_script(), *sys.argv[1:], "--part"]
    return int(bool(fan_out({part: [*command, part] for part in given.parts}, 1)))


if __name__ == "__main__":
    sys.exit(main())
