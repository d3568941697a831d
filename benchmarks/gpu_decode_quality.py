"""Answers of the small model with sparse decoding: exact match over budget and threshold, by kind of page.

    python -m benchmarks.gpu_decode_quality OUT SET.jsonl.gz [SET ...] [--gpus N] [--rows N]
        [--reuse | --observers | --offloaded]

Sets are question sets (see ragserve/eval/data.py), LongEval lines, or key-value retrieval; prompts over 8,000
tokens are left out. Each kind of page is an engine of its own, N at a time, each on its own GPU. OUT gets
quality.json, and a file per kind of page before. Every prompt is prefilled once: modes differ in decode steps
only. With streaming heads (of results/heads-embedded.json) budgets are tried with and without them.
``--reuse``: only dense, and budgets by reuse interval; ``--observers``: dense, and what chooses pages;
``--offloaded``: dense, and budgets and thresholds with the KV on the device and, in a second engine whose
pool holds few prompts, on the host, with the same lag; ``same answers`` counts those with the same text.
Takes about 2 minutes per kind of page on an H200; also runs on a CPU. RAGSERVE_ATTENTION names SGLang's
attention backend if its default is not installed."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.fan_out import described, engine_args, fan_out, this_script
from benchmarks.lib.places import RESULTS
from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.config import DEFAULT_MODEL, load
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.offline import run_once
from ragserve.files import write_json
from ragserve.json_lines import json_lines
from ragserve.verification.engine_run import first_token
from ragserve.verification.metrics import contains_answer, exact_match
from sglang_ext.attention.pools.streaming_heads import save_pattern

LONGEST = 8000
IN_FLIGHT = 16
PAGES: dict[str, dict[str, Any]] = {
    "64 of 16": {},
    "flat 16": {"decode_page_size": 16},
    "flat 64": {"decode_logical_page": 64},
    "64 of 16 in 8 bits": {"kv_bits": 8},
    "64 of 16 in 4 bits": {"kv_bits": 4},
    **{f"64 of 16, {share} % streaming": {"streaming": share} for share in (25, 50, 75)},
    "64 by centre": {"decode_ranking": "center", "decode_bound": "lowest"},
}
ON_HOST = "64 of 16 on the host"
ROOM = {
    ON_HOST: {"max_total_tokens": 3072, "kv_offload_bytes": 2**30},
    "64 of 16": {"kv_offload_bytes": 2**24},
}
GATES = RESULTS / "heads-embedded.json"
TEXTS = "answers"  # of a row, until they have been compared
Asked = tuple[list[int], list[str], bool]  # prompt, answers, whether the answer must be exact
DENSE: dict[str, Any] = {"mode": "dense"}


def budgets(sizes: Sequence[int], reuse: Sequence[int], **more: Any) -> list[dict[str, Any]]:
    return [
        {"mode": "hierarchical", "budget": budget, "reuse": interval, "dense_below": 0, **more}
        for interval in reuse
        for budget in sizes
    ]


def threshold(value: float, **more: Any) -> dict[str, Any]:
    return {"mode": "progressive", "threshold": value, "dense_below": 0, **more}


BUDGETS = budgets((128, 256, 512, 1024, 2048), (4,))
REUSE = budgets((512, 1024), (1, 4, 16, 64))
OBSERVERS = [
    *(
        mode
        for who in ("last", "window", "prompt", "recent")
        for mode in budgets((512, 1024), (16,), observe=who)
    ),
    *(
        mode
        for who in ("last", "window")
        for mode in budgets((512, 1024), (16,), observe=who, scores="exact")
    ),
]
LAGGING = [*budgets((256, 512), (4,), lag=2), threshold(0.9)]
OFFLOADED = [mode | {"offloaded": True} for mode in LAGGING[:2]]
OFFLOADED.append(LAGGING[2] | {"offloaded": True, "budget": 512, "reuse": 4})
FRESH = budgets((256, 512, 1024), (1, 16))
STREAMING = [
    threshold(1.0, streaming=True),  # the other heads attend to everything
    *(mode for streams in (False, True) for mode in budgets((512, 1024), (16,), streaming=streams)),
]
THRESHOLDS = [threshold(value) for value in (0.5, 0.8, 0.9, 0.95, 0.98, 1.0)]


def prompts(path: Path, rows: int, builder: PromptBuilder, longest: int = LONGEST) -> list[Asked]:
    """Prompts of ``rows`` rows, spread over a set, without those of more than ``longest`` tokens."""
    raw = [row for _, row in json_lines(path)]
    raw = [raw[i * len(raw) // rows] for i in range(rows)] if rows < len(raw) else raw
    found = []
    for row in raw:
        if "ordered_kv_records" in row:
            records = "\n".join(f'"{key}": "{value}"' for key, value in row["ordered_kv_records"])
            documents = [PromptDocument("kv", "Records", records)]
            question, answers, exact = f'What is the value of the key "{row["key"]}"?', [row["value"]], False
        elif "expected_number" in row:
            head, _, tail = row["prompt"].rpartition("Now the record is over.")
            documents = [PromptDocument("lines", "Record", head or row["prompt"])]
            question = tail.strip() or "What is the number?"
            answers, exact = [str(row["expected_number"])], False
        else:
            documents = [PromptDocument(str(i), title, text) for i, (title, text) in enumerate(row["docs"])]
            question, answers, exact = row["question"], row["answers"], True
        built = builder.build(question, documents, max_prompt_tokens=10**9)
        if len(built.input_ids) <= longest:
            found.append((built.input_ids, answers, exact))
    return found


async def ask(
    engine: Any, namespace: str, mode: dict[str, Any], places: asyncio.Semaphore, prompt: Asked
) -> tuple[bool, Any, str]:
    """Tell whether the answer is right, what its decode steps read, and the answer."""
    ids, answers, exact = prompt
    async with places:
        request = GenerateRequest("q", ids, namespace, "prefix", Sampling(40), decode=mode)
        answer = await first_token(engine, request)
    right = exact_match(answer.text, answers) > 0 if exact else contains_answer(answer.text, answers)
    return right, answer.last.decode, answer.text


async def measure(
    engine: Any, name: str, sets: list[Path], rows: int, study: str, report: dict[str, Any], out: Path
) -> None:
    builder = PromptBuilder.load(engine.info.tokenizer)
    modes = [DENSE, *([] if "centre" in name else BUDGETS + FRESH), *THRESHOLDS]
    if "bits" in name:  # beside those of plain KV, not a study of their own
        modes = [DENSE, *BUDGETS[2:], *THRESHOLDS[3:4]]
    if "streaming" in name:
        modes = [DENSE, *STREAMING]
    if study:
        modes = [DENSE, *{"reuse": REUSE, "observers": OBSERVERS, "offloaded": LAGGING}[study]]
    if name == ON_HOST:
        modes = OFFLOADED
    for path in sets:
        asked = await asyncio.to_thread(prompts, path, rows, builder)
        if not asked:
            print(f"{path.name}: every prompt has more than {LONGEST} tokens", flush=True)
            continue
        for mode in modes:
            places = asyncio.Semaphore(IN_FLIGHT)
            done = await asyncio.gather(*(ask(engine, path.name, mode, places, each) for each in asked))
            read = [use for _, use, _ in done if use is not None]
            row: dict[str, Any] = {"pages": name, "set": path.name.split(".")[0], **mode, "n": len(done)}
            row["prompt tokens"] = sum(len(ids) for ids, _, _ in asked) // len(asked)
            row["right"] = round(100 * sum(bool(right) for right, _, _ in done) / len(done), 1)
            if read:
                row["share read"] = round(sum(use.share for use in read) / len(read), 4)
                weights = [use.weight for use in read if use.weight is not None]
                row["weight"] = round(sum(weights) / len(weights), 4) if weights else None
            if study == "offloaded":
                row[TEXTS] = [text for _, _, text in done]
            if mode.get("offloaded"):
                steps, offloaded = (
                    sum(getattr(use, n) for use in read) for n in ("steps", "offloaded_steps")
                )
                row["offloaded share of steps"] = round(offloaded / max(1, steps), 3)
                row["prompts prefilled by layers"] = sum(use.segmented_tokens > 0 for use in read)
                row["misses"] = sum(use.misses for use in read)
                row["host reads"] = sum(use.host_reads for use in read)
            report["rows"].append(row)
            print(json.dumps({key: row[key] for key in row if key != TEXTS}), flush=True)
            write_json(out, report)


def child(name: str, out: Path, sets: list[Path], rows: int, study: str) -> None:
    path = out / f"quality-{name.replace(' ', '-').replace(',', '').replace('%', 'percent')}.json"
    report: dict[str, Any] = {"pages": name, "rows": []}

    async def work(engine: Any) -> None:
        report["engine"] = described(engine.info)
        await measure(engine, name, sets, rows, study, report, path)
        await engine.control("check")
        report["statistics checked"] = True

    number = [*PAGES, ON_HOST].index(name)
    options: dict[str, Any] = {
        "sparse_attention": "on",
        "decode_mode": "dense",
        "decode_budget": 128,
        "decode_max_budget": 2048,
        "max_total_tokens": 2**18,
        "decode_page_size": 64,
        "decode_logical_page": 16,
    } | PAGES.get(name, {})
    if study == "offloaded":
        options |= ROOM[name]
    if (share := options.pop("streaming", None)) is not None:
        options["decode_heads"] = heads = out / f"heads-{share}.json"
        gates = torch.tensor(json.loads(GATES.read_text(encoding="utf-8"))["gates"])
        save_pattern(heads, gates, share=share / 100, model="ragserve-tiny")
    graphs = {"cuda_graph_max_bs_decode": IN_FLIGHT, "disable_prefill_cuda_graph": True}
    options["engine_args"] = graphs | engine_args(None)
    folder = out / f"data-{number}"
    run_once(
        load(model=DEFAULT_MODEL, data_dir=folder, kv_disk_bytes=0, port=32_000 + 200 * number, **options),
        work,
    )
    write_json(path, report)


def compare_answers(reports: list[dict[str, Any]]) -> None:
    """Count the offloaded answers that are those of the device, and leave the texts out."""
    rows = [row for report in reports for row in report["rows"]]
    device = {place(row): row[TEXTS] for row in rows if TEXTS in row and not row.get("offloaded")}
    for row in rows:
        if TEXTS in row and row.get("offloaded") and (texts := device.get(place(row))) is not None:
            row["same answers"] = sum(a == b for a, b in zip(texts, row[TEXTS], strict=True))
    for row in rows:
        row.pop(TEXTS, None)
        if "same answers" in row:
            print(json.dumps(row), flush=True)


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("set", "mode", "threshold") if row["mode"] == "progressive" else ("set", "mode", "budget")
    return tuple(row.get(name) for name in names)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rows", type=int, default=100)
    studies = parser.add_mutually_exclusive_group()
    for study in ("reuse", "observers", "offloaded"):
        studies.add_argument(f"--{study}", dest="study", action="store_const", const=study, default="")
    parser.add_argument("--pages", choices=[*PAGES, ON_HOST], action="append")
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    names = given.pages or list(ROOM if given.study == "offloaded" else PAGES)
    if given.child:
        child(names[0], given.out, given.sets, given.rows, given.study)
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    same = [str(given.out), *map(str, given.sets), "--rows", str(given.rows), "--child"]
    same += [f"--{given.study}"] if given.study else []
    failed = fan_out({name: [*this_script(), *same, "--pages", name] for name in names}, given.gpus)
    paths = sorted(given.out.glob("quality-*.json"))
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    if given.study == "offloaded":
        compare_answers(reports)
    write_json(given.out / "quality.json", reports)
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
