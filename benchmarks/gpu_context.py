"""Composed contexts on a CUDA machine: are they right, and how soon is the first token there?

    python -m benchmarks.gpu_context OUT_FOLDER --parts kernels,answers
    python -m benchmarks.gpu_context OUT_FOLDER --parts speed [--lengths 2048,8192] [--document-tokens 4096]
        [--merge EARLIER.json]

Three parts, each in its own process with a time limit, each writing its JSON to OUT_FOLDER whatever happens
to the
others: `kernels` (the tests that need a GPU), `answers` (the small model: tiers, recomputation and traffic
compared with each other), `speed` (`ragserve.bench.context` with the shape of Llama-3.1-8B and random
weights, up to nine minutes). Needs SGLang (0.5.17 was run there) and this project, installed without
dependencies so that
SGLang finds its plugin, and no web server. Exits with 1 if a part failed."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.fan_out import described, engine_args, this_script
from benchmarks.lib.places import REPO
from benchmarks.lib.rounding import BFLOAT16, apart
from ragserve.files import write_json

SEEN_BY_GPU = (
    "tests/kernels/test_composition.py",
    "tests/kernels/test_prefix_rows_attention.py",
    "tests/kernels/test_rotate_gather.py",
    "tests/unit/documents/test_cuda.py",
)
LIMITS_S = {"kernels": 150, "answers": 180, "speed": 560}
CROWDS = 3
NEW = 12  # tokens of an answer
STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("concat", {}),
    ("concat", {"keep": 0.5}),
    ("concat", {"recompute": "all"}),
    ("epic", {"first": 16}),
    ("random", {"share": 0.2}),
    ("cacheblend", {"share": 0.15}),
    ("samkv", {"keep": 1.0, "recompute": "all"}),
    ("samkv", {}),
    ("samkv", {"keep": 0.5, "update": "fusion", "selection": "layers"}),
    ("samkv", {"keep": 0.5, "recompute": "sentences", "share": 0.2}),
    ("concat", {"recompute": "sentences", "share": 0.1}),
)


def kernels(options: argparse.Namespace) -> bool:
    """Run the tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *SEEN_BY_GPU]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    print(done.stdout[-1500:], done.stderr[-500:], flush=True)
    result = {"exit": done.returncode, "end": done.stdout[-3000:]}
    write_json(options.out / "context-kernels.json", result)
    return done.returncode == 0


