"""Pages that offloaded requests in progressive mode read from the host, and load, on a running engine.

    python -m benchmarks.offloaded_reads OUT.json SET.jsonl.gz [--rows N] [--steps N] [--thresholds X,X]
        [--budgets N,N] [--resident-blocks N,N]

Prompts of a question set with long documents (ragserve/eval/data.py) are answered with their KV on the device
and on the host, with pages of 16 tokens and so many resident blocks for each page of a choice. Rows give
pages of KV heads, and in how many answers offloading changes a token. Runs on a CPU, and on a GPU."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.fan_out import engine_args, listed
from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.config import DEFAULT_MODEL, Settings
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.local import LocalEngine
from ragserve.engine.offline import run_once
from ragserve.eval.data import load, set_name
from ragserve.verification import report
from ragserve.verification.engine_run import TimedAnswer, first_token

PAGE = 16
NOTE = (
    "All but attended are counts of pages of layers and KV heads, of all prompts. reads: by steps, over the "
    "link; fills: of these, written to resident blocks, too; loads: into blocks, beside steps; in blocks: of "
    "those that choices named. attended: pages that a step attends to in each layer and head, mean, of so "
    "many. differing: answers that are not those of requests whose KV is on the device."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("set", type=Path)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--thresholds", type=listed(float), default=[0.7, 0.9])
    parser.add_argument("--budgets", type=listed(int), default=[1024])
    parser.add_argument("--resident-blocks", type=listed(int), default=[1, 2])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    given = parser.parse_args()
    points = [
        (threshold, budget, resident_blocks)
        for threshold in given.thresholds
        for budget in given.budgets
        for resident_blocks in given.resident_blocks
    ]
    questions = list(load(given.set, given.rows))

    async def work(engine: LocalEngine) -> None:
        builder, resident, rows = PromptBuilder.load(engine.info.tokenizer), {}, []
        prompts = []
        for one in questions:
            documents = [PromptDocument("", each.title, each.text) for each in one.documents]
            prompts.append(
                builder.build(one.question, documents, max_prompt_tokens=engine.info.max_prompt_tokens)
            )

        async def answer(number: int, steps: int = given.steps, **decode: Any) -> TimedAnswer:
            ids = prompts[number].input_ids
            sampling = Sampling(steps, ignore_eos=True)
            options = {"mode": "progressive", "dense_below": 0, "streaming": False} | decode
            request = GenerateRequest("reads", ids, "reads", "full", sampling, decode=options)
            return await first_token(engine, request)

        for number in range(len(prompts)):
            await answer(number, steps=1)  # from here on all find the same part of the prompt in the cache
        for threshold, budget, resident_blocks in points:
            total, differing, attended, seconds = dict[str, int](), 0, 0.0, 0.0
            for number in range(len(prompts)):
                if (threshold, number) not in resident:
                    found = await answer(number, threshold=threshold)
                    resident[threshold, number] = list(found.last.output_ids)
                started = time.perf_counter()
                found = await answer(
                    number,
                    threshold=threshold,
                    offloaded=True,
                    budget=budget,
                    resident_blocks=resident_blocks,
                    reuse=16,
                )
                seconds += time.perf_counter() - started
                differing += list(found.last.output_ids) != resident[threshold, number]
                said = found.last.decode
                if said is None:
                    raise RuntimeError("the answer has no report on its decoding")
                attended += said.pages / len(prompts)
                for name in ("offloaded_steps", "host_reads", "misses", "hits", "fills"):
                    total[name] = total.get(name, 0) + getattr(said, name)
            rows.append(
                {
                    "threshold": threshold,
                    "budget": budget,
                    "resident_blocks": resident_blocks,
                    "offloaded steps": total["offloaded_steps"],
                    "attended": round(attended, 1),
                    "of": round(said.pages_held, 1),
                    "reads": total["host_reads"],
                    "loads": total["misses"],
                    "fills": total["fills"],
                    "in resident_blocks": total["hits"],
                    "differing": differing,
                    "seconds": round(seconds, 1),
                }
            )
            workload = {"set": set_name(given.set), "prompts": len(prompts), "steps": given.steps}
            tokens = sum(len(prompt.input_ids) for prompt in prompts) // len(prompts)
            model = {"model": Path(given.model).name, "tokens": tokens, "page": PAGE}
            report.write("offloaded reads", workload | model, rows, out=given.out, note=NOTE)

    graphs: dict[str, Any] = {}
    if torch.cuda.is_available():  # small: starting matters more here than decoding
        graphs = {"cuda_graph_max_bs_decode": 4, "disable_prefill_cuda_graph": True}
    with tempfile.TemporaryDirectory(prefix="ragserve-reads-") as folder:
        settings = Settings(
            model=given.model,
            data_dir=Path(folder),
            kv_disk_bytes=0,
            max_total_tokens=32_768,
            sparse_attention="on",
            decode_page_size=PAGE,
            kv_offload_bytes=2**30,
            engine_timeout_s=3600,  # on a CPU that has other work
            engine_args=graphs | engine_args(None),
        )
        run_once(settings, work)


if __name__ == "__main__":
    main()