class Answers:
    """Greedy answers of the small model with their log-probabilities, straight from SGLang."""

    def __init__(self, engine: Any) -> None:
        from ragserve.answering.prompt import PromptBuilder

        self._engine = engine
        self._builder = PromptBuilder.load(engine.info.tokenizer)

    def request(self, row: dict[str, Any], strategy: str, options: dict[str, Any]) -> Any:
        from ragserve.answering.prompt import PromptDocument
        from ragserve.engine.base import GenerateRequest, Sampling

        documents = [PromptDocument(str(i), title, text) for i, (title, text) in enumerate(row["docs"])]
        prompt = self._builder.build(row["question"], documents, max_prompt_tokens=8000)
        spans = prompt.spans
        return GenerateRequest("q", prompt.input_ids, "answers", strategy, Sampling(NEW), spans, options)

    async def warm(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            await self._engine.warm(self.request(row, "concat", {}))

    async def __call__(
        self, row: dict[str, Any], strategy: str, options: dict[str, Any]
    ) -> tuple[list[int], list[float], set[str]]:
        """Token ids, log-probabilities, and the tiers that the documents came from."""
        import uuid

        from sglang.srt.managers.io_struct import GenerateReqInput

        from ragserve.engine.stream import payload
        from sglang_ext.process.launch import tokenizer_manager
        from sglang_ext.wire.protocol import PLAN_FIELD

        fields = payload(self.request(row, strategy, options), uuid.uuid4().hex) | {
            "return_logprob": True,
            "stream": False,
        }
        fields["sampling_params"]["ignore_eos"] = True
        outputs = [
            out async for out in tokenizer_manager().generate_request(GenerateReqInput(**fields), None)
        ]
        meta = outputs[-1]["meta_info"]
        pairs = meta["output_token_logprobs"]
        # beside composed requests, exact ones have the field too, empty
        text = (meta.get(PLAN_FIELD) or [None])[0]
        report = json.loads(text) if text else {"by_tier": {}}
        return [token for _, token, _ in pairs], [logprob for logprob, _, _ in pairs], set(report["by_tier"])


def _median_difference(pairs: list[tuple[bool, float]]) -> float:
    return statistics.median(difference for _, difference in pairs)


def _differences(pairs: list[tuple[bool, float]]) -> dict[str, Any]:
    return {"same tokens": sum(same for same, _ in pairs), "worst": max(worst for _, worst in pairs)}


async def check_graphs(engine: Any, ask: Answers, rows: list[dict[str, Any]], found: dict[str, Any]) -> None:
    """Recompute whole contexts, short enough for a CUDA graph: the answers must be those of `full`."""
    from sglang_ext.context.recompute.graphs import SIZES

    short = [row | {"docs": [(title, text[:300]) for title, text in row["docs"][:3]]} for row in rows]
    tokens = max(ask.request(row, "concat", {}).spans[-1].end for row in short)
    captured = (await engine.control("info"))["recompute_graphs"]
    await ask.warm(short)
    pairs = [
        apart(await ask(row, "concat", {"recompute": "all"}), await ask(row, "full", {})) for row in short
    ]
    control = [apart(await ask(row, "concat", {}), await ask(row, "full", {})) for row in short]
    found["recompute by graph"] = {
        "graphs": captured,
        "longest context": tokens,
        "same tokens": sum(same for same, _ in pairs),
        "median": _median_difference(pairs),
        "median without": _median_difference(control),
    }
    found["right: recompute by graph"] = (
        captured > 0 and tokens <= SIZES[-1] and _median_difference(pairs) < BFLOAT16
    )


async def check_answers(engine: Any, found: dict[str, Any], questions: int) -> None:
    lines = (REPO / "tests/data/questions/crossdoc_8.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:questions]]
    ask, started = Answers(engine), time.monotonic()
    await ask.warm(rows)
    exact = [await ask(row, "full", {}) for row in rows]
    everything = [await ask(row, "concat", {"recompute": "all"}) for row in rows]
    nothing = [await ask(row, "concat", {}) for row in rows]
    pairs = [apart(a, b) for a, b in zip(everything, exact, strict=True)]
    control = [apart(a, b) for a, b in zip(nothing, exact, strict=True)]
    found["questions"] = len(rows)
    found["recompute all against full"] = _differences(pairs)
    found["recompute nothing against full"] = _differences(control)
    # bfloat16: other kernels round differently, and a tie may fall the other way
    same = sum(same for same, _ in pairs)
    found["right: recompute all"] = _median_difference(pairs) < BFLOAT16 and 2 * same > len(rows)
    await check_graphs(engine, ask, rows, found)
    print(json.dumps(found), f"{time.monotonic() - started:.0f} s", flush=True)
    for strategy, options in STRATEGIES:
        answers = {}
        for tier, evicted in (("device", []), ("host", ["device"]), ("disk", ["device", "host"])):
            if not evicted:
                await ask.warm(rows)
            answers[tier] = []
            for row in rows:
                if evicted:
                    await engine.control("evict", tiers=evicted)
                answers[tier].append(await ask(row, strategy, options))
        name = f"{strategy} {json.dumps(options)}"
        tiers = {tier: all(used == {tier} for _, _, used in got) for tier, got in answers.items()}
        beside = {
            t: _differences([apart(a, b) for a, b in zip(answers[t], answers["device"], strict=True)])
            for t in ("host", "disk")
        }
        found[name] = {"from the tier meant": tiers}
        for figure in ("same tokens", "worst"):
            found[name][figure] = {tier: each[figure] for tier, each in beside.items()}
        close = all(each["same tokens"] >= len(rows) - 1 for each in beside.values())
        found[f"right: {name}"] = all(tiers.values()) and close
        print(name, found[name], f"{time.monotonic() - started:.0f} s", flush=True)
    single = [await ask(row, "epic", {"first": 16}) for row in rows]
    together = []
    for _ in range(CROWDS):  # the kernel reads pinned host memory while other requests decode
        await engine.control("evict", tiers=["device"])
        mixed = [
            ask(row, s, o) for row in rows for s, o in (("epic", {"first": 16}), ("full", {}), ("concat", {}))
        ]
        together += [apart(a, b) for a, b in zip((await asyncio.gather(*mixed))[::3], single, strict=True)]
    found["epic from host in a crowd, as alone"] = _differences(together) | {"of": len(together)}
    found["right: crowd"] = _median_difference(together) < BFLOAT16
    await engine.control("check")
    found["right: accounts"] = True


def answers(options: argparse.Namespace) -> bool:
    from ragserve.config import DEFAULT_MODEL, load
    from ragserve.engine.offline import run_once

    found: dict[str, Any] = {}
    path = options.out / "context-answers.json"

    async def work(engine: Any) -> None:
        found["engine"] = described(engine.info)
        try:
            await check_answers(engine, found, options.questions)
        finally:
            write_json(path, found)

    with tempfile.TemporaryDirectory(prefix="ragserve-answers-") as folder:
        args = engine_args(options.answers_attention)
        run_once(load(model=DEFAULT_MODEL, data_dir=Path(folder), engine_args=args), work)
    print(json.dumps(found, indent=1), flush=True)
    return all(value for name, value in found.items() if name.startswith("right"))


def speed(options: argparse.Namespace) -> bool:
    from ragserve.bench import context

    tiers = ("", *options.tiers.split(","))
    cases = [case for case in context.CASES if case.strategy in options.strategies.split(",")]
    for part in filter(None, options.without.split(",")):
        cases = [case for case in cases if part not in case.name]
    kept = [
        replace(
            case, name=case.name + options.label, tiers=tuple(tier for tier in case.tiers if tier in tiers)
        )
        for case in cases
    ]
    context.run(  # raises, after the last one, if a case failed
        options.out,
        shape=options.shape,
        lengths=[int(n) for n in options.lengths.split(",")],
        document_tokens=[int(n) for n in options.document_tokens.split(",")],
        cases=[case for case in kept if case.tiers],
        merge=options.merge,
        repeats=options.repeats,
        prefill_kernels=options.prefill,
        tp_size=options.tp,
        kv_page_bits=options.page_bits,
        **({} if "disk" in tiers else {"kv_disk_bytes": 0}),
        **({"mem_fraction_static": 0.75} if options.attention != "torch_native" else {}),
        engine_args=engine_args(options.attention) | options.engine,
    )
    return True


PARTS = {"kernels": kernels, "answers": answers, "speed": speed}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", choices=tuple(LIMITS_S), help="this one only, in this process")
    parser.add_argument("--parts", default=",".join(LIMITS_S))
    parser.add_argument("--lengths", default="2048,8192,32768,102400", help="of `speed`")
    parser.add_argument(
        "--document-tokens", default="512", help="of `speed`; the first one with all strategies"
    )
    parser.add_argument("--tiers", default="device,host,disk", help="of `speed`")
    parser.add_argument("--shape", default="llama-3.1-8b", help="of `speed`")
    parser.add_argument(
        "--merge",
        type=Path,
        help="an earlier report of `speed`, whose rows stay unless they are measured again",
    )
    parser.add_argument("--questions", type=int, default=8, help="of `answers`, 2 to 8")
    parser.add_argument(
        "--attention",
        default="flashinfer",
        help="of `speed`; FlashInfer compiles for two minutes on a new machine",
    )
    parser.add_argument("--strategies", default="full,prefix,concat,epic,cacheblend,samkv", help="of `speed`")
    parser.add_argument(
        "--prefill",
        default="auto",
        choices=("auto", "fa2"),
        help="of `speed`: kernels of FlashInfer's prefill, see the setting prefill_kernels",
    )
    parser.add_argument("--label", default="", help="of `speed`: added to the strategies' names")
    parser.add_argument("--repeats", type=int, default=5, help="of `speed`")
    parser.add_argument("--without", default="", help="of `speed`: cases whose names have one of these")
    parser.add_argument("--page-bits", type=int, default=16, help="of `speed`: see kv_page_bits")
    parser.add_argument("--tp", type=int, default=1, help="of `speed`: GPUs of the engine")
    parser.add_argument("--answers-attention", default="triton")
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="further SGLang options of `speed`, as JSON"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part:
        return not PARTS[options.part](options)
    failed = False
    for part in options.parts.split(","):
        started = time.monotonic()
        command = [*this_script(), *sys.argv[1:], "--part", part]
        try:
            code = subprocess.run(command, timeout=LIMITS_S[part], check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        outcome = f"FAILED ({code})" if code else "right"
        print(f"== {part}: {outcome}, {time.monotonic() - started:.0f} s", flush=True)
        failed |= bool(code)
    return failed


if __name__ == "__main__":
    sys.exit(main())
